"""Emission: how a collator hands on a batch whose truth it knows: masks, offsets, labels nobody should learn from.

Without a consumer the batch takes the neutral form an adapter reads; with one, that consumer's route is applied.
Legend: B batch rows, S width, T tokens of a flat row, N sequences.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from collate_npu.consumers.adapter import KEEP_KEY, BatchAdapter
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.masks.forms import dense, none_is_exact, varlen
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

MaskMode = Literal["auto", "none", "4d", "2d", "omit"]


class Emitter(Protocol):
    """The settings both collators share."""

    @property
    def attention_mask(self) -> MaskMode: ...
    @property
    def consumer(self) -> str | None: ...
    @property
    def pattern(self) -> str | Pattern: ...
    @property
    def label_pad_token_id(self) -> int: ...
    @property
    def labels_shifted(self) -> bool: ...
    @property
    def max_mask_bytes(self) -> int: ...
    @property
    def _adapter(self) -> BatchAdapter | None: ...


def emit(collator: Emitter, batch: dict[str, Any], segments: Segments, *, padding_free: bool) -> dict[str, Any]:
    """The finished batch: `attention_mask` and `attention_mask_2d` as the collator's mode or its consumer wants them."""
    mode, adapter = collator.attention_mask, collator._adapter
    if adapter is not None:
        out: dict[str, Any] = adapter.apply(batch, segments, padding_free=padding_free)
    elif padding_free:
        out = {key: value for key, value in batch.items() if key != KEEP_KEY} | {"attention_mask": None}
    else:
        out = batch | {"attention_mask": _mask(collator, segments), KEEP_KEY: segments.keep}
    if mode == "omit":
        if adapter is not None and out.get("attention_mask") is not None and not none_is_exact(segments, collator.pattern):
            rule = f"{collator.consumer} learns of padding from this key alone, and {none_is_exact(segments).why}."
            raise UnsupportedFormError(explain("attention_mask", "'omit'", rule, "Use 'auto', or pad right."))
        out.pop("attention_mask", None)
    return out


def _mask(collator: Emitter, segments: Segments) -> Tensor | None:
    if collator.attention_mask in ("2d", "omit"):
        return segments.keep
    exact = none_is_exact(segments, collator.pattern)
    if collator.attention_mask == "none" and not exact:
        rule = f"attention_mask='none' was asked for, and {exact.why}."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Use 'auto', or pad right."))
    if exact and collator.attention_mask != "4d":
        return None
    return dense(segments, polarity="masked", pattern=collator.pattern, max_mask_bytes=collator.max_mask_bytes)


def adapter_of(collator: Emitter, model: Any, model_type: str | None) -> BatchAdapter | None:
    """The adapter of the consumer a collator names; the model's config is read now, the model is not kept."""
    if collator.consumer is None:
        return None
    return BatchAdapter(
        model,
        model_type=model_type,
        consumer=collator.consumer,
        pattern=collator.pattern,
        max_mask_bytes=collator.max_mask_bytes,
    )


def check_mode(mode: str, consumer: str | None, return_tensors: str) -> None:
    """Raise for settings that contradict each other."""
    if mode not in ("auto", "none", "4d", "2d", "omit"):
        rule = "attention_mask is 'auto', 'none', '4d', '2d' or 'omit'."
        raise CollateError(explain("attention_mask", repr(mode), rule, "'auto' suits most trainers."))
    if consumer is not None and mode not in ("auto", "omit"):
        rule = f"The consumer {consumer!r} decides the form of its mask."
        raise CollateError(explain("attention_mask", repr(mode), rule, "Leave it at 'auto'."))
    if return_tensors != "pt":
        raise CollateError(explain("return_tensors", repr(return_tensors), "Batches are torch tensors.", "Pass 'pt'."))


def offsets(segments: Segments) -> dict[str, Any]:
    """Everything a padding-free consumer may read, always together; an alignment tail is one more sequence.

    transformers' FlashAttentionKwargs and DataCollatorWithFlattening name them; `seq_lens` are the real lengths.
    """
    form = varlen(segments, keep_tail=True)
    return {
        "position_ids": form.position_ids,
        "cu_seq_lens_q": form.cu_seqlens,
        "cu_seq_lens_k": form.cu_seqlens,
        "max_length_q": form.max_length,
        "max_length_k": form.max_length,
        "seq_idx": form.seq_idx,
        "seq_lens": torch.tensor(segments.lengths[0], dtype=torch.int32),
    }


def ignore_labels(collator: Emitter, batch: dict[str, Any], segments: Segments) -> dict[str, Any]:
    """Ignore the labels of padding, and of a token that follows padding or another sequence: alone, nothing predicts it.

    Bidirectional attention predicts tokens in place, so its labels stay; so do targets that are not one a token.
    """
    labels = batch.get("labels")
    tokens = isinstance(labels, Tensor) and tuple(labels.shape) == segments.shape and not labels.is_floating_point()
    if not isinstance(labels, Tensor) or not tokens or not predicts_next(collator):
        return batch
    ids_BS = segments.ids
    ignored_BS = ids_BS == 0
    ignored_BS[:, 1:] |= ids_BS[:, 1:] != ids_BS[:, :-1]
    return batch | {"labels": labels.masked_fill(ignored_BS, collator.label_pad_token_id)}


def predicts_next(collator: Emitter) -> bool:
    """Are labels those of the next token, not moved yet?"""
    return not collator.labels_shifted and Pattern.of(collator.pattern).kind != "bidirectional"
