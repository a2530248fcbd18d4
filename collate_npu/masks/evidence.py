"""Evidence: what a square attention matrix says of padding, packing and pattern, and what it cannot say.

A token is real if it attends itself and if its key is used; both must agree. A query row that attends everything while
others do not is a filler (an empty row that its producer "unmasked") and is no evidence. Sequences end where a real
token does not attend the real token before it. Then the reading is proved: one attention pattern, rebuilt from it,
must give the matrix back on every real row; and every other reading that gives the same matrix is looked for (doubts.py).

What is known beside the matrix (`Known`) is not guessed from it: with a keep mask only real rows count, with the
Segments they are compared and nothing else.

One pass over the matrix where it is that of plain causal attention, a few where it is another's, one block of it where
the polarity is wrong; memory is a block of rows. Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collate_npu.host import Array
from collate_npu.masks.doubts import (
    refuse_chunks,
    refuse_gaps,
    refuse_inverted,
    refuse_unmasked_rows,
    refuse_visible_padding,
)
from collate_npu.masks.extents import Extents, Guess, after_token, fillers, read_rows, sequences
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.polarity import Bools
from collate_npu.masks.proof import Rows, UnexplainedError, prove
from collate_npu.masks.square import Square
from collate_npu.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known beside the matrix. `keep` is bool `[B, S]`; `segments` says more and excludes it."""

    keep: Bools | None = None
    segments: Segments | None = None
    pattern: Pattern | None = None
    """Declared; None looks for one."""
    unmasked_rows: bool = False
    """The producer fills fully blocked rows with True."""
    prove: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """The sequences a matrix shows and the pattern that gives it back (None where that was not asked)."""

    segments: Segments
    pattern: Pattern | None


@dataclass(frozen=True)
class Shown:
    """What the matrix shows, `[B, S]` or `[B]`."""

    segments: Segments
    guess: Guess
    """Corrected where it was wrong."""
    real: Bools
    counts: Bools
    filler: Bools
    proved: Bools
    """Rows known to be those of plain causal attention on `segments`."""

    def extents_and_reach(self) -> tuple[Extents, int]:
        """What each query row attends, and how far back any of them that counts looks."""
        return self.guess.extents, int(self.reach.max())

    @cached_property
    def reach(self) -> Array:
        """How far back any row that counts looks, padding queries included."""
        back_BQ = np.where(self.counts, np.arange(self.real.shape[1]) - self.guess.extents.first, 0)
        return np.asarray(back_BQ.max(axis=1))

    @cached_property
    def sees_future(self) -> Bools:
        """Does a real query attend a key after it?"""
        ahead_BQ = self.guess.extents.last > np.arange(self.real.shape[1])
        return np.asarray((self.real & ahead_BQ).any(axis=1))

    @cached_property
    def sees_all(self) -> Bools:
        """Does every query attend every key?"""
        return np.asarray(self.guess.full.all(axis=1))

    @property
    def last_sees_all(self) -> Bools:
        """Does the last query attend every key?"""
        return self.guess.full[:, -1]

    @cached_property
    def live_padding(self) -> Bools:
        """Does every padded query after a token attend something, as a mask of key columns alone leaves it?"""
        attends_BQ = self.guess.extents.some & ~self.filler
        return np.asarray((attends_BQ | ~after_token(self.real)).all(axis=1))


def read_square(square: Square, known: Known) -> Reading:
    """`Reading` of a `[B, S, S]` matrix.

    Raises `UnexplainedError` where nothing gives this matrix, `AmbiguousMaskError` where two different truths do.
    """
    if known.segments is not None:
        pattern = prove(square, known.segments, known.pattern, lambda: (_all_extents(square), 0))
        return Reading(known.segments, pattern)
    shown = _read(square, known.keep)
    segments, proved_BQ = shown.segments, shown.proved
    if known.pattern is not None and known.pattern.cuts and segments.packed:
        segments, proved_BQ = Segments.kept(shown.real), np.zeros_like(proved_BQ)
    if known.keep is not None:
        refuse_inverted(square, segments)
    if not known.prove:
        return Reading(segments, None)
    refuse_gaps(shown, segments, known.pattern)
    pattern = prove(square, segments, known.pattern, shown.extents_and_reach, proved_BQ)
    if known.keep is None:
        refuse_unmasked_rows(shown, pattern, declared=known.pattern is not None, unmasked_rows=known.unmasked_rows)
        refuse_visible_padding(shown, segments)
    if known.pattern is None and pattern.causal:
        refuse_chunks(shown, segments, pattern)
    return Reading(segments, pattern)


def _read(square: Square, keep_BS: Bools | None) -> Shown:
    """What the matrix shows, unless a row that counts attends a key that is not real."""
    diagonal_BS, used_BK = square.diagonal(), np.zeros(square.shape, bool)
    may_BK = diagonal_BS if keep_BS is None else keep_BS
    wrong = UnexplainedError(lambda: _disagreements(square, keep_BS))
    if _turned_around(square, diagonal_BS) if keep_BS is None else (keep_BS & ~diagonal_BS).any():
        raise wrong
    guess = Guess(square, diagonal_BS, keep_BS)

    def read(b: int, blocks: Iterable[tuple[int, int]]) -> None:
        for low, high in blocks:
            used_BK[b] |= read_rows(square, b, low, high, guess.extents, keep_BS)
            if (used_BK[b] & ~may_BK[b]).any():
                raise wrong

    for b in range(len(used_BK)):
        read(b, guess.odd_blocks(b))
    counts_BS = ~fillers(guess.full) if keep_BS is None else keep_BS
    real_BS, proved_BQ, segments = diagonal_BS & counts_BS, guess.proved, guess.segments
    if len(misread := np.flatnonzero((real_BS != guess.real).any(axis=1))):
        for b in misread.tolist():
            read(b, square.blocks())
        proved_BQ[misread] = False
        segments, _ = sequences(square, real_BS)
    if ((used_BK | (guess.full & counts_BS).any(axis=1, keepdims=True)) & ~real_BS).any():
        raise wrong
    filler_BS = ~counts_BS if keep_BS is None else np.zeros_like(real_BS)
    return Shown(segments, guess, real_BS, counts_BS, filler_BS, proved_BQ)


def _turned_around(square: Square, diagonal_BS: Bools) -> bool:
    """Does the first token that does not attend itself attend another such? One row tells most wrong polarities."""
    return bool((square.row(diagonal_BS.argmin(axis=1)) & ~diagonal_BS).any())


def _all_extents(square: Square) -> Extents:
    extents = Extents.none(*square.shape)
    for b in range(square.shape[0]):
        for low, high in square.blocks():
            read_rows(square, b, low, high, extents)
    return extents


def _disagreements(square: Square, keep_BS: Bools | None) -> Rows:
    """Each row of the batch in which diagonal, used keys and the keep mask do not say the same."""
    B, S = square.shape
    extents, diagonal_BS, used_BK = Extents.none(B, S), square.diagonal(), np.zeros((B, S), bool)
    for b in range(B):
        for low, high in square.blocks():
            used_BK[b] |= read_rows(square, b, low, high, extents, keep_BS)
    counts_BS = ~fillers(extents.full) if keep_BS is None else keep_BS
    used_BK |= (extents.full & counts_BS).any(axis=1, keepdims=True)
    real_BS = diagonal_BS & counts_BS
    true_BS = real_BS if keep_BS is None else keep_BS
    return [(b, told) for b in range(B) for told in _told(used_BK[b], real_BS[b], true_BS[b])]


def _told(used_K: Bools, real_S: Bools, true_S: Bools) -> Iterator[str]:
    at = np.flatnonzero(used_K & ~real_S)
    if len(at):  # the key of a real token is used, by itself
        yield f"key {at[0]} is attended by other tokens, but token {at[0]} is padding or does not attend itself"
    elif (real_S != true_S).any():
        yield f"{real_S.sum()} real tokens where the 2D mask has {true_S.sum()}"
