"""The copy itself: runs of a tensor along one dimension, side by side.

One run is a view. Two equal runs, as zigzag has them, are one step slice and one copy. A tensor that is expanded
(position ids of right-padded rows) is cut on one row and expanded again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collate_npu.parallel.layout import Run, indices

_FEW_BYTES = 1 << 19
_FEW_RUNS = 16
_NUMPY = frozenset(
    {torch.int64, torch.int32, torch.bool, torch.float32, torch.float16, torch.float64, torch.uint8, torch.int16}
)


def take(x: Tensor, dim: int, runs: tuple[Run, ...]) -> Tensor:
    """The runs of `x` along `dim` (not negative), in their order; autograd flows."""
    if len(runs) == 1:
        return x.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
    plain = x.is_contiguous()
    if not plain and (repeated := [d for d in range(x.ndim) if d != dim and x.stride(d) == 0 and x.shape[d] > 1]):
        return _take_expanded(x, dim, runs, repeated)
    if len(runs) == 2 and (step := _as_step(runs, x.shape[dim])) is not None:
        return _step_slice(x, dim, *step, plain)
    if len(runs) > _FEW_RUNS:
        return x.index_select(dim, indices(runs).to(x.device))
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs or ((0, 0),)], dim)


def _take_expanded(x: Tensor, dim: int, runs: tuple[Run, ...], repeated: list[int]) -> Tensor:
    shape = list(x.shape)
    for d in repeated:
        x = x.narrow(d, 0, 1)
    taken = take(x, dim, runs)
    shape[dim] = taken.shape[dim]
    return taken.expand(shape)


def _as_step(runs: tuple[Run, ...], width: int) -> tuple[int, int, int] | None:
    """`(chunk, first, last)` where two equal runs are two chunks of a regular cut of the row."""
    (a, b), (c, d) = runs
    chunk = b - a
    if c < a or d - c != chunk or any(n % chunk for n in (a, c, width)):
        return None
    return chunk, a // chunk, c // chunk


def _step_slice(x: Tensor, dim: int, chunk: int, first: int, last: int, plain: bool) -> Tensor:
    shape = x.shape
    picked = (*(slice(None),) * dim, slice(first, last + 1, last - first))
    cut = (*shape[:dim], shape[dim] // chunk, chunk, *shape[dim + 1 :])
    joined = (*shape[:dim], 2 * chunk, *shape[dim + 1 :])
    # numpy's copy starts faster; torch's runs on all threads and is the only one for devices, bf16 and autograd.
    small = x.nbytes // cut[dim] < _FEW_BYTES or torch.get_num_threads() == 1
    if small and plain and x.is_cpu and x.dtype in _NUMPY and not x.requires_grad:
        return torch.from_numpy(x.numpy().reshape(cut)[picked].reshape(joined))
    return x.reshape(cut)[picked].reshape(joined)
