"""Evidence: what a square attention matrix shows: which tokens are real, what each query attends, where sequences part.

A token is real if it attends itself and if its key is used; both must agree. A query row that attends everything while
others do not is a filler (an empty row that its producer "unmasked") and is no evidence.

Most masks are those of plain causal attention: that is guessed from a few reads of each row, and compared block by block;
what is not as guessed is read. One pass over the matrix, one block of it where the polarity is wrong; memory is a block of
rows. Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from collate_npu.arrays import Array, once
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.masks.polarity import Bools
from collate_npu.masks.square import Square, regions_of
from collate_npu.segments import Segments, of_keep

Rows = list[tuple[int, str]]


class UnexplainedError(Exception):
    """No padding and no pattern gives this matrix, under the polarity it was read with; `rows` says where and why.

    `instead` names a pattern that would explain it, where one was given. `rows` are read off the matrix when asked for.
    """

    def __init__(self, rows: Callable[[], Rows], instead: Pattern | None = None) -> None:
        super().__init__()
        self.rows, self.instead = rows, instead


@dataclass(slots=True)
class Extents:
    """What each query row `[B, S]` attends: its first and last key (its own place where it attends none), whether any, and
    whether every key."""

    first: Array
    last: Array
    some: Bools
    full: Bools


class Shown:
    """What the matrix shows, `[B, S]`: guessed to be plain causal attention, where padding attends as the token before it
    does, or nothing, or everything; `look` corrects what is not so."""

    def __init__(self, square: Square, diagonal_BS: Bools, keep_BS: Bools | None) -> None:
        B, S = square.shape
        self.full = square.column(0) & square.column(S - 1)
        """Rows that attend everything."""
        self.full[:, -1] = square.row(np.full(B, S - 1)).all(axis=1)
        self._keep_BS = keep_BS
        self.real = diagonal_BS & self.counts
        self.segments, self._begins_BS = sequences(square, self.real)
        self.proved = np.zeros((B, S), bool)
        """Rows known to be those of plain causal attention on `segments`, where they are real."""
        self._filled_BQ = self.full.copy()
        whole_B = self.real.all(axis=1) & ~self._begins_BS[:, 1:].any(axis=1)
        self._filled_BQ[whole_B, -1] = False  # the last row of a causal sequence without padding is an ordinary one
        self._empty_BQ = after_token(self.real) & ~self._filled_BQ
        if self._empty_BQ.any():  # all such rows of a row are taken to be as the first of them
            self._empty_BQ &= ~square.row(self._empty_BQ.argmax(axis=1)).any(axis=1, keepdims=True)
        self._odd_B = (self._filled_BQ | self._empty_BQ).any(axis=1)
        self._square, self._regions = square, regions_of(self.segments)

    @property
    def filler(self) -> Bools:
        """Rows that their producer unmasked, where nothing beside the matrix says which rows count."""
        return fillers(self.full) if self._keep_BS is None else np.zeros_like(self.full)

    @property
    def counts(self) -> Bools:
        """Rows that are evidence."""
        return ~self.filler if self._keep_BS is None else self._keep_BS

    @once
    def extents(self) -> Extents:
        """What each query attends: as guessed, until what was found otherwise is written over it; `full` is among them."""
        own_S = np.arange(self.real.shape[1], dtype=np.int32)
        start_BQ = np.maximum.accumulate(np.where(self._begins_BS, own_S, 0), axis=1)
        last_BQ = np.maximum.accumulate(np.where(self.real, own_S, -1), axis=1)
        any_BQ = (last_BQ >= 0) & ~self._empty_BQ | self.full
        first_BQ = np.where(self.full, 0, np.where(any_BQ, start_BQ, own_S))
        last_BQ = np.where(self.full, len(own_S) - 1, np.where(any_BQ, last_BQ, own_S))
        return Extents(first_BQ, last_BQ, any_BQ, self.full)

    @property
    def reach(self) -> int:
        """How far back any row that counts looks, padding queries included."""
        back_BQ = np.arange(self.real.shape[1]) - self.extents.first
        return int(back_BQ.max(initial=0, where=self.counts))

    def odd_blocks(self, b: int) -> Iterator[tuple[int, int]]:
        """The blocks of query rows that are not exactly as guessed."""
        attends = self._square.attends
        for low, high in self._square.blocks():
            given_QK, filled_Q = self._square.given(low, high, self._regions[b], CAUSAL), self._filled_BQ[b, low:high]
            if self._odd_B[b]:
                given_QK[filled_Q] = attends
                given_QK[self._empty_BQ[b, low:high]] = not attends
            if self._square.equals_given(self._square.raw_rows(b, low, high)):
                self.proved[b, low:high] = ~filled_Q
            else:
                yield low, high


def look(square: Square, keep_BS: Bools | None) -> Shown:
    """What the matrix shows, unless a row that counts attends a key that is not real."""
    diagonal_BS, used_BK = square.diagonal(), np.zeros(square.shape, bool)
    may_BK = diagonal_BS if keep_BS is None else keep_BS
    wrong = UnexplainedError(lambda: _disagreements(square, keep_BS))
    if keep_BS is None:  # a token that does not attend itself attends another such: one row tells most wrong polarities
        inverted_BS = square.row(diagonal_BS.argmin(axis=1)) & ~diagonal_BS
    else:
        inverted_BS = keep_BS & ~diagonal_BS
    if inverted_BS.any():
        raise wrong
    shown = Shown(square, diagonal_BS, keep_BS)

    def read(b: int, blocks: Iterable[tuple[int, int]]) -> None:
        for low, high in blocks:
            used_BK[b] |= read_rows(square, b, low, high, shown.extents, keep_BS)
            if (used_BK[b] & ~may_BK[b]).any():
                raise wrong

    for b in range(len(used_BK)):
        read(b, shown.odd_blocks(b))
    guessed_BS = shown.real
    shown.real = diagonal_BS & shown.counts
    if len(misread := np.flatnonzero((shown.real != guessed_BS).any(axis=1))):
        for b in misread.tolist():
            read(b, square.blocks())
        shown.proved[misread] = False
        shown.segments, _ = sequences(square, shown.real)
    if ((used_BK | (shown.full & shown.counts).any(axis=1, keepdims=True)) & ~shown.real).any():
        raise wrong
    return shown


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
        return of_keep(real_BS), begins_BS
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
    """Read these query rows of one row of the batch `into` their place; the keys `[S]` that those that count attend: where
    that is not known, all that do not attend everything."""
    rows_QK = square.rows(b, low, high)
    at, own_Q = (b, slice(low, high)), np.arange(low, high)
    first_Q, last_Q = rows_QK.argmax(axis=1), rows_QK.shape[1] - 1 - rows_QK[:, ::-1].argmax(axis=1)
    any_Q = rows_QK[own_Q - low, first_Q]
    full_Q = (first_Q == 0) & (last_Q == square.shape[1] - 1)
    full_Q[full_Q] = rows_QK[full_Q].all(axis=1)
    into.some[at], into.full[at] = any_Q, full_Q
    into.first[at], into.last[at] = np.where(any_Q, first_Q, own_Q), np.where(any_Q, last_Q, own_Q)
    counts_Q = ~full_Q if counts_BS is None else counts_BS[at]
    used_K: Bools = np.logical_or.reduce(rows_QK if counts_Q.all() else rows_QK[counts_Q], axis=0)
    return used_K


def all_extents(square: Square, counts_BS: Bools | None = None) -> tuple[Extents, Bools]:
    """What every query attends, read off the whole matrix; and the keys `[B, S]` that those that count attend."""
    own_BQ, used_BK = np.tile(np.arange(square.shape[1], dtype=np.int32), (square.shape[0], 1)), np.zeros(square.shape, bool)
    extents = Extents(own_BQ, own_BQ.copy(), used_BK.copy(), used_BK.copy())
    for b in range(len(used_BK)):
        for low, high in square.blocks():
            used_BK[b] |= read_rows(square, b, low, high, extents, counts_BS)
    return extents, used_BK


def _disagreements(square: Square, keep_BS: Bools | None) -> Rows:
    """Each row of the batch in which diagonal, used keys and the keep mask do not say the same."""
    extents, used_BK = all_extents(square, keep_BS)
    counts_BS = ~fillers(extents.full) if keep_BS is None else keep_BS
    used_BK |= (extents.full & counts_BS).any(axis=1, keepdims=True)
    real_BS = square.diagonal() & counts_BS
    rows: Rows = []
    for b, at_S in enumerate(used_BK & ~real_BS):
        if at_S.any():  # the key of a real token is used, by itself
            k = at_S.argmax()
            rows.append((b, f"key {k} is attended by other tokens, but token {k} is padding or does not attend itself"))
        elif keep_BS is not None and (real_BS[b] != keep_BS[b]).any():
            rows.append((b, f"{real_BS[b].sum()} real tokens where the 2D mask has {keep_BS[b].sum()}"))
    return rows
