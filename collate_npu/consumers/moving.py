"""Moving: a batch on its way to a card. All its tensors go in one copy, out of memory that the card reads by itself, and the
host goes on meanwhile: a copy a tensor waits each time (torch: `non_blocking` does so only from pinned memory).

Legend: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from collate_npu.segments import Segments

_ALIGNED = 64
"""Bytes at whose multiples tensors begin, as torch's own allocators do for vectors of any type."""


def moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on this device, its plain host tensors as views of one storage there; what is there already stays.

    Mappings of tensors (a mask for each kind of layer) come along. Tensors that are pinned already go by themselves.

    >>> moved({"input_ids": torch.tensor([[1, 2]]), "attention_mask": None}, torch.device("meta"))
    {'input_ids': tensor(..., device='meta', size=(1, 2), dtype=torch.int64), 'attention_mask': None}
    """
    held = dict(_flat(batch))
    together = {name: value for name, value in held.items() if _waits(value)}
    there = {name: _alone(value, device) for name, value in held.items() if name not in together}
    return _nested(batch, there | _in_one(together, device))


def positions_on(segments: Segments, device: torch.device | None) -> Tensor:
    """`segments.position_ids`, made on this device where rows of one sequence without holes say them by where they start."""
    if device is None or segments.packed or segments.hole_rows:
        return segments.position_ids
    starts = dict.fromkeys(range(segments.shape[0]), segments.shape[1]) | {b: start for b, start, _ in segments.spans}
    places_S = torch.arange(segments.shape[1], device=device)
    return (places_S - torch.tensor([*starts.values()])[:, None].to(device, non_blocking=True)).clamp_(min=0)


def _flat(batch: Mapping[str, Any], *outer: str) -> Any:
    for name, value in batch.items():
        yield from _flat(value, *outer, name) if isinstance(value, Mapping) else [((*outer, name), value)]


def _nested(batch: Mapping[str, Any], held: Mapping[Any, Any], *outer: str) -> dict[str, Any]:
    inner = {name: (*outer, name) for name in batch}
    return {
        name: _nested(value, held, *inner[name]) if isinstance(value, Mapping) else held[inner[name]]
        for name, value in batch.items()
    }


def _waits(value: Any) -> bool:
    """Would its own copy keep the host waiting: a plain tensor in memory that is not pinned?"""
    plain = type(value) is Tensor and value.is_cpu and value.layout is torch.strided and not value.is_nested
    return plain and not value.requires_grad and not value.is_pinned()


def _alone(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return value.to(device) if hasattr(value, "to") else value  # a BlockMask takes no more


def _in_one(tensors: Mapping[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
    ends, size = {}, 0
    for name, tensor in tensors.items():
        start, size = size, size + -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        ends[name] = slice(start, start + tensor.nbytes)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
    for name, tensor in tensors.items():
        buffer[ends[name]].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = buffer.to(device, non_blocking=True)  # torch keeps the buffer until the copy is done
    return {name: there[ends[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}
