"""Wrapping: middleware around a collator someone already has.

Costs what deriving costs: nothing measurable for a 2D mask, a few passes over its bytes for a 4D one.
Legend: B batch rows, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.adapters import KEEP_KEY, BatchAdapter, find_segments
from collate_npu.emission import MaskMode, adapter_of, check_mode, emit, ignore_first_labels, offsets
from collate_npu.errors import AmbiguousMaskError, explain
from collate_npu.forms import MAX_MASK_BYTES, Polarity
from collate_npu.patterns import Pattern
from collate_npu.segments import Segments, Side

Features = Sequence[Mapping[str, Any]]


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
        rows = [np.asarray(feature["input_ids"]) for feature in features if "input_ids" in feature]
        batch = {key: value for key, value in dict(self.inner(features, *args, **kwargs)).items() if value is not None}
        masked = "attention_mask" in batch or KEEP_KEY in batch
        if not masked and _is_flat(batch, len(features)):
            segments = find_segments(batch, padding_free=True)
            return emit(self, batch | offsets(segments), segments, padding_free=True)
        if masked:
            segments = find_segments(batch, polarity=self.polarity, pattern=self.pattern)
        else:
            segments = _align(batch["input_ids"], rows)
        return emit(self, ignore_first_labels(self, batch, segments), segments, padding_free=False)


def _is_flat(batch: Mapping[str, Any], samples: int) -> bool:
    ids = batch.get("input_ids")
    one_row = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[0] == 1
    return one_row and (samples > 1 or "cu_seq_lens_q" in batch or "position_ids" in batch)


def _align(input_ids: Tensor, rows: Sequence[np.ndarray[Any, Any]]) -> Segments:
    """Where each sample's ids stand in its row of a batch that carries no mask; the side is the batch's, not a row's."""
    B, S = input_ids.shape
    ids_BS = input_ids.numpy()
    sides: tuple[Side, Side] = ("right", "left")
    fits = len(rows) == B and all(len(row) <= S for row in rows)
    found = [side for side in sides if fits and all(_stands(ids_BS[b], row, side) for b, row in enumerate(rows))]
    lengths = [len(row) for row in rows]
    if len(found) == 1 or (found and min(lengths) == S):
        return Segments.from_lengths(lengths, S, found[0])
    rule = "No key says which tokens are padding, and the samples' ids stand " + (
        "at both ends alike." if found else "at neither end of their rows."
    )
    remedy = "Let the inner collator emit attention_mask, or use PaddingCollator."
    raise AmbiguousMaskError(explain("input_ids", f"a batch [{B}, {S}] without a mask", rule, remedy))


def _stands(padded_S: np.ndarray[Any, Any], row: np.ndarray[Any, Any], side: Side) -> bool:
    at = padded_S[: len(row)] if side == "right" else padded_S[len(padded_S) - len(row) :]
    return bool(np.array_equal(at, row))
