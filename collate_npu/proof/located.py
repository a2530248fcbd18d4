"""Located: where the samples of a batch stand in it, told by their tokens.

Who made the batch chose its side, its order and whether rows are packed, so none of that is assumed. Its mask is what is
under test, so it is not believed either: it only decides between places where the tokens fit equally well. What is not
the samples, token for token, and padding of one value is refused: a comparison would be wrong. Costs O(B * S) a sample.
Where no samples are known (a dumped batch), they are what the one door reads in it (`samples_of`).
Legend: B rows, S width, L tokens of a sample, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, host_array
from collate_npu.errors import CollateError, explain, explain_rows
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.patterns import Pattern
from collate_npu.outputs import per_sequence
from collate_npu.proof.measure import IGNORED, Batch, Numbers, measure, uncached
from collate_npu.segments import Segments, keep_array

REMEDY_SAME_TOKENS = "Switch off what changes tokens (bos, eos, cutting, masking), or give samples as they are collated."
_TRIES, _MOST = 20_000, 64
"""Places tried and arrangements looked at, at most: only samples that repeat one token have more."""


@dataclass(frozen=True, slots=True)
class Located:
    """The samples of a batch as Segments, and which sample each sequence is."""

    segments: Segments
    order: tuple[int, ...]
    """The sample of each of the N sequences, which are counted row by row."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[Batch] = ()
    """The samples, with labels of their own."""

    @classmethod
    def in_order(cls, segments: Segments, batch: Mapping[str, Any] | None = None, features: Sequence[Batch] = ()) -> Located:
        """Samples that stand in their order."""
        return cls(segments, tuple(range(segments.num_sequences)), batch or {}, features)

    def rows(self, x: Tensor) -> list[Tensor]:
        """`[B, S, ...]` to N tensors `[length, ...]`, `[B, V]` to N tensors `[1, V]`, in the order of the samples."""
        if x.ndim == 2 and self.segments.packed:
            rule = "This model gives one answer a row, and these rows hold several samples."
            raise CollateError(explain("batch", f"rows of {self.segments.lengths}", rule, "Give each sample its own row."))
        found = per_sequence(x, self.segments) if x.ndim > 2 else list(x.split(1))  # type: ignore[no-untyped-call]
        return [found[self.order.index(n)] for n in range(len(found))]

    def label_fault(self) -> str:
        """How the labels of the batch differ from those of its samples, "" where they do not. Nothing predicts a first
        label, which may be ignored; a batch without labels may leave them to others where they are the tokens."""
        told, own = self._labels(), [feature["labels"] for feature in self.features]
        if told is None:
            asked = any(feature["labels"] != feature["input_ids"] for feature in self.features)
            return "The batch has no labels, and those of the samples are not their tokens" if asked else ""
        pairs = [list(enumerate(zip(given, mine))) for given, mine in zip(told, own)]
        bad = [(n, t, *pair) for n, row in enumerate(pairs) for t, pair in row if pair[0] != pair[1]]
        bad = [(n, t, given, mine) for n, t, given, mine in bad if t or given != IGNORED]
        if not bad:
            return ""
        n, t, given, mine = bad[0]
        count = f"{len(bad)} label{'s' * (len(bad) > 1)}"
        where = f"{count} not as the samples have them: sample {n}, token {t} has {given} for {mine}"
        after = [[*feature["input_ids"][1:], IGNORED] for feature in self.features]
        if given != IGNORED and all(x in (IGNORED, y) for pair in zip(told, after) for x, y in zip(*pair)):
            return f"{where}. They are moved by a place, which the model does itself: leave them where their tokens are"
        lost = sum(given == IGNORED for *_, given, _ in bad)
        return f"{where}; {lost} are ignored, as where labels are made by labels == pad_token_id" if lost else where

    def _labels(self) -> list[list[int]] | None:
        """What the batch gives the tokens of each sample; None where it has no labels of tokens."""
        labels = None if self.batch.get("labels") is None else _tensor(self.batch, "labels")
        if labels is None or tuple(labels.shape) != self.segments.shape:
            return None
        return [row[:, 0].tolist() for row in self.rows(labels[..., None])]

    def with_labels(self) -> Batch:
        """The batch, with its own tokens as labels where it has none."""
        if self.batch.get("labels") is not None:
            return {**self.batch, "labels": _tensor(self.batch, "labels")}
        unread_BS = (self.segments.position_ids == 0) | ~self.segments.keep
        return {**self.batch, "labels": _tensor(self.batch, "input_ids").masked_fill(unread_BS, IGNORED)}

    def numbers(self, model: Any, gradients: bool) -> Numbers:
        """What the model makes of the batch as it is."""
        return measure(model, uncached(model, self.with_labels()), self.rows, gradients)


def _tensor(batch: Mapping[str, Any], key: str) -> Tensor:
    return torch.as_tensor(host_array(key, batch[key])).long()


def keep_of(batch: Mapping[str, Any]) -> Array | None:
    """The 2D mask that a batch carries, bool `[B, S]`; None where it has none."""
    for key in ("attention_mask_2d", "attention_mask"):
        if len(getattr(batch.get(key), "shape", ())) == 2:
            keep: Array = host_array(key, batch[key]) > 0
            return keep
    return None


def locate(batch: Mapping[str, Any], features: Sequence[Batch]) -> Located:
    """Where each sample stands in `input_ids` `[B, S]` of a batch, by its tokens. Raises `CollateError` where one is not
    there whole, where there are other tokens, or where tokens do not tell."""
    ids_BS = _tokens(batch)
    samples = [np.asarray(feature["input_ids"]) for feature in features]
    batch = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in batch.items()}
    starts = [_starts(ids_BS, sample) for sample in samples]
    whole = "tokens that are not in the batch, in one piece"
    if lost := [(n, f"{len(ids)} {whole}") for n, ids in enumerate(samples) if not starts[n]]:
        rule = "Each sample is compared with its own tokens in the batch."
        raise CollateError(explain_rows("samples", lost, rule, REMEDY_SAME_TOKENS))
    keep_BS = keep_of(batch)
    if keep_BS is not None and _is_of(samples, ids_BS, keep_BS):
        return Located.in_order(Segments.from_keep(keep_BS), batch, features)
    found = [_located(ids_BS.shape, samples, each) for each in islice(_arrangements(ids_BS, samples, starts), _MOST + 1)]
    if not found:
        rule = "Beside the samples a batch holds padding of one value; anything else would change what they give."
        raise CollateError(explain("batch", "tokens that no sample has", rule, REMEDY_SAME_TOKENS))
    return replace(_chosen(found, keep_BS), batch=batch, features=features)


def samples_of(batch: Mapping[str, Any], pattern: str | Pattern | None = None, *, next_token: bool = False) -> Located:
    """The samples of a batch, with the labels it gives them, and where they stand. Raises what the door raises.

    What predicts the `next_token` moves the labels itself: there a label that is not ignored is its token.
    """
    segments = segments_from_batch(batch, pattern=pattern)
    keys = ("input_ids", "input_ids" if batch.get("labels") is None else "labels")
    ids, labels = ([row.tolist() for row in per_sequence(batch[key], segments)] for key in keys)
    if next_token:
        labels = [[x if y != IGNORED else y for x, y in zip(*pair)] for pair in zip(ids, labels)]
    return Located.in_order(segments, batch, [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)])


def _is_of(samples: Sequence[Array], ids_BS: Array, keep_BS: Array) -> bool:
    """Does the mask keep in each row the tokens of its sample and nothing else?"""
    rows = len(samples) == len(ids_BS) and keep_BS.shape == ids_BS.shape
    return rows and all(np.array_equal(ids[keep], own) for ids, keep, own in zip(ids_BS, keep_BS, samples))


def _tokens(batch: Mapping[str, Any]) -> Array:
    given = batch.get("input_ids") if isinstance(batch, Mapping) else None
    ids_BS: Array = np.zeros(0) if given is None else host_array("input_ids", given)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iu":
        got = type(batch).__name__ if given is None else f"input_ids {ids_BS.dtype} {list(ids_BS.shape)}"
        rule = "The samples are found by their tokens: integers [B, S] in a mapping."
        raise CollateError(explain("batch", got, rule, "Let the collator return input_ids."))
    return ids_BS


def _starts(ids_BS: Array, sample: Array) -> list[int]:
    """The places of the flat batch at which these tokens stand, in one row."""
    S, L = ids_BS.shape[1], len(sample)
    if not L or L > S:
        return []
    ends = (ids_BS[:, : S - L + 1] == sample[0]) & (ids_BS[:, L - 1 :] == sample[-1])
    return [int(b * S + s) for b, s in zip(*np.nonzero(ends)) if np.array_equal(ids_BS[b, s : s + L], sample)]


def _arrangements(ids_BS: Array, samples: Sequence[Array], starts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Each way to place all samples apart, so that all that is left has one value. Equal samples stand in their order."""
    flat, free, chosen = ids_BS.reshape(-1), np.ones(ids_BS.size, bool), [-1] * len(samples)
    hardest = sorted(range(len(samples)), key=lambda n: (len(starts[n]), -len(samples[n]), n))
    same = {n: [m for m in range(n) if np.array_equal(samples[m], samples[n])] for n in range(len(samples))}
    tries = iter(range(_TRIES))

    def place(depth: int) -> Iterator[list[int]]:
        if depth == len(hardest):
            left = flat[free]
            if not left.size or (left == left[0]).all():
                yield list(chosen)
            return
        n = hardest[depth]
        for start in starts[n]:
            here = slice(start, start + len(samples[n]))
            if next(tries, None) is not None and free[here].all() and all(chosen[m] < start for m in same[n]):
                free[here], chosen[n] = False, start
                yield from place(depth + 1)
                free[here], chosen[n] = True, -1

    yield from place(0)


def _located(shape: tuple[int, ...], samples: Sequence[Array], starts: Sequence[int]) -> Located:
    ids = np.zeros(shape[0] * shape[1], np.int32)
    order = sorted(range(len(samples)), key=lambda n: starts[n])
    for number, n in enumerate(order, 1):
        ids[starts[n] : starts[n] + len(samples[n])] = number
    return Located(Segments.from_ids(ids.reshape(shape)), tuple(order))


def _chosen(found: list[Located], keep_BS: Array | None) -> Located:
    """The one that fits the mask, else with a row for each sample, in their order, padded on one side."""

    def unlikely(each: Located) -> tuple[bool, ...]:
        astray = keep_BS is not None and not np.array_equal(keep_array(each.segments), keep_BS)
        return astray, each.segments.packed, list(each.order) != sorted(each.order), each.segments.padding_side == "mixed"

    best, *others = sorted(found, key=unlikely)
    if len(found) > _MOST or (others and unlikely(others[0]) == unlikely(best)):
        rule = "The same tokens stand in several places, and neither a mask nor the side of the others tells which is meant."
        remedy = "Give samples whose tokens differ from the padding."
        raise CollateError(explain("batch", f"{len(found)} ways to read it", rule, remedy))
    return best
