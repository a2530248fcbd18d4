"""Transport: how a batch leaves a DataLoader's worker.

torch puts each tensor into a shared-memory file of its own and hands its descriptor over a socket (torch 2.13
multiprocessing/reductions.py:590-620), which takes longer than collating. Here the tensors of a batch leave together,
whole numbers in the fewest bytes that hold them: in the message itself where that is small, else in one shared storage.
A plain dict arrives, each tensor with its own memory, dtype and shape. Costs one copy on each side.

Where /dev/shm is full torch loses a batch and its loader waits for ever; here the batch goes in the message, and a warning
says so. A worker whose trainer was killed ends: nobody reads its messages.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from multiprocessing import current_process, parent_process
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from time import sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import get_worker_info

from collate_npu.arrays import Array

# Measured with two workers on two cores. A longer message takes the pipe longer than shared memory takes; a longer tensor
# that no narrower type holds is faster in a storage of torch's own, which the receiver keeps and does not copy.
INLINE_BYTES = 1 << 19
ORDERLY = 8
"""Seconds in which torch's watchdog, which looks every five, ends a worker in its own way."""

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_HELD: dict[torch.dtype, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in _NAMES}
_HELD[torch.bfloat16] = np.dtype("int16")  # its bits: numpy has no such type
_NARROW = [(np.dtype(kind), np.iinfo(kind)) for kind in ("i1", "i2", "i4")]

# A tensor's key, dtype, shape, its numpy dtype in the buffer, and its first byte there.
Place = tuple[Any, torch.dtype, tuple[int, ...], str, int]


class Shipment(dict[Any, Any]):
    """A batch in a worker: a dict that multiprocessing's pickler sends in its own way."""


def shipped(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch in a form that leaves a DataLoader's worker fast; outside a worker the batch itself."""
    if get_worker_info() is None:
        return batch
    _watch_trainer(os.getpid())
    return Shipment(batch)


@cache
def _watch_trainer(worker: int) -> None:
    """Once a worker: a thread that ends it with its trainer, as a loader's end does, at the latest after `ORDERLY` seconds.

    torch's own watchdog leaves the loop, and then Python joins the thread that feeds the queue (multiprocessing/queues.py),
    whose message is longer than the pipe: each worker holds the end that would be read, so it never breaks. And below a
    fork server that watchdog looks at the server, which stays.
    """
    process, trainer = current_process(), parent_process()
    if trainer is not None and getattr(getattr(process, "_target", None), "__name__", "") == "_worker_loop":
        queues = [each for each in process._args if isinstance(each, Queue)]  # type: ignore[attr-defined]
        Thread(target=_end_with, args=(trainer, os.getppid(), queues), daemon=True).start()


def _end_with(trainer: Any, parent: int, queues: list[Queue[Any]]) -> None:
    """A forked worker's siblings keep its sentinel of the trainer open, so its parent process id is compared there."""
    while trainer.is_alive() and os.getppid() == parent:
        sleep(1)
    for queue in queues:
        queue.cancel_join_thread()
    sleep(ORDERLY)
    os._exit(1)


def _pack(batch: Shipment) -> tuple[Any, ...]:
    """What the pickler writes: the values that go as ever, the places of the tensors, and the buffer that holds them. It
    runs in the thread that feeds the worker's queue, where an error would lose the batch, so it refuses nothing."""
    others: dict[Any, Any] = {}
    places: list[Place] = []
    arrays: list[Array] = []
    size, limit = 0, INLINE_BYTES
    for key, value in batch.items():
        if not _travels(value):
            others[key] = Shipment(value) if type(value) is dict else value
            continue
        value = value.resolve_neg()
        array = (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()
        kind = _narrowest(array)
        alone = array.nbytes > INLINE_BYTES and (kind == array.dtype or value.is_shared())
        if alone and _with_room(value.share_memory_) is not None:  # as torch's pickler moves it
            others[key], limit = value, 0  # a message waits in the pipe to be read, and the copying of a long mask behind it
            continue
        others[key] = None
        places.append((key, value.dtype, array.shape, kind.str, size))
        arrays.append(array)
        size += -(-array.size * kind.itemsize // 8) * 8
    storage = _with_room(partial(torch.UntypedStorage._new_shared, size)) if size > limit else None
    buffer = bytearray(size) if storage is None else storage
    held = _memory(buffer)
    for (_, _, shape, kind_there, start), array in zip(places, arrays):
        np.copyto(np.ndarray(shape, kind_there, held, start), array, casting="unsafe")
    return _unpack, (others, places, bytes(buffer) if isinstance(buffer, bytearray) else buffer)


def _with_room(move: Callable[[], Any]) -> Any:
    """Return what moves into shared memory, or None, with a warning, where that is full."""
    try:
        return move()
    except RuntimeError as error:
        remedy = "Enlarge it (docker run --shm-size=8g), or give the loader fewer workers or a lower prefetch_factor."
        text = f"no shared memory for a batch, which takes a slower way, a pipe: {error}. {remedy}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None


def _unpack(batch: dict[Any, Any], places: list[Place], buffer: Any) -> dict[Any, Any]:
    """Return, in the trainer's process, the tensors in their places, in memory of their own."""
    held = _memory(buffer)
    for key, dtype, shape, kind, start in places:
        tensor = torch.from_numpy(np.ndarray(shape, kind, held, start).astype(_HELD[dtype]))
        batch[key] = tensor if tensor.dtype is dtype else tensor.view(dtype)
    return batch


def _memory(buffer: Any) -> Any:
    """What numpy takes as an array's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(buffer).numpy() if isinstance(buffer, torch.UntypedStorage) else buffer


def _travels(value: Any) -> bool:
    """Return True for a plain tensor on the host. torch sends the others."""
    plain = type(value) is Tensor and value.dtype in _HELD and value.layout is torch.strided and not value.is_nested
    return plain and value.device.type == "cpu" and not value.requires_grad


def _narrowest(array: Array) -> np.dtype[Any]:
    """Return the narrowest type that holds these whole numbers."""
    if array.dtype.kind != "i" or array.itemsize == 1 or not array.size:
        return array.dtype
    least, most = array.min(), array.max()
    return next((kind for kind, limits in _NARROW if limits.min <= least and most <= limits.max), array.dtype)


ForkingPickler.register(Shipment, _pack)
# torch's tree_map knows types exactly: it would take a subclass of dict for a leaf.
_pytree.register_pytree_node(
    Shipment, lambda batch: (list(batch.values()), list(batch)), lambda values, keys: Shipment(zip(keys, values))
)
