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

from collate_npu.collate.features import sample_segment_ids
from collate_npu.collate.padding import pad_rows
from collate_npu.collate.wire import MaskMode, adapter_of, check_mode, finish_batch, ignore_labels, with_offsets
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Consumer
from collate_npu.errors import AmbiguousMaskError, CollateError, explain, explain_rows, shape_of
from collate_npu.host import Array, host_array
from collate_npu.keys import KEYS, SEGMENT_KEY, Key, of_kind, with_role
from collate_npu.masks.find import segments_from_batch, token_shape
from collate_npu.masks.forms import MAX_MASK_BYTES
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.polarity import Polarity, check_polarity
from collate_npu.segments import Segments, Side

Features = Sequence[Mapping[str, Any]]


def wrap_collator(
    inner: Callable[..., Mapping[str, Any]],
    *,
    polarity: Polarity | None = None,
    attention_mask: MaskMode = "auto",
    consumer: str | Consumer | None = None,
    pattern: str | Pattern | None = None,
    model: Any = None,
    model_type: str | None = None,
    label_pad_token_id: int = -100,
    labels_shifted: bool = False,
    keys: Mapping[str, Key] = KEYS,
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> WrappedCollator:
    """Middleware: the batch of any collator in, ours out; picklable if `inner` is.

    The inner batch may carry a 2D mask, a 4D mask (of the `polarity` and `pattern` declared, or proved), both, or none.
    What the samples tell (lengths, own masks, packing ids, `seq_lengths`) counts wherever they stand whole in the batch,
    and must agree with its masks. A flat, padding-free row stays one and gets all its offsets. The other arguments are
    those of `PaddingCollator`.
    """
    return WrappedCollator(
        inner,
        polarity=polarity,
        attention_mask=attention_mask,
        consumer=consumer,
        pattern=pattern,
        label_pad_token_id=label_pad_token_id,
        labels_shifted=labels_shifted,
        keys=keys,
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
    consumer: str | Consumer | None
    pattern: str | Pattern | None
    label_pad_token_id: int
    labels_shifted: bool
    keys: Mapping[str, Key] = field(repr=False)
    max_mask_bytes: int
    model: InitVar[Any]
    model_type: InitVar[str | None]
    _adapter: BatchAdapter | None = field(init=False, repr=False, compare=False)

    def __post_init__(self, model: Any, model_type: str | None) -> None:
        check_mode(self.attention_mask, self.consumer, "pt")
        check_polarity(self.polarity)
        object.__setattr__(self, "_adapter", adapter_of(self, model, model_type))

    def __call__(self, features: Features, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The inner collator's batch, its masks replaced. Raises `CollateError` where its padding cannot be told."""
        inner = dict(self.inner(features, *args, **kwargs))
        batch = {key: value for key, value in inner.items() if value is not None}
        samples = _Samples(*sample_segment_ids(features))
        masked = any(key in batch for key in of_kind(KEYS, "truth"))
        if not masked and _is_flat(batch, samples):
            segments = _flat_segments(batch, samples)
            flat = with_offsets(batch, segments)
            return finish_batch(self, ignore_labels(self, flat, segments), segments, padding_free=True)
        segments = self._masked(batch, samples) if masked else _align(batch, samples)
        return finish_batch(self, ignore_labels(self, batch, segments), segments, padding_free=False)

    def _masked(self, batch: Mapping[str, Any], samples: _Samples) -> Segments:
        """Through the door, with what the samples tell as one more source where they stand whole in the batch."""
        told = [] if SEGMENT_KEY in batch else samples.standing(batch)
        for known in told:
            try:
                return self._found({**batch, SEGMENT_KEY: known.ids})
            except CollateError:
                continue
        segments = self._found(batch)
        if told:
            _refuse_disagreement(segments, told)
        return segments

    def _found(self, batch: Mapping[str, Any]) -> Segments:
        declared = self.pattern if self._adapter is None else self._adapter.declared
        return segments_from_batch(batch, polarity=self.polarity, pattern=declared)


@dataclass(frozen=True, slots=True)
class _Samples:
    """What the samples say before the inner collator sees them: token ids and segment ids `[L]` of each."""

    token_ids: list[Array]
    segment_ids: list[Array]

    def standing(self, batch: Mapping[str, Any]) -> list[Segments]:
        """The Segments by the samples, for each side on which all of them stand whole; none where the ids were changed."""
        if batch.get("input_ids") is None or token_shape(batch)[0] != len(self.token_ids):
            return []
        ids_BS = host_array("input_ids", batch["input_ids"])
        sides: tuple[Side, Side] = ("right", "left")
        found = [self._padded(ids_BS.shape[1], side) for side in sides if self._stand(ids_BS, side)]
        return found[:1] if len(found) == 2 and found[0] == found[1] else found

    def _stand(self, ids_BS: Array, side: Side) -> bool:
        return all(_stands(ids_BS[b], row, side) for b, row in enumerate(self.token_ids))

    def _padded(self, width: int, side: Side) -> Segments:
        return Segments.from_ids(pad_rows("attention_mask", self.segment_ids, width=width, side=side))

    def joined(self) -> Array:
        """Segment ids of all samples, one after another in one row."""
        before = np.cumsum([0, *(row.max(initial=0) for row in self.segment_ids)])
        return np.concatenate([np.where(row > 0, row + n, 0) for row, n in zip(self.segment_ids, before)])


def _stands(padded_S: Array, row: Array, side: Side) -> bool:
    at = padded_S[: len(row)] if side == "right" else padded_S[len(padded_S) - len(row) :]
    return len(row) <= len(padded_S) and bool(np.array_equal(at, row))


# --- what the samples tell of a batch


def _is_flat(batch: Mapping[str, Any], samples: _Samples) -> bool:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
        return False
    rows = samples.token_ids
    whole = len(rows) == 1 and len(rows[0]) == ids.shape[1] and "position_ids" in batch
    return bool(with_role(batch, "offsets", "padded_offsets")) or len(rows) > 1 or whole


def _flat_segments(batch: Mapping[str, Any], samples: _Samples) -> Segments:
    """The samples one after another, if that is what the row holds; what follows them is alignment, not a sequence."""
    ids_S = host_array("input_ids", batch["input_ids"])[0]
    if samples.token_ids and _stands(ids_S, np.concatenate(samples.token_ids), "right"):
        joined = samples.joined()
        return Segments.from_ids(np.pad(joined, (0, len(ids_S) - len(joined)))[None])
    return segments_from_batch(batch, padding_free=True)


def _refuse_disagreement(segments: Segments, told: list[Segments]) -> None:
    """A mask that calls a sample's own tokens padding (ids != pad, where pad is eos) is not the truth."""
    rows = range(segments.shape[0])
    wrong = [b for b in rows if not any(np.array_equal(known.array[b], segments.array[b]) for known in told)]
    bad = [(b, f"sequences of {list(segments.lengths[b])}, not {list(told[0].lengths[b])} tokens") for b in wrong or rows]
    rule = "The inner collator's mask disagrees with the samples about which tokens are real."
    remedy = "Let it build the mask from lengths: a mask of ids != pad_token_id loses every real eos where pad is eos."
    raise CollateError(explain_rows("attention_mask", bad, rule, remedy))


def _align(batch: Mapping[str, Any], samples: _Samples) -> Segments:
    """Where each sample stands in its row of a batch that carries no mask; the side is the batch's, not a row's."""
    found = samples.standing(batch)
    if len(found) == 1:
        return found[0]
    rule = "No key says which tokens are padding, and the samples' ids stand " + (
        "at both ends alike." if found else "at neither end of their rows."
    )
    remedy = "Let the inner collator emit attention_mask, or use PaddingCollator."
    got = f"{shape_of(batch.get('input_ids'))} without a mask"
    raise AmbiguousMaskError(explain("input_ids", got, rule, remedy))
