"""Collators: features in, a batch out whose masks agree with each other, on the CPU, picklable.

A batch has `attention_mask` (4D or None) beside `attention_mask_2d`, segment ids, offsets and ignored labels: the neutral
form that an adapter reads. With a consumer named, it has what that consumer reads. `segments_from_batch` gives back from the
neutral form the Segments that the collator knew.
Costs one pass over the tokens; a 4D mask costs B * S * S bytes and is built only where nothing cheaper is exact.
Legend: B batch rows, S width, T tokens of a flat row, N sequences.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from collate_npu.arrays import Side, dims, host_array, whole_number
from collate_npu.collate.features import Features, Samples, read_features
from collate_npu.collate.padding import Rows, Slots, best_fit, concatenate_values, lay_rows, stack_values
from collate_npu.collate.transport import shipped
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.labels_and_positions import check_labels, labels_for, refuse_moved
from collate_npu.consumers.mask_choice import Consumer, ConsumerName
from collate_npu.consumers.model_traits import LabelRule, config_of, consumer_of, text_config
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows, not_one_of, refuse_rows
from collate_npu.keys import KEEP_KEY, KEYS, SEGMENT_KEY, Key, check_keys, of_kind, with_role
from collate_npu.masks.forms import none_is_exact, offsets_of, own_places, write_dense
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources, check_longest, physical_offsets
from collate_npu.segments import PADS_BEFORE, Segments, of_lengths
from collate_npu.validation import check_model, check_return_tensors, check_tokenizer, checked

MaskMode = Literal["auto", "none", "4d", "2d", "omit"]


class BatchWriter:
    """What a batch is for, and how it is written: the settings that both collators share.

    Raises `CollateError` for settings that contradict each other.
    """

    def __init__(
        self,
        model: Any,
        *,
        model_type: str | None = None,
        consumer: ConsumerName | Consumer | None,
        attention_mask: MaskMode,
        pattern: str | Pattern | None,
        padding_free: bool,
        label_pad_token_id: int,
        keys: Mapping[str, Key],
        labels_shifted: bool,
        packing: bool = False,
    ) -> None:
        if model is not None:
            check_model(model, config=True)
        self.label_pad_token_id = whole_number("label_pad_token_id", label_pad_token_id, least=-(1 << 63))
        self.keys, self.labels_shifted, self.mode = check_keys(keys), labels_shifted, attention_mask
        named = model_type is not None or consumer_of(model) is not None or consumer is not None
        if model is not None and not named:
            rule = "A config or a plain module does not say which stack reads the batch."
            remedy = "Pass consumer= ('transformers', 'megatron', ...)."
            raise CollateError(explain("consumer", "None", rule, remedy, more="consumer"))
        rule, remedy = "The consumer decides the form of its mask.", "Leave it at 'auto'."
        if flat := not named and padding_free and attention_mask in ("4d", "2d"):
            rule, remedy = "A padding-free row has offsets and no mask.", "Leave it at 'auto', or set padding_free=False."
        if flat or (named and attention_mask not in ("auto", "omit")):
            raise CollateError(explain("attention_mask", repr(attention_mask), rule, remedy))
        settings: dict[str, Any] = {"consumer": consumer, "padding_free": padding_free, "pattern": pattern, "keys": keys}
        settings["labels_shifted"] = labels_shifted or None
        self.adapter = BatchAdapter(model, model_type=model_type, **settings) if named else None
        """The adapter of the named consumer or of the model, which is not kept."""
        self.pattern = Pattern.of(pattern or "causal") if self.adapter is None else self.adapter.pattern
        """The attention that the batch is for: declared, the model's own, or plain causal."""
        neutral: LabelRule = "places" if self.pattern.name == "bidirectional" else "next"  # this form has no head
        self.labels = neutral if self.adapter is None else self.adapter.label_rule
        """What the model does with labels."""
        self.left = "" if self.adapter is None else self.adapter.left
        """Why the model is out of scope, and its batches are padded as transformers pads them; "" in scope."""
        if self.left and (padding_free or packing):
            rule = f"Batches of this model are only padded, as transformers pads them: {self.left}."
            raise UnsupportedFormError(explain("padding_free, packing", "True", rule, "Leave both out."))
        self.predicts_next = not self.left and not labels_shifted and self.labels == "next"
        """True if the model predicts the next token and labels are not shifted yet."""

    def adds_positions(self, left: bool) -> bool:
        """True if the model could count positions of some batch wrong: padding on the left, or with an id that it counts.
        Then all have positions: a dispatcher takes the keys of the first batch for those of all."""
        return self.adapter is not None and not self.left and (left or self.adapter.model.positions == "padding_idx")

    def ignore(self, batch: dict[str, Any], segments: Segments, *, own: bool, flat: bool) -> None:
        """Put into a batch of ours the labels that `ignored` returns. What a sample's `own` mask calls padding has its label
        still; without such masks only real tokens have one, and no pass over the batch is needed."""
        if own or batch["labels"].ndim != 2:
            batch |= self.ignored(Sources.of(batch), segments, self.labels_shifted, flat=flat)
        elif self.predicts_next:
            labels_BS = batch["labels"].numpy()
            refuse_moved(batch["input_ids"].numpy(), labels_BS, segments)
            for b, start, _ in segments.spans if segments.packed or segments.padding_side in PADS_BEFORE else ():
                labels_BS[b, start] = self.label_pad_token_id if start else labels_BS[b, 0]
            if flat or self.adapter is not None:
                labels_BS[:, 0] = self.label_pad_token_id

    def ignored(self, batch: Sources, segments: Segments, shifted: bool | None, *, flat: bool) -> dict[str, Tensor]:
        """Return the labels that must change: of padding, and the first of each sequence, which nothing predicts. The shift
        drops that of column 0, but a Trainer before transformers 5.16 divides the loss by their count, too."""
        if self.left:
            return {}
        check_labels(batch, segments, None if self.adapter is None else self.adapter.model.labels)
        holes = self.adapter is None or not self.adapter.model.by_sequence
        out = labels_for(batch, segments, self.labels, shifted, ignored=self.label_pad_token_id, holes=holes)
        labels = out.get("labels", batch.get("labels"))
        first = self.predicts_next and shifted is False and (flat or self.adapter is not None)
        if first and isinstance(labels, Tensor) and dims(labels)[:2] == segments.shape:
            out["labels"] = torch.cat([torch.full_like(labels[:, :1], self.label_pad_token_id), labels[:, 1:]], dim=1)
        return out

    def write(
        self, batch: dict[str, Any], segments: Segments, *, padding_free: bool, counted: bool = False
    ) -> dict[str, Any]:
        """Return the batch with its masks as the mode or the consumer wants them; `counted`: Segments made its positions."""
        if self.left:
            out = {**batch, "attention_mask": (segments.ids if segments.packed else segments.keep).long()}
        elif self.adapter is not None:
            sources = Sources.of(batch)
            sources.counted |= counted
            out = self.adapter.write(sources, segments, padding_free)
        elif padding_free:
            out = {key: value for key, value in batch.items() if key not in (KEEP_KEY, SEGMENT_KEY)}
            out["attention_mask"] = None
        else:
            out = {**batch, "attention_mask": self._choose_mask(segments), KEEP_KEY: segments.keep}
            out.pop(SEGMENT_KEY, None)
            # a 2D mask says neither where sequences part nor that a row is empty
            if segments.packed or not all(segments.lengths):
                out[SEGMENT_KEY] = segments.ids
        if self.mode == "omit" and out.pop("attention_mask", None) is not None:
            exact = none_is_exact(segments, self.pattern)
            if self.adapter is not None and not exact:
                rule = f"{self.adapter.consumer.name} reads padding from this key only, and {exact.why}."
                raise UnsupportedFormError(explain("attention_mask", "'omit'", rule, "Use 'auto', or pad right."))
        return out if get_worker_info() is None else shipped(out)

    def _choose_mask(self, segments: Segments) -> Tensor | None:
        """Return the mask of a batch for which no stack is named."""
        if self.mode in ("2d", "omit"):
            return segments.keep
        exact = none_is_exact(segments, self.pattern)
        if self.mode == "none" and not exact:
            rule = f"attention_mask='none' is set, and {exact.why}."
            raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Use 'auto', or pad right."))
        if exact.ok and self.mode != "4d":
            return None
        _warn_of_neutral_form()
        return write_dense(segments, "masked", self.pattern)


@cache
def _warn_of_neutral_form() -> None:
    """Once a process: whoever trains a transformers model with this batch as it is gets the mask the wrong way round."""
    warnings.warn(
        "collate_npu: this batch has a 4D attention_mask with True = blocked, for a BatchAdapter or Megatron-core. A "
        "transformers model reads True as attended. Pass model= (or consumer='transformers') to the collator, or run "
        "BatchAdapter(model) on the batch; consumer='megatron' turns this warning off.",
        stacklevel=5,
    )


def add_offsets(batch: Mapping[str, Any], segments: Segments) -> dict[str, Any]:
    """Return a flat row with all its offsets; its own physical ones stay if they fit, positions of axes beside the text row.
    Raises where images stand in the row and no positions say where."""
    places = longest = None
    if with_role(batch, "padded_offsets"):
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


_PADDED = "Leave it out: collate_npu.parallel.pad_documents(batch, {}=...) does it to a batch with padding_free=True."
ELSEWHERE = {
    "separator_id": "Leave it out: the first label of each sequence becomes label_pad_token_id.",
    "sequence_multiple": _PADDED.format("multiple"),
    "max_sequences": _PADDED.format("max_sequences"),
}
"""Our option for each option of other collators."""
_MADE = "wrap_collator(DataCollatorForLanguageModeling(tokenizer, mlm=False), model=model) makes labels from input_ids."
_RETURNED = ("return_position_ids", "return_flash_attn_kwargs", "return_seq_idx")
_OWN = {
    **dict.fromkeys(_RETURNED, "Leave it out: the collator emits what the model reads."),
    **dict.fromkeys(("mlm", "mlm_probability"), f"PaddingCollator takes labels from the samples. {_MADE}"),
    "processing_class": "Pass tokenizer=.",
    "processor": "Pass tokenizer=processor.tokenizer.",
    "truncation": "Truncate when tokenising.",
}


@checked(instead=ELSEWHERE | _OWN)
class PaddingCollator:
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
    * `labels_shifted`: True if each label already stands with the token that predicts it.
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

    def __init__(
        self,
        tokenizer: Any = None,
        model: Any = None,
        padding: bool | Literal["longest", "max_length"] | Sequence[int] = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        *,
        consumer: ConsumerName | Consumer | None = None,
        attention_mask: MaskMode = "auto",
        pattern: str | Pattern | None = None,
        padding_free: bool = False,
        packing: bool = False,
        pad_token_id: int | None = None,
        padding_side: Side | None = None,
        label_pad_token_id: int = -100,
        labels_shifted: bool = False,
        keys: Mapping[str, Key] = KEYS,
        return_tensors: Any = "pt",
    ) -> None:
        check_return_tensors(return_tensors)
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        self.writer = BatchWriter(
            model, consumer=consumer, attention_mask=attention_mask, pattern=pattern, padding_free=padding_free,
            label_pad_token_id=label_pad_token_id, keys=keys, labels_shifted=labels_shifted, packing=packing,
        )  # fmt: skip
        self.tokenizer, self.padding_free, self.packing, self.keys = tokenizer, padding_free, packing, keys
        pad_token_id = getattr(tokenizer, "pad_token_id", None) if pad_token_id is None else pad_token_id
        self.pad_token_id = None if pad_token_id is None else whole_number("pad_token_id", pad_token_id)
        self.padding_side: Side = padding_side or getattr(tokenizer, "padding_side", None) or "right"
        if self.padding_side not in ("left", "right"):  # a tokenizer takes any string
            raise not_one_of("tokenizer.padding_side", self.padding_side, ("left", "right"))
        ids = None if model is None else getattr(text_config(config_of(model)), "vocab_size", None)
        if isinstance(ids, int) and (self.pad_token_id or 0) >= ids and consumer_of(model) == "transformers":
            rule = f"The model's vocabulary has {ids} tokens, and padding runs through its embedding."
            remedy = "Pass pad_token_id= (any id below; eos will do), or model.resize_token_embeddings(len(tokenizer))."
            raise CollateError(explain("pad_token_id", str(self.pad_token_id), rule, remedy))
        self.max_length = None if max_length is None else whole_number("max_length", max_length, least=1)
        self.pad_to_multiple_of = (
            None if pad_to_multiple_of is None else whole_number("pad_to_multiple_of", pad_to_multiple_of, least=1)
        )
        self.padding = _checked_padding(padding, self.max_length)
        padded = not padding_free or self.pad_to_multiple_of or isinstance(self.padding, tuple)
        if self.pad_token_id is None and padded:
            rule = "Padding needs an id that the embedding has; which one does not matter to the masks."
            remedy = "Set tokenizer.pad_token = tokenizer.eos_token, or pass pad_token_id=."
            raise CollateError(explain("pad_token_id", "None", rule, remedy))
        if packing and (padding_free or self.padding is False):
            got = f"True beside padding_free={padding_free}, padding={self.padding!r}"
            rule = "A packed row is padded and holds several samples."
            raise CollateError(explain("packing", got, rule, "Leave packing out."))

    def __call__(self, features: Features, return_tensors: str | None = None) -> dict[str, Any]:
        """One batch, a plain dict whose first key is `input_ids`. Raises `CollateError` naming every bad row.

        `features` is a list of samples, or a dict of columns.
        """
        if return_tensors is not None:
            check_return_tensors(return_tensors)
        samples = read_features(features, keys=self.keys)
        limit = self.max_length
        if limit is not None:
            longer = [(b, f"{n} tokens") for b, n in enumerate(samples.lengths) if n > limit]
            rule = f"max_length is {limit}, and the collator cuts no tokens."
            refuse_rows("input_ids", longer, rule, "Truncate when tokenising.")
        batch, segments = _flat(self, samples) if self.padding_free else _padded(self, samples)
        if samples.kinds.get("labels") == "tokens":
            self.writer.ignore(batch, segments, own=samples.segment_ids is not None, flat=self.padding_free)
        counted = "position_ids" not in samples.columns
        return self.writer.write(batch, segments, padding_free=self.padding_free, counted=counted)


def _padded(collator: PaddingCollator, samples: Samples) -> tuple[dict[str, Any], Segments]:
    side, writer = collator.padding_side, collator.writer
    lengths, ids = samples.lengths, samples.segment_ids
    width, alone = _width(collator, lengths), [[b] for b in range(len(lengths))]
    rows = best_fit(lengths, min(width, collator.max_length or width)) if collator.packing else alone
    slots = Slots.of(rows, lengths, width, side)
    batch = _laid_out(collator, samples, samples.columns, slots)
    if ids is None:
        segments = of_lengths([[lengths[b] for b in row] for row in rows], width, side)
    else:
        apart = [np.where(row > 0, row + np.int64(b * width), 0) for b, row in enumerate(ids)]  # numbered anew in each row
        segments = Segments.from_ids(lay_rows("attention_mask", apart, slots=slots))
    positions = writer.adapter is None or writer.adds_positions(side == "left" or collator.packing)
    if positions and "position_ids" not in batch and "vision" not in samples.kinds.values():
        batch["position_ids"] = segments.position_ids
    return batch, segments


def _laid_out(collator: PaddingCollator, samples: Samples, columns: Mapping[str, Rows], slots: Slots) -> dict[str, Any]:
    """Each key as one tensor, what has one value a token in its slots: positions of several axes `[axes, L]` too."""
    batch: dict[str, Any] = {}
    fills: dict[Any, float] = {"pad": collator.pad_token_id or 0, "ignored": collator.writer.label_pad_token_id}
    fills["pad_type"] = getattr(collator.tokenizer, "pad_token_type_id", 0) or 0
    for key, column in columns.items():
        kind = samples.kinds[key]
        if kind == "tokens":
            rule = collator.keys[key]
            fill: Any = fills.get(rule.fill, 0 if rule.fill == "next" else rule.fill)
            batch[key] = lay_rows(key, column, slots=slots, fill=fill, whole=rule.whole)
        elif kind == "axes":
            rows = [np.ascontiguousarray(np.moveaxis(np.asarray(row), 0, -1)) for row in column]
            batch[key] = lay_rows(key, Rows(rows), slots=slots, whole=True).movedim(-1, 0).contiguous()
        elif kind == "vision":
            batch[key] = concatenate_values(key, column, unit=collator.keys[key].unit, order=slots.order)
        elif kind == "targets":
            batch[key] = torch.as_tensor(np.stack([host_array(key, column[b]) for b in slots.order])).float()
        else:
            _refuse_places(collator, key, column, samples.lengths, slots)
            batch[key] = stack_values([column[b] for b in slots.order])
    return batch


_PLACES = re.compile(r"(^|_)(positions?|places?|starts?|ends?|spans?|bounds?|pos)(_|$)|(token|cls|image)_ind(ex|ices)$")
"""Names under which data sets hold places of a sample's own row."""


def _refuse_places(collator: PaddingCollator, key: str, column: Rows, lengths: list[int], slots: Slots) -> None:
    """Refuse a key whose numbers are places of a row, by its name and its values, where the tokens move to other places."""
    moved = {b: slots.starts[b] % slots.shape[1] for b in slots.order if slots.starts[b] % slots.shape[1]}
    if key in collator.keys or not moved or not _PLACES.search(key):
        return
    held = {b: np.asarray(column[b]) for b in range(len(lengths))}
    fits = (x.dtype.kind in "iu" and x.min() >= -1 and x.max() <= lengths[b] for b, x in held.items() if x.size)
    if any(x.size for x in held.values()) and all(fits):
        rule = "Its numbers look like places of a sample's tokens, and these tokens stand elsewhere in the batch."
        remedy = f"Pad right; or add the shift behind the collator, and pass keys={{**KEYS, {key!r}: SAMPLE}}."
        raise CollateError(explain_rows(key, [(b, f"tokens moved by {n}") for b, n in moved.items()], rule, remedy))


def _flat(collator: PaddingCollator, samples: Samples) -> tuple[dict[str, Any], Segments]:
    """One row of real tokens; what padding does in the samples is left out, alignment comes at the end."""
    ids, lengths, held, columns = samples.segment_ids, samples.lengths, samples.lengths, samples.columns
    if ids is not None:
        lengths = [n for row in ids for n in np.bincount(row)[1:].tolist() if n]
        held = [int((row > 0).sum()) for row in ids]
        by_token = {key: column for key, column in columns.items() if samples.kinds[key] in ("tokens", "axes")}
        real = {key: Rows(np.asarray(row)[..., i > 0] for row, i in zip(column, ids)) for key, column in by_token.items()}
        columns = columns | real
    width = _width(collator, [sum(lengths)])
    segments = of_lengths([lengths], width)
    return add_offsets(_laid_out(collator, samples, columns, Slots.of([range(len(held))], held, width)), segments), segments


def _width(collator: PaddingCollator, lengths: list[int]) -> int:
    if collator.padding is False and len(set(lengths)) > 1:
        bad = [(b, f"{n} tokens") for b, n in enumerate(lengths)]
        refuse_rows("input_ids", bad, "padding=False takes rows of one length.", "Pass padding=True.")
    width = _aligned(collator, max(lengths))
    if max(lengths) > width:
        bad = [(b, f"{n} tokens") for b, n in enumerate(lengths) if n > width]
        rule = f"padding={collator.padding!r} makes rows {width} tokens wide at most, and the collator cuts no tokens."
        remedy = "Raise the widths (or max_length), truncate when tokenising, or put fewer samples in a flat row."
        refuse_rows("input_ids", bad, rule, remedy)
    return width


def _aligned(collator: PaddingCollator, longest: int) -> int:
    """Return the width for rows of up to `longest` tokens: the narrowest given width that fits, else the widest."""
    multiple = collator.pad_to_multiple_of or 1
    if isinstance(collator.padding, tuple):
        widths: list[int] = sorted(-(-width // multiple) * multiple for width in collator.padding)
        return next((width for width in widths if width >= longest), widths[-1])
    fixed = collator.max_length if collator.packing or collator.padding == "max_length" else None
    return -(-(fixed or longest) // multiple) * multiple


def _checked_padding(padding: Any, max_length: int | None) -> bool | str | tuple[int, ...]:
    """Return the option `padding`, widths as a tuple."""
    if isinstance(padding, (Tensor, np.ndarray)):
        padding = host_array("padding", padding).tolist()
    if isinstance(padding, Sequence) and not isinstance(padding, (str, bytes)):
        padding = tuple(whole_number("padding", width, least=1) for width in padding)
    if padding not in (True, False, "longest", "max_length") and (not isinstance(padding, tuple) or not padding):
        rule = "padding is True or 'longest', 'max_length', widths (4096, 8192, ...), or False for rows of one length."
        raise CollateError(explain("padding", repr(padding), rule, "True suits most trainers."))
    if padding == "max_length" and max_length is None:
        raise CollateError(explain("max_length", "None", "padding='max_length' pads to it.", "Pass max_length=."))
    return padding  # type: ignore[no-any-return]
