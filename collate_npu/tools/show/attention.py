"""Attention: what the queries of one row of a batch attend, read a few query rows at a time, whole or folded by blocks.

Nothing of size S * S is built: a block of query rows is filled or read, counted and forgotten, O(Q * K) time for each row.
Legend: B batch, S width, Q query rows, K keys, R and C rows and columns of what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.host import Array
from collate_npu.masks.fill import fill_rows, regions_of
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.masks.polarity import Bools
from collate_npu.segments import Segments


class Cell(IntEnum):
    """What a cell of a picture says of its place, or of all places of its block."""

    BLOCKED = 0
    """Or padding."""
    WHOLE = 1
    """Attends; a real token."""
    PART = 2
    """Some places of the block do."""
    TOO_MUCH = 3
    """Attends, and ought not to."""
    TOO_LITTLE = 4
    """Is blocked, and ought to attend."""
    ELSEWHERE = 5
    """Held by another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is drawn: cells `[R, C]`, each of `block` places a side."""

    cells: Array
    """int8, one of `Cell`."""
    owner: Array
    """int32: which sequence of its row the keys of a cell belong to, 0 for none or several."""
    block: int
    share: float
    """The part of the places (not of the cells) that is blocked, or padding; 0 to 1."""
    wrong: int = 0
    """Places that ought to be otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What each query of row `b` of a batch attends: `rows(low, high)` is bool `[high - low, K]`."""

    b: int
    shape: tuple[int, int]
    """`(Q, K)`."""
    rows: Callable[[int, int], Bools]
    owner: Array
    """int32 `[K]`: the sequence of each key, 0 for padding; all 1 where nobody knows."""
    queries: Array | None = None
    """int64 `[Q]`: the place of each query in the whole row, where it is not its number."""
    ought: Callable[[int, int], Bools] | None = None
    """What it should be, as `rows`, where that is known and differs."""
    counts: Bools | None = None
    """bool `[Q]`: the queries for which that matters; outputs at padding are read by nobody."""

    def place(self, q: int) -> int:
        """Where query row q stands in the whole row."""
        return q if self.queries is None else int(self.queries[q])

    def grid(self, block: int) -> Grid:
        """Folded: a cell stands for block * block places."""
        Q, K = self.shape
        lows = range(0, Q, block)
        folded = [self._folded(low, min(low + block, Q), block) for low in lows]
        cells = np.array([cells for cells, _, _ in folded], np.int8).reshape(len(lows), -(-K // block))
        owner_C = one_owner(self.owner, block)
        attended, wrong = sum(n for _, n, _ in folded), sum(n for _, _, n in folded)
        share = 1 - attended / max(Q * K, 1)
        return Grid(cells=cells, owner=np.tile(owner_C, (len(lows), 1)), block=block, share=share, wrong=wrong)

    def _folded(self, low: int, high: int, block: int) -> tuple[Array, int, int]:
        """One row of cells, how many of its places attend, how many of them ought to be otherwise."""
        seen_QK = self.rows(low, high)
        count_C = _sums(seen_QK, block)
        size_C = _sums(np.ones((1, self.shape[1]), bool), block) * (high - low)
        cells_C = np.where(count_C == 0, Cell.BLOCKED, np.where(count_C == size_C, Cell.WHOLE, Cell.PART))
        if self.ought is None:
            return cells_C, int(count_C.sum()), 0
        matters_Q1 = np.ones((high - low, 1), bool) if self.counts is None else self.counts[low:high, None]
        ought_QK = self.ought(low, high)
        little_C = _sums(~seen_QK & ought_QK & matters_Q1, block)
        much_C = _sums(seen_QK & ~ought_QK & matters_Q1, block)
        cells_C = np.where(much_C > 0, Cell.TOO_MUCH, np.where(little_C > 0, Cell.TOO_LITTLE, cells_C))
        return cells_C, int(count_C.sum()), int(much_C.sum() + little_C.sum())


def attention_of(segments: Segments, b: int, *, pattern: Pattern = CAUSAL, queries: Tensor | None = None) -> Attention:
    """As the truth has it: `dense(segments, pattern=pattern, rows=queries)[b, 0]`, of which a block is built at a time."""
    S = segments.shape[1]
    regions, held = regions_of(segments)[b], None if queries is None else queries.numpy()

    def rows(low: int, high: int) -> Bools:
        out_QK = np.empty((high - low, S), bool)
        picked = np.arange(low, high) if held is None else held[low:high]
        cuts = np.flatnonzero(np.diff(picked) != 1) + 1
        for part_QK, run in zip(np.split(out_QK, cuts), np.split(picked, cuts)):
            fill_rows(part_QK, int(run[0]), regions, pattern, True, False)
        return out_QK

    shape = (S if held is None else len(held), S)
    return Attention(b=b, shape=shape, rows=rows, owner=segments.array[b], queries=held)


def compared(found: Attention, truth: Segments, pattern: Pattern) -> Attention:
    """The same, each place beside what the truth has there."""
    ought = attention_of(truth, found.b, pattern=pattern)
    return replace(found, ought=ought.rows, counts=truth.array[found.b] > 0, owner=ought.owner)


def row_grid(ids: Array, block: int, held: Bools | None = None) -> Grid:
    """One row of a batch as a row of cells: `ids` int32 `[S]`, 0 is padding; `held` bool `[S]`, what a rank has of it."""
    real_S = ids > 0
    count_C, size_C = _sums(real_S[None], block), _sums(np.ones((1, len(ids)), bool), block)
    cells_C = np.where(count_C == 0, Cell.BLOCKED, np.where(count_C == size_C, Cell.WHOLE, Cell.PART))
    here = real_S if held is None else real_S[held]
    if held is not None:
        cells_C = np.where(_sums(held[None], block) == 0, Cell.ELSEWHERE, cells_C)
    share = 1 - float(here.mean()) if len(here) else 0.0
    return Grid(cells=cells_C.astype(np.int8)[None], owner=one_owner(ids, block)[None], block=block, share=share)


def one_owner(ids: Array, block: int) -> Array:
    """int32 `[C]`: the sequence that all tokens of a block belong to, 0 where it holds none or several."""
    starts = np.arange(0, len(ids), block)
    if not len(starts):
        return np.zeros(0, np.int32)
    high_C = np.maximum.reduceat(ids, starts)
    low_C = np.minimum.reduceat(np.where(ids > 0, ids, np.iinfo(np.int32).max), starts)
    return np.where(low_C == high_C, high_C, 0).astype(np.int32)


def _sums(values_QK: Bools, block: int) -> Any:
    """int64 `[C]`: how many places of each block of columns are True."""
    starts = np.arange(0, values_QK.shape[1], block)
    return np.add.reduceat(np.count_nonzero(values_QK, axis=0), starts) if len(starts) else np.zeros(0, np.int64)
