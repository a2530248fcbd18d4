"""Rows: what ids, keep masks and positions `[B, S]` show of each row: where padding stands, where sequences begin.

Everything costs O(B * S). Legend: B batch rows, S width, T tokens without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from torch import Tensor

from collate_npu.errors import CollateError, explain, explain_rows, shape_of
from collate_npu.host import Array, host_array

Side = Literal["right", "left"]
PaddingSide = Literal["none", "left", "right", "mixed"]
SIDES: tuple[Side, Side] = ("right", "left")


@lru_cache(8)
def places(width: int) -> Array:
    """0, 1, 2, ... of a row; read-only."""
    numbers_S = np.arange(width)
    numbers_S.flags.writeable = False
    return numbers_S


def one_run(keep_BS: Array, side: Side) -> list[int]:
    """Real tokens of each row, if they stand together on one side, padding on this."""
    B, S = keep_BS.shape
    if not S:
        return [0] * B
    if side == "right":
        at_B = keep_BS.argmin(axis=1)  # the first padding, or any place of a row without
        lengths_B = np.where(keep_BS[np.arange(B), at_B], S, at_B)
    else:
        at_B = keep_BS.argmax(axis=1)  # the first token, or any place of a row without
        lengths_B = np.where(keep_BS[np.arange(B), at_B], S - at_B, 0)
    lengths: list[int] = lengths_B.tolist()
    return lengths


def side_around(totals: Sequence[int], width: int, side: Side) -> PaddingSide:
    """Where padding stands around rows of so many tokens, without gaps."""
    if min(totals, default=width) == width:
        return "none"
    if side == "right" or not any(0 < n < width for n in totals):
        return "right"
    return "left" if all(totals) else "mixed"


def side_of(keep_BS: Array) -> PaddingSide:
    """Where padding stands, over all rows."""
    if keep_BS.all():
        return "none"
    grows, falls = keep_BS[:, 1:] > keep_BS[:, :-1], keep_BS[:, 1:] < keep_BS[:, :-1]
    if not grows.any():
        return "right"
    return "left" if not falls.any() and keep_BS[:, -1].all() else "mixed"


def sequence_starts(positions_BS: Array, keep_BS: Array) -> tuple[Array, Array]:
    """Where sequences begin by their positions, bool `[B, S]`; in which rows each counts 0, 1, 2, ..., bool `[B]`."""
    real_T = np.flatnonzero(keep_BS)
    values_T, rows_T = positions_BS.reshape(-1)[real_T], real_T // max(keep_BS.shape[1], 1)
    follows_T = np.zeros(len(real_T), bool)
    follows_T[1:] = (values_T[1:] == values_T[:-1] + 1) & (rows_T[1:] == rows_T[:-1])
    starts_BS = np.zeros(keep_BS.shape, bool)
    starts_BS.reshape(-1)[real_T[~follows_T]] = True
    custom_BS = starts_BS & (positions_BS != 0)
    return starts_BS, ~custom_BS.any(axis=1)


def as_ids(ids: Any) -> Array:
    """int64 `[B, S]` of ids that may be those of sequences."""
    ids_BS = host_array("segment ids", ids)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iub":
        rule = "Segment ids are a [B, S] tensor of whole numbers."
        raise CollateError(explain("segment ids", shape_of(ids_BS), rule, "Pass an int32 tensor."))
    if ids_BS.size and ids_BS.min() < 0:
        bad = [(int(b), f"the id {ids_BS[b].min()}") for b in np.flatnonzero((ids_BS < 0).any(axis=1))]
        rule = "0 is padding and sequences count from 1; no id is negative."
        raise CollateError(explain_rows("segment ids", bad, rule, "Add 1 to ids that count from -1 or 0."))
    return ids_BS.astype(np.int64, copy=False)


def _previous_real(ids_BS: Array) -> Array:
    """For each place, the id of the nearest real token before it in the row, 0 if there is none."""
    B, S = ids_BS.shape
    last_BS = np.maximum.accumulate(np.where(ids_BS != 0, np.arange(S), -1), axis=1)
    before_BS = np.concatenate([np.full((B, 1), -1), last_BS[:, :-1]], axis=1)[:, :S]
    previous: Array = np.where(before_BS >= 0, np.take_along_axis(ids_BS, np.maximum(before_BS, 0), axis=1), 0)
    return previous


def check_order(ids_BS: Array) -> None:
    """Raise where the sequences of a row are not numbered 1, 2, ... in their order."""
    step_BS = np.where(ids_BS != 0, ids_BS - _previous_real(ids_BS), 0)
    bad = np.flatnonzero(((step_BS < 0) | (step_BS > 1)).any(axis=1))
    if len(bad):
        rule = "The n-th sequence of a row has the id n, and sequences stand in order."
        rows = [(int(b), f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Use Segments.from_ids, which renumbers."))


def renumber(ids_BS: Array) -> Array:
    """Any labels as 1, 2, ... in order of appearance. Raises where a label comes back."""
    starts_BS = (ids_BS != 0) & (ids_BS != _previous_real(ids_BS))
    numbered_BS = np.where(ids_BS != 0, np.cumsum(starts_BS, axis=1), 0)
    labels = [ids_S[starts_S].tolist() for ids_S, starts_S in zip(ids_BS, starts_BS)]
    bad = [b for b, row in enumerate(labels) if len(set(row)) < len(row)]
    if bad:
        rule = "A sequence's tokens stand together; its label does not come back after another sequence."
        rows = [(b, f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Give each sequence of a row a label of its own."))
    return numbered_BS


def positions_with_holes(ids_S: Array) -> Array:
    """Of one row: real tokens count in their own sequence, padding after a token counts on from it."""
    place_S, real_S = np.arange(len(ids_S)), ids_S != 0
    last_S = np.maximum.accumulate(np.where(real_S, place_S, -1))
    rank_S = np.cumsum(real_S) - 1
    starts_S = real_S & (ids_S != _previous_real(ids_S[None])[0])
    origin_S = np.maximum.accumulate(np.where(starts_S, rank_S, 0))
    positions_S: Array = np.where(last_S >= 0, rank_S - origin_S + place_S - last_S, 0)
    return positions_S


def count(keep_BS: Array) -> list[int]:
    """Real tokens of each row."""
    counts: list[int] = np.count_nonzero(keep_BS, axis=1).tolist()
    return counts


def length_rows(lengths: Any) -> list[list[int]]:
    """One list of token counts for each row of the batch; raises for what is no count."""
    if isinstance(lengths, list) and all(type(n) is int and n >= 0 for n in lengths):
        return [[n] for n in lengths]
    if isinstance(lengths, (Tensor, np.ndarray)):
        lengths = host_array("lengths", lengths)
    rows: list[list[int]] = []
    bad: list[tuple[int, str]] = []
    for b, row in enumerate(lengths):
        counts = np.atleast_1d(host_array("lengths", row)) if np.ndim(row) == 0 or len(row) else np.zeros(0, np.int64)
        if counts.dtype.kind not in "iu" or counts.ndim != 1 or (counts < 0).any():
            bad.append((b, f"lengths {counts.tolist()}"))
        rows.append(counts.tolist())
    if bad:
        raise CollateError(explain_rows("lengths", bad, "Lengths are whole numbers, 0 or more.", "Count the tokens again."))
    return rows


def values(array: Array) -> str:
    """An array as an error names it."""
    seen = ", ".join(map(str, np.unique(array)[:6].tolist()))
    return f"{array.dtype} {list(array.shape)} with values {seen}"
