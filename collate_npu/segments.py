"""Segments: which sequence each token of a batch belongs to; 0 is padding.

The smallest thing from which every mask, offset and position follows. It lives on the host, costs four bytes a token,
and is built where the lengths are known (the collator) or derived, with proof, from a mask someone else built.
Every tensor it gives is a fresh one: writing to it changes nothing else.
Legend: B batch rows, S width, T tokens without padding, N sequences in the whole batch. `■` is a real token, `⬚` padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu import arrays
from collate_npu.arrays import Array, PaddingSide, Side, once
from collate_npu.errors import CollateError, explain, explain_rows, shape_of

Values = Tensor | npt.ArrayLike
"""A tensor, a numpy array or nested lists."""


class Segments:
    """`ids`, int32 `[B, S]`: 0 is padding, n >= 1 is the n-th sequence of the row. Never changes once built.

    Two sequences of 3 and 5 tokens, one row each, then both in one row of ten::

        right         left          packed
        ■ ■ ■ ⬚ ⬚     ⬚ ⬚ ■ ■ ■     1 1 1 2 2 2 2 2 0 0
        ■ ■ ■ ■ ■     ■ ■ ■ ■ ■

    A sequence may have holes (`1 1 0 1`), and padding may stand between sequences (`1 1 0 2 2`). Raises `CollateError`
    where ids are not whole numbers from 1 upwards in the order of the sequences; `from_ids` renumbers any labels.

    >>> segments = Segments([[0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1]])
    >>> segments
    Segments(B=2, S=6, lengths=[3+2, 4], padding='left')
    >>> segments.position_ids.tolist()
    [[0, 0, 1, 2, 0, 1], [0, 0, 0, 1, 2, 3]]
    >>> segments.keep[1].tolist(), segments.shape, segments.packed, segments.padding_side
    ([False, False, True, True, True, True], (2, 6), True, 'left')
    >>> segments.lengths, segments.row_lengths, segments.sequence_lengths, segments.ids.dtype, segments.array.flags.writeable
    (((3, 2), (4,)), (5, 4), (3, 2, 4), torch.int32, False)
    >>> segments.num_sequences, segments.num_tokens, segments.num_padding, segments.padding_share, segments.max_length
    (3, 9, 3, 0.25, 4)
    >>> segments.cu_seqlens_host, segments.cu_seqlens.dtype, segments.indices.tolist(), segments.last_indices.tolist()
    ((0, 3, 5, 9), torch.int32, [1, 2, 3, 4, 5, 8, 9, 10, 11], [3, 5, 11])
    >>> hole = Segments([[1, 1, 0, 1], [0, 0, 0, 0]])
    >>> hole.hole_rows, hole.empty_rows, hole.spans, hole.longest_span
    ((0,), (1,), ((0, 0, 4),), 4)
    """

    def __init__(self, ids: Values) -> None:
        ids_BS = arrays.as_ids(ids)
        arrays.check_order(ids_BS)
        ready(self._hold(ids_BS))

    def _hold(self, ids_BS: Array) -> Segments:
        """By its ids; everything else is computed where it is asked for."""
        self.array = np.array(ids_BS, np.int32, order="C")
        self.array.flags.writeable = False
        return self

    # --- built from

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]] | Values, width: int | None = None, side: Side = "right"
    ) -> Segments:
        """From token counts: `[3, 5]` is one sequence a row, `[[3, 2], [5]]` several. `width` defaults to the longest.

        >>> Segments.from_lengths([3, 5]).ids.tolist()
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
        >>> Segments.from_lengths([[3, 2], [4]], width=6, side="left")
        Segments(B=2, S=6, lengths=[3+2, 4], padding='left')
        """
        rows = arrays.length_rows(lengths)
        totals = [sum(row) for row in rows]
        width = max(totals, default=0) if width is None else arrays.whole_number("width", width)
        bad = [(b, f"lengths {row}") for b, row in enumerate(rows) if totals[b] > width]
        if bad:
            rule = f"A row's lengths fit the width, {width}."
            raise CollateError(explain_rows("lengths", bad, rule, "Pass a larger width, or truncate the rows."))
        if side not in ("left", "right"):
            raise CollateError(explain("side", repr(side), "Padding goes to one side.", "Pass 'left' or 'right'."))
        arrays.check_places("lengths", len(rows) * width, "Count the tokens again, and look at the width.")
        return ready(of_lengths(rows, width, side))

    @classmethod
    def from_keep(cls, keep: Values) -> Segments:
        """From `[B, S]` bool or 0/1, True = real token: one sequence a row, holes allowed. Inverse of `keep`.

        >>> Segments.from_keep([[False, True, True], [True, True, True]])
        Segments(B=2, S=3, lengths=[2, 3], padding='left')
        """
        keep_BS = arrays.host_array("keep", keep)
        arrays.check_places("keep", keep_BS.size, arrays.OF_A_BATCH)
        if keep_BS.ndim != 2 or not (keep_BS.dtype == bool or ((keep_BS == 0) | (keep_BS == 1)).all()):
            rule = "A keep mask is [B, S] and holds True/False or 1/0 (1 = real token)."
            remedy = "For packing ids (1 1 2 2 0) use Segments.from_ids; for 4D masks derive_segments."
            seen = ", ".join(map(str, np.unique(keep_BS)[:6].tolist()))
            raise CollateError(explain("keep", f"{shape_of(keep_BS)} with values {seen}", rule, remedy))
        return ready(of_keep(keep_BS.astype(bool, copy=False)))

    @classmethod
    def from_ids(cls, ids: Values) -> Segments:
        """From `[B, S]` ints, 0 = padding: any labels, renumbered 1, 2, ... in order of appearance in each row.

        Packing masks (`1 1 2 2 0`, LLaMA-Factory's neat_packing; JAX segment_ids) are this form. A label that comes
        back after another sequence began is an error, not a new sequence.

        >>> Segments.from_ids([[7, 7, 4, 0]]).ids.tolist()
        [[1, 1, 2, 0]]
        """
        return ready(of_ids(arrays.as_ids(ids)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Values, width: int | None = None) -> Segments:
        """One flat row `[1, width]` from cumulative offsets `0, 3, 8, ...` (leading 0 present); the tail is padding.

        >>> Segments.from_cu_seqlens([0, 3, 5], width=6).ids.tolist()
        [[1, 1, 1, 2, 2, 0]]
        """
        offsets = arrays.as_offsets("cu_seqlens", cu_seqlens)
        return cls.from_lengths([np.diff(offsets).tolist()], width=width)

    @classmethod
    def from_position_ids(cls, position_ids: Values) -> Segments:
        """From `[B, S]` positions without padding: a sequence begins at every 0.

        That is how padding-free batches carry their boundaries (TRL, transformers' DataCollatorWithFlattening). Raises
        where positions do not count 0, 1, 2, ... in every sequence: custom positions say nothing of boundaries.

        >>> Segments.from_position_ids([[0, 1, 2, 0, 1]]).lengths
        ((3, 2),)
        """
        positions_BS = arrays.host_array("position_ids", position_ids)
        arrays.check_places("position_ids", positions_BS.size, arrays.OF_A_BATCH)
        if positions_BS.ndim != 2:
            raise CollateError(explain("position_ids", shape_of(positions_BS), "Positions are [B, S].", "Reshape them."))
        starts_BS, counts_B = arrays.sequence_starts(positions_BS, np.ones(positions_BS.shape, bool))
        bad = [(int(b), str(positions_BS[b].tolist()[:24])) for b in np.flatnonzero(~counts_B)]
        if bad:
            rule = "Positions tell sequences apart where each of them counts 0, 1, 2, ..."
            remedy = "Use Segments.from_ids, from_lengths or from_cu_seqlens."
            raise CollateError(explain_rows("position_ids", bad, rule, remedy))
        return ready(_built(np.cumsum(starts_BS, axis=1)))

    # --- read off

    @once
    def array(self) -> Array:
        """`ids` as a numpy array, read-only and not copied."""
        ids_BS = np.zeros(self.shape, np.int32)
        numbers = [n for row in self.lengths for n in range(1, len(row) + 1)]
        for n, (b, start, end) in zip(numbers, self.spans):
            ids_BS[b, start:end] = n
        ids_BS.flags.writeable = False
        return ids_BS

    @once
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Real tokens of each sequence, row by row; `()` for a row of padding alone. Host numbers, no device sync."""
        return tuple(tuple(np.bincount(ids_S)[1:].tolist()) for ids_S in self.array)

    @once
    def sequence_lengths(self) -> tuple[int, ...]:
        """Real tokens of each of the N sequences."""
        return tuple(chain.from_iterable(self.lengths))

    @property
    def empty_rows(self) -> tuple[int, ...]:
        """Rows of padding alone."""
        return tuple(b for b, row in enumerate(self.lengths) if not row)

    @property
    def ids(self) -> Tensor:
        """int32 `[B, S]`: 0 is padding, n the n-th sequence of the row."""
        return torch.from_numpy(self.array.copy())

    @once
    def shape(self) -> tuple[int, int]:
        """`(B, S)`."""
        B, S = self.array.shape
        return B, S

    @property
    def keep(self) -> Tensor:
        """bool `[B, S]`, True = real token: the wire's `attention_mask_2d`. Inverse of `from_keep` for unpacked rows."""
        return torch.from_numpy(keep_array(self))

    @once
    def row_lengths(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return tuple(map(sum, self.lengths))

    @property
    def num_sequences(self) -> int:
        """N, over all rows."""
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """T, real tokens of the batch."""
        return sum(self.sequence_lengths)

    @property
    def num_padding(self) -> int:
        """Places of the batch that are padding, alignment and tail included."""
        return self.shape[0] * self.shape[1] - self.num_tokens

    @property
    def padding_share(self) -> float:
        """The share of all places that is padding, 0 to 1. Throughput in places times (1 - share) is in real tokens."""
        return self.num_padding / max(self.shape[0] * self.shape[1], 1)

    @property
    def max_length(self) -> int:
        """The longest sequence, 0 for a batch of padding."""
        return max(map(max, filter(None, self.lengths)), default=0)

    @once
    def cu_seqlens_host(self) -> tuple[int, ...]:
        """`(0, end of sequence 1, ...)` over the T real tokens, N + 1 numbers, on the host."""
        return (0, *accumulate(self.sequence_lengths))

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 `[N + 1]`, the same offsets as a tensor. Inverse of `from_cu_seqlens` for one flat row."""
        return torch.tensor(self.cu_seqlens_host, dtype=torch.int32)

    @property
    def indices(self) -> Tensor:
        """int64 `[T]`, where the real tokens stand in the flattened `[B * S]` batch, in order."""
        return self._compiled[0].clone() if torch.compiler.is_compiling() else torch.from_numpy(self._indices_T).clone()

    @property
    def last_indices(self) -> Tensor:
        """int64 `[N]`, where the last real token of each sequence stands in the flattened `[B * S]` batch."""
        return self._compiled[1].clone() if torch.compiler.is_compiling() else torch.from_numpy(self._ends_N).clone()

    @once
    def _compiled(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._indices_T), torch.from_numpy(self._ends_N)

    @once
    def _keep_BS(self) -> Array:
        keep_BS: Array = self.array != 0 if self.hole_rows else np.zeros(self.shape, bool)
        for b, start, end in () if self.hole_rows else self.spans:
            keep_BS[b, start:end] = True
        return keep_BS

    @once
    def _indices_T(self) -> Array:
        return np.flatnonzero(self.array)

    @once
    def _ends_N(self) -> Array:
        ends_N: Array = self._indices_T[np.array(self.cu_seqlens_host)[1:] - 1]
        return ends_N

    @property
    def position_ids(self) -> Tensor:
        """int64 `[B, S]`: real tokens count from 0 in their own sequence, so left padding starts at 0.

        Padding before the first token is 0; padding after a token keeps counting (3 tokens in a row of 5: `0 1 2 3 4`),
        because a reset there would read as one more sequence to whoever infers packing from positions
        (transformers 5.23 masking_utils.py:876-882).
        """
        return torch.from_numpy(position_array(self))

    @once
    def padding_side(self) -> PaddingSide:
        """Where padding stands, over all rows: `"mixed"` means both sides, holes, or gaps between sequences."""
        return arrays.side_of(self.array != 0)

    @once
    def packed(self) -> bool:
        """True where some row holds more than one sequence."""
        return max(map(len, self.lengths), default=0) > 1

    @once
    def longest_span(self) -> int:
        """Places from the first to the last token of the widest sequence, holes counted."""
        return max([end - start for _, start, end in self.spans], default=0)

    @once
    def hole_rows(self) -> tuple[int, ...]:
        """Rows in which padding stands inside a sequence."""
        wide = {b for (b, start, end), n in zip(self.spans, self.sequence_lengths) if end - start > n}
        return tuple(sorted(wide))

    @once
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """`(row, first index, last index + 1)` of each of the N sequences, holes included."""
        S = max(self.shape[1], 1)
        first_N, last_N = self._indices_T[np.array(self.cu_seqlens_host)[:-1]], self._ends_N
        return tuple(zip((first_N // S).tolist(), (first_N % S).tolist(), (last_N % S + 1).tolist()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and np.array_equal(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        B, S = self.shape
        lengths = ", ".join("+".join(map(str, row)) or "0" for row in self.lengths[:8]) + (", ..." if B > 8 else "")
        return f"Segments(B={B}, S={S}, lengths=[{lengths}], padding={self.padding_side!r})"


# --- without checks or copies, for whoever has arrays; nothing is computed before it is asked for


def of_lengths(rows: Sequence[Sequence[int]], width: int, side: Side = "right") -> Segments:
    """As `Segments.from_lengths`, of rows of counts that fit."""
    segments = object.__new__(Segments)
    segments.shape = len(rows), width
    segments.lengths = tuple([tuple(row) if all(row) else tuple(filter(None, row)) for row in rows])
    segments.padding_side = arrays.side_around(segments.row_lengths, width, side)
    spans: list[tuple[int, int, int]] = []
    for b, row in enumerate(segments.lengths):
        start = 0 if side == "right" else width - segments.row_lengths[b]
        for length in row:
            spans += [(b, start, start := start + length)]
    segments.spans, segments.hole_rows = tuple(spans), ()
    return segments


_SIDES: tuple[Side, ...] = get_args(Side)


def of_keep(keep_BS: Array) -> Segments:
    """As `Segments.from_keep`, of a bool array."""
    real = np.count_nonzero(keep_BS)
    for side in _SIDES:
        if real == sum(lengths := arrays.one_run(keep_BS, side)):
            segments = of_lengths([[n] for n in lengths], keep_BS.shape[1], side)
            segments._keep_BS = keep_BS.copy()  # whose it is may write to it
            return segments
    return _built(keep_BS)


def of_ids(ids_BS: Array) -> Segments:
    """As `Segments.from_ids`, of an array of whole numbers."""
    one = ids_BS.max(initial=0) <= 1
    return of_keep(ids_BS.astype(bool)) if one else _built(arrays.renumber(ids_BS))


def _built(ids_BS: Array) -> Segments:
    return object.__new__(Segments)._hold(ids_BS)


def ready(segments: Segments) -> Segments:
    """Return `segments` with what compiled code reads computed now: torch cannot trace the search."""
    _ = segments.shape, segments._compiled
    return segments


def keep_array(segments: Segments) -> Array:
    """`keep` as a fresh numpy array, bool `[B, S]`."""
    keep_BS: Array = segments._keep_BS.copy()
    return keep_BS


@lru_cache(maxsize=8)
def _places(S: int) -> Array:
    """int64 `[S]`: 0, 1, ..., never written to."""
    return np.arange(S)


def positions_match(segments: Segments, positions_BS: Array) -> bool:
    """True if these equal its `position_ids` at every place."""
    right = _places(segments.shape[1]) if _counts_places(segments) else position_array(segments)
    return bool((positions_BS == right).all())


def _counts_places(segments: Segments) -> bool:
    """One sequence in each row, from its first place on."""
    return not segments.packed and segments.padding_side in ("none", "right") and all(segments.lengths)


def position_array(segments: Segments) -> Array:
    """`position_ids` as a fresh numpy array, int64 `[B, S]`."""
    (B, S), spans, lengths = segments.shape, segments.spans, segments.sequence_lengths
    place_S = _places(S)
    if _counts_places(segments):
        positions_BS = np.empty((B, S), np.int64)
        positions_BS[:] = place_S
        return positions_BS
    positions_BS = np.zeros((B, S), np.int64)
    for n, (b, start, end), (next_b, next_start, _) in zip(lengths, spans, (*spans[1:], (B, 0, 0))):
        stop = next_start if next_b == b else S
        positions_BS[b, start:stop] = place_S[: stop - start]
        if end - start > n:  # a place in a hole counts on from the token before it
            real_L = segments.array[b, start:stop] != 0
            last_L = np.maximum.accumulate(place_S[: stop - start] * real_L)
            positions_BS[b, start:stop] += np.cumsum(real_L) - 1 - last_L
    return positions_BS
