"""Wrapping: middleware around a collator someone already has.

Costs what deriving costs: nothing measurable for a 2D mask, a few passes over its bytes for a 4D one.
Legend: B batch rows, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collate_npu.arrays import PLAIN, Array, Side, dims, host_tensor
from collate_npu.collate.collators import ELSEWHERE, BatchWriter, MaskMode, add_offsets
from collate_npu.collate.features import joined_segment_ids, sample_segment_ids
from collate_npu.collate.padding import pad_rows
from collate_npu.collate.transport import shipped
from collate_npu.consumers.labels_and_positions import check_rebuilt
from collate_npu.consumers.mask_choice import Consumer, ConsumerName
from collate_npu.errors import AmbiguousMaskError, CollateError, UnsupportedFormError, explain, explain_rows, shape_of
from collate_npu.keys import KEEP_KEY, KEYS, SAMPLE, SEGMENT_KEY, Key, of_kind, with_role
from collate_npu.masks.batch_reader import agreed, segments_from_batch, with_labels
from collate_npu.masks.mask_values import Polarity
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources
from collate_npu.outputs import unpad
from collate_npu.segments import Segments
from collate_npu.validation import check_batch, check_collator, check_return_tensors, checked

_FIRST = "Pass the collator first, then the model: wrap_collator(collator, model)."
_OF_ROWS = ("tokenizer", "pad_token_id", "padding_side", "padding", "max_length", "pad_to_multiple_of", "packing")
_INNER = dict.fromkeys(("collator", "data_collator", "collate_fn"), _FIRST)


@checked(instead=ELSEWHERE | _INNER | dict.fromkeys(_OF_ROWS, "Set it in the inner collator."))
class WrappedCollator:
    """Wraps any collator: returns its batch with correct masks, positions and labels. Picklable if `inner` is.

    The batch of `inner` may have a 2D mask, a 4D mask, both, or none. Samples have lengths, and may have masks, packing
    ids and `seq_lengths` of their own. If the batch holds whole samples, the masks of the batch must agree with these. A
    flat row stays flat and gets all its boundaries.

    * `inner`: your collator.
    * `padding_free`: True makes one flat row of every batch.
    * `polarity`: what True means in the 4D mask of your collator. None: the mask must prove it, otherwise it is refused.
    * `model_type`: a name of transformers' registry, if you pass no module. A Megatron trainer then reads the batch.

    The other options are those of `PaddingCollator`. `pattern` is also the pattern of the masks of `inner`.

    >>> keep = torch.tensor([[0, 0, 1], [1, 1, 1]])
    >>> inner_batch = {"input_ids": torch.tensor([[0, 0, 7], [4, 5, 6]]), "attention_mask": keep}
    >>> batch = wrap_collator(lambda samples: inner_batch)([{"input_ids": [7]}, {"input_ids": [4, 5, 6]}])
    >>> {key: list(value.shape) for key, value in batch.items()}
    {'input_ids': [2, 3], 'attention_mask': [2, 1, 3, 3], 'attention_mask_2d': [2, 3]}
    """

    def __init__(
        self,
        inner: Callable[..., Mapping[str, Any]],
        model: Any = None,
        *,
        model_type: str | None = None,
        consumer: ConsumerName | Consumer | None = None,
        attention_mask: MaskMode = "auto",
        pattern: str | Pattern | None = None,
        polarity: Polarity | None = None,
        padding_free: bool = False,
        label_pad_token_id: int = -100,
        labels_shifted: bool = False,
        keys: Mapping[str, Key] = KEYS,
        return_tensors: Any = "pt",
    ) -> None:
        check_return_tensors(return_tensors)
        check_collator(inner)
        self.writer = BatchWriter(
            model, model_type=model_type, consumer=consumer, attention_mask=attention_mask, pattern=pattern,
            padding_free=padding_free, label_pad_token_id=label_pad_token_id, keys=keys, labels_shifted=labels_shifted,
        )  # fmt: skip
        self.inner, self.pattern, self.polarity = inner, pattern, polarity
        self.padding_free, self.keys = padding_free, keys

    def __call__(self, features: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inner collator's batch with its masks replaced. Raises `CollateError` where its padding is unknown."""
        check_return_tensors(kwargs.get("return_tensors"))
        # first: some collators write into the samples
        samples = None if self.writer.left else _Samples(*sample_segment_ids(features))
        given = self.inner(features, *args, **kwargs)
        check_batch(given, self.inner)
        if samples is None or (self.writer.adapter is not None and self.writer.adapter.is_left(given)):
            return shipped(dict(given))
        batch = Sources.of_tensors({key: x for key, x in Sources.of(given).items() if x is not None})
        if not with_role(batch, "tokens", "segment_ids", "keep"):
            rule = "The trainer builds the rows of this batch after the collator."
            remedy = "Do not wrap this collator; call collate_npu.adapt(model)."
            raise CollateError(explain("input_ids", f"a batch of {', '.join(map(str, batch))}", rule, remedy))
        masked = any(key in batch for key in of_kind(KEYS, "truth")) or bool(batch.named["padded_lengths"])
        if not masked and _is_flat(batch, samples):
            segments = with_labels(batch, _flat_segments(batch, samples))
            whole, flat = batch | add_offsets(batch, segments), True
        else:
            segments = self._masked(batch, samples) if masked else with_labels(batch, _align(batch, samples))
            flat = self.padding_free
            flattened, segments = _flattened(batch, segments, self.keys) if flat else ({}, segments)
            whole = Sources(flattened) if flat else batch
        left = getattr(getattr(self.inner, "tokenizer", None), "padding_side", None) == "left"  # as transformers' collators
        if not flat and "position_ids" not in whole and self.writer.adds_positions(left):
            whole |= {"position_ids": segments.position_ids}
        if samples.labels is not None and not self.writer.labels_shifted:
            check_rebuilt(whole, segments, *(np.concatenate(samples.real(rows)) for rows in (None, samples.labels)))
        # Megatron's stand with the token before, torchtune's do not: the tokens tell
        shifted = self.writer.labels_shifted or (None if batch.named["tokens"] == ("tokens",) else False)
        changed = self.writer.ignored(whole, segments, shifted, flat=False)
        out = self.writer.write(whole | changed if changed else whole, segments, padding_free=flat)
        if self.writer.adapter is not None:
            _check_second_rows(batch, out)
        return out

    def _masked(self, batch: Sources, samples: _Samples) -> Segments:
        """Read the batch, with the lengths of the samples as one more source where they stand whole in the batch."""
        standing = [] if SEGMENT_KEY in batch else samples.standing(batch)
        for known in standing:
            try:
                return self._found(batch | {SEGMENT_KEY: known.ids})
            except CollateError:
                continue
        segments = self._found(batch)
        if standing:
            _refuse_disagreement(segments, standing)
        return segments

    def _found(self, batch: Sources) -> Segments:
        if self.writer.adapter is not None:
            return self.writer.adapter.read(batch, self.polarity, padding_free=False)
        return agreed(batch, polarity=self.polarity, pattern=self.pattern, padding_free=False)


wrap_collator = WrappedCollator
"""The name to call it by."""


@dataclass(frozen=True, slots=True)
class _Samples:
    """The samples before the inner collator sees them: token ids and segment ids `[L]` of each."""

    token_ids: list[Array]
    own: list[Array] | None
    """None where every sample is one sequence without holes."""
    labels: list[Array] | None = None

    @property
    def segment_ids(self) -> list[Array]:
        return [np.ones(len(row), np.int32) for row in self.token_ids] if self.own is None else self.own

    def standing(self, batch: Sources) -> list[Segments]:
        """Return the Segments of the samples for each side on which all stand whole; none if the ids were changed."""
        named = batch.named["tokens"]
        if named not in (("input_ids",), ("tokens",)) or batch.shape()[0] != len(self.token_ids):
            return []
        ids_BS = batch.array(named[0])
        sides: tuple[Side, Side] = ("right", "left")
        standing = (side for side in sides if all(_stands(ids_BS[b], row, side) for b, row in enumerate(self.token_ids)))
        width, own = ids_BS.shape[1], self.segment_ids
        found = [Segments.from_ids(pad_rows("attention_mask", own, width=width, side=side)) for side in standing]
        return found[:1] if len(found) == 2 and found[0] == found[1] else found

    def real(self, rows: list[Array] | None = None) -> list[Array]:
        """Token ids of each sample, or these rows of one value a token, without its own padding."""
        rows = self.token_ids if rows is None else rows
        return rows if self.own is None else [row[ids > 0] for row, ids in zip(rows, self.own)]


def _stands(padded_S: Array, row: Array, side: Side) -> bool:
    at = padded_S[: len(row)] if side == "right" else padded_S[len(padded_S) - len(row) :]
    return len(row) <= len(padded_S) and bool(np.array_equal(at, row))


# --- what the samples tell of a batch


def _check_second_rows(batch: Mapping[str, Any], out: Mapping[str, Any]) -> None:
    """Refuse a second tensor of tokens that would run with what we add for `input_ids`, such as `KL_input_ids` of TRL's KTO
    (1.16 kto_trainer.py:1339-1365)."""
    second = [key for key in batch if str(key).lower().endswith("_input_ids")]
    added = [key for key in out if key not in batch and key not in ("attention_mask", KEEP_KEY)]
    if second and added:
        rule = f"The batch has other rows under {second[0]}, and a trainer may run them with {', '.join(added)}."
        remedy = "Pad right; or do not wrap this collator, and call collate_npu.adapt(model)."
        raise UnsupportedFormError(explain(second[0], shape_of(batch[second[0]]), rule, remedy))


def _is_flat(batch: Mapping[str, Any], samples: _Samples) -> bool:
    if len(shape := dims(batch.get("input_ids"))) != 2 or shape[0] != 1:
        return False
    rows = samples.real()
    whole = len(rows) == 1 and len(rows[0]) == shape[1] and "position_ids" in batch
    return bool(with_role(batch, "offsets", "padded_offsets")) or len(rows) > 1 or whole


def _flat_segments(batch: Sources, samples: _Samples) -> Segments:
    """The samples one after another, if that is what the row holds; what follows them is alignment, not a sequence. Padding
    inside a sample may be gone (LLaMA-Factory 0.9.5 data/collator.py:463, flash attention), and padding may stand behind
    each, where physical offsets say so: by the ids alone a pad token that is a real one elsewhere looks in place."""
    if with_role(batch, "padded_offsets"):
        return segments_from_batch(batch, padding_free=True)
    ids_S = batch.array("input_ids")[0]
    for key in with_role(batch, "offsets"):
        if (placed := _at_offsets(ids_S, batch.offsets[key], samples)) is not None:
            return placed
    joined = joined_segment_ids(samples.segment_ids) if samples.token_ids else np.zeros(0, np.int32)
    for tokens, ids in ((samples.token_ids, joined), (samples.real(), joined[joined > 0])):
        if tokens and _stands(ids_S, np.concatenate(tokens), "right"):
            return Segments.from_ids(np.pad(ids, (0, len(ids_S) - len(ids)))[None])
    return segments_from_batch(batch, padding_free=True)


def _at_offsets(ids_S: Array, offsets: Array, samples: _Samples) -> Segments | None:
    """Return the Segments if each sample stands at the start of its place, with padding behind it; else None."""
    starts, ends = offsets[: len(samples.token_ids)], offsets[1 : len(samples.token_ids) + 1]
    if not len(ends) or len(ends) != len(samples.token_ids) or offsets[0] or offsets[-1] > len(ids_S):
        return None
    found_S = np.zeros(len(ids_S), np.int32)
    joined = np.split(joined_segment_ids(samples.segment_ids), np.cumsum([len(ids) for ids in samples.segment_ids])[:-1])
    for start, end, tokens, ids in zip(starts, ends, samples.token_ids, joined):
        if end - start < len(tokens) or not _stands(ids_S[start:end], tokens, "right"):
            return None
        found_S[start : start + len(ids)] = ids
    return Segments.from_ids(found_S[None])


def _flattened(batch: Sources, segments: Segments, keys: Mapping[str, Key]) -> tuple[dict[str, Any], Segments]:
    """Every sequence of a padded batch in one flat row, without the padding; what is not one value a token stays."""
    unlisted = [key for key, value in batch.items() if key not in keys and dims(value)[:2] == segments.shape]
    if unlisted:
        rule = "collate_npu does not guess whether a key has one value for each token."
        remedy = f"Pass keys={{**KEYS, {unlisted[0]!r}: TOKENS}} (from collate_npu.keys), or SAMPLE in place of TOKENS."
        raise CollateError(explain(unlisted[0], shape_of(batch[unlisted[0]]), rule, remedy))
    kinds = {key: keys.get(key, SAMPLE).kind for key in batch}
    flat = {key: value for key, value in batch.items() if kinds[key] not in ("truth", "offsets", "tokens", "positions")}
    for key in of_kind(batch, "tokens", "positions", keys=keys):
        value = batch[key] if getattr(batch[key], "dtype", None) in PLAIN else batch.array(key, host_tensor)
        if kinds[key] == "positions" and value.ndim == 3:
            flat[key] = torch.stack([unpad(each, segments) for each in value])[:, None]
        else:  # labels of a whole sample stay
            flat[key] = unpad(value, segments)[None] if dims(value)[:2] == segments.shape else value
    lying = Segments.from_lengths([list(segments.sequence_lengths)])
    return add_offsets(flat, lying), lying


def _refuse_disagreement(segments: Segments, standing: list[Segments]) -> None:
    """Refuse a mask that calls a sample's own tokens padding, such as `ids != pad` if pad is eos."""
    rows = range(segments.shape[0])
    wrong = [b for b in rows if not any(np.array_equal(known.array[b], segments.array[b]) for known in standing)]
    found, held = segments.lengths, standing[0].lengths
    bad = [(b, f"sequences of {list(found[b])}, not {list(held[b])} tokens") for b in wrong or rows]
    rule = "The inner collator's mask disagrees with the samples about which tokens are real."
    remedy = "Let it build the mask from lengths: if pad is eos, a mask made by ids != pad_token_id loses every real eos."
    raise CollateError(explain_rows("attention_mask", bad, rule, remedy))


def _align(batch: Sources, samples: _Samples) -> Segments:
    """Return where each sample stands in a batch that carries no mask; all rows are padded on one side."""
    found = samples.standing(batch)
    if len(found) == 1:
        return found[0]
    where = "fit both ends of their rows" if found else "stand at neither end of their rows"
    rule = f"No key says which tokens are padding, and the ids of the samples {where}."
    remedy = "Let the inner collator emit attention_mask (and segment_ids, if rows are packed), or use PaddingCollator."
    raise AmbiguousMaskError(explain("input_ids", f"{shape_of(batch.get('input_ids'))} without a mask", rule, remedy))
