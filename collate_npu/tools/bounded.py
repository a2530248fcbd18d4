"""Bounded: somebody else's code that runs so long, and in so much memory, at most."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


@contextmanager
def bounded(seconds: float, more_bytes: int) -> Iterator[None]:
    """Raise `TimeoutError`, or let Python raise `MemoryError`, in what runs here beyond that.

    Time is bound on the main thread of a Unix, memory on Linux; elsewhere nothing is.
    """

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with _memory(more_bytes):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _memory(more: int) -> Iterator[None]:
    held = Path("/proc/self/statm")
    if not held.exists():
        yield
        return
    resource = import_module("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(held.read_text().split()[0]) * resource.getpagesize() + more
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
