"""Proof: a square mask is what one attention pattern gives on known sequences, in every real query row, or it is not.

The rows that a pattern gives are written beside those of the mask, a block at a time, and compared byte by byte; the first
block with a wrong row ends it. One pass over the mask for each pattern that holds, one block for most that do not.

Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from collate_npu.masks.extents import Extents
from collate_npu.masks.patterns import CAUSAL, Pattern, explanations
from collate_npu.masks.polarity import Bools
from collate_npu.masks.square import Rebuilt, Square
from collate_npu.segments import Segments

Rows = list[tuple[int, str]]


class UnexplainedError(Exception):
    """No padding and no pattern gives this matrix, under the polarity it was read with; `rows` says where and why.

    `instead` names a pattern that would explain it, where the pattern was given. What is said is read off the matrix when
    it is asked for: where the other polarity is proved, nobody does.
    """

    def __init__(self, told: Callable[[], Rows], instead: Pattern | None = None) -> None:
        super().__init__()
        self._told, self.instead = told, instead

    @property
    def rows(self) -> Rows:
        """`(row of the batch, what is wrong with it)`."""
        return self._told()


def wrong_rows(square: Square, segments: Segments, pattern: Pattern, proved_BQ: Bools | None = None) -> Iterator[int]:
    """Rows of the batch in which some real query attends other keys than this pattern says, but for those `proved`."""
    counts_BQ = segments.array != 0
    if proved_BQ is not None:
        counts_BQ &= ~proved_BQ
    left = np.flatnonzero(counts_BQ.any(axis=1)).tolist()
    if not left:
        return
    rebuilt = Rebuilt(square, segments, pattern)
    for b in left:
        if any(_differs(square, rebuilt, b, low, high, counts_BQ[b, low:high]) for low, high in square.blocks()):
            yield b


def _differs(square: Square, rebuilt: Rebuilt, b: int, low: int, high: int, counts_Q: Bools) -> bool:
    if not counts_Q.any():
        return False
    found_QK, given_QK = square.raw_rows(b, low, high), rebuilt.rows(b, low, high)
    return not rebuilt.equals(found_QK) and bool(((found_QK != given_QK).any(axis=1) & counts_Q).any())


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the matrix shows of its pattern, over all rows of the batch."""

    reach: int
    sees_future: bool
    prefixes: list[int]


def _shown(segments: Segments, extents: Extents, reach: int) -> _Shown:
    """Real queries that attend another sequence follow no pattern; for those, what is shown need not make sense."""
    place_Q = np.arange(segments.shape[1])
    real_BQ = segments.array != 0
    back_BQ = np.where(real_BQ, place_Q - extents.first, 0)
    ahead_BQ = np.where(real_BQ & (extents.last > place_Q), extents.last + 1, 0)
    prefixes = [max(int(ahead_BQ[b, start:end].max()) - start, 0) for b, start, end in segments.spans]
    return _Shown(max(reach, int(back_BQ.max(initial=0))), bool(ahead_BQ.any()), prefixes)


def prove(
    square: Square,
    segments: Segments,
    pattern: Pattern | None,
    look: Callable[[], tuple[Extents, int]],
    proved_BQ: Bools | None = None,
) -> Pattern:
    """The pattern that gives the matrix back on every real row: the declared one, or the first that does.

    `look` gives what every query attends, and how far back any that counts looks; it is asked only where the first
    pattern fails. `proved_BQ` are queries that plain causal attention is known to give on these sequences. Raises
    `UnexplainedError`.
    """

    def wrong(tried: Pattern) -> Iterator[int]:
        return wrong_rows(square, segments, tried, proved_BQ if tried == CAUSAL else None)

    def holds(tried: Pattern) -> bool:
        return next(wrong(tried), None) is None

    def search() -> Pattern | None:
        shown = _shown(segments, *look())
        return next((p for p in explanations(shown) if p not in (CAUSAL, pattern) and holds(p)), None)

    if pattern is not None:
        pattern.check(segments.num_sequences)
    first = pattern or CAUSAL
    if holds(first):
        return first
    found = (CAUSAL if pattern is not None and pattern != CAUSAL and holds(CAUSAL) else None) or search()
    if pattern is None and found is not None:
        return found
    said = "rows that no pattern gives" if pattern is None else f"rows that are not those of {pattern} attention"
    raise UnexplainedError(lambda: [(b, said) for b in wrong(first)], found)
