"""Doubts: other readings that give the same square mask; where there is one, the mask is refused and both are named.

Each rule costs O(B * S), from what the mask shows. Legend: B batch, S width, N sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np

from collate_npu.errors import REMEDY_CARRY_2D, AmbiguousMaskError, explain_rows
from collate_npu.host import Array
from collate_npu.masks.patterns import Pattern, Prefix, Sliding
from collate_npu.masks.polarity import Bools
from collate_npu.masks.square import Square
from collate_npu.segments import Segments


class Shown(Protocol):
    """What the matrix shows, `[B, S]` or `[B]` (evidence.py)."""

    @property
    def real(self) -> Bools: ...
    @property
    def filler(self) -> Bools: ...
    @property
    def reach(self) -> Array: ...
    @property
    def sees_future(self) -> Bools: ...
    @property
    def sees_all(self) -> Bools: ...
    @property
    def last_sees_all(self) -> Bools: ...
    @property
    def live_padding(self) -> Bools: ...


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
    all_B = shown.sees_all
    mixed = not declared and isinstance(pattern, Prefix) and not all_B.all()
    pads_left = bool((filler_BS.any(axis=1) & ~filler_BS[:, -1]).any())
    last_B = shown.last_sees_all & shown.real[:, -1]
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

    Padding that nobody sees, in any row, shows that this producer's does not. One row that sees everything shows
    nothing: it was unmasked, or is a token of padding that attends the others and, on its diagonal, itself.
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
    reach = pattern.size - 1 if isinstance(pattern, Sliding) else int(shown.reach.max())
    if pattern is None and shown.sees_future.any():
        return
    apart = {b: f"tokens {j} and {i} that do not meet" for b, j, i in _boundaries(segments) if i - j > reach}
    rule = f"No token looks back more than {reach}: they are two sequences, or one under a window of {reach + 1}."
    declare = "" if pattern is not None else "Declare the pattern, e.g. pattern='causal'. "
    _raise_ambiguous(sorted(apart.items()), rule, declare + REMEDY_CARRY_2D)


def refuse_chunks(shown: Shown, segments: Segments, pattern: Pattern) -> None:
    """Packed sequences that end on multiples of one number look like one sequence a row under chunked attention.

    Packing and chunks at once are not considered: any longest sequence would be doubtful.
    """
    if not segments.packed or pattern.reaches(segments.longest_span):
        return
    boundaries = list(_boundaries(segments))
    start_N, stop_N = _extents(segments, live=bool(shown.live_padding.all()))
    meets_N = np.diff([b for b, *_ in segments.spans]) == 0
    first = int(np.argmax(meets_N))
    for size in range(int(stop_N[first]), int(start_N[first + 1]) + 1):
        chunk_N = start_N // size
        if (chunk_N == (stop_N - 1) // size).all() and (np.diff(chunk_N)[meets_N] != 0).all():
            bad = {b: f"sequences that end at token {j}" for b, j, _ in reversed(boundaries)}
            rule = f"They are packed sequences, or one sequence a row under chunked attention of {size}."
            remedy = f"Declare pattern='causal' or pattern=Pattern.chunked({size}). {REMEDY_CARRY_2D}"
            _raise_ambiguous(sorted(bad.items()), rule, remedy)


def _raise_ambiguous(rows: list[tuple[int, str]], rule: str, remedy: str = REMEDY_CARRY_2D) -> None:
    if rows:
        raise AmbiguousMaskError(explain_rows("attention_mask", rows, rule, remedy))


def _extents(segments: Segments, *, live: bool) -> tuple[Array, Array]:
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
