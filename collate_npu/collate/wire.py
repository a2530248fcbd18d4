"""Wire: how a collator hands on a batch whose Segments it knows: masks, segment ids, offsets, ignored labels.

Without a consumer the batch takes the neutral form an adapter reads; with one, that consumer's route is applied. The door
(`segments_from_batch`) gives back from the neutral form what the collator knew.

Legend: B batch rows, S width, T tokens of a flat row, N sequences.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from torch import Tensor

from collate_npu import debug
from collate_npu.arrays import whole_number
from collate_npu.checked import check_fields, check_model
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Consumer, ConsumerName, say_batch
from collate_npu.consumers.forwards import LabelRule
from collate_npu.consumers.models import consumer_of
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.keys import KEEP_KEY, KEYS, SEGMENT_KEY, Key, of_kind, with_role
from collate_npu.masks.forms import MAX_MASK_BYTES, dense, none_is_exact, offsets_of, own_places
from collate_npu.masks.hazards import hazards_of_tokens, say_hazards
from collate_npu.masks.offsets import places_of
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments

MaskMode = Literal["auto", "none", "4d", "2d", "omit"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rows are laid out, beside what transformers' collators can be told.

    * `sequence_multiple`: of flat rows: pads each sequence behind its tokens, exact for causal layers, and the row.
    * `max_sequences`: of flat rows: offsets for so many, and `max_length_q/k` is the width. The rest of the row is cut into
      the missing sequences; a model of attention alone gets its last offset again.
    * `separator_id`: of flat rows: the label of the first token of each sequence.
    * `allow_empty`: rows without a real token, else an error.
    * `labels_shifted`: the labels stand with the token that predicts them already.
    * `max_mask_bytes`: what a dense mask may take.

    With fixed widths too, all batches have the same shapes, as graphs and compilers want. `sequence_multiple=4`,
    `max_sequences=4`, and the collator's `padding=(8, 16)`::

        1 1 1 0 2 2 0 0 0 0 0 0 0 0 0 0     cu_seqlens_padded 0 4 8 12 16     cu_seqlens 0 3 5 5 5

    >>> from collate_npu import PaddingCollator
    >>> layout = Layout(sequence_multiple=4, max_sequences=4)
    >>> collator = PaddingCollator(pad_token_id=0, padding_free=True, padding=(8, 16), layout=layout)
    >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> batch["cu_seqlens_padded"].tolist(), batch["cu_seqlens"].tolist()
    ([0, 4, 8, 12, 16], [0, 3, 5, 5, 5])
    """

    sequence_multiple: int | None = None
    max_sequences: int | None = None
    separator_id: int = -100
    allow_empty: bool = False
    labels_shifted: bool = False
    max_mask_bytes: int = MAX_MASK_BYTES

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("separator_id", self.separator_id, least=-(1 << 63))


@dataclass(frozen=True, kw_only=True)
class Emitter:
    """The settings both collators share, and what they do to a batch that is laid out."""

    consumer: ConsumerName | Consumer | None = None
    attention_mask: MaskMode = "auto"
    pattern: str | Pattern | None = None
    padding_free: bool = False
    label_pad_token_id: int = -100
    keys: Mapping[str, Key] = field(default_factory=lambda: KEYS, repr=False)
    layout: Layout = field(default_factory=Layout)
    _adapter: BatchAdapter | None = field(init=False, repr=False, compare=False)
    """Of the consumer named, or told by the model, which is not kept."""
    _attends: Pattern = field(init=False, repr=False, compare=False)
    """The attention the batch is for: declared, told by the model, or plain causal."""
    _labels: LabelRule = field(init=False, repr=False, compare=False)
    """What the model does with labels."""

    def _settle(self, model: Any, model_type: str | None = None) -> None:
        """Make the adapter. Raises for settings that contradict each other."""
        if model is not None:
            check_model(model, config=True)
        whole_number("label_pad_token_id", self.label_pad_token_id, least=-(1 << 63))
        told = model_type is not None or consumer_of(model) is not None or self.consumer is not None
        if model is not None and not told:
            rule = "A config or a plain module does not say who reads the batch."
            remedy = "Pass consumer= ('transformers', 'megatron', ...)."
            raise CollateError(explain("consumer", "None", rule, remedy, more="consumer"))
        mode, rule, remedy = self.attention_mask, "", "Leave it at 'auto'."
        if mode not in get_args(MaskMode):
            rule, remedy = "attention_mask is 'auto', 'none', '4d', '2d' or 'omit'.", "'auto' suits most trainers."
        elif told and mode not in ("auto", "omit"):
            rule = "The consumer decides the form of its mask."
        elif self.padding_free and mode in ("4d", "2d"):
            rule, remedy = "A padding-free row has offsets and no mask.", "Leave it at 'auto', or set padding_free=False."
        if rule:
            raise CollateError(explain("attention_mask", repr(mode), rule, remedy))
        settings: dict[str, Any] = {"consumer": self.consumer, "padding_free": self.padding_free, "pattern": self.pattern}
        settings |= {"keys": self.keys, "max_mask_bytes": self.layout.max_mask_bytes, "model_type": model_type}
        adapter = BatchAdapter(model, **settings) if told else None
        object.__setattr__(self, "_adapter", adapter)
        object.__setattr__(self, "_attends", Pattern.of(self.pattern or "causal") if adapter is None else adapter.pattern)
        in_place = self._attends.name == "bidirectional"  # the neutral form has no head to ask
        heads = None if adapter is None else adapter.label_rule({})
        object.__setattr__(self, "_labels", heads or ("places" if in_place else "next"))

    @property
    def _predicts_next(self) -> bool:
        """Are labels those of the next token, not moved yet?"""
        return not self.layout.labels_shifted and self._labels == "next"

    def _tells_positions(self, left: bool) -> bool:
        """Could the model count some batch of this collator wrong: padding on the left, or with an id that it counts?

        Then all have positions: a dispatcher takes the keys of the first batch for those of all.
        """
        return self._adapter is not None and (left or self._adapter.model.positions == "padding_idx")

    def _finished(
        self, batch: dict[str, Any], segments: Segments, *, padding_free: bool, counted: bool = False
    ) -> dict[str, Any]:
        """The batch with `attention_mask` and `attention_mask_2d` as the mode or the consumer wants them; `counted`: its
        positions, if any, were made of the Segments."""
        if self._adapter is not None:
            sources = Sources.of(batch)
            sources.counted |= counted
            out = self._adapter.routed(sources, segments, padding_free)
        elif padding_free:
            out = {key: value for key, value in batch.items() if key not in (KEEP_KEY, SEGMENT_KEY)}
            out["attention_mask"] = None
        else:
            out = {**batch, "attention_mask": self._mask(segments), KEEP_KEY: segments.keep}
            out.pop(SEGMENT_KEY, None)
            # a 2D mask says neither where sequences part nor that a row is empty
            if segments.packed or not all(segments.lengths):
                out[SEGMENT_KEY] = segments.ids
        if self.attention_mask == "omit":
            exact = none_is_exact(segments, self._attends)
            if self._adapter is not None and out.get("attention_mask") is not None and not exact:
                rule = f"{self._adapter.consumer.name} learns of padding from this key alone, and {exact.why}."
                raise UnsupportedFormError(explain("attention_mask", "'omit'", rule, "Use 'auto', or pad right."))
            out.pop("attention_mask", None)
        if debug.ON:
            say_hazards(hazards_of_tokens(Sources.of(batch), segments))
            if self._adapter is None:
                asked = f"attention_mask={self.attention_mask!r}; {none_is_exact(segments, self._attends).why}"
                why = "offsets say it" if padding_free else asked
                say_batch("no consumer named: the neutral form, for a BatchAdapter", out, segments, why=why)
        return out

    def _mask(self, segments: Segments) -> Tensor | None:
        if self.attention_mask in ("2d", "omit"):
            return segments.keep
        exact = none_is_exact(segments, self._attends)
        if self.attention_mask == "none" and not exact:
            rule = f"attention_mask='none' was asked for, and {exact.why}."
            raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Use 'auto', or pad right."))
        if exact and self.attention_mask != "4d":
            return None
        _warn_of_neutral_form()
        return dense(segments, polarity="masked", pattern=self._attends, max_mask_bytes=self.layout.max_mask_bytes)


@cache
def _warn_of_neutral_form() -> None:
    """Once a process: whoever trains a transformers model with this batch as it is gets the mask the wrong way round."""
    warnings.warn(
        "collate_npu: this batch has a 4D attention_mask with True = blocked, for a BatchAdapter or Megatron-core. A "
        "transformers model reads True as attended. Pass model= (or consumer='transformers') to the collator, or run "
        "BatchAdapter(model) on the batch; with consumer='megatron' this warning stays away.",
        stacklevel=4,
    )


def with_offsets(
    batch: Mapping[str, Any], segments: Segments, places: Sequence[int] | None = None, *, longest: int | None = None
) -> dict[str, Any]:
    """A flat row with all its offsets (`places` and `longest` as in `offsets_of`); a batch's own physical offsets stay
    where they fit. Positions of several axes stay beside the text row.

    Raises where images stand in the row and no positions say where.
    """
    if places is None and with_role(batch, "padded_offsets"):
        places = places_of(Sources.of(batch), segments) or own_places(segments)
        longest = max((int(batch[key]) for key in with_role(batch, "longest") if batch[key] is not None), default=None)
    told, positions = offsets_of(segments, places, longest=longest), batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 3:
        return {**batch, **told, "position_ids": positions, "text_position_ids": told["position_ids"]}
    if vision := of_kind(batch, "vision"):
        rule = "Where images stand among the tokens of a flat row cannot be told from its offsets."
        remedy = "Give each sample its position_ids [3, L] (the model's get_rope_index), or set padding_free=False."
        raise UnsupportedFormError(explain("position_ids", f"no axes beside {', '.join(vision)}", rule, remedy))
    return {**batch, **told}
