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
from collate_npu.outputs import repad, unpad

KEY = "position_ids"
TEXT_KEY = "text_position_ids"


def positions_for(consumer: Consumer, case: Case, batch: Mapping[str, Any]) -> Tensor | None:
    """`position_ids` of this batch for this consumer; None where they are left out."""
    given = (
        None if batch.get(KEY) is None else batch[KEY] if isinstance(batch[KEY], Tensor) else host_tensor(KEY, batch[KEY])
    )
    rule = case.model.positions
    if not consumer.counts_positions:
        return given if given is not None or _has_axes(case, batch) else case.segments.position_ids
    derived = given is None or _derived(given, case)
    if rule == "axes" and (case.padding_free or case.segments.packed):
        return _axes(case, None if derived else given, batch)
    if not derived:
        return given
    if rule == "none" or (rule == "axes" and _has_axes(case, batch)):
        return None
    if rule == "padding_idx":
        return _by_ids(case, batch) if case.segments.packed or _pads_with_text(case, batch) else None
    if given is not None and case.model.first_position == 0:
        return given
    wide = case.model.rope_limit is not None and case.segments.shape[1] > case.model.rope_limit
    needed = case.inside or case.segments.packed or case.padding_free or wide
    if not needed:
        return None
    counted = case.segments.position_ids
    return counted.add_(case.model.first_position) if case.model.first_position else counted


def _pads_with_text(case: Case, batch: Mapping[str, Any]) -> bool:
    """Is some padding filled with another id than the one this model does not count?"""
    padding = host_tensor("input_ids", batch["input_ids"])[~case.segments.keep]
    return bool((padding != case.model.first_position - 1).any())


def _by_ids(case: Case, batch: Mapping[str, Any]) -> Tensor:
    """As RoBERTa's family counts each sequence alone: `padding_idx + 1` and on, tokens with that very id left at it."""
    padding_idx, segments = case.model.first_position - 1, case.segments
    counts_T = (unpad(host_tensor("input_ids", batch["input_ids"]), segments) != padding_idx).long()
    counted_T = counts_T.cumsum(0)
    before_N = (counted_T - counts_T)[segments.cu_seqlens[:-1].long()]
    inside_T = counted_T - before_N.repeat_interleave(torch.tensor(segments.sequence_lengths))
    return repad(inside_T * counts_T + padding_idx, segments, fill=padding_idx)


def _derived(given: Any, case: Case) -> bool:
    """Are these the positions that follow from the Segments, as a collator adds them?"""
    positions = host_tensor(KEY, given)
    keep = case.segments.keep
    return positions.shape == keep.shape and torch.equal(positions[keep], case.segments.position_ids[keep])


def _has_axes(case: Case, batch: Mapping[str, Any]) -> bool:
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
