"""Evidence: what a square attention matrix says of padding, packing and pattern, and what it cannot say.

A token is real if it attends itself and if its key is used; both must agree. A query row that attends everything while
others do not is a filler (an empty row that its producer "unmasked") and is no evidence. Sequences end where a real
token does not attend the real token before it. Then the reading is proved: one attention pattern, rebuilt from it,
must give the matrix back on every real row; and every other reading that gives the same matrix is looked for.

What is known beside the matrix (`Known`) is not guessed from it: with a keep mask only real rows count, with the
Segments they are compared and nothing else.

Time is linear in the matrix; memory is one row of the batch beside it. Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from collate_npu.errors import REMEDY_CARRY_2D, AmbiguousMaskError, explain_rows
from collate_npu.masks.forms import dense_row
from collate_npu.masks.patterns import CAUSAL, Pattern, Prefix, Sliding, explanations
from collate_npu.segments import Segments

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[Any]
Rows = list[tuple[int, str]]


class UnexplainedError(Exception):
    """No padding and no pattern gives this matrix, under the polarity it was read with; `rows` says where and why.

    `instead` names a pattern that would explain it, where the pattern was given.
    """

    def __init__(self, rows: Rows, instead: Pattern | None = None) -> None:
        super().__init__(rows)
        self.rows, self.instead = rows, instead


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


@dataclass(frozen=True, slots=True)
class _Row:
    """What one row of the batch shows; the arrays are `[S]`."""

    real: Bools
    filler: Bools
    ids: Ints
    reach: int
    """How far back any row that counts looks, padding queries included."""
    sees_future: bool
    sees_all: bool
    last_sees_all: bool
    live_padding: bool
    """Every padded query after a token attends something, as a mask of key columns alone leaves it."""


def read_square(attends_BQK: Bools, known: Known) -> Reading:
    """`Reading` of a `[B, S, S]` bool matrix, True = attends.

    Raises `UnexplainedError` where nothing gives this matrix, `AmbiguousMaskError` where two different truths do.
    """
    if known.segments is not None:
        return Reading(known.segments, _prove(attends_BQK, known.segments, known.pattern))
    rows = _read_rows(attends_BQK, known.keep)
    ids_BS = np.stack([row.ids for row in rows])
    if known.pattern is not None and known.pattern.cuts:
        ids_BS = (ids_BS > 0).astype(np.int32)
    segments = Segments.from_ids(ids_BS)
    if known.keep is not None:
        _refuse_inverted(attends_BQK, segments)
    if not known.prove:
        return Reading(segments, None)
    _refuse_gaps(rows, segments, known.pattern)
    pattern = _prove(attends_BQK, segments, known.pattern, rows)
    if known.keep is None:
        _refuse_unmasked_rows(rows, known, pattern)
        _refuse_visible_padding(rows, segments)
    if known.pattern is None and pattern.causal:
        _refuse_chunks(rows, segments, pattern)
    return Reading(segments, pattern)


# --- reading


def _read_rows(attends_BQK: Bools, keep_BS: Bools | None) -> list[_Row]:
    rows, bad = [], []
    for b, attends_QK in enumerate(attends_BQK):
        counts_Q = ~_fillers(attends_QK) if keep_BS is None else keep_BS[b]
        used_K = np.logical_or.reduce(attends_QK, axis=0, where=counts_Q[:, None])
        real_S = attends_QK.diagonal() & counts_Q
        if (used_K != real_S).any():
            bad.append((b, _disagreement(used_K, real_S)))
        elif keep_BS is not None and (real_S != keep_BS[b]).any():
            bad.append((b, f"{real_S.sum()} real tokens where the 2D mask has {keep_BS[b].sum()}"))
        else:
            rows.append(_read_row(attends_QK, counts_Q, real_S, keep_BS is None))
    if bad:
        raise UnexplainedError(bad)
    return rows


def _fillers(attends_QK: Bools) -> Bools:
    """Rows that attend every key, future ones included, while other rows do not."""
    full_Q: Bools = np.asarray(attends_QK.all(axis=1))
    if full_Q.all():
        return np.zeros_like(full_Q)
    filler_Q: Bools = full_Q.copy()
    filler_Q[-1] &= full_Q[:-1].any()  # alone, a last row that sees everything is an ordinary causal row
    return filler_Q


def _disagreement(used_K: Bools, real_S: Bools) -> str:
    at = int(np.flatnonzero(used_K != real_S)[0])
    if used_K[at]:
        return f"key {at} is attended by other tokens, but token {at} is padding or does not attend itself"
    return f"token {at} attends itself, but its key is used by no row that counts"


def _read_row(attends_QK: Bools, counts_Q: Bools, real_S: Bools, fillers: bool) -> _Row:
    at = np.flatnonzero(real_S)
    ids = np.zeros(len(real_S), np.int32)
    ids[at] = 1 + np.concatenate([[0], np.cumsum(~attends_QK[at[1:], at[:-1]])])[: len(at)]
    first_Q, last_Q = _extent(attends_QK)
    place_Q = np.arange(len(real_S))
    filler_Q = ~counts_Q if fillers else np.zeros_like(real_S)
    after_Q = ~real_S & (place_Q > at[0] if len(at) else False)
    return _Row(
        real=real_S,
        filler=filler_Q,
        ids=ids,
        reach=int((place_Q - first_Q)[counts_Q].max(initial=0)),
        sees_future=bool((last_Q > place_Q)[real_S].any()),
        sees_all=bool(attends_QK.all()),
        last_sees_all=bool(attends_QK[-1].all()),
        live_padding=bool((attends_QK.any(axis=1) & ~filler_Q)[after_Q].all()),
    )


def _extent(attends_QK: Bools) -> tuple[Ints, Ints]:
    """First and last key each row attends; its own place for a row that attends none."""
    Q, K = attends_QK.shape
    any_Q = attends_QK.any(axis=1)
    first_Q = np.where(any_Q, attends_QK.argmax(axis=1), np.arange(Q))
    last_Q = np.where(any_Q, K - 1 - attends_QK[:, ::-1].argmax(axis=1), np.arange(Q))
    return first_Q, last_Q


# --- proof


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the matrix shows of its pattern, over all rows of the batch."""

    reach: int
    sees_future: bool
    prefixes: list[int]

    @classmethod
    def of(cls, attends_BQK: Bools, segments: Segments, rows: list[_Row] | None) -> _Shown:
        reach, future, prefixes = 0, False, []
        for b, start, end in segments.spans:
            real_Q = segments.array[b, start:end] != 0
            first_Q, last_Q = _extent(attends_BQK[b, start:end, start:end])
            place_Q = np.arange(end - start)
            ahead_Q = real_Q & (last_Q > place_Q)
            future |= bool(ahead_Q.any())
            reach = max(reach, int((place_Q - first_Q)[real_Q].max(initial=0)))
            prefixes.append(int((last_Q + 1)[ahead_Q].max(initial=0)))
        return cls(max([reach, *(row.reach for row in rows or ())]), future, prefixes)


def _prove(attends_BQK: Bools, segments: Segments, pattern: Pattern | None, rows: list[_Row] | None = None) -> Pattern:
    """The pattern that gives the matrix back on every real row: the declared one, or the first that does."""
    if pattern is not None:
        pattern.check(segments.num_sequences)
        if wrong := _wrong_rows(attends_BQK, segments, pattern):
            bad = [(b, f"rows that are not those of {pattern} attention") for b in wrong]
            raise UnexplainedError(bad, _search(attends_BQK, segments, rows))
        return pattern
    found = _search(attends_BQK, segments, rows)
    if found is None:
        wrong = _wrong_rows(attends_BQK, segments, CAUSAL)
        raise UnexplainedError([(b, "rows that no pattern gives") for b in wrong])
    return found


def _search(attends_BQK: Bools, segments: Segments, rows: list[_Row] | None) -> Pattern | None:
    shown = _Shown.of(attends_BQK, segments, rows)
    fits = (p for p in explanations(shown) if not _wrong_rows(attends_BQK, segments, p))
    return next(fits, None)


def _wrong_rows(attends_BQK: Bools, segments: Segments, pattern: Pattern) -> list[int]:
    """Rows of the batch in which some real query attends other keys than this pattern says."""
    wrong = []
    for b, attends_QK in enumerate(attends_BQK):
        rebuilt_QK = dense_row(segments, b, pattern)
        np.not_equal(rebuilt_QK, attends_QK, out=rebuilt_QK)
        if (rebuilt_QK.any(axis=1) & (segments.array[b] != 0)).any():
            wrong.append(b)
    return wrong


# --- other readings of the same matrix


def _raise_ambiguous(rows: Rows, rule: str, remedy: str = REMEDY_CARRY_2D) -> None:
    if rows:
        raise AmbiguousMaskError(explain_rows("attention_mask", rows, rule, remedy))


def _refuse_inverted(attends_BQK: Bools, segments: Segments) -> None:
    """The 2D mask says which rows count. Turned around, padding that attends itself alone looks like many sequences."""
    bad = []
    for b, row in enumerate(segments.lengths):
        if len(row) < 2 or max(row) > 1:
            continue
        padding = np.flatnonzero(segments.array[b] == 0)
        among = attends_BQK[b][np.ix_(padding, padding)]
        if among.sum() > among.diagonal().sum():
            bad.append((b, f"{len(row)} real tokens that attend themselves alone, beside padding that attends padding"))
    rule = "They are sequences of one token, or the 2D mask is turned around (True = padding)."
    _raise_ambiguous(bad, rule, "Pass attention_mask_2d with True = real; with sequences of one token, segment_ids too.")


def _refuse_unmasked_rows(rows: list[_Row], known: Known, pattern: Pattern) -> None:
    """A producer that unmasks empty rows makes right padding by one, or a row of padding, equal to no padding at all."""
    if len(rows[0].real) < 2 and not known.unmasked_rows:
        return
    unmasks = known.unmasked_rows or any(row.filler.any() for row in rows)
    mixed = known.pattern is None and isinstance(pattern, Prefix) and not all(row.sees_all for row in rows)
    pads_left = any(row.filler.any() and not row.filler[-1] for row in rows)
    bad = [
        (b, "rows that all see everything" if row.sees_all else "a last row that sees everything")
        for b, row in enumerate(rows)
        if (row.sees_all and (unmasks or mixed)) or (unmasks and row.last_sees_all and row.real[-1] and not pads_left)
    ]
    _raise_ambiguous(bad, "Where empty rows are unmasked, these are real tokens throughout, or end in padding.")
    ends = [(b, "last rows that see everything") for b, row in enumerate(rows) if row.filler[-1] and not known.unmasked_rows]
    rule = "They are padding that was unmasked, or real tokens that attend to both sides (an image)."
    _raise_ambiguous(ends, rule, f"Pass unmasked_rows=True if the producer unmasks rows. {REMEDY_CARRY_2D}")


def _refuse_visible_padding(rows: list[_Row], segments: Segments) -> None:
    """Padding may attend itself (a forced diagonal, a sequence of its own) and then looks like a sequence.

    Padding that nobody sees, in any row, shows that this producer's does not. One row that sees everything shows
    nothing: it was unmasked, or is a token of padding that attends the others and, on its diagonal, itself.
    """
    if any((~row.real).sum() > (row.filler.sum() == 1) for row in rows):
        return
    packed = [(b, row) for b, row in enumerate(segments.lengths) if len(row) > 1]
    bad = [(b, f"sequences of {', '.join(map(str, row[:8]))} tokens") for b, row in packed]
    _raise_ambiguous(bad, "All of them are real, or some are padding that attends itself.")


def _refuse_gaps(rows: list[_Row], segments: Segments, pattern: Pattern | None) -> None:
    """Two sequences with padding between them look like one sequence whose hole is wider than its window."""
    if pattern is not None and not isinstance(pattern, Sliding):
        return
    reach = pattern.size - 1 if isinstance(pattern, Sliding) else max(row.reach for row in rows)
    if pattern is None and any(row.sees_future for row in rows):
        return
    apart = {b: f"tokens {j} and {i} that do not meet" for b, j, i in _boundaries(segments) if i - j > reach}
    rule = f"No token looks back more than {reach}: they are two sequences, or one under a window of {reach + 1}."
    declare = "" if pattern is not None else "Declare the pattern, e.g. pattern='causal'. "
    _raise_ambiguous(sorted(apart.items()), rule, declare + REMEDY_CARRY_2D)


def _refuse_chunks(rows: list[_Row], segments: Segments, pattern: Pattern) -> None:
    """Packed sequences that end on multiples of one number look like one sequence a row under chunked attention.

    Packing and chunks at once are not considered: any longest sequence would be doubtful.
    """
    boundaries = list(_boundaries(segments))
    if not boundaries or pattern.reaches(segments.longest_span):
        return
    start_N, stop_N = _extents(segments, live=all(row.live_padding for row in rows))
    meets_N = np.diff([b for b, *_ in segments.spans]) == 0
    first = int(np.argmax(meets_N))
    for size in range(int(stop_N[first]), int(start_N[first + 1]) + 1):
        chunk_N = start_N // size
        if (chunk_N == (stop_N - 1) // size).all() and (np.diff(chunk_N)[meets_N] != 0).all():
            bad = {b: f"sequences that end at token {j}" for b, j, _ in reversed(boundaries)}
            rule = f"They are packed sequences, or one sequence a row under chunked attention of {size}."
            remedy = f"Declare pattern='causal' or pattern=Pattern.chunked({size}). {REMEDY_CARRY_2D}"
            _raise_ambiguous(sorted(bad.items()), rule, remedy)


def _extents(segments: Segments, *, live: bool) -> tuple[Ints, Ints]:
    """Where each sequence starts and stops, counted from its row's first token; with live padding, which belongs to the
    sequence before it, up to the next one."""
    S = segments.shape[1]
    row_N, start_N, stop_N = np.array(segments.spans, np.int64).T
    if live:
        same_N = np.diff(row_N) == 0
        stop_N = np.append(np.where(same_N, start_N[1:], S), S)
    origin_N = start_N[np.searchsorted(row_N, row_N)]
    return start_N - origin_N, stop_N - origin_N


def _boundaries(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """`(row, last token of a sequence, first token of the next)` wherever two meet in a row."""
    for (b, _, end), (next_b, next_start, _) in pairwise(segments.spans):
        if b == next_b:
            yield b, end - 1, next_start
