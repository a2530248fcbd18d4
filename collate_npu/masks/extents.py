"""Extents: the first and the last key that each query row of a square mask attends, and whether it attends all.

Most masks are those of plain causal attention. So that is tried first, from a few reads of each row, and compared block by
block: where a block is as expected, its extents are known; where not, they are read off it. One pass over the mask.

Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    first: Array
    last: Array
    """First and last key; its own place for a row that attends none."""
    some: Bools
    full: Bools
    """Does it attend any key, does it attend every key?"""

    @classmethod
    def none(cls, B: int, S: int) -> Extents:
        """Rows that attend nothing."""
        own_BQ = np.tile(np.arange(S, dtype=np.int32), (B, 1))
        return cls(own_BQ, own_BQ.copy(), np.zeros((B, S), bool), np.zeros((B, S), bool))


class Guess:
    """Plain causal attention, where padding attends as the token before it does, or nothing, or everything."""

    def __init__(self, square: Square, diagonal_BS: Bools, keep_BS: Bools | None) -> None:
        B, S = square.shape
        self.full = square.column(0) & square.column(S - 1)
        """Rows that attend everything: as guessed, until what was found otherwise is written over it."""
        self.full[:, -1] = square.row(np.full(B, S - 1)).all(axis=1)
        self.real = diagonal_BS & (~fillers(self.full) if keep_BS is None else keep_BS)
        self.segments, self._begins_BS = sequences(square, self.real)
        self._filled_BQ = self.full.copy()
        whole_B = self.real.all(axis=1) & ~self._begins_BS[:, 1:].any(axis=1)
        self._filled_BQ[whole_B, -1] = False  # the last row of a causal sequence without padding is an ordinary one
        self._empty_BQ = after_token(self.real) & ~self._filled_BQ
        if self._empty_BQ.any():  # all such rows of a row are taken to be as the first of them
            self._empty_BQ &= ~square.row(self._empty_BQ.argmax(axis=1)).any(axis=1, keepdims=True)
        self._odd_B = (self._filled_BQ | self._empty_BQ).any(axis=1)
        self._held_BQ = np.zeros((B, S), bool)
        self._square, self._rebuilt = square, Rebuilt(square, self.segments, CAUSAL)

    @cached_property
    def extents(self) -> Extents:
        """As guessed, and `full_BQ` among them."""
        own_S = np.arange(self.real.shape[1], dtype=np.int32)
        start_BQ = np.maximum.accumulate(np.where(self._begins_BS, own_S, 0), axis=1)
        last_BQ = np.maximum.accumulate(np.where(self.real, own_S, -1), axis=1)
        any_BQ = (last_BQ >= 0) & ~self._empty_BQ | self.full
        first_BQ = np.where(self.full, 0, np.where(any_BQ, start_BQ, own_S))
        last_BQ = np.where(self.full, len(own_S) - 1, np.where(any_BQ, last_BQ, own_S))
        return Extents(first_BQ, last_BQ, any_BQ, self.full)

    @property
    def proved(self) -> Bools:
        """Rows found to be those of plain causal attention, where they are real."""
        proved_BQ: Bools = self._held_BQ & ~self._filled_BQ
        return proved_BQ

    def odd_blocks(self, b: int) -> Iterator[tuple[int, int]]:
        """The blocks of query rows that are not exactly as guessed."""
        for low, high in self._square.blocks():
            if self._holds(b, low, high):
                self._held_BQ[b, low:high] = True
            else:
                yield low, high

    def _holds(self, b: int, low: int, high: int) -> bool:
        given_QK, attends = self._rebuilt.rows(b, low, high), self._square.attends
        if self._odd_B[b]:
            given_QK[self._filled_BQ[b, low:high]] = attends
            given_QK[self._empty_BQ[b, low:high]] = not attends
        return self._rebuilt.equals(self._square.raw_rows(b, low, high))


def sequences(square: Square, real_BS: Bools) -> tuple[Segments, Bools]:
    """A sequence ends where a real token does not attend the real token before it; `[B, S]` says where one begins."""
    begins_BS, follows_BS = real_BS.copy(), np.zeros_like(real_BS)
    follows_BS[:, 1:] = real_BS[:, :-1]
    begins_BS[:, 1:] &= ~(follows_BS[:, 1:] & square.diagonal(before=1))
    distant_BS = begins_BS & ~follows_BS & np.logical_or.accumulate(follows_BS, axis=1)
    if distant_BS.any():  # holes, and padding between sequences
        last_BS = np.maximum.accumulate(np.where(real_BS, np.arange(real_BS.shape[1]), 0), axis=1)
        b_N, q_N = np.nonzero(distant_BS)
        begins_BS[b_N, q_N] = ~square.at(b_N, q_N, last_BS[b_N, q_N - 1])
    if (np.count_nonzero(begins_BS, axis=1) <= 1).all():
        return Segments.kept(real_BS), begins_BS
    return Segments.from_ids(np.cumsum(begins_BS, axis=1) * real_BS), begins_BS


def after_token(real_BS: Bools) -> Bools:
    """Padding that stands behind the first token of its row."""
    return np.logical_or.accumulate(real_BS, axis=1) & ~real_BS


def fillers(full_BQ: Bools) -> Bools:
    """Rows that attend every key, future ones included, while other rows do not."""
    if not full_BQ[:, :-1].any():
        return np.zeros_like(full_BQ)  # alone, a last row that sees everything is an ordinary causal row
    filler_BQ = full_BQ & ~full_BQ.all(axis=1, keepdims=True)
    filler_BQ[:, -1] &= full_BQ[:, :-1].any(axis=1)
    return filler_BQ


def read_rows(square: Square, b: int, low: int, high: int, into: Extents, counts_BS: Bools | None = None) -> Bools:
    """Read these query rows of one row of the batch `into` their place; the keys `[S]` that those that count attend.

    Where it is not known which rows count, those that attend everything do not.
    """
    rows_QK = square.rows(b, low, high)
    at, own_Q = (b, slice(low, high)), np.arange(low, high)
    first_Q, last_Q = rows_QK.argmax(axis=1), _last(rows_QK)
    any_Q = rows_QK[own_Q - low, first_Q]
    full_Q = (first_Q == 0) & (last_Q == square.shape[1] - 1)
    full_Q[full_Q] = rows_QK[full_Q].all(axis=1)
    into.some[at], into.full[at] = any_Q, full_Q
    into.first[at], into.last[at] = np.where(any_Q, first_Q, own_Q), np.where(any_Q, last_Q, own_Q)
    counts_Q = ~full_Q if counts_BS is None else counts_BS[at]
    used_K: Bools = np.logical_or.reduce(rows_QK if counts_Q.all() else rows_QK[counts_Q], axis=0)
    return used_K


def _last(rows_QK: Bools) -> Array:
    """The last True of each row, anything for a row without one: among the last eight bytes that hold one."""
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
