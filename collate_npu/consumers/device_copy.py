"""Device copy: a batch goes to its device in one copy out of pinned memory, which does not wait (torch: `non_blocking`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64
"""Bytes at whose multiples tensors begin, as torch's own allocators do for vectors of any type."""


def move_batch(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the batch on this device. Its plain host tensors become views of one storage there. Mappings of
    tensors (a mask for each kind of layer) move too. A pinned tensor is copied by itself.

    >>> move_batch({"input_ids": torch.tensor([[1, 2]]), "attention_mask": None}, torch.device("meta"))
    {'input_ids': tensor(..., device='meta', size=(1, 2), dtype=torch.int64), 'attention_mask': None}
    """
    there = _in_one({id(value): value for value in _values(batch) if _waits(value)}, device)
    return _placed(batch, there, device)


def _values(batch: Mapping[str, Any]) -> Iterator[Any]:
    for value in batch.values():
        yield from _values(value) if isinstance(value, Mapping) else (value,)


def _placed(batch: Mapping[str, Any], there: dict[int, Tensor], device: torch.device) -> dict[str, Any]:
    """Return the batch on the device: values from `there`; others, as a tensor under a second name, are copied."""
    out: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            out[name] = _placed(value, there, device)
        elif isinstance(value, Tensor):
            moved = there.pop(id(value), None)
            out[name] = value.to(device, non_blocking=True) if moved is None else moved
        else:
            out[name] = value.to(device) if hasattr(value, "to") else value  # a BlockMask takes no more
    return out


def _waits(value: Any) -> bool:
    """Return True if the host would wait for its copy: a plain tensor in memory that is not pinned."""
    plain = type(value) is Tensor and value.is_cpu and value.layout is torch.strided and not value.is_nested
    return plain and not value.requires_grad and not value.is_pinned()


def _in_one(tensors: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    ends, size = {}, 0
    for name, tensor in tensors.items():
        start, size = size, size + -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        ends[name] = slice(start, start + tensor.nbytes)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
    for name, tensor in tensors.items():
        buffer[ends[name]].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = buffer.to(device, non_blocking=True)  # torch keeps the buffer until the copy is done
    return {name: there[ends[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}
