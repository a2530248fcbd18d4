"""Positions: what a consumer is given as `position_ids`, and when it is better left to count by itself.

Megatron-style stacks always get them. A transformers model gets them where its own count would be wrong (left padding,
packing) or the batch has them, and then as that model counts (`model_traits.position_rule`). Positions that count places
over padding are counted again; a caller's own are never replaced.
Legend: B rows, S width, T tokens of a flat row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from collate_npu.consumers.mask_routing import Case, Consumer
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.masks.sources import Sources, check_counts
from collate_npu.outputs import repad, unpad
from collate_npu.segments import PADS_BEFORE, Segments

KEY = "position_ids"
TEXT_KEY = "text_position_ids"


def positions_for(consumer: Consumer, case: Case, sources: Sources, device: torch.device | None = None) -> Tensor | None:
    """`position_ids` of this batch for this consumer, made on this device where it can; None where they are left out."""
    given, rule = sources.get(KEY), case.model.positions
    counted = sources.counted and sources.get(TEXT_KEY) is None and getattr(given, "ndim", 2) == 2
    first = case.model.first_position
    kind = "derived" if given is None or counted else kind_of(torch.from_numpy(sources.array(KEY)), case.segments, first)
    if kind == "places":
        given = None
    elif given is not None and not isinstance(given, Tensor):
        given = torch.from_numpy(sources.array(KEY))
    if not consumer.counts_positions:
        return given if given is not None or _has_axes(case, sources) else positions_on(case.segments, device)
    derived = kind != "own"
    if not derived and rule != "none" and given is not None and tuple(given.shape) == case.segments.shape:
        check_counts(sources.array(KEY), case.segments)
    if rule == "axes" and (case.padding_free or case.segments.packed):
        return _axes(case, None if derived else given, sources)
    if not derived:
        return given
    if rule == "none" or (rule == "axes" and _has_axes(case, sources)):
        return None
    if rule == "padding_idx" and sources.get("input_ids") is not None:  # padding may hold an id that this model counts
        padding = torch.from_numpy(sources.array("input_ids"))[~case.segments.keep]
        foreign = bool((padding != first - 1).any())
        return _by_ids(case, sources) if case.segments.packed or foreign or given is not None else None
    if given is not None and first == 0:
        return given
    segments, limit = case.segments, case.model.rope_limit
    wide = limit is not None and segments.shape[1] > limit
    moves = segments.packed or segments.padding_side in PADS_BEFORE
    needed = given is not None or moves or case.padding_free or wide
    return positions_on(segments, device).add_(first) if needed else None


def _by_ids(case: Case, sources: Sources) -> Tensor:
    """As RoBERTa's family counts each sequence alone: `padding_idx + 1` and on, tokens with that very id left at it."""
    padding_idx, segments = case.model.first_position - 1, case.segments
    counts_T = (unpad(torch.from_numpy(sources.array("input_ids")), segments) != padding_idx).long()
    counted_T = counts_T.cumsum(0)
    before_N = (counted_T - counts_T)[segments.cu_seqlens[:-1].long()]
    inside_T = counted_T - before_N.repeat_interleave(torch.tensor(segments.sequence_lengths))
    return repad(inside_T * counts_T + padding_idx, segments, fill=padding_idx)


def kind_of(positions: Tensor, segments: Segments, first: int = 0) -> Literal["derived", "places", "own"]:
    """Do they follow from the Segments, as a collator adds them? Or count places, whatever stands before a sequence? One
    row is that of all, and a model that counts from `first` may be given either so."""
    keep_BS, derived_BS = segments.keep, segments.position_ids
    if positions.shape[-1:] != keep_BS.shape[1:] or positions.ndim != 2:
        return "own"
    positions = positions.expand(keep_BS.shape)[keep_BS]
    places = torch.arange(keep_BS.shape[1]).expand(keep_BS.shape)[keep_BS]
    for start in dict.fromkeys((0, first)):
        if torch.equal(positions, derived_BS[keep_BS] + start):
            return "own" if start else "derived"
    return "places" if any(torch.equal(positions, places + start) for start in (0, first)) else "own"


def restart(positions: Tensor | None, segments: Segments) -> bool:
    """True if they separate the sequences of rows without padding as transformers does (masking_utils.py:773-780)."""
    if positions is None:
        return False
    text_BS = (positions[0] if positions.ndim == 3 else positions).cpu()
    numbers_BS = (text_BS.diff(prepend=text_BS[:, :1] - 1) != 1).cumsum(-1) + 1
    return torch.equal(numbers_BS, segments.ids.long())


def _has_axes(case: Case, sources: Sources) -> bool:
    """Images or clips in padded rows: the model derives several axes from the 2D mask, and one row would replace them."""
    return not case.padding_free and bool(sources.named["vision"])


def _axes(case: Case, own: Tensor | None, sources: Sources) -> Tensor:
    """`[4, B, S]`: the text row, which starts again with each sequence, and three axes (modeling_qwen2_5_vl.py:795-817)."""
    if own is None and sources.named["vision"]:
        rule = "Where images stand among tokens cannot be told from a flat or packed row."
        remedy = "Give each sample its position_ids [3, L] (the model's get_rope_index), or pad one sequence a row."
        raise UnsupportedFormError(explain(KEY, "none beside images", rule, remedy))
    text = case.segments.position_ids
    axes = text if own is None else own
    axes = axes if axes.ndim == 3 else axes.repeat(3, 1, 1)
    return axes if len(axes) == 4 else torch.cat([text[None], axes])


def positions_on(segments: Segments, device: torch.device | None) -> Tensor:
    """`segments.position_ids`, made on this device where rows of one sequence without holes say them by where they start."""
    if device is None or segments.packed or segments.hole_rows:
        return segments.position_ids
    starts = dict.fromkeys(range(segments.shape[0]), segments.shape[1]) | {b: start for b, start, _ in segments.spans}
    places_S = torch.arange(segments.shape[1], device=device)
    return (places_S - torch.tensor([*starts.values()])[:, None].to(device, non_blocking=True)).clamp_(min=0)
