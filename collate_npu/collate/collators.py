"""The collator: features in, a batch out whose masks agree with each other, on the CPU, picklable.

It emits `attention_mask` (4D or None) beside `attention_mask_2d`, or, with a consumer named, what that consumer reads.
Costs one pass over the tokens; a 4D mask costs B * S * S bytes and is built only where nothing cheaper is exact.

Legend: B batch rows, S width, T tokens of a flat row, N sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from math import lcm
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from collate_npu.collate import padding
from collate_npu.collate.columns import Features
from collate_npu.collate.features import Samples, read_features
from collate_npu.collate.transport import shipped
from collate_npu.collate.wire import (
    MaskMode,
    adapter_of,
    check_mode,
    check_tensors,
    finish_batch,
    pattern_of,
    predicts_next,
    with_offsets,
)
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Consumer
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.host import whole_number
from collate_npu.keys import KEYS, Key, of_kind
from collate_npu.masks.forms import MAX_MASK_BYTES
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.places import aligned, least_room, with_tail
from collate_npu.outputs import ignore_first_labels
from collate_npu.parallel.documents import place_documents
from collate_npu.rows import Side
from collate_npu.segments import Segments


@dataclass(frozen=True)
class PaddingCollator:
    """Features to one padded batch, or with `padding_free` to one flat row; pass it as `data_collator=`.

    Every key that `KEYS` lists with one value a token is padded together: `input_ids`, `labels`, `position_ids`,
    `loss_scale`, `routed_experts` and others; `keys={**KEYS, "my_weights": TOKENS}` adds your own. Vision keys are joined,
    numbers become `[B]`, anything else a list of B. Lengths, and a row's own `attention_mask`, say which tokens are real;
    `pad_token_id` never does, for it is often a real eos. Holes in a row's mask stay holes. `1 1 2 2 0`, or
    `seq_lengths`, mark several sequences in a row.

    With a `model` (a module), or a `consumer` named, the batch is what that consumer reads, and nothing else is needed.
    Without, it is for an adapter at the trainer: `attention_mask` is None exactly where that is exact, else bool
    `[B, 1, S, S]`, True = blocked, beside bool `attention_mask_2d`, and int32 `segment_ids` where a row holds several
    sequences. `attention_mask` may then be "4d" (always built), "none" (raises where None is not exact), "2d" (the keep
    mask), or "omit" (no such key: accelerate's gather and TRL cannot carry None).

    `padding_free=True` puts all samples in one flat row with its offsets. `max_length` is a limit, and with
    `padding="max_length"` the width, of a flat row too; `padding=(4096, 8192)` takes the narrowest of these widths that
    fits. Longer rows raise, nothing is cut. Labels are not shifted yet (unless `labels_shifted`), so the first label of
    every sequence is ignored: alone, nothing predicts it.

    Two settings are for flat rows alone. `sequence_multiple=64` pads each sequence behind its tokens, which is exact for
    causal layers, and the row to a multiple of it too. `max_sequences=N` gives the offsets one length, N + 1, and
    `max_length_q/k` one value, the width: with fixed widths all batches have the same shapes, as graphs and compilers
    want. The rest of the row is one tail, cut into the sequences that are missing (`masks.places.with_tail`). A model
    known to have attention alone gets its last offset again instead. `sequence_multiple=4`, `padding=(8, 16)`,
    `max_sequences=4`::

        1 1 1 0 2 2 0 0 0 0 0 0 0 0 0 0     cu_seqlens_padded 0 4 8 12 16     cu_seqlens 0 3 5 5 5

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
    _: KW_ONLY
    pad_token_id: int | None = None
    padding_side: Side | None = None
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = -100
    padding_free: bool = False
    separator_id: int = -100
    attention_mask: MaskMode = "auto"
    consumer: str | Consumer | None = None
    return_tensors: str = "pt"
    padding: bool | Literal["longest", "max_length"] | Sequence[int] = True
    pattern: str | Pattern | None = None
    labels_shifted: bool = False
    allow_empty: bool = False
    keys: Mapping[str, Key] = field(default_factory=lambda: KEYS, repr=False)
    max_mask_bytes: int = MAX_MASK_BYTES
    sequence_multiple: int | None = None
    max_sequences: int | None = None
    model: InitVar[Any] = None
    model_type: InitVar[str | None] = None
    _adapter: BatchAdapter | None = field(init=False, repr=False, compare=False)

    def __post_init__(self, model: Any, model_type: str | None) -> None:
        check_mode(self.attention_mask, self.consumer, self.return_tensors, padding_free=self.padding_free)
        given = {"pad_token_id": self.pad_token_id, "padding_side": self.padding_side}
        for name, value in given.items():
            object.__setattr__(self, name, getattr(self.tokenizer, name, None) if value is None else value)
        object.__setattr__(self, "padding_side", self.padding_side or "right")
        _check_padding(self)
        if self.pad_token_id is None and (not self.padding_free or _pads_flat_rows(self)):
            rule = "Padding needs an id that the embedding has; which one does not matter to the masks."
            remedy = "Set tokenizer.pad_token = tokenizer.eos_token, or pass pad_token_id=."
            raise CollateError(explain("pad_token_id", "None", rule, remedy))
        object.__setattr__(self, "_adapter", adapter_of(self, model, model_type))
        if self.sequence_multiple and not pattern_of(self).causal:
            rule = f"Padding behind a sequence is in the sequence for kernels, and {pattern_of(self)} attention looks ahead."
            remedy = "Leave it out; pad_to_multiple_of pads the row behind all of them."
            raise UnsupportedFormError(explain("sequence_multiple", str(self.sequence_multiple), rule, remedy))

    def __call__(self, features: Features, return_tensors: str | None = None) -> dict[str, Any]:
        """One batch, a plain dict whose first key is `input_ids`. Raises `CollateError` naming every bad row.

        `features` is a list of samples, an Arrow table, a dict of columns, or flat tokens beside `seq_lengths`.
        """
        check_tensors(return_tensors or self.return_tensors)
        samples = read_features(features, allow_empty=self.allow_empty, keys=self.keys)
        batch, segments = _flat(self, samples) if self.padding_free else _padded(self, samples)
        return shipped(finish_batch(self, batch, segments, padding_free=self.padding_free))


def _padded(collator: PaddingCollator, samples: Samples) -> tuple[dict[str, Any], Segments]:
    side: Side = collator.padding_side or "right"
    width = _width(collator, samples.lengths)
    batch: dict[str, Any] = {}
    for key, column in samples.columns.items():
        if samples.kinds[key] == "tokens":
            fill, whole = _fill(collator, key), collator.keys[key].whole
            batch[key] = padding.pad_rows(key, column, width=width, side=side, fill=fill, whole=whole)
        elif samples.kinds[key] == "axes":
            batch[key] = padding.pad_positions(column, width=width, side=side)
        else:
            batch[key] = _other(collator, key, column, samples)
    if samples.segment_ids is None:
        segments = Segments.laid_out([[n] for n in samples.lengths], width, side)
    else:
        segments = Segments.from_ids(padding.pad_rows("attention_mask", samples.segment_ids, width=width, side=side))
    if collator._adapter is None and "position_ids" not in batch and not of_kind(batch, "vision"):
        batch["position_ids"] = segments.position_ids
    filled = samples.segment_ids is None
    if samples.kinds.get("labels") == "tokens" and not (filled and segments.padding_side in ("none", "right")):
        batch["labels"] = _ignored(collator, batch["labels"], segments, filled=filled)
    return batch, segments


def _ignored(collator: PaddingCollator, labels: Tensor, segments: Segments, *, filled: bool) -> Tensor:
    """Nothing predicts the first token of a sequence; in column 0 the shift drops its label.

    Padding is `filled` already, but for what a sample's own mask calls padding.
    """
    if not predicts_next(collator) or labels.ndim != 2:
        return labels
    if not filled:
        return ignore_first_labels(labels, segments, ignore_index=collator.label_pad_token_id)
    labels_BS = labels.numpy()
    for b, start, _ in segments.spans:
        if start:
            labels_BS[b, start] = collator.label_pad_token_id
    return labels


def _flat(collator: PaddingCollator, samples: Samples) -> tuple[dict[str, Any], Segments]:
    """One row of real tokens; what padding does in the samples is left out, alignment comes at the end or is placed."""
    ids, lengths = samples.segment_ids, samples.lengths
    if ids is not None:
        lengths = [n for row in ids for n in np.bincount(row)[1:].tolist() if n]
    _check_max_length(collator, samples.lengths)
    places, width = _places(collator, lengths)
    written = width if places is None else sum(lengths)
    batch: dict[str, Any] = {}
    for key, column in samples.columns.items():
        if samples.kinds[key] == "tokens":
            rows = column if ids is None else [np.asarray(row)[i > 0] for row, i in zip(column, ids)]
            fill, whole = _fill(collator, key), collator.keys[key].whole
            batch[key] = padding.flatten_rows(key, rows, width=written, fill=fill, whole=whole)
        elif samples.kinds[key] == "axes":
            axes = column if ids is None else [np.asarray(row)[:, i > 0] for row, i in zip(column, ids)]
            batch[key] = padding.flatten_positions(axes, width=written)
        else:
            batch[key] = _other(collator, key, column, samples)
    segments = Segments.laid_out([lengths], written)
    if places is not None:
        batch, segments = place_documents(batch, segments, places, keys=_filled(collator, batch))
    batch = with_offsets(batch, segments, places, longest=width if collator.max_sequences else None)
    labels = batch.get("labels")
    if labels is not None and predicts_next(collator) and samples.kinds["labels"] == "tokens":
        labels[0, [start for _, start, _ in segments.spans]] = collator.separator_id
    return batch, segments


def _places(collator: PaddingCollator, lengths: list[int]) -> tuple[list[int] | None, int]:
    """What each sequence of a flat row takes up, None where they stand side by side, and the width of the row."""
    multiple, count = collator.sequence_multiple or 1, collator.max_sequences
    if collator.sequence_multiple is None and count is None:
        return None, _flat_width(collator, sum(lengths), f"{sum(lengths)} tokens in all")
    held = aligned(lengths, multiple)
    repeats = collator._adapter is not None and collator._adapter.model.needs_mask_2d is False
    tail = least_room(len(held), count, multiple=multiple, repeats=repeats)
    got = f"{sum(lengths)} tokens" + (f", {sum(held)} with their alignment" if multiple > 1 else " in all")
    got += f", and a tail of {tail} for max_sequences" if tail else ""
    width = _flat_width(collator, sum(held) + tail, got)
    return with_tail(
        held, width, max_sequences=count, multiple=multiple, repeats=repeats, behind=pattern_of(collator).causal
    ), width


def _filled(collator: PaddingCollator, batch: Mapping[str, Any]) -> dict[str, Key]:
    """The keys of a batch with a number for what padding holds, but for positions, which count on."""
    rules = {key: collator.keys[key] for key in batch if key in collator.keys}
    counted = {key: rule for key, rule in rules.items() if rule.fill in ("next", "last")}
    return {key: replace(rule, fill=_fill(collator, key)) for key, rule in rules.items()} | counted


def _other(collator: PaddingCollator, key: str, column: list[Any], samples: Samples) -> Any:
    if samples.kinds[key] == "vision":
        return padding.concatenate_values(key, column, unit=collator.keys[key].unit)
    if samples.kinds[key] == "targets":
        return torch.as_tensor(np.stack([np.asarray(row, np.float32) for row in column]))
    return padding.stack_values(key, column)


def _fill(collator: PaddingCollator, key: str) -> float:
    """What padding holds: the pad id, the ignored label, or a number; positions of padding are 0."""
    fill = collator.keys[key].fill
    if fill == "pad":
        return collator.pad_token_id or 0
    if fill == "pad_type":
        return getattr(collator.tokenizer, "pad_token_type_id", 0) or 0
    return collator.label_pad_token_id if fill == "ignored" else 0 if isinstance(fill, str) else fill


def _width(collator: PaddingCollator, lengths: list[int]) -> int:
    _check_max_length(collator, lengths)
    if collator.padding is False and len(set(lengths)) > 1:
        rows = [(b, f"{n} tokens") for b, n in enumerate(lengths)]
        raise CollateError(explain_rows("input_ids", rows, "padding=False takes rows of one length.", "Pass padding=True."))
    width = _aligned(collator, max(lengths))
    if too_long := [(b, f"{n} tokens") for b, n in enumerate(lengths) if n > width]:
        rule = f"padding={collator.padding!r} makes rows {width} tokens wide at most, and nothing is cut here."
        raise CollateError(explain_rows("input_ids", too_long, rule, "Raise the widths, or truncate when tokenising."))
    return width


def _flat_width(collator: PaddingCollator, needed: int, got: str) -> int:
    """A flat row as wide as what stands in it, or the width asked for."""
    width = _aligned(collator, needed)
    if needed > width:
        rule = f"padding={collator.padding!r} makes the flat row {width} tokens wide at most."
        remedy = "Raise " + ("max_length" if collator.padding == "max_length" else "the widths")
        raise CollateError(explain("input_ids", got, rule, f"{remedy}, or put fewer samples in a batch."))
    return width


def _aligned(collator: PaddingCollator, longest: int) -> int:
    """The width for rows of up to `longest` tokens; of several given, the narrowest that fits, else the widest."""
    multiple = lcm(collator.pad_to_multiple_of or 1, collator.sequence_multiple or 1)
    if isinstance(collator.padding, tuple):
        widths = sorted(padding.round_up(width, multiple) for width in collator.padding)
        return next((width for width in widths if width >= longest), widths[-1])
    limit = collator.max_length
    fixed = limit if collator.padding == "max_length" and limit is not None else longest
    return padding.round_up(fixed, multiple)


def _check_max_length(collator: PaddingCollator, lengths: list[int]) -> None:
    limit = collator.max_length
    too_long = [] if limit is None else [(b, f"{n} tokens") for b, n in enumerate(lengths) if n > limit]
    if too_long:
        rule = f"max_length is {limit}, and nothing is cut here, where labels and masks would lose their tokens."
        raise CollateError(explain_rows("input_ids", too_long, rule, "Truncate when tokenising."))


def _pads_flat_rows(collator: PaddingCollator) -> bool:
    settings = (collator.pad_to_multiple_of, collator.sequence_multiple, collator.max_sequences)
    return any(settings) or isinstance(collator.padding, tuple)


def _check_padding(collator: PaddingCollator) -> None:
    for name in ("pad_token_id", "max_length", "pad_to_multiple_of", "sequence_multiple", "max_sequences"):
        if getattr(collator, name) is not None:
            whole_number(name, getattr(collator, name), least=int(name != "pad_token_id"))
    if collator.padding_side not in ("left", "right"):
        rule = "Padding goes to one side."
        raise CollateError(explain("padding_side", repr(collator.padding_side), rule, "Pass 'left' or 'right'."))
    _check_widths(collator)
    for name in ("sequence_multiple", "max_sequences"):
        if getattr(collator, name) is not None and not collator.padding_free:
            rule = "It is for flat rows; padded rows have pad_to_multiple_of."
            raise CollateError(explain(name, repr(getattr(collator, name)), rule, "Leave it out, or set padding_free=True."))


def _check_widths(collator: PaddingCollator) -> None:
    if isinstance(collator.padding, Iterable) and not isinstance(collator.padding, str):
        widths = tuple(whole_number("padding", width, least=1) for width in collator.padding)
        object.__setattr__(collator, "padding", widths)
    known = collator.padding in (True, False, "longest", "max_length")
    if not known and (not isinstance(collator.padding, tuple) or not collator.padding):
        rule = "padding is True or 'longest', 'max_length', widths (4096, 8192, ...), or False for rows of one length."
        raise CollateError(explain("padding", repr(collator.padding), rule, "True suits most trainers."))
    if collator.padding == "max_length" and collator.max_length is None:
        raise CollateError(explain("max_length", "None", "padding='max_length' pads to it.", "Pass max_length=."))
