"""Ranks for tests: a pool of processes on Gloo, or threads of this one, that run one function together, each call under a
deadline.

The test process draws the cases and stays outside the group, so that hypothesis can shrink a failure; a rank that
fails sends its traceback, and ranks that wait for it are ended instead of waited for.
"""

import importlib
import multiprocessing
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

START = 120.0
"""Seconds to import torch and meet the others, on a loaded machine."""
CALL = 60.0
"""Seconds for one call; a passing one takes milliseconds."""


class Pool:
    """`pool(function, *args)` runs `function(*args)` on every rank at once and returns the list of results.

    A function is one of a module that the ranks can import, or its name, `"module.function"`, so that what the module
    imports stays out of the test process.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def __call__(self, function: Callable[..., Any] | str, *args: Any, seconds: float = CALL) -> list[Any]:
        if not self._workers:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(seconds)  # a pool that lost a rank starts afresh at the next call

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers = []

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        store = tempfile.NamedTemporaryFile(prefix="gloo-", delete=False).name  # noqa: SIM115
        ends = [spawn.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in ends]
        self._workers = [
            spawn.Process(target=_rank, args=(rank, self.size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for worker in self._workers:
            worker.start()
        self._collect(START)

    def _collect(self, seconds: float) -> list[Any]:
        deadline = monotonic() + seconds
        results, failures, silent = [], [], False
        for rank, pipe in enumerate(self._pipes):
            if failures:
                deadline = min(deadline, monotonic() + 1)  # the others may wait for the one that failed
            if not pipe.poll(max(deadline - monotonic(), 0)):
                silent = True
                failures.append(f"rank {rank}: no answer in {seconds} s")
                continue
            ok, answer = pipe.recv()
            (results if ok else failures).append(answer if ok else f"rank {rank}:\n{answer}")
        if silent:
            self.close()
        if failures:
            raise AssertionError("\n".join(failures))
        return results


class Threads:
    """As `Pool`, in milliseconds: torch's own stand-in for a process group, whose ranks are threads. It
    carries no Python objects."""

    size = 4

    def __call__(self, function: Callable[..., Any], *args: Any, seconds: float = CALL) -> list[Any]:
        import pytest
        import torch.distributed as dist
        from torch._C._distributed_c10d import _set_thread_isolation_mode
        from torch.testing._internal.distributed import multi_threaded_pg as torchs

        from collate_npu.parallel import agreement

        store, results, failures = dist.HashStore(), [None] * self.size, list[str]()

        def run(rank: int) -> None:
            try:
                dist.init_process_group("threaded", store=store, rank=rank, world_size=self.size)
                results[rank] = function(*args)
                dist.destroy_process_group()
            except BaseException as error:
                failures.append(f"rank {rank}:\n{traceback.format_exc()}")
                torchs.ProcessLocalGroup.exception_handle(error)

        ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.size)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "main_thread", threading.current_thread)
            _set_thread_isolation_mode(True)
            torchs._install_threaded_pg()
            try:
                for rank in ranks:
                    rank.start()
                deadline = monotonic() + seconds
                for rank in ranks:
                    rank.join(max(deadline - monotonic(), 0))
                failures += [f"rank {n}: no answer in {seconds} s" for n, rank in enumerate(ranks) if rank.is_alive()]
            finally:
                torchs._uninstall_threaded_pg()
                _set_thread_isolation_mode(False)
        if failures:
            raise AssertionError("\n".join(failures))
        return results


def _rank(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=CALL)}
    dist.init_process_group("gloo", store=dist.FileStore(store, size), **place)
    pipe.send((True, None))
    while True:
        function, args = pipe.recv()
        try:
            if isinstance(function, str):
                module, _, name = function.rpartition(".")
                function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
