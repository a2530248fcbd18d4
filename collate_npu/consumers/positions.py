"""Positions: what a consumer is given as `position_ids`, and when it is better left to count by itself.

Megatron-style stacks always get them. A transformers model gets them only where its own count would be wrong (left
padding, packing), and then as that model counts: RoBERTa's family from `padding_idx + 1` on, models with several axes as
`[4, 1, T]`. Positions of the caller's own are never replaced. Legend: B rows, S width, T tokens of a flat row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.consumer import Case, Consumer
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.host import host_tensor
from collate_npu.keys import of_kind

KEY = "position_ids"
TEXT_KEY = "text_position_ids"


def positions_for(consumer: Consumer, case: Case, batch: Mapping[str, Any]) -> Tensor | None:
    """`position_ids` of this batch for this consumer; None where they are left out."""
    given = batch.get(KEY)
    own = None if given is None or _derived(given, case) else given if isinstance(given, Tensor) else host_tensor(KEY, given)
    if not consumer.counts_positions:
        return own if own is not None or _needs_axes(case, batch) else case.segments.position_ids
    if case.model.positions == "axes" and (case.padding_free or not case.plain):
        return _axes(case, own, batch)
    if own is not None or case.model.positions in ("none", "axes"):
        return own
    if case.segments.packed and case.model.positions == "padding_idx":
        counted = case.segments.position_ids + case.model.first_position
        return torch.where(case.segments.keep, counted, case.model.first_position - 1)
    by_place = case.model.positions == "places" and case.inside
    return case.segments.position_ids if by_place or case.segments.packed or case.padding_free else None


def _derived(given: Any, case: Case) -> bool:
    """Are these the positions that follow from the Segments, as a collator adds them?"""
    positions = host_tensor(KEY, given)
    keep = case.segments.keep
    return positions.shape == keep.shape and torch.equal(positions[keep], case.segments.position_ids[keep])


def _needs_axes(case: Case, batch: Mapping[str, Any]) -> bool:
    """Images or clips in padded rows: the model derives several axes from the 2D mask, and one row would replace them."""
    return not case.padding_free and bool(of_kind(batch, "vision"))


def _axes(case: Case, own: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
    """`[4, B, S]`: the text row, which starts again with each sequence, and three axes (modeling_qwen2_5_vl.py:795-817)."""
    text = case.segments.position_ids[None]
    if own is None and of_kind(batch, "vision"):
        rule = "Where images stand among tokens cannot be told from a flat or packed row."
        remedy = "Give each sample its position_ids [3, L] (the model's get_rope_index), or pad one sequence a row."
        raise UnsupportedFormError(explain(KEY, "none beside images", rule, remedy))
    if own is None:
        return text.repeat(4, 1, 1)
    return own if len(own) == 4 and own.ndim == 3 else torch.cat([text, own if own.ndim == 3 else own.repeat(3, 1, 1)])
