"""verl 0.9.1, Megatron engine: jagged rows to padded ones, the mask the model takes, and the way back.

`pad_jagged` and `to_jagged` are each other's inverse; `engine` has the same under verl's own names. Unlike verl's
(models/mcore/util.py) they keep the 2D mask on every device, and build no `[B, 1, S, S]` for an NPU: None is exact for
jagged rows and causal attention. Costs one pass over the tokens. Legend: B rows, S width, L = S / cp of a row on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, cast

import torch
from torch import Tensor

from collate_npu.collate.padding import round_up
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.outputs import repad, unpad
from collate_npu.parallel import ContextParallel, gather_sequence, ranks_agree, split_tensor
from collate_npu.parallel.agreement import batch_facts
from collate_npu.segments import Segments

PACKAGE, TESTED = "verl", "0.9.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """What one rank's model takes of a jagged batch: values `[B, L, ...]`, a 2D mask bool `[B, L]`, True = real, int64
    positions `[B, L]`; and the Segments of the whole batch `[B, S]` for the way back."""

    values: Tensor
    attention_mask: Tensor | None
    """None on an NPU, where MindSpeed's causal attention is refused any mask; elsewhere the 2D mask."""
    attention_mask_2d: Tensor
    position_ids: Tensor
    segments: Segments


def pad_jagged(
    values: Tensor,
    cp: ContextParallel | None = None,
    *,
    npu: bool | None = None,
    width: int | None = None,
    fp8: bool = False,
    roll: bool = False,
) -> Padded:
    """A jagged `[B, j, ...]` as this rank's padded rows. Inverse of `to_jagged`.

    `cp` defaults to Megatron's groups, `npu` to verl's own check. `width` is verl's `forced_max_seqlen`, before alignment.
    `roll` moves tokens one place to the left (labels). Under context parallelism all ranks call it.

    >>> ids = torch.nested.nested_tensor([torch.tensor([1, 2, 3]), torch.tensor([4])], layout=torch.jagged)
    >>> padded = pad_jagged(ids, ContextParallel(size=1, rank=0), npu=True)
    >>> padded.values.tolist(), padded.attention_mask, padded.attention_mask_2d[1].tolist()
    ([[1, 2, 3], [4, 0, 0]], None, [True, False, False])
    """
    cp = cp or ContextParallel.from_megatron()
    with ranks_agree(cp, call="split") as facts:
        segments = segments_from_jagged(values, cp, width=width, fp8=fp8)
        whole = repad(values.values(), segments)
        facts |= batch_facts({} if whole.is_floating_point() else {"input_ids": whole}, segments)
    keep = split_tensor(segments.keep.to(whole.device), cp)
    return Padded(
        values=split_tensor(torch.roll(whole, -1, dims=1) if roll else whole, cp),
        attention_mask=None if (on_npu() if npu is None else npu) else keep,
        attention_mask_2d=keep,
        position_ids=split_tensor(segments.position_ids.to(whole.device), cp),
        segments=segments,
    )


def to_jagged(output: Tensor, segments: Segments, cp: ContextParallel | None = None) -> Tensor:
    """This rank's output `[B, L, ...]` as a jagged `[B, j, ...]` of the whole rows. Inverse of `pad_jagged`.

    Every rank gets all rows; gradients reach this rank's own part, as with verl's (`loss="same"` of `gather_sequence`).

    >>> rows = to_jagged(torch.tensor([[1, 2, 3], [4, 0, 0]]), Segments.from_lengths([3, 1]), ContextParallel(1, 0))
    >>> [row.tolist() for row in rows.unbind()]
    [[1, 2, 3], [4]]
    """
    whole = gather_sequence(output, cp or ContextParallel.from_megatron(), segments)
    offsets = torch.tensor((0, *segments.row_lengths)).cumsum(0).to(whole.device)
    return torch.nested.nested_tensor_from_jagged(unpad(whole, segments), offsets)


def segments_from_jagged(values: Tensor, cp: ContextParallel, *, width: int | None = None, fp8: bool = False) -> Segments:
    """`[B, S]` of a jagged batch, S aligned: `tp * 2 * cp`, with fp8 also a rank's `B * S` tokens in blocks of 128.

    Source: verl models/mcore/util.py:686-707.
    """
    jagged = cast(Any, values)
    if not values.is_nested or values.layout != torch.jagged or jagged.lengths() is not None or values.ndim < 2:
        rule = "verl carries ragged rows as a jagged nested tensor [B, j, ...] without gaps."
        remedy = "Use torch.nested.nested_tensor(rows, layout=torch.jagged)."
        raise CollateError(explain("input_ids", f"{shape_of(values)}, {values.layout}", rule, remedy))
    lengths = jagged.offsets().diff().tolist()
    blocks = 128 * cp.tensor_parallel * cp.size if fp8 else 1
    multiple = lcm(cp.multiple, blocks // gcd(len(lengths), blocks))
    return Segments.from_lengths(lengths, round_up(max(lengths, default=0) if width is None else width, multiple))


def on_npu() -> bool:
    """What verl itself found when it was imported."""
    from verl.models.mcore import util

    return bool(util.is_npu_available)
