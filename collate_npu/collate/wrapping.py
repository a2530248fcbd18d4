"""Wrapping: middleware around a collator someone already has.

Costs what deriving costs: nothing measurable for a 2D mask, a few passes over its bytes for a 4D one.
Legend: B batch rows, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.collate.padding import pad_rows
from collate_npu.collate.wire import MaskMode, adapter_of, check_mode, emit, ignore_labels, offsets
from collate_npu.consumers.adapter import KEEP_KEY, BatchAdapter, find_segments
from collate_npu.errors import AmbiguousMaskError, CollateError, explain, explain_rows, shape_of
from collate_npu.masks.forms import MAX_MASK_BYTES, Polarity
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments, Side

Features = Sequence[Mapping[str, Any]]
Array = npt.NDArray[Any]


def wrap_collator(
    inner: Callable[..., Mapping[str, Any]],
    *,
    polarity: Polarity | None = None,
    attention_mask: MaskMode = "auto",
    consumer: str | None = None,
    pattern: str | Pattern = "causal",
    model: Any = None,
    model_type: str | None = None,
    label_pad_token_id: int = -100,
    labels_shifted: bool = False,
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> WrappedCollator:
    """Middleware: the batch of any collator in, ours out; picklable if `inner` is.

    The inner batch may carry a 2D mask, a 4D mask (of the `polarity` declared, or proved), both, or none: then the
    lengths of the features and where their ids stand in the batch tell the padding. A flat, padding-free row stays one
    and gets all its offsets. The other arguments are those of `PaddingCollator`.
    """
    return WrappedCollator(
        inner,
        polarity=polarity,
        attention_mask=attention_mask,
        consumer=consumer,
        pattern=pattern,
        label_pad_token_id=label_pad_token_id,
        labels_shifted=labels_shifted,
        max_mask_bytes=max_mask_bytes,
        model=model,
        model_type=model_type,
    )


@dataclass(frozen=True)
class WrappedCollator:
    """What `wrap_collator` returns."""

    inner: Callable[..., Mapping[str, Any]]
    _: KW_ONLY
    polarity: Polarity | None
    attention_mask: MaskMode
    consumer: str | None
    pattern: str | Pattern
    label_pad_token_id: int
    labels_shifted: bool
    max_mask_bytes: int
    model: InitVar[Any]
    model_type: InitVar[str | None]
    _adapter: BatchAdapter | None = field(init=False, repr=False, compare=False)

    def __post_init__(self, model: Any, model_type: str | None) -> None:
        check_mode(self.attention_mask, self.consumer, "pt")
        object.__setattr__(self, "_adapter", adapter_of(self, model, model_type))

    def __call__(self, features: Features, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The inner collator's batch, its masks replaced. Raises `CollateError` where its padding cannot be told."""
        rows = [_Sample.of(feature) for feature in features if feature.get("input_ids") is not None]
        batch = {key: value for key, value in dict(self.inner(features, *args, **kwargs)).items() if value is not None}
        if "attention_mask" in batch or KEEP_KEY in batch:
            segments = find_segments(batch, polarity=self.polarity, pattern=self.pattern)
            _check_samples(batch, segments, rows)
        elif _is_flat(batch, rows):
            segments = _flat_truth(batch, rows)
            return emit(self, batch | offsets(segments), segments, padding_free=True)
        else:
            segments = _align(batch["input_ids"], rows)
        return emit(self, ignore_labels(self, batch, segments), segments, padding_free=False)


@dataclass(frozen=True, slots=True)
class _Sample:
    """What a feature says before the inner collator sees it: its ids, and which of them are real."""

    ids: Array
    keep: Array

    @classmethod
    def of(cls, feature: Mapping[str, Any]) -> _Sample:
        ids = np.asarray(feature["input_ids"])
        own = feature.get("attention_mask")
        fits = own is not None and np.shape(own) == ids.shape
        return cls(ids, np.asarray(own) > 0 if fits else np.ones(ids.shape, bool))


# --- what the features tell of a batch


def _is_flat(batch: Mapping[str, Any], rows: Sequence[_Sample]) -> bool:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
        return False
    whole = len(rows) == 1 and len(rows[0].ids) == ids.shape[1] and "position_ids" in batch
    return "cu_seq_lens_q" in batch or len(rows) > 1 or whole


def _flat_truth(batch: Mapping[str, Any], rows: Sequence[_Sample]) -> Segments:
    """The samples one after another, if that is what the row holds; what follows them is alignment, not a sequence."""
    ids_S = batch["input_ids"][0].numpy()
    joined = np.concatenate([row.ids for row in rows]) if rows else np.arange(0)
    if len(joined) and _stands(ids_S, joined, "right"):
        return Segments.from_lengths([[len(row.ids) for row in rows]], len(ids_S))
    return find_segments(batch, padding_free=True)


def _standing(input_ids: Any, rows: Sequence[_Sample]) -> list[Side]:
    """The sides on which every sample stands whole in its row of the batch; none where the inner collator changed them."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or len(rows) != len(input_ids):
        return []
    ids_BS = input_ids.numpy()
    sides: tuple[Side, Side] = ("right", "left")
    return [side for side in sides if all(_stands(ids_BS[b], row.ids, side) for b, row in enumerate(rows))]


def _stands(padded_S: Array, row: Array, side: Side) -> bool:
    at = padded_S[: len(row)] if side == "right" else padded_S[len(padded_S) - len(row) :]
    return len(row) <= len(padded_S) and bool(np.array_equal(at, row))


def _check_samples(batch: Mapping[str, Any], segments: Segments, rows: Sequence[_Sample]) -> None:
    """A mask that calls a sample's own tokens padding (ids != pad, where pad is eos) is not the truth."""
    width = segments.shape[1]
    sides = _standing(batch.get("input_ids"), rows)
    truths = [pad_rows("attention_mask", [row.keep for row in rows], width=width, side=side) > 0 for side in sides]
    if not truths or any(torch.equal(keep, segments.keep) for keep in truths):
        return
    wrong = [b for b in range(len(rows)) if not any(torch.equal(keep[b], segments.keep[b]) for keep in truths)]
    bad = [(b, f"{segments.row_lengths[b]} real tokens, not {int(rows[b].keep.sum())}") for b in wrong or range(len(rows))]
    rule = "The inner collator's mask disagrees with the samples about which tokens are real."
    remedy = "Let it build the mask from lengths: a mask of ids != pad_token_id loses every real eos where pad is eos."
    raise CollateError(explain_rows("attention_mask", bad, rule, remedy))


def _align(input_ids: Any, rows: Sequence[_Sample]) -> Segments:
    """Where each sample stands in its row of a batch that carries no mask; the side is the batch's, not a row's."""
    found = _standing(input_ids, rows)
    keeps = [row.keep for row in rows]
    if len(found) == 1 or (found and min(map(len, keeps)) == input_ids.shape[1]):
        return Segments.from_keep(pad_rows("attention_mask", keeps, width=input_ids.shape[1], side=found[0]))
    rule = "No key says which tokens are padding, and the samples' ids stand " + (
        "at both ends alike." if found else "at neither end of their rows."
    )
    remedy = "Let the inner collator emit attention_mask, or use PaddingCollator."
    raise AmbiguousMaskError(explain("input_ids", f"{shape_of(input_ids)} without a mask", rule, remedy))
