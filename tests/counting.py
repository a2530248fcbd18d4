"""Work that is counted, not timed: function calls of Python, operations of torch, bytes."""

import gc
import sys
from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode


def calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions: what small batches pay for. Warm: what is cached is called before."""
    work()
    found = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], object]) -> list[str]:
    """Torch's operations by name, each of which costs a microsecond before it begins, and most a pass over their bytes."""
    work()  # warm
    with _Operations() as mode:
        work()
    return mode.found
