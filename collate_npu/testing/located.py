"""Located: where the samples of a batch stand in it, told by their tokens.

Who made the batch chose its side, its order and whether rows are packed, so none of that is assumed. Its mask is what is
under test, so it is not believed either: it only decides between places where the tokens fit equally well. What is not
the samples, token for token, and padding of one value is refused: a comparison would be wrong. Costs O(B * S) a sample.

Legend: B rows, S width, L tokens of a sample, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain, explain_rows
from collate_npu.host import Array, host_array
from collate_npu.outputs import per_sequence
from collate_npu.segments import Segments
from collate_npu.testing.measure import IGNORED, Batch

REMEDY_SAME_TOKENS = (
    "Switch off what changes tokens (bos, eos, cutting, masking at random), or give samples as the collator makes them."
)
_TRIES = 20_000
"""Places tried at most: only samples that repeat one token need more."""


@dataclass(frozen=True, slots=True)
class Located:
    """The samples of a batch as Segments, and which sample each sequence is."""

    segments: Segments
    order: tuple[int, ...]
    """The sample of each of the N sequences, which are counted row by row."""

    def rows(self, x: Tensor) -> list[Tensor]:
        """`[B, S, ...]` to N tensors `[length, ...]`, `[B, V]` to N tensors `[1, V]`, in the order of the samples."""
        if x.ndim == 2 and self.segments.packed:
            rule = "This model gives one answer a row, and these rows hold several samples."
            raise CollateError(explain("batch", f"rows of {self.segments.lengths}", rule, "Give each sample its own row."))
        found = per_sequence(x, self.segments) if x.ndim > 2 else list(x.split(1))  # type: ignore[no-untyped-call]
        return [found[self.order.index(n)] for n in range(len(found))]

    def labelled(self, batch: Mapping[str, Any], features: Sequence[Batch]) -> list[Batch]:
        """The samples with the labels that the batch gives their tokens. A first label predicts nothing: it stays."""
        if batch.get("labels") is None:
            return list(features)
        labels_BS = torch.as_tensor(host_array("labels", batch["labels"]))
        given = self.rows(labels_BS[..., None])
        pairs = zip(features, (row[:, 0].tolist() for row in given))
        return [{**feature, "labels": [feature["labels"][0], *labels[1:]]} for feature, labels in pairs]

    def with_labels(self, batch: Mapping[str, Any]) -> Batch:
        """The batch, with its own tokens as labels where it has none."""
        if batch.get("labels") is not None:
            return {**batch, "labels": torch.as_tensor(host_array("labels", batch["labels"])).long()}
        ids_BS = torch.as_tensor(host_array("input_ids", batch["input_ids"])).long()
        first_BS = self.segments.position_ids == 0
        return {**batch, "labels": ids_BS.masked_fill(first_BS | ~self.segments.keep, IGNORED)}


def keep_of(batch: Mapping[str, Any]) -> Array | None:
    """The 2D mask that a batch carries, bool `[B, S]`; None where it has none."""
    for key in ("attention_mask_2d", "attention_mask"):
        value = batch.get(key)
        if value is not None and not isinstance(value, Mapping) and len(getattr(value, "shape", ())) == 2:
            keep: Array = host_array(key, value) > 0
            return keep
    return None


def locate(batch: Mapping[str, Any], features: Sequence[Batch]) -> Located:
    """Where each sample stands in `input_ids` `[B, S]` of a batch, by its tokens.

    Raises `CollateError` where a sample is not there whole, where there are other tokens, or where tokens do not tell.
    """
    ids_BS = _tokens(batch)
    samples = [np.asarray(feature["input_ids"]) for feature in features]
    starts = [_starts(ids_BS, sample) for sample in samples]
    lost = [
        (n, f"{len(samples[n])} tokens that are not in the batch, in one piece")
        for n in range(len(samples))
        if not starts[n]
    ]
    if lost:
        rule = "Each sample is compared with its own tokens in the batch."
        raise CollateError(explain_rows("samples", lost, rule, REMEDY_SAME_TOKENS))
    found = list(islice(_arrangements(ids_BS, samples, starts), 64))
    if not found:
        rule = "Beside the samples a batch holds padding of one value; anything else would change what they give."
        raise CollateError(explain("batch", "tokens that no sample has", rule, REMEDY_SAME_TOKENS))
    chosen = _chosen([_located(ids_BS.shape, samples, each) for each in found], keep_of(batch))
    _check_nothing_added(chosen.segments, keep_of(batch))
    return chosen


def _tokens(batch: Mapping[str, Any]) -> Array:
    if not isinstance(batch, Mapping):
        rule = "A collator gives a mapping with input_ids [B, S]."
        raise CollateError(explain("batch", type(batch).__name__, rule, "Return a dict of tensors."))
    ids_BS = host_array("input_ids", batch["input_ids"]) if batch.get("input_ids") is not None else np.zeros(0)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iu":
        got = f"keys {', '.join(map(str, batch))}" if not ids_BS.size else f"input_ids {list(ids_BS.shape)}"
        rule = "The samples are found by their tokens: integers [B, S]."
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
    """The one that fits the mask, else the one whose rows are padded on one side, in the order of the samples."""
    if keep_BS is not None:
        found = [each for each in found if np.array_equal(each.segments.keep_array(), keep_BS)] or found
    found = [each for each in found if each.order == tuple(sorted(each.order))] or found
    found = [each for each in found if each.segments.padding_side != "mixed"] or found
    if len(found) > 1:
        rule = "The same tokens stand in several places, and neither a mask nor the side of the others tells which is meant."
        remedy = "Give samples whose tokens differ from the padding."
        raise CollateError(explain("batch", f"{len(found)} ways to read it", rule, remedy))
    return found[0]


def _check_nothing_added(segments: Segments, keep_BS: Array | None) -> None:
    """A mask that keeps as many more tokens in every row, whatever its length: bos or eos of the pad token's value."""
    if keep_BS is None or segments.packed or len(set(segments.row_lengths)) < 2:
        return
    more_B = (keep_BS & ~segments.keep_array()).sum(axis=1)
    if more_B.min() == more_B.max() > 0:
        rule = "The mask keeps them in every row beside its sample, so they are no padding, and change what it gives."
        raise CollateError(explain("batch", f"{int(more_B[0])} more tokens in every row", rule, REMEDY_SAME_TOKENS))
