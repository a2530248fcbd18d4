"""Fill: the query rows of a square mask, written into an array, every element once.

Every form and every proof of a mask goes through `fill_rows`. Legend: Q, K query and key rows, S width.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from collate_npu.arrays import Array
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

_last = attrgetter("last")


class Region(NamedTuple):
    """One sequence, as the n-th of the batch, and the query rows that show it; all places are those of the row."""

    n: int
    start: int
    end: int
    """Its first key, and one more than its last."""
    first: int
    last: int
    """Its query rows, `last` not among them: padding belongs to the sequence before it, leading padding to the first."""
    holes: Array | None
    """Which of its places are padding, bool; None where none is."""


def regions_of(segments: Segments) -> list[list[Region]]:
    """For each row of the batch its sequences; every query is in one region, unless the row is padding alone."""
    spans, lengths, (B, S) = segments.spans, segments.sequence_lengths, segments.shape
    rows: list[list[Region]] = [[] for _ in range(B)]
    for n, (b, start, end) in enumerate(spans):
        last = spans[n + 1][1] if n + 1 < len(spans) and spans[n + 1][0] == b else S
        holes = segments.array[b, start:end] == 0 if end - start > lengths[n] else None
        rows[b].append(Region(n, start, end, start if rows[b] else 0, last, holes))
    return rows


def fill_rows(out_QK: Array, low: int, regions: Sequence[Region], pattern: Pattern, allowed: Any, forbidden: Any) -> None:
    """Write the query rows low, low + 1, ... of one row of the batch."""
    high = low + len(out_QK)
    if not regions:
        out_QK[:] = forbidden
    at = bisect_right(regions, low, key=_last) if low else 0
    for region in regions[at:] if at else regions:
        if region.first >= high:
            break
        q0, q1 = max(low, region.first), min(high, region.last)
        _fill_region(out_QK[q0 - low : q1 - low], q0, region, pattern, allowed, forbidden)


def _fill_region(rows_QK: Array, q0: int, region: Region, pattern: Pattern, allowed: Any, forbidden: Any) -> None:
    """Up to three stretches of queries: before the sequence, in it, and behind it."""
    n, start, end, _, _, holes = region
    q1, S = q0 + len(rows_QK), rows_QK.shape[1]
    low = q0
    if pattern.causal and low < start:
        low = min(start, q1)
        rows_QK[: low - q0] = forbidden
    while low < q1:
        # A causal query of the sequence sees no key behind itself, so those behind the sequence need no care of their own.
        inside = pattern.causal and low < end
        high, stop = (min(end, q1), S) if inside else (q1, end)
        block_QK = rows_QK[low - q0 : high - q0]
        if start:
            block_QK[:, :start] = forbidden
        if stop < S:
            block_QK[:, stop:] = forbidden
        pattern.fill(block_QK[:, start:stop], low - start, n, allowed, forbidden)
        if holes is not None:
            np.copyto(block_QK[:, start:end], forbidden, where=holes)
        low = high
        if inside and pattern.settles and low < q1:
            rows_QK[low - q0 :] = block_QK[-1]
            return
