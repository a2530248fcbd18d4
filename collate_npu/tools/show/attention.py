"""Attention: what the queries of one row of a batch attend, read a few query rows at a time, and folded into cells.

Nothing of size S * S is built: a block of query rows is filled or read, counted and forgotten, O(Q * K) time for each row.
Legend: B batch, S width, Q query rows, K keys, R and C rows and columns of what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.masks.polarity import Bools
from collate_npu.masks.square import fill_rows, regions_of
from collate_npu.segments import Segments


class Cell(IntEnum):
    """What a cell of a picture says of its place, or of all places of its block."""

    BLOCKED = 0
    WHOLE = 1
    PART = 2
    TOO_MUCH = 3
    TOO_LITTLE = 4
    COUNTED = 5
    IGNORED = 6
    ON_PADDING = 7


SIGNS: Mapping[Cell, tuple[str, str, str]] = {
    Cell.WHOLE: ("■", "", "attends, real"),
    Cell.BLOCKED: ("⬚", "dim", "blocked, padding"),
    Cell.PART: ("◧", "", "a part of the block"),
    Cell.TOO_MUCH: ("+", "bold red", "attends and ought not to"),
    Cell.TOO_LITTLE: ("-", "bold red", "is blocked and ought to attend"),
    Cell.COUNTED: ("o", "dim", "label counts"),
    Cell.IGNORED: ("×", "red", "label ignored"),
    Cell.ON_PADDING: ("!", "bold red", "label on padding"),
}
"""Sign, style and meaning: a sign says what a colour says."""
MOST_PLACES = 1 << 32
"""Of the squares that are drawn, which takes some seconds."""
COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "bright_cyan")
"""Of the sequences of a row, in turn; red is for what is wrong."""


def sign_of(cell: int, owner: int = 0, numbered: bool = False) -> tuple[str, str]:
    """Sign and style; a sequence's number stands for a whole cell where rows hold several."""
    sign, style, _ = SIGNS[Cell(cell)]
    if not owner or style:
        return sign, style
    return "123456789"[(owner - 1) % 9] if numbered and cell == Cell.WHOLE else sign, COLOURS[(owner - 1) % len(COLOURS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is drawn: cells `[R, C]`, each of a block of places."""

    cells: Array
    """int8, one of `Cell`."""
    owner: Array
    """int32 `[C]`: which sequence of its row the keys of a cell belong to, 0 for none or several."""
    share: float
    """The part of the places (not of the cells) that is blocked, or padding; 0 to 1."""
    wrong: int = 0
    """Places that ought to be otherwise."""

    def signs(self, r: int, *, numbered: bool = False) -> list[tuple[str, str]]:
        """One row of cells, each with its style."""
        return [sign_of(cell, owner, numbered) for cell, owner in zip(self.cells[r].tolist(), self.owner.tolist())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What each query of row `b` of a batch attends: `rows(low, high)` is bool `[high - low, K]`."""

    b: int
    shape: tuple[int, int]
    """`(Q, K)`."""
    rows: Callable[[int, int], Bools]
    owner: Array
    """int32 `[K]`: the sequence of each key, 0 for padding; all 1 where nobody knows."""
    queries: Array
    """int64 `[Q]`: the place of each query in the whole row."""
    ought: Callable[[int, int], Bools] | None = None
    """What it should be, as `rows`, where that is known and differs."""
    counts: Bools | None = None
    """bool `[Q]`: the queries for which that matters; outputs at padding are read by nobody."""

    def grid(self, block: int) -> Grid:
        """Folded: a cell stands for block * block places."""
        Q, K = self.shape
        folded = [self._folded(low, min(low + block, Q), block) for low in range(0, Q, block)]
        cells = np.array([cells for cells, _, _ in folded], np.int8).reshape(len(folded), -(-K // block))
        attended, wrong = sum(n for _, n, _ in folded), sum(n for _, _, n in folded)
        return Grid(cells=cells, owner=one_owner(self.owner, block), share=1 - attended / max(Q * K, 1), wrong=wrong)

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


def attention_of(
    segments: Segments, b: int, *, pattern: Pattern = CAUSAL, queries: Tensor | None = None, opened: bool = False
) -> Attention:
    """As the truth has it: `dense(segments, pattern=pattern, rows=queries)[b, 0]`, of which a block is built at a time.

    `opened`: a query that sees no key sees itself, as `masks.forms.open_empty_rows` has it.
    """
    S, regions = segments.shape[1], regions_of(segments)[b]
    places = np.arange(S) if queries is None else queries.numpy()

    def rows(low: int, high: int) -> Bools:
        out_QK, picked = np.empty((high - low, S), bool), places[low:high]
        cuts = np.flatnonzero(np.diff(picked) != 1) + 1
        for part_QK, run in zip(np.split(out_QK, cuts), np.split(picked, cuts)):
            fill_rows(part_QK, int(run[0]), regions, pattern, True, False)
        if opened:
            empty_N = np.flatnonzero(~out_QK.any(axis=1))
            out_QK[empty_N, picked[empty_N]] = True
        return out_QK

    return Attention(b=b, shape=(len(places), S), rows=rows, owner=segments.array[b], queries=places)


def drawable(squares: Sequence[Attention], most: int) -> int:
    """How many of them are drawn, and no more than `most`; none where one alone is too large."""
    Q, K = squares[0].shape
    return min(most, MOST_PLACES // max(Q * K, 1))


def row_grid(ids: Array, block: int) -> Grid:
    """One row of a batch as a row of cells: `ids` int32 `[S]`, 0 is padding."""
    row = Attention(b=0, shape=(1, len(ids)), rows=lambda low, high: ids[None] > 0, owner=ids, queries=np.zeros(1))
    return row.grid(block)


def one_owner(ids: Array, block: int) -> Array:
    """int32 `[C]`: the sequence that all tokens of a block belong to, 0 where it holds none or several."""
    starts = np.arange(0, len(ids), block)
    high_C = np.maximum.reduceat(ids, starts)
    low_C = np.minimum.reduceat(np.where(ids > 0, ids, np.iinfo(np.int32).max), starts)
    return np.where(low_C == high_C, high_C, 0).astype(np.int32)


def block_for(width: int, cells: int) -> int:
    """The least round number of places a cell must stand for, so that a row of `width` has at most so many cells."""
    least = -(-width // max(cells, 1))
    return 1 << max(least - 1, 0).bit_length() if least <= 64 else -(-least // 64) * 64


def _sums(values_QK: Bools, block: int) -> Any:
    """int64 `[C]`: how many places of each block of columns are True."""
    return np.add.reduceat(np.count_nonzero(values_QK, axis=0), np.arange(0, values_QK.shape[1], block))
