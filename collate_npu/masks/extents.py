"""Extents: the first and the last key that each query row of a square mask attends, and whether it attends all.

Most masks are those of plain causal attention. So that is tried first, from a few reads of each row, and compared block by
block: where a block is as expected, its extents are known; where not, they are read off it. One pass over the mask.

Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collate_npu.host import Array
from collate_npu.masks.patterns import CAUSAL
from collate_npu.masks.polarity import Bools
from collate_npu.masks.square import Rebuilt, Square
from collate_npu.segments import Segments


@dataclass(slots=True)
class Extents:
    """What each query row `[B, S]` attends."""

    first_BQ: Array
    last_BQ: Array
    """First and last key; its own place for a row that attends none."""
    any_BQ: Bools
    full_BQ: Bools
    """Does it attend any key, does it attend every key?"""

    @classmethod
    def none(cls, B: int, S: int) -> Extents:
        """Rows that attend nothing."""
        own_BQ = np.tile(np.arange(S, dtype=np.int32), (B, 1))
        return cls(own_BQ, own_BQ.copy(), np.zeros((B, S), bool), np.zeros((B, S), bool))


class Guess:
    """Plain causal attention: real tokens attend themselves; padding attends as the token before it does, nothing, or all."""

    def __init__(self, square: Square, diagonal_BS: Bools, keep_BS: Bools | None) -> None:
        B, S = square.shape
        self._full_BQ = square.column(0) & square.column(S - 1)
        self._full_BQ[:, -1] = square.row(S - 1).all(axis=1)
        self.real_BS = diagonal_BS & (~fillers(self._full_BQ) if keep_BS is None else keep_BS)
        self.segments, self._begins_BS = sequences(square, self.real_BS)
        self._own_S = np.arange(S, dtype=np.int32)
        self._start_BQ = np.maximum.accumulate(np.where(self._begins_BS, self._own_S, 0), axis=1)
        behind_BQ = np.logical_or.accumulate(self.real_BS, axis=1) & ~self.real_BS & ~self._full_BQ
        self._empty_BQ = np.zeros((B, S), bool)
        b_N, q_N = np.nonzero(behind_BQ)
        self._empty_BQ[b_N, q_N] = ~square.at(b_N, q_N, self._start_BQ[b_N, q_N])
        self._odd_B = (self._full_BQ | self._empty_BQ).any(axis=1)
        self.proved_BQ = np.zeros((B, S), bool)
        """Rows found to be those of plain causal attention, where they are real."""
        self._square, self._rebuilt = square, Rebuilt(square, self.segments, CAUSAL)

    @cached_property
    def _whole_BQ(self) -> Bools:
        """The last row where nothing is padding: plain causal, and yet it attends everything."""
        whole_B: Bools = self.real_BS.all(axis=1) & ~self._begins_BS[:, 1:].any(axis=1)
        return whole_B[:, None] & (self._own_S == len(self._own_S) - 1)

    @cached_property
    def extents(self) -> Extents:
        """As guessed, until what was found otherwise is written over it."""
        last_BQ = np.maximum.accumulate(np.where(self.real_BS, self._own_S, -1), axis=1)
        any_BQ = (last_BQ >= 0) & ~self._empty_BQ | self._full_BQ
        first_BQ = np.where(self._full_BQ, 0, np.where(any_BQ, self._start_BQ, self._own_S))
        last_BQ = np.where(self._full_BQ, len(self._own_S) - 1, np.where(any_BQ, last_BQ, self._own_S))
        return Extents(first_BQ, last_BQ, any_BQ, self._full_BQ | self._whole_BQ)

    def odd_blocks(self, b: int) -> Iterator[tuple[int, int]]:
        """The blocks of query rows that are not exactly as guessed; those that are count as proved."""
        for low, high in self._square.blocks():
            if self._holds(b, low, high):
                self.proved_BQ[b, low:high] = ~self._full_BQ[b, low:high] | self._whole_BQ[b, low:high]
            else:
                yield low, high

    def _holds(self, b: int, low: int, high: int) -> bool:
        given_QK, attends = self._rebuilt.rows(b, low, high), self._square.attends
        if self._odd_B[b]:
            given_QK[self._full_BQ[b, low:high]] = attends
            given_QK[self._empty_BQ[b, low:high]] = not attends
        return self._rebuilt.equals(self._square.raw_rows(b, low, high))


def sequences(square: Square, real_BS: Bools) -> tuple[Segments, Bools]:
    """A sequence ends where a real token does not attend the real token before it; `[B, S]` says where one begins."""
    at_T = np.flatnonzero(real_BS)
    b_T, q_T = np.divmod(at_T, square.shape[1])
    begins_T = np.ones(len(at_T), bool)
    first_T = b_T[1:] != b_T[:-1]
    begins_T[1:] = first_T | ~square.at(b_T[1:], q_T[1:], q_T[:-1])
    begins_BS = np.zeros(real_BS.shape, bool)
    begins_BS.reshape(-1)[at_T] = begins_T
    if np.count_nonzero(begins_T[1:]) == np.count_nonzero(first_T):
        return Segments.from_keep(real_BS), begins_BS
    return Segments.from_ids(np.cumsum(begins_BS, axis=1) * real_BS), begins_BS


def fillers(full_BQ: Bools) -> Bools:
    """Rows that attend every key, future ones included, while other rows do not."""
    filler_BQ = full_BQ & ~full_BQ.all(axis=1, keepdims=True)
    filler_BQ[:, -1] &= full_BQ[:, :-1].any(axis=1)  # alone, a last row that sees everything is an ordinary causal row
    return filler_BQ


def read_extents(
    square: Square,
    b: int,
    into: Extents,
    blocks: Iterable[tuple[int, int]],
    *,
    counts_Q: Bools | None = None,
    only_K: Bools | None = None,
) -> Bools:
    """Read these blocks of one row of the batch `into` its place; the keys `[S]` that their rows that count attend.

    Unless `counts_Q` says so, rows that attend everything do not count. With `only_K` reading stops once another key is
    used.
    """
    used_K = np.zeros(square.shape[1], bool)
    for low, high in blocks:
        rows_QK = square.rows(b, low, high)
        _read_rows(rows_QK, low, b, into)
        counted_Q = ~into.full_BQ[b, low:high] if counts_Q is None else counts_Q[low:high]
        used_K |= np.logical_or.reduce(rows_QK if counted_Q.all() else rows_QK[counted_Q], axis=0)
        if only_K is not None and (used_K & ~only_K).any():
            break
    return used_K


def _read_rows(rows_QK: Bools, low: int, b: int, into: Extents) -> None:
    Q, K = rows_QK.shape
    places_Q = np.arange(Q)
    first_Q, last_Q = rows_QK.argmax(axis=1), _last(rows_QK)
    any_Q = rows_QK[places_Q, first_Q]
    full_Q = (first_Q == 0) & (last_Q == K - 1)
    full_Q[full_Q] = rows_QK[full_Q].all(axis=1)
    at = b, slice(low, low + Q)
    into.any_BQ[at], into.full_BQ[at] = any_Q, full_Q
    into.first_BQ[at] = np.where(any_Q, first_Q, low + places_Q)
    into.last_BQ[at] = np.where(any_Q, last_Q, low + places_Q)


def _last(rows_QK: Bools) -> Array:
    """The last True of each row, whatever for a row without one: the last eight bytes that hold one, then the last of them."""
    Q, K = rows_QK.shape
    if K % 8 or not rows_QK.flags.c_contiguous:
        padded_QK = np.zeros((Q, -(-K // 8) * 8), bool)
        padded_QK[:, :K] = rows_QK
        rows_QK = padded_QK
    words_QW = rows_QK.view(np.uint64) != 0
    word_Q = words_QW.shape[1] - 1 - words_QW[:, ::-1].argmax(axis=1)
    eight_Q8 = rows_QK.reshape(Q, -1, 8)[np.arange(Q), word_Q]
    last_Q: Array = word_Q * 8 + 7 - eight_Q8[:, ::-1].argmax(axis=1)
    return last_Q
