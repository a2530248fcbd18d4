"""Gather: the whole row on every rank, in order and with gradients, from the shards of a group.

One all-gather of the shard and one copy into order; the order is known before anyone waits for anyone, and ranks compare
what they hold before each gather, and before a backward that exchanges gradients (`agreement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collate_npu.errors import CollateError, explain, not_one_of, shape_of
from collate_npu.masks.forms import check_cuts
from collate_npu.outputs import to_nested
from collate_npu.parallel.agreement import batch_facts, digest_offsets, ranks_agree, turn_of, uncompiled
from collate_npu.parallel.layout import ContextParallel, check_group, indices, mesh_group, token_runs
from collate_npu.parallel.split import jagged, jagged_cu_seqlens
from collate_npu.segments import Segments, as_offsets
from collate_npu.validation import checked, dimension

Loss = Literal["same", "local"]
Piece = tuple[int, int, int, int]
"""(place in the whole row, rank, place in its shard, length)"""

_FEW_PIECES = 64


@uncompiled
@checked
def gather_sequence(
    output: Tensor,
    cp: ContextParallel,
    segments: Segments | None = None,
    *,
    dim: int = 1,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    loss: Loss = "same",
) -> Tensor:
    """Return the whole output, in order, on every rank, from all shards. Undoes `split_batch` and `split_tensor`.

    `dim` is the sequence, 1 in `[B, S / size, ...]` (0 in Megatron's `[S / size, B, H]`); a jagged output
    `[N, j, ...]` comes back jagged. `segments`, of the whole batch, are checked against the result, which
    `last_token`, `per_sequence` and `to_nested` then take. Layouts `document_*` need the offsets the batch was split
    by: `cu_seqlens=cu_seqlens_of(shard)`.

    Say how the ranks use the whole row, because the gradient depends on it:

    * `loss="same"`: every rank computes the same loss from it (pooling, rewards, a replicated head). Each shard gets
      its part of that one gradient, without communication; add parameter gradients up over the group.
    * `loss="local"`: each rank computes something of its own from it (its queries against gathered keys). Each shard
      gets the sum over ranks, by one reduce-scatter: the gradient of the sum of the ranks' losses.

    >>> gather_sequence(torch.tensor([[4, 5, 6]]), ContextParallel(size=1, rank=0)).tolist()  # README runs it on two ranks
    [[4, 5, 6]]
    """
    shard, offsets = output, cu_seqlens
    with turn_of(cp):
        with ranks_agree(cp, call="gather") as facts:  # whatever is wrong on one rank, it says so before the others wait
            dim = dimension("output", output, dim)
            if loss not in get_args(Loss):
                raise not_one_of("loss", loss, get_args(Loss), "Pass 'same' if every rank computes the same loss from it.")
            if output.is_nested:
                shard, dim, offsets = cast(Any, output).values(), 0, jagged_cu_seqlens(output, cp) * cp.size
            _check_shape(output, shard.shape, cp, segments, dim)
            offsets = None if offsets is None else as_offsets("cu_seqlens", offsets).tolist()  # one look at the device
            if segments is not None and offsets is not None and segments.shape[0] == 1:
                check_cuts("cu_seqlens", np.array(offsets), segments)
            facts |= {"output": shape_of(shard), "dim": str(dim), "loss": loss} | batch_facts({}, segments)
            facts["gradient"] = str(loss == "local" and shard.requires_grad and torch.is_grad_enabled())
            facts["documents"] = partial(digest_offsets, offsets)
            pieces = _pieces(shard.shape[dim] * cp.size, cp, offsets)
            if cp.size > 1:
                check_group(cp.group, cp.size, cp.rank)
        if cp.size > 1:
            shard = _in_order(_all_gather(shard, cp, loss, str(facts.get("number"))).unbind(0), pieces, dim)
    if not output.is_nested:
        return shard
    return to_nested(shard[None], segments) if segments else jagged(shard, torch.tensor(offsets, device=shard.device))


def _check_shape(output: Tensor, shard: torch.Size, cp: ContextParallel, segments: Segments | None, dim: int) -> None:
    if segments is None:
        return
    (B, S), width = segments.shape, shard[dim] * cp.size
    if output.is_nested and (1, width) != (B, S):
        rule = f"Gathered, the documents are one flat row of {width} tokens."
        raise CollateError(explain("segments", repr(segments), rule, "Pass the Segments of that row (pad_documents)."))
    if width != S or (dim == 1 and shard[0] != B):
        rule = f"The batch is {[B, S]} (rows, width): one of {cp.size} shards has {S / cp.size:g} tokens in dim {dim}."
        raise CollateError(explain("output", shape_of(output), rule, "Pass the Segments of the unsplit batch."))


def _pieces(width: int, cp: ContextParallel, offsets: Sequence[int] | None) -> list[Piece]:
    pieces = []
    for rank in range(cp.size):
        at = 0
        for start, stop in token_runs(width, cp.with_rank(rank), offsets):
            pieces.append((start, rank, at, stop - start))
            at += stop - start
    return sorted(pieces)


def _in_order(shards: Sequence[Tensor], pieces: list[Piece], dim: int) -> Tensor:
    if 0 < len(pieces) <= _FEW_PIECES:
        return torch.cat([shards[rank].narrow(dim, at, length) for _, rank, at, length in pieces], dim)
    size = shards[0].shape[dim]
    order = indices([(rank * size + at, rank * size + at + length) for _, rank, at, length in pieces])
    return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))


def _all_gather(output: Tensor, cp: ContextParallel, loss: Loss, number: str) -> Tensor:
    if output.dtype == torch.bool:  # not every backend carries bool
        return _all_gather(output.view(torch.uint8), cp, loss, number).view(torch.bool)
    shards: Tensor = _AllGather.apply(output, cp, loss, number)  # type: ignore[no-untyped-call]
    return shards


class _AllGather(torch.autograd.Function):
    """`[...]` on each rank to `[size, ...]` on all of them."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, cp: ContextParallel, loss: Loss, number: str) -> Tensor:
        ctx.cp, ctx.loss, ctx.number = cp, loss, number
        shards = shard.new_empty((cp.size, *shard.shape))
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed both
        all_gather(shards.flatten(), shard.contiguous().flatten(), group=mesh_group(cp.group))
        return shards

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """Return this rank's part of one gradient (`same`), or the sum over ranks (`local`): all are at one gather."""
        (grad,) = grads
        if ctx.loss == "same":
            return grad[ctx.cp.rank], None, None, None
        total = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with turn_of(ctx.cp):
            with ranks_agree(ctx.cp, call="backward") as facts:
                facts |= {"the gather": ctx.number, "gradient": shape_of(grad)}
            reduce_scatter(total.view(-1), grad.contiguous().flatten(), group=mesh_group(ctx.cp.group))
        return total, None, None, None
