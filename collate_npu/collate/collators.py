"""Collators: features in, a batch out whose masks agree with each other, on the CPU, picklable.

A batch has `attention_mask` (4D or None) beside `attention_mask_2d`, segment ids, offsets and ignored labels: the neutral
form that an adapter reads. With a consumer named, it has what that consumer reads. `segments_from_batch` gives back from the
neutral form the Segments that the collator knew.
Costs one pass over the tokens; a 4D mask costs B * S * S bytes and is built only where nothing cheaper is exact.
Legend: B batch rows, S width, T tokens of a flat row, N sequences.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from functools import cache, partial
from math import lcm
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from collate_npu.arrays import Side, check_places, host_array, whole_number
from collate_npu.collate.features import Features, Samples, read_features
from collate_npu.collate.padding import Rows, Slots, best_fit, concatenate_values, lay_rows, stack_values
from collate_npu.collate.transport import shipped
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_routing import Consumer, ConsumerName
from collate_npu.consumers.model_traits import LabelRule, consumer_of
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.keys import KEEP_KEY, KEYS, SEGMENT_KEY, Key, check_keys, of_kind, with_role
from collate_npu.masks.forms import (
    MAX_MASK_BYTES,
    add_tail,
    aligned,
    least_room,
    mask_needed_reason,
    offsets_of,
    own_places,
    write_dense,
)
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources, check_longest, physical_offsets
from collate_npu.outputs import ignore_first_labels
from collate_npu.parallel.split import place_documents, with_fills
from collate_npu.segments import PADS_BEFORE, Segments, of_lengths
from collate_npu.validation import check_model, check_return_tensors, check_tokenizer, checked

MaskMode = Literal["auto", "none", "4d", "2d", "omit"]


@checked
@dataclass(frozen=True, kw_only=True)
class Layout:
    """How rows are laid out, beyond the options of transformers' collators.

    * `sequence_multiple`: flat rows: pads each sequence behind its tokens, and the row, to a multiple; exact if causal.
    * `max_sequences`: flat rows: boundaries for this many sequences, and `max_length_q/k` is the width of the row. The rest
      of the row is cut into the missing sequences; a model with attention alone gets its last boundary again.
    * `separator_id`: flat rows: the label of the first token of each sequence.
    * `allow_empty`: True allows rows without a real token, which otherwise raise an error.
    * `labels_shifted`: True if each label already stands with the token that predicts it.
    * `max_mask_bytes`: the most bytes that a 4D mask may take; a larger one raises an error.

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
    """The adapter of the named consumer or of the model, which is not kept."""
    _attends: Pattern = field(init=False, repr=False, compare=False)
    """The attention that the batch is for: declared, the model's own, or plain causal."""
    _labels: LabelRule = field(init=False, repr=False, compare=False)
    """What the model does with labels."""
    _predicts_next: bool = field(init=False, repr=False, compare=False)
    """True if labels are those of the next token and not shifted yet."""
    _left: str = field(init=False, repr=False, compare=False)
    """Why the model is out of scope, and its batches are padded as transformers pads them; "" in scope."""

    def _settle(self, model: Any, model_type: str | None = None) -> None:
        """Make the adapter. Raises for settings that contradict each other."""
        if model is not None:
            check_model(model, config=True)
            object.__setattr__(self, "model", ...)  # `dataclasses.replace` passes it on
        whole_number("label_pad_token_id", self.label_pad_token_id, least=-(1 << 63))
        check_keys(self.keys)
        named = model_type is not None or consumer_of(model) is not None or self.consumer is not None
        if model is not None and not named:
            rule = "A config or a plain module does not say which stack reads the batch."
            remedy = "Pass consumer= ('transformers', 'megatron', ...)."
            raise CollateError(explain("consumer", "None", rule, remedy, more="consumer"))
        mode, rule, remedy = self.attention_mask, "", "Leave it at 'auto'."
        if named and mode not in ("auto", "omit"):
            rule = "The consumer decides the form of its mask."
        elif self.padding_free and mode in ("4d", "2d"):
            rule, remedy = "A padding-free row has offsets and no mask.", "Leave it at 'auto', or set padding_free=False."
        if rule:
            raise CollateError(explain("attention_mask", repr(mode), rule, remedy))
        settings: dict[str, Any] = {"consumer": self.consumer, "padding_free": self.padding_free, "pattern": self.pattern}
        settings |= {"keys": self.keys, "max_mask_bytes": self.layout.max_mask_bytes, "model_type": model_type}
        adapter = BatchAdapter(model, **settings) if named else None
        object.__setattr__(self, "_adapter", adapter)
        object.__setattr__(self, "_attends", Pattern.of(self.pattern or "causal") if adapter is None else adapter.pattern)
        in_place = self._attends.name == "bidirectional"  # the neutral form has no head
        heads = None if adapter is None else adapter.label_rule
        object.__setattr__(self, "_labels", heads or ("places" if in_place else "next"))
        object.__setattr__(self, "_left", "" if adapter is None else adapter.left)
        if self._left and (self.padding_free or getattr(self, "packing", False)):
            rule = f"Batches of this model are only padded, as transformers pads them: {self._left}."
            raise UnsupportedFormError(explain("padding_free, packing", "True", rule, "Leave both out."))
        in_next = not self._left and not self.layout.labels_shifted and self._labels == "next"
        object.__setattr__(self, "_predicts_next", in_next)

    def _adds_positions(self, left: bool) -> bool:
        """True if the model could count positions of some batch wrong: padding on the left, or with an id that it counts.

        Then all have positions: a dispatcher takes the keys of the first batch for those of all.
        """
        return self._adapter is not None and not self._left and (left or self._adapter.model.positions == "padding_idx")

    def _finished(
        self, batch: dict[str, Any], segments: Segments, *, padding_free: bool, counted: bool = False
    ) -> dict[str, Any]:
        """The batch with `attention_mask` and `attention_mask_2d` as the mode or the consumer wants them; `counted`: its
        positions, if any, were made of the Segments."""
        if self._left:
            out = {**batch, "attention_mask": (segments.ids if segments.packed else segments.keep).long()}
        elif self._adapter is not None:
            sources = Sources.of(batch)
            sources.counted |= counted
            out = self._adapter.write(sources, segments, padding_free)
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
            why = mask_needed_reason(segments, self._attends)
            if self._adapter is not None and out.get("attention_mask") is not None and why:
                rule = f"{self._adapter.consumer.name} reads padding from this key only, and {why}."
                raise UnsupportedFormError(explain("attention_mask", "'omit'", rule, "Use 'auto', or pad right."))
            out.pop("attention_mask", None)
        return out

    def _mask(self, segments: Segments) -> Tensor | None:
        if self.attention_mask in ("2d", "omit"):
            return segments.keep
        why = mask_needed_reason(segments, self._attends)
        if self.attention_mask == "none" and why:
            rule = f"attention_mask='none' is set, and {why}."
            raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Use 'auto', or pad right."))
        if not why and self.attention_mask != "4d":
            return None
        _warn_of_neutral_form()
        return write_dense(segments, "masked", self._attends, max_mask_bytes=self.layout.max_mask_bytes)


@cache
def _warn_of_neutral_form() -> None:
    """Once a process: whoever trains a transformers model with this batch as it is gets the mask the wrong way round."""
    warnings.warn(
        "collate_npu: this batch has a 4D attention_mask with True = blocked, for a BatchAdapter or Megatron-core. A "
        "transformers model reads True as attended. Pass model= (or consumer='transformers') to the collator, or run "
        "BatchAdapter(model) on the batch; consumer='megatron' turns this warning off.",
        stacklevel=5,
    )


def add_offsets(
    batch: Mapping[str, Any], segments: Segments, places: Sequence[int] | None = None, *, longest: int | None = None
) -> dict[str, Any]:
    """A flat row with all its offsets (`places` and `longest` as in `offsets_of`); a batch's own physical offsets stay
    where they fit. Positions of several axes stay beside the text row.

    Raises where images stand in the row and no positions say where.
    """
    if places is None and with_role(batch, "padded_offsets"):
        sources = Sources.of(batch)
        places = physical_offsets(sources, segments) or own_places(segments)
        check_longest(sources, segments)
        longest = max((sources.array(key).item() for key in sources.named["longest"]), default=None)
    offsets, positions = offsets_of(segments, places, longest=longest), batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 3:
        return {**batch, **offsets, "position_ids": positions, "text_position_ids": offsets["position_ids"]}
    if vision := of_kind(batch, "vision"):
        rule = "The offsets of a flat row do not show where images stand among its tokens."
        remedy = "Set padding_free=False. With a get_rope_index, the model can make position_ids [3, L] of each sample."
        raise UnsupportedFormError(explain("position_ids", f"none, with {', '.join(vision)}", rule, remedy))
    return {**batch, **offsets}


ELSEWHERE = {field.name: f"Pass layout=Layout({field.name}=...)." for field in fields(Layout)}
"""What to write here for options of other collators."""
_RETURNED = ("return_position_ids", "return_flash_attn_kwargs", "return_seq_idx")
_MADE = "wrap_collator(DataCollatorForLanguageModeling(tokenizer, mlm=False), model=model) makes labels from input_ids."
_OWN = {
    **dict.fromkeys(_RETURNED, "Leave it out: the collator emits what the model reads."),
    **dict.fromkeys(("mlm", "mlm_probability"), f"PaddingCollator takes labels from the samples. {_MADE}"),
    "processing_class": "Pass tokenizer=.",
    "processor": "Pass tokenizer=processor.tokenizer.",
    "truncation": "Truncate when tokenising.",
}


@checked(instead=ELSEWHERE | _OWN)
@dataclass(frozen=True)
class PaddingCollator(Emitter):
    """Makes one padded batch of samples, or with `padding_free` one flat row; pass it as `data_collator=`.

    Keys with one value a token (`KEYS` lists them) are padded together: `input_ids`, `labels`, `position_ids` and others.
    Vision keys are joined, numbers become `[B]`, anything else becomes a list of B. Lengths, and a sample's own
    `attention_mask`, say which tokens are real; `pad_token_id` does not, because it is often a real eos. Holes stay holes.
    `1 1 2 2 0`, or `seq_lengths`, mark several sequences. Without model and consumer, run `BatchAdapter` on the batch.

    * `tokenizer`: gives `pad_token_id` and `padding_side`.
    * `model`: the module that gets the batch; the batch has the form that it reads. The module is not kept.
    * `consumer`: who reads the batch, if you pass no module: a name, or a `Consumer`.
    * `attention_mask`: "auto": what the model reads; without a model, None if None is right, otherwise 4D. "4d" and "2d"
      always give that form. "none" raises if None is wrong. "omit" leaves the key out (accelerate's gather needs that).
    * `pattern`: what attention sees. None: plain causal, or the model's own.
    * `padding_free`: True puts all samples in one flat row, with its boundaries.
    * `label_pad_token_id`: the label that the loss ignores.
    * `keys`: rules for keys of your own: `{**KEYS, "my_weights": TOKENS}`.
    * `layout`: how rows are laid out: options that transformers' collators do not have.
    * `padding`: True pads to the longest row; "max_length" to `max_length`; `(4096, 8192)` to the narrowest width that
      fits. False takes rows of one length only.
    * `packing`: True puts several samples in a row of `max_length` (or of the longest sample), by best fit decreasing.
    * `max_length`: the longest row. A longer sample raises an error; nothing is cut. With `padding="max_length"`, the width.
    * `pad_to_multiple_of`: makes the width a multiple of this.
    * `pad_token_id`: the token at padding. Default: the tokenizer's.
    * `padding_side`: "left" or "right". Default: the tokenizer's, or "right".
    * `return_tensors`: "pt", as in transformers' collators.

    The first label of every sequence is ignored, because no token predicts it. Packed samples keep the order of the batch
    in each row, and rows have the order of their first samples; images and values of a sample, `[N]`, follow.

    >>> collator = PaddingCollator(pad_token_id=0, padding_side="left")
    >>> batch = collator([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}])
    >>> {key: list(value.shape) for key, value in batch.items()}
    {'input_ids': [2, 3], 'labels': [2, 3], 'position_ids': [2, 3], 'attention_mask': [2, 1, 3, 3], 'attention_mask_2d':
        [2, 3]}
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask_2d"][1].tolist()
    ([[1, 2, 3], [0, 0, 4]], [[1, 2, 3], [-100, -100, -100]], [False, False, True])
    >>> PaddingCollator(padding_free=True)([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])["cu_seq_lens_q"].tolist()
    [0, 3, 4]
    """

    tokenizer: Any = None
    model: InitVar[Any] = None
    padding: bool | Literal["longest", "max_length"] | Sequence[int] = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    _: KW_ONLY
    packing: bool = False
    pad_token_id: int | None = None
    padding_side: Side | None = None
    return_tensors: InitVar[str | None] = "pt"

    def __post_init__(self, model: Any, return_tensors: str | None) -> None:
        check_return_tensors(return_tensors)
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer)
        self._settle(model)
        given = {"pad_token_id": self.pad_token_id, "padding_side": self.padding_side}
        for name, value in given.items():
            object.__setattr__(self, name, getattr(self.tokenizer, name, None) if value is None else value)
        object.__setattr__(self, "padding_side", self.padding_side or "right")
        _check_padding(self)
        wider = (self.pad_to_multiple_of, self.layout.sequence_multiple, self.layout.max_sequences)
        padded = not self.padding_free or any(wider) or isinstance(self.padding, tuple)
        if self.pad_token_id is None and padded:
            rule = "Padding needs an id that the embedding has; which one does not matter to the masks."
            remedy = "Set tokenizer.pad_token = tokenizer.eos_token, or pass pad_token_id=."
            raise CollateError(explain("pad_token_id", "None", rule, remedy))
        beside = {"padding_free=True": self.padding_free, "padding=False": self.padding is False}
        beside |= {"allow_empty=True": self.layout.allow_empty}
        if self.packing and any(beside.values()):
            got = "True beside " + ", ".join(name for name, value in beside.items() if value)
            rule = "A packed row is padded and holds several samples, each with tokens."
            raise CollateError(explain("packing", got, rule, "Leave packing out."))
        if self.layout.sequence_multiple and not self._attends.causal:
            rule = f"Kernels count padding after a sequence as part of it, and {self._attends} attention looks ahead."
            remedy = "Leave it out; pad_to_multiple_of pads only the end of the row."
            raise UnsupportedFormError(explain("sequence_multiple", str(self.layout.sequence_multiple), rule, remedy))

    def __call__(self, features: Features, return_tensors: str | None = None) -> dict[str, Any]:
        """One batch, a plain dict whose first key is `input_ids`. Raises `CollateError` naming every bad row.

        `features` is a list of samples, an Arrow table, a dict of columns, or flat tokens beside `seq_lengths`.
        """
        if return_tensors is not None:
            check_return_tensors(return_tensors)
        samples = read_features(features, allow_empty=self.layout.allow_empty, keys=self.keys)
        if self.max_length is not None and max(samples.lengths) > self.max_length:
            _refuse_longer(self.max_length, samples.lengths)
        batch, segments = _flat(self, samples) if self.padding_free else _padded(self, samples)
        out = self._finished(batch, segments, padding_free=self.padding_free, counted="position_ids" not in samples.columns)
        return out if get_worker_info() is None else shipped(out)


def _padded(collator: PaddingCollator, samples: Samples) -> tuple[dict[str, Any], Segments]:
    side: Side = collator.padding_side or "right"
    lengths, ids = samples.lengths, samples.segment_ids
    width = _width(collator, lengths)
    alone = [[b] for b in range(len(lengths))]
    rows = best_fit(lengths, min(width, collator.max_length or width)) if collator.packing else alone
    slots = Slots.of(rows, lengths, width, side)
    batch = _laid_out(collator, samples, samples.columns, slots)
    if ids is None:
        segments = of_lengths([[lengths[b] for b in row] for row in rows], width, side)
    else:
        apart = [np.where(row > 0, row + np.int64(b * width), 0) for b, row in enumerate(ids)]  # numbered anew in each row
        segments = Segments.from_ids(lay_rows("attention_mask", apart, slots=slots))
    positions = collator._adapter is None or collator._adds_positions(side == "left" or collator.packing)
    if positions and "position_ids" not in batch and "vision" not in samples.kinds.values():
        batch["position_ids"] = segments.position_ids
    if samples.kinds.get("labels") != "tokens" or batch["labels"].ndim != 2 or not collator._predicts_next:
        return batch, segments
    # Nothing predicts the first token of a sequence. The shift drops that of column 0, but a Trainer of transformers
    # before 5.16 counts it, and divides the loss by the count (4.57.1 trainer.py:5620).
    if ids is not None:  # what a sample's own mask calls padding has its label still
        batch["labels"] = ignore_first_labels(batch["labels"], segments, ignore_index=collator.label_pad_token_id)
    elif segments.packed or segments.padding_side in PADS_BEFORE:
        labels_BS = batch["labels"].numpy()
        for b, start, _ in segments.spans:
            if start:
                labels_BS[b, start] = collator.label_pad_token_id
    if collator._adapter is not None:
        batch["labels"].numpy()[:, 0] = collator.label_pad_token_id
    return batch, segments


def _laid_out(collator: PaddingCollator, samples: Samples, columns: Mapping[str, Rows], slots: Slots) -> dict[str, Any]:
    """Each key as one tensor, what has one value a token in its slots: positions of several axes `[axes, L]` too."""
    batch: dict[str, Any] = {}
    fills = _fills(collator)
    lay: Any = partial(lay_rows, slots=slots)
    for key, column in columns.items():
        kind = samples.kinds[key]
        if kind == "tokens":
            rule = collator.keys[key]
            fill = fills.get(rule.fill, 0 if rule.fill == "next" else rule.fill)
            batch[key] = lay(key, column, fill=fill, whole=rule.whole)
        elif kind == "axes":
            rows = [np.ascontiguousarray(np.moveaxis(np.asarray(row), 0, -1)) for row in column]
            batch[key] = lay(key, Rows(rows), whole=True).movedim(-1, 0).contiguous()
        elif kind == "vision":
            batch[key] = concatenate_values(key, column, unit=collator.keys[key].unit, order=slots.order)
        elif kind == "targets":
            batch[key] = torch.as_tensor(np.stack([host_array(key, column[b]) for b in slots.order])).float()
        else:
            batch[key] = stack_values([column[b] for b in slots.order])
    return batch


def _flat(collator: PaddingCollator, samples: Samples) -> tuple[dict[str, Any], Segments]:
    """One row of real tokens; what padding does in the samples is left out, alignment comes at the end or is placed."""
    ids, lengths, held, columns = samples.segment_ids, samples.lengths, samples.lengths, samples.columns
    if ids is not None:
        lengths = [n for row in ids for n in np.bincount(row)[1:].tolist() if n]
        held = [int((row > 0).sum()) for row in ids]
        by_token = {key: column for key, column in columns.items() if samples.kinds[key] in ("tokens", "axes")}
        real = {key: Rows(np.asarray(row)[..., i > 0] for row, i in zip(column, ids)) for key, column in by_token.items()}
        columns = columns | real
    places, width = _places(collator, lengths)
    written = width if places is None else sum(lengths)
    batch = _laid_out(collator, samples, columns, Slots.of([range(len(held))], held, written))
    segments = of_lengths([lengths], written)
    if places is not None:
        batch, segments = place_documents(batch, segments, places, keys=with_fills(collator.keys, _fills(collator)))
    batch = add_offsets(batch, segments, places, longest=width if collator.layout.max_sequences else None)
    labels = batch.get("labels")
    if labels is not None and collator._predicts_next and samples.kinds["labels"] == "tokens":
        labels[0, [start for _, start, _ in segments.spans]] = collator.layout.separator_id
    return batch, segments


def _places(collator: PaddingCollator, lengths: list[int]) -> tuple[list[int] | None, int]:
    """What each sequence of a flat row takes up, None where they stand side by side, and the width of the row."""
    multiple, count = collator.layout.sequence_multiple or 1, collator.layout.max_sequences
    held = aligned(lengths, multiple)
    repeats = collator._adapter is not None and collator._adapter.model.needs_mask_2d is False
    tail = least_room(len(held), count, multiple=multiple, repeats=repeats)
    width = _aligned(collator, sum(held) + tail)
    if sum(held) + tail > width:
        got = f"{sum(lengths)} tokens" + (f", {sum(held)} with their alignment" if multiple > 1 else " in all")
        got += f", and a tail of {tail} for max_sequences" if tail else ""
        rule = f"padding={collator.padding!r} makes the flat row {width} tokens wide at most."
        remedy = "Raise " + ("max_length" if collator.padding == "max_length" else "the widths")
        raise CollateError(explain("input_ids", got, rule, f"{remedy}, or put fewer samples in a batch."))
    if collator.layout.sequence_multiple is None and count is None:
        return None, width
    check_places("sequence_multiple", width, "Pass a smaller multiple (a chunk is 64).")
    causal = collator._attends.causal
    return add_tail(held, width, max_sequences=count, multiple=multiple, repeats=repeats, behind=causal), width


def _fills(collator: PaddingCollator) -> dict[Any, float]:
    """What padding holds, by the name a key has for it; positions of padding count on, or are 0."""
    pad_type = getattr(collator.tokenizer, "pad_token_type_id", 0) or 0
    return {"pad": collator.pad_token_id or 0, "pad_type": pad_type, "ignored": collator.label_pad_token_id}


def _width(collator: PaddingCollator, lengths: list[int]) -> int:
    if collator.padding is False and len(set(lengths)) > 1:
        rows = [(b, f"{n} tokens") for b, n in enumerate(lengths)]
        raise CollateError(explain_rows("input_ids", rows, "padding=False takes rows of one length.", "Pass padding=True."))
    width = _aligned(collator, max(lengths))
    if too_long := [(b, f"{n} tokens") for b, n in enumerate(lengths) if n > width]:
        rule = f"padding={collator.padding!r} makes rows {width} tokens wide at most, and the collator cuts no tokens."
        raise CollateError(explain_rows("input_ids", too_long, rule, "Raise the widths, or truncate when tokenising."))
    return width


def _aligned(collator: PaddingCollator, longest: int) -> int:
    """The width for rows of up to `longest` tokens; of several given, the narrowest that fits, else the widest."""
    multiple = lcm(collator.pad_to_multiple_of or 1, collator.layout.sequence_multiple or 1)
    if isinstance(collator.padding, tuple):
        widths: list[int] = sorted(-(-width // multiple) * multiple for width in collator.padding)
        return next((width for width in widths if width >= longest), widths[-1])
    fixed = collator.max_length if collator.packing or collator.padding == "max_length" else None
    return -(-(fixed or longest) // multiple) * multiple


def _refuse_longer(limit: int, lengths: list[int]) -> None:
    too_long = [(b, f"{n} tokens") for b, n in enumerate(lengths) if n > limit]
    rule = f"max_length is {limit}, and the collator cuts no tokens."
    raise CollateError(explain_rows("input_ids", too_long, rule, "Truncate when tokenising."))


def _check_padding(collator: PaddingCollator) -> None:
    own = {name: getattr(collator.layout, name) for name in ("sequence_multiple", "max_sequences")}
    named = {name: getattr(collator, name) for name in ("pad_token_id", "max_length", "pad_to_multiple_of")}
    for name, value in {**named, **own}.items():
        if value is not None:
            whole_number(name, value, least=int(name != "pad_token_id"))
            if name in own and not collator.padding_free:
                rule = "It is for flat rows; padded rows have pad_to_multiple_of."
                remedy = "Leave it out, or set padding_free=True without packing."
                raise CollateError(explain(name, repr(value), rule, remedy))
    padding: Any = collator.padding
    if isinstance(padding, (Tensor, np.ndarray)):
        padding = host_array("padding", padding).tolist()
    if isinstance(padding, Sequence) and not isinstance(padding, (str, bytes)):
        padding = tuple(whole_number("padding", width, least=1) for width in padding)
    object.__setattr__(collator, "padding", padding)
    known = collator.padding in (True, False, "longest", "max_length")
    if not known and (not isinstance(collator.padding, tuple) or not collator.padding):
        rule = "padding is True or 'longest', 'max_length', widths (4096, 8192, ...), or False for rows of one length."
        raise CollateError(explain("padding", repr(collator.padding), rule, "True suits most trainers."))
    if collator.padding == "max_length" and collator.max_length is None:
        raise CollateError(explain("max_length", "None", "padding='max_length' pads to it.", "Pass max_length=."))
