"""The copy itself: runs of a tensor along one dimension, side by side.

Two equal runs, as zigzag has them, are one step slice and one copy. The whole row is the tensor itself; anything less is a
copy, so that writing to a shard changes nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from collate_npu.parallel.layout import Run, indices

_FEW_BYTES = 1 << 19
_FEW_RUNS = 16
_NUMPY = frozenset(
    {torch.int64, torch.int32, torch.bool, torch.float32, torch.float16, torch.float64, torch.uint8, torch.int16}
)


def take_runs(x: Tensor, dim: int, runs: tuple[Run, ...]) -> Tensor:
    """The runs of `x` along `dim` (not negative), in their order, as a tensor of its own; autograd flows."""
    width = x.shape[dim]
    if runs == ((0, width),):
        return x
    if len(runs) == 1:
        return x.narrow(dim, runs[0][0], runs[0][1] - runs[0][0]).clone(memory_format=torch.contiguous_format)
    if len(runs) == 2 and (step := _as_step(runs, width)) is not None:
        return _step_slice(x, dim, *step)
    if len(runs) > _FEW_RUNS:
        return x.index_select(dim, indices(runs).to(x.device))
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs or ((0, 0),)], dim)


def _as_step(runs: tuple[Run, ...], width: int) -> tuple[int, int, int] | None:
    """`(chunk, first, last)` where two equal runs are two chunks of a regular cut of the row."""
    (a, b), (c, d) = runs
    chunk = b - a
    if c < a or d - c != chunk or a % chunk or c % chunk or width % chunk:
        return None
    return chunk, a // chunk, c // chunk


def _step_slice(x: Tensor, dim: int, chunk: int, first: int, last: int) -> Tensor:
    # numpy's copy starts faster; torch's runs on all threads and is the only one for devices, bf16 and autograd.
    plain = x.dtype in _NUMPY and x.is_cpu and not x.requires_grad and x.is_contiguous()
    if plain and (torch.get_num_threads() == 1 or x.nbytes * chunk < _FEW_BYTES * x.shape[dim]):
        return torch.from_numpy(_two_chunks(x.numpy(), dim, chunk, first, last))
    taken: Tensor = _two_chunks(x, dim, chunk, first, last)
    return taken


def _two_chunks(x: Any, dim: int, chunk: int, first: int, last: int) -> Any:
    """The copy, of a tensor or an array."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    picked = (*(slice(None),) * dim, slice(first, last + 1, last - first))
    return x.reshape(*before, x.shape[dim] // chunk, chunk, *after)[picked].reshape(*before, 2 * chunk, *after)
