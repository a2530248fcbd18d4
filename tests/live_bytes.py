"""What a piece of work really allocates at its peak: tensors that live at once, and numpy's arrays."""

import gc
import tracemalloc
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Live(TorchDispatchMode):
    """Bytes of all storages that operators made and that still live, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.seen or not storage.nbytes():
            return
        self.seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that lived at once: the less of two runs, because the first one imports and caches, and because what another
    thread allocates meanwhile counts. Storages whose Python object dies early count until then; views count once."""
    gc.collect()
    gc.freeze()  # what lives now is not looked through again: 0.2 s beside transformers
    return min(_peak(work), _peak(work))


def _peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with _Live() as live:
            work()
        return max(live.peak, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
