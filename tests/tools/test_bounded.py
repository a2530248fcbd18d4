"""Code of somebody else's is bound while it runs, and nothing is afterwards."""

import signal
import threading
from pathlib import Path

import pytest

from collate_npu.tools.user_code import bounded

resource = pytest.importorskip("resource")


def test_the_clock_and_what_it_called_are_as_before():
    before = signal.getsignal(signal.SIGALRM)
    with bounded(60, 1 << 50):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert (signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)) == ((0.0, 0.0), before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is bound on Linux")
@pytest.mark.parametrize(("soft", "bound"), [(resource.RLIM_INFINITY, True), (1 << 62, True), (1 << 20, False)])
def test_memory_is_bound_below_its_limit_which_is_then_as_before(monkeypatch, soft, bound):
    limits = [(soft, resource.RLIM_INFINITY)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    with bounded(60, 1 << 50):
        assert [1 << 50 < most < 1 << 51 for most, _ in limits[1:]] == [True] * bound
    assert limits[-1] == limits[0]


def test_on_another_thread_and_where_no_clock_is_nothing_is_bound(monkeypatch):
    done = []

    def work():
        with bounded(60, 1 << 50):
            done.append(signal.getitimer(signal.ITIMER_REAL)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    monkeypatch.delattr(signal, "setitimer")
    work()
    assert done == [0.0, 0.0]
