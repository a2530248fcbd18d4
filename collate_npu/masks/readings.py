"""Readings: what a square mask means: sequences and one attention pattern that give it back, and no others that do too.

The reading is proved: rows that a pattern gives are compared with those of the mask, a block at a time; the first block
with a wrong row ends it. Where another reading gives the same matrix, the mask is refused and both are named. What is known
beside it (`Known`) is not guessed: with a keep mask only real rows count, with the Segments they are compared, no more.

One pass over the mask for each pattern that holds, one block for most that do not; doubts cost O(B * S).
Legend: B batch, S width, N sequences, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from collate_npu.errors import AmbiguousMaskError, explain_rows
from collate_npu.masks.evidence import Extents, Shown, UnexplainedError, after_token, all_extents, look
from collate_npu.masks.patterns import CAUSAL, Pattern, Prefix, Sliding
from collate_npu.masks.polarity import REMEDY_CARRY_2D, Bools
from collate_npu.masks.square import Region, Square, regions_of
from collate_npu.segments import Segments, of_keep


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


def read_square(square: Square, known: Known) -> Reading:
    """`Reading` of a `[B, S, S]` matrix.

    Raises `UnexplainedError` where nothing gives this matrix, `AmbiguousMaskError` where two different truths do.
    """
    if known.segments is not None:
        pattern = prove(square, known.segments, known.pattern, lambda: (all_extents(square)[0], 0))
        return Reading(known.segments, pattern)
    shown = look(square, known.keep)
    segments, proved_BQ = shown.segments, shown.proved
    if known.pattern is not None and known.pattern.cuts and segments.packed:
        segments, proved_BQ = of_keep(shown.real), np.zeros_like(proved_BQ)
    if known.keep is not None:
        refuse_inverted(square, segments)
    if not known.prove:
        return Reading(segments, None)
    refuse_gaps(shown, segments, known.pattern)
    pattern = prove(square, segments, known.pattern, lambda: (shown.extents, shown.reach), proved_BQ)
    if known.keep is None:
        refuse_unmasked_rows(shown, pattern, declared=known.pattern is not None, unmasked_rows=known.unmasked_rows)
        refuse_visible_padding(shown, segments)
    if known.pattern is None and pattern.causal:
        refuse_chunks(shown, segments, pattern)
    return Reading(segments, pattern)


# --- one pattern gives it back


def prove(
    square: Square,
    segments: Segments,
    pattern: Pattern | None,
    extents: Callable[[], tuple[Extents, int]],
    proved_BQ: Bools | None = None,
) -> Pattern:
    """The pattern that gives the matrix back on every real row: the declared one, or the first that does.

    `extents`, what every query attends and how far back any that counts looks, is asked where the first pattern fails.
    `proved_BQ` are queries that plain causal attention is known to give. Raises `UnexplainedError`.
    """

    def wrong(tried: Pattern) -> Iterator[int]:
        return wrong_rows(square, segments, tried, proved_BQ if tried == CAUSAL else None)

    first = pattern or CAUSAL
    first.check(segments.num_sequences)
    if next(wrong(first), None) is None:
        return first
    seen = _seen(segments, *extents())
    tries = filter(None, (kind.explaining(*seen) for kind in Pattern.__subclasses__()))
    found = next((each for each in tries if each != first and next(wrong(each), None) is None), None)
    if pattern is None and found is not None:
        return found
    said = "rows that no pattern gives" if pattern is None else f"rows that are not those of {pattern} attention"
    raise UnexplainedError(lambda: [(b, said) for b in wrong(first)], found)


def wrong_rows(square: Square, segments: Segments, pattern: Pattern, proved_BQ: Bools | None = None) -> Iterator[int]:
    """Rows of the batch in which some real query attends other keys than this pattern says, but for those `proved`."""
    counts_BQ = segments.array != 0
    if proved_BQ is not None:
        counts_BQ &= ~proved_BQ
    if not counts_BQ.any():
        return
    for b, (regions, counts_Q) in enumerate(zip(regions_of(segments), counts_BQ)):
        blocks = ((low, high) for low, high in square.blocks() if counts_Q[low:high].any())
        if any(_differs(square, b, block, regions, pattern, counts_Q) for block in blocks):
            yield b


def _differs(square: Square, b: int, at: tuple[int, int], regions: list[Region], pattern: Pattern, counts_Q: Bools) -> bool:
    found_QK, given_QK = square.raw_rows(b, *at), square.given(*at, regions, pattern)
    return not square.equals_given(found_QK) and bool(((found_QK != given_QK).any(axis=1) & counts_Q[slice(*at)]).any())


def _seen(segments: Segments, extents: Extents, reach: int) -> tuple[int, list[int]]:
    """What `Pattern.explaining` is told; where real queries attend another sequence, it need not make sense."""
    place_Q = np.arange(segments.shape[1])
    real_BQ = segments.array != 0
    back_BQ = np.where(real_BQ, place_Q - extents.first, 0)
    ahead_BQ = np.where(real_BQ & (extents.last > place_Q), extents.last + 1, 0)
    prefixes = [max(int(ahead_BQ[b, start:end].max()) - start, 0) for b, start, end in segments.spans]
    return max(reach, int(back_BQ.max(initial=0))), prefixes


# --- so do others


def refuse_inverted(square: Square, segments: Segments) -> None:
    """The 2D mask says which rows count. Turned around, padding that attends itself alone looks like many sequences."""
    doubtful = [b for b, row in enumerate(segments.lengths) if len(row) > 1 and max(row) == 1]
    bad = [
        (b, f"{len(segments.lengths[b])} real tokens that attend themselves alone, beside padding that attends padding")
        for b in doubtful
        if any(_attends_other(square.rows(b, low, high), low, segments.array[b] == 0) for low, high in square.blocks())
    ]
    rule = "They are sequences of one token, or the 2D mask is turned around (True = padding)."
    _raise_ambiguous(bad, rule, "Pass attention_mask_2d with True = real; with sequences of one token, segment_ids too.")


def _attends_other(rows_QK: Bools, low: int, among_S: Bools) -> bool:
    """Does one of these tokens attend another of them?"""
    q_N = np.flatnonzero(among_S[low : low + len(rows_QK)])
    found_NK = rows_QK[q_N] & among_S
    found_NK[np.arange(len(q_N)), low + q_N] = False
    return bool(found_NK.any())


def refuse_unmasked_rows(shown: Shown, pattern: Pattern, *, declared: bool, unmasked_rows: bool) -> None:
    """A producer that unmasks empty rows makes right padding by one, or a row of padding, equal to no padding at all."""
    filler_BS = shown.filler
    unmasks = unmasked_rows or bool(filler_BS.any())
    if (filler_BS.shape[1] < 2 and not unmasked_rows) or not (unmasks or isinstance(pattern, Prefix)):
        return
    all_B = np.asarray(shown.full.all(axis=1))
    mixed = not declared and isinstance(pattern, Prefix) and not all_B.all()
    pads_left = bool((filler_BS.any(axis=1) & ~filler_BS[:, -1]).any())
    last_B = shown.full[:, -1] & shown.real[:, -1]
    bad_B = (all_B & (unmasks or mixed)) | (last_B & (unmasks and not pads_left))
    bad = [
        (b, "rows that all see everything" if all_B[b] else "a last row that sees everything")
        for b in np.flatnonzero(bad_B).tolist()
    ]
    _raise_ambiguous(bad, "Where empty rows are unmasked, these are real tokens throughout, or end in padding.")
    end_B = filler_BS[:, -1] & (not unmasked_rows)
    ends = [(b, "last rows that see everything") for b in np.flatnonzero(end_B).tolist()]
    rule = "They are padding that was unmasked, or real tokens that attend to both sides (an image)."
    _raise_ambiguous(ends, rule, f"Pass unmasked_rows=True if the producer unmasks rows. {REMEDY_CARRY_2D}")


def refuse_visible_padding(shown: Shown, segments: Segments) -> None:
    """Padding may attend itself (a forced diagonal, a sequence of its own) and then looks like a sequence.

    Padding that nobody sees, in any row, shows that this producer's does not. One row that sees everything shows nothing:
    it was unmasked, or is padding that attends the others and, on its diagonal, itself.
    """
    if not segments.packed or ((~shown.real).sum(axis=1) > (shown.filler.sum(axis=1) == 1)).any():
        return
    packed = [(b, row) for b, row in enumerate(segments.lengths) if len(row) > 1]
    bad = [(b, f"sequences of {', '.join(map(str, row[:8]))} tokens") for b, row in packed]
    _raise_ambiguous(bad, "All of them are real, or some are padding that attends itself.")


def refuse_gaps(shown: Shown, segments: Segments, pattern: Pattern | None) -> None:
    """Two sequences with padding between them look like one sequence whose hole is wider than its window."""
    if not segments.packed or (pattern is not None and not isinstance(pattern, Sliding)):
        return
    reach = pattern.size - 1 if isinstance(pattern, Sliding) else shown.reach
    if pattern is None and (shown.real & (shown.extents.last > np.arange(segments.shape[1]))).any():
        return  # a query attends a key after it
    apart = {b: f"tokens {j} and {i} that do not meet" for b, j, i in _boundaries(segments) if i - j > reach}
    rule = f"No token looks back more than {reach}: they are two sequences, or one under a window of {reach + 1}."
    declare = "" if pattern is not None else "Declare the pattern, e.g. pattern='causal'. "
    _raise_ambiguous(sorted(apart.items()), rule, declare + REMEDY_CARRY_2D)


def refuse_chunks(shown: Shown, segments: Segments, pattern: Pattern) -> None:
    """Packed sequences that end on multiples of one number look like one sequence a row under chunked attention.

    Packing and chunks at once are not considered: any longest sequence would be doubtful. Places are counted from a row's
    first token; padding that attends as the sequence before it belongs to that one.
    """
    if not segments.packed or pattern.reaches(segments.longest_span):
        return
    row_N, start_N, stop_N = np.array(segments.spans, np.int64).T
    meets_N = np.diff(row_N) == 0
    if ((shown.extents.some & ~shown.filler) | ~after_token(shown.real)).all():
        stop_N = np.append(np.where(meets_N, start_N[1:], segments.shape[1]), segments.shape[1])
    origin_N = start_N[np.searchsorted(row_N, row_N)]
    start_N, stop_N, first = start_N - origin_N, stop_N - origin_N, int(np.argmax(meets_N))
    for size in range(int(stop_N[first]), int(start_N[first + 1]) + 1):
        chunk_N = start_N // size
        if (chunk_N == (stop_N - 1) // size).all() and (np.diff(chunk_N)[meets_N] != 0).all():
            bad = {b: f"sequences that end at token {j}" for b, j, _ in reversed(list(_boundaries(segments)))}
            rule = f"They are packed sequences, or one sequence a row under chunked attention of {size}."
            remedy = f"Declare pattern='causal' or pattern=Pattern.chunked({size}). {REMEDY_CARRY_2D}"
            _raise_ambiguous(sorted(bad.items()), rule, remedy)


def _raise_ambiguous(rows: list[tuple[int, str]], rule: str, remedy: str = REMEDY_CARRY_2D) -> None:
    if rows:
        raise AmbiguousMaskError(explain_rows("attention_mask", rows, rule, remedy))


def _boundaries(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """`(row, last token of a sequence, first token of the next)` wherever two meet in a row."""
    for (b, _, end), (next_b, next_start, _) in pairwise(segments.spans):
        if b == next_b:
            yield b, end - 1, next_start
