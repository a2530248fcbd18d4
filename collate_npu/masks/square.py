"""Square: query rows of `[S, S]`, written as sequences and a pattern give them, or read from a mask under one polarity.

Every form and every proof of a mask goes through `fill_rows`. Reading goes in blocks of query rows that stay in cache, and
nothing of the size of the mask is built: a bool mask is read where it lies, any other dtype becomes bool block by block.
Legend: B batch, H heads, S width, Q/K query and key rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from collate_npu.arrays import Array
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.polarity import BLOCK, Bools, MaskValues, Polarity
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


class Square:
    """`[B, S, S]`, True = attends, of values `[S, S]`, `[B, S, S]` or `[B, H, S, S]` under one polarity: of all heads, which
    are alike, the first. One row serves any `batch_size`."""

    def __init__(self, values: MaskValues, polarity: Polarity, batch_size: int) -> None:
        raw = values.raw[:, 0] if values.raw.ndim == 4 else values.raw
        self._raw_BQK = np.broadcast_to(raw, (batch_size, *raw.shape[-2:]))
        self._read = partial(values.attending, polarity=polarity)
        self.shape = batch_size, raw.shape[-1]
        self._scratch: dict[int, tuple[bytearray, Bools]] = {}
        self.raw_rows = self._as_they_lie if raw.dtype == bool else self.rows
        """`rows` without a copy, where `attends` stands for "attends"."""
        self.attends = not (raw.dtype == bool and polarity == "masked")

    def rows(self, b: int, low: int, high: int) -> Bools:
        """bool `[high - low, S]`: query rows of one row of the batch."""
        return self._read(self._raw_BQK[b, low:high])

    def _as_they_lie(self, b: int, low: int, high: int) -> Bools:
        return self._raw_BQK[b, low:high]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """`(first query, last query + 1)`, for every row of the batch: at most a fourth of the mask is read at once."""
        B, S = self.shape
        rows = max(min(BLOCK // max(S, 1), B * S // 4), 1)
        step = rows if rows < 8 else rows // 8 * 8
        for low in range(0, S, step):
            yield low, min(low + step, S)

    def diagonal(self, before: int = 0) -> Bools:
        """`[B, S - before]`: does each token attend itself, or the one so many places before it?"""
        return self._read(self._raw_BQK.diagonal(-before, axis1=1, axis2=2))

    def column(self, k: int) -> Bools:
        """`[B, S]`: the queries that attend key k."""
        return self._read(self._raw_BQK[..., k])

    def row(self, q_B: Array) -> Bools:
        """`[B, S]`: the keys that one query of each row of the batch attends."""
        return self.at(np.arange(len(q_B)), q_B, slice(None))

    def at(self, b_N: Array, q_N: Array, k_N: Array | slice) -> Bools:
        """`[N]`: single places, or `[N, S]`: single rows."""
        return self._read(self._raw_BQK[b_N, q_N, k_N])

    def given(self, low: int, high: int, regions: Sequence[Region], pattern: Pattern) -> Bools:
        """The query rows that a pattern gives, as `raw_rows` holds them; the next call writes over them."""
        if high - low not in self._scratch:  # the last block of a mask is smaller
            raw = bytearray((high - low) * self.shape[1])
            self._scratch[high - low] = raw, np.frombuffer(raw, bool).reshape(-1, self.shape[1])
        rows_QK = self._scratch[high - low][1]
        fill_rows(rows_QK, low, regions, pattern, self.attends, not self.attends)
        return rows_QK

    def equals_given(self, found_QK: Bools) -> bool:
        """Is it byte by byte what `given` gave last? bytearray compares at the speed of memory, numpy at half of it."""
        return self._scratch[len(found_QK)][0] == np.ascontiguousarray(found_QK)
