"""Wire: how a collator hands on a batch whose Segments it knows: masks, segment ids, offsets, ignored labels.

Without a consumer the batch takes the neutral form an adapter reads; with one, that consumer's route is applied. The door
(`segments_from_batch`) gives back from the neutral form what the collator knew.

Legend: B batch rows, S width, T tokens of a flat row, N sequences.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from collate_npu import debug
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Consumer, ConsumerName
from collate_npu.consumers.models import consumer_of
from collate_npu.consumers.routes import say_batch
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.keys import KEEP_KEY, SEGMENT_KEY, Key, of_kind, with_role
from collate_npu.masks.forms import dense, none_is_exact, offsets_of
from collate_npu.masks.hazards import say_hazards_of_tokens
from collate_npu.masks.patterns import Bidirectional, Pattern
from collate_npu.masks.places import own_places, places_of
from collate_npu.outputs import ignore_first_labels
from collate_npu.segments import Segments

MaskMode = Literal["auto", "none", "4d", "2d", "omit"]


class Emitter(Protocol):
    """The settings both collators share."""

    @property
    def attention_mask(self) -> MaskMode: ...
    @property
    def padding_free(self) -> bool: ...
    @property
    def consumer(self) -> ConsumerName | Consumer | None: ...
    @property
    def pattern(self) -> str | Pattern | None: ...
    @property
    def label_pad_token_id(self) -> int: ...
    @property
    def labels_shifted(self) -> bool: ...
    @property
    def max_mask_bytes(self) -> int: ...
    @property
    def keys(self) -> Mapping[str, Key]: ...
    @property
    def _adapter(self) -> BatchAdapter | None: ...


def finish_batch(collator: Emitter, batch: dict[str, Any], segments: Segments, *, padding_free: bool) -> dict[str, Any]:
    """The finished batch: `attention_mask` and `attention_mask_2d` as the collator's mode or its consumer wants them."""
    adapter = collator._adapter
    if adapter is not None:
        out = adapter.render(batch, segments, padding_free=padding_free)
    elif padding_free:
        out = {key: value for key, value in batch.items() if key not in (KEEP_KEY, SEGMENT_KEY)} | {"attention_mask": None}
    else:
        out = batch | {"attention_mask": _mask(collator, segments), KEEP_KEY: segments.keep}
        out.pop(SEGMENT_KEY, None)
        if segments.packed or segments.empty_rows:  # a 2D mask says neither where sequences part nor that a row is empty
            out[SEGMENT_KEY] = segments.ids
    if collator.attention_mask == "omit":
        _check_omitted(collator, out, segments)
        out.pop("attention_mask", None)
    if debug.ON:
        say_hazards_of_tokens(batch, segments)
        if adapter is None:
            asked = f"attention_mask={collator.attention_mask!r}"
            why = "offsets say it" if padding_free else f"{asked}; {none_is_exact(segments, pattern_of(collator)).why}"
            say_batch("no consumer named: the neutral form, for a BatchAdapter", out, segments, why=why)
    return out


def _check_omitted(collator: Emitter, out: dict[str, Any], segments: Segments) -> None:
    exact = none_is_exact(segments, pattern_of(collator))
    if collator._adapter is not None and out.get("attention_mask") is not None and not exact:
        rule = f"{collator._adapter.consumer.name} learns of padding from this key alone, and {exact.why}."
        raise UnsupportedFormError(explain("attention_mask", "'omit'", rule, "Use 'auto', or pad right."))


def _mask(collator: Emitter, segments: Segments) -> Tensor | None:
    if collator.attention_mask in ("2d", "omit"):
        return segments.keep
    exact = none_is_exact(segments, pattern_of(collator))
    if collator.attention_mask == "none" and not exact:
        rule = f"attention_mask='none' was asked for, and {exact.why}."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Use 'auto', or pad right."))
    if exact and collator.attention_mask != "4d":
        return None
    _warn_of_neutral_form()
    return dense(segments, polarity="masked", pattern=pattern_of(collator), max_mask_bytes=collator.max_mask_bytes)


@cache
def _warn_of_neutral_form() -> None:
    """Once a process: whoever trains a transformers model with this batch as it is gets the mask the wrong way round."""
    warnings.warn(
        "collate_npu: this batch has a 4D attention_mask with True = blocked, for a BatchAdapter or Megatron-core. A "
        "transformers model reads True as attended. Pass model= (or consumer='transformers') to the collator, or run "
        "BatchAdapter(model) on the batch; with consumer='megatron' this warning stays away.",
        stacklevel=4,
    )


def pattern_of(collator: Emitter) -> Pattern:
    """The attention the batch is for: declared, told by the model, or plain causal."""
    return Pattern.of(collator.pattern or "causal") if collator._adapter is None else collator._adapter.pattern


def adapter_of(collator: Emitter, model: Any, model_type: str | None) -> BatchAdapter | None:
    """The adapter of the consumer a collator names, or its model tells; the model itself is not kept."""
    if collator.consumer is None and model_type is None and (model is None or consumer_of(model) is None):
        if model is None:
            return None
        rule = "A config or a plain module does not say who reads the batch."
        raise CollateError(explain("consumer", "None", rule, "Pass consumer= ('transformers', 'megatron', ...)."))
    return BatchAdapter(
        model,
        model_type=model_type,
        consumer=collator.consumer,
        padding_free=collator.padding_free,
        pattern=collator.pattern,
        keys=collator.keys,
        max_mask_bytes=collator.max_mask_bytes,
    )


def check_mode(mode: str, consumer: object, return_tensors: str, *, padding_free: bool = False) -> None:
    """Raise for settings that contradict each other."""
    if mode not in get_args(MaskMode):
        rule = "attention_mask is 'auto', 'none', '4d', '2d' or 'omit'."
        raise CollateError(explain("attention_mask", repr(mode), rule, "'auto' suits most trainers."))
    if consumer is not None and mode not in ("auto", "omit"):
        rule = "The consumer decides the form of its mask."
        raise CollateError(explain("attention_mask", repr(mode), rule, "Leave it at 'auto'."))
    if padding_free and mode in ("4d", "2d"):
        rule = "A padding-free row has offsets and no mask."
        raise CollateError(explain("attention_mask", repr(mode), rule, "Leave it at 'auto', or set padding_free=False."))
    check_tensors(return_tensors)


def check_tensors(return_tensors: str) -> None:
    """Raise for batches of anything but torch's tensors."""
    if return_tensors != "pt":
        raise CollateError(explain("return_tensors", repr(return_tensors), "Batches are torch tensors.", "Pass 'pt'."))


def with_offsets(
    batch: Mapping[str, Any], segments: Segments, places: Sequence[int] | None = None, *, longest: int | None = None
) -> dict[str, Any]:
    """A flat row with all its offsets (`places` and `longest` as in `offsets_of`); a batch's own physical offsets stay
    where they fit. Positions of several axes stay beside the text row.

    Raises where images stand in the row and no positions say where.
    """
    if places is None and with_role(batch, "padded_offsets"):
        places = places_of(batch, segments) or own_places(segments)
        longest = max((int(batch[key]) for key in with_role(batch, "longest") if batch[key] is not None), default=None)
    told, positions = offsets_of(segments, places, longest=longest), batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 3:
        return {**batch, **told, "position_ids": positions, "text_position_ids": told["position_ids"]}
    if vision := of_kind(batch, "vision"):
        rule = "Where images stand among the tokens of a flat row cannot be told from its offsets."
        remedy = "Give each sample its position_ids [3, L] (the model's get_rope_index), or set padding_free=False."
        raise UnsupportedFormError(explain("position_ids", f"no axes beside {', '.join(vision)}", rule, remedy))
    return {**batch, **told}


def ignore_labels(collator: Emitter, batch: dict[str, Any], segments: Segments) -> dict[str, Any]:
    """Ignore the labels of padding and the first of every sequence; targets that are not one a token stay as they are.

    Bidirectional attention predicts tokens in place, so its labels stay.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not predicts_next(collator):
        return batch
    if tuple(labels.shape) != segments.shape:
        return batch
    return batch | {"labels": ignore_first_labels(labels, segments, ignore_index=collator.label_pad_token_id)}


def predicts_next(collator: Emitter) -> bool:
    """Are labels those of the next token, not moved yet?"""
    return not collator.labels_shifted and not isinstance(pattern_of(collator), Bidirectional)
