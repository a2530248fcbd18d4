"""Segments: which sequence each token of a batch belongs to, 0 for padding; and the algebra of boundaries, from lengths,
offsets, ids, positions and starts to each other.

Every mask, offset and position follows from Segments. It lives on the host and costs four bytes a token. The collator builds
it from lengths; from a mask that somebody else built it is derived and proved. Every tensor that it returns is a copy:
writing to it changes nothing else. Reading rows costs O(B * S).
Legend: B batch rows, S width, T tokens without padding, N sequences in the whole batch. `■` is a real token, `⬚` padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.arrays import OF_A_BATCH, Array, PaddingSide, Side, check_places, host_array, once, whole_number
from collate_npu.errors import CollateError, explain, refuse_rows, shape_of
from collate_npu.validation import checked

Values = Tensor | npt.ArrayLike
"""A tensor, a numpy array or nested lists."""
PADS_BEFORE: tuple[PaddingSide, ...] = ("left", "mixed")
"""Padding sides for which padding stands before a real token of its row."""


class Segments:
    """Which sequence each token belongs to: `ids`, int32 `[B, S]`, 0 for padding, n for the n-th sequence of the row.

    Two sequences of 3 and 5 tokens, one row each, then both in one row of ten::

        right         left          packed
        ■ ■ ■ ⬚ ⬚     ⬚ ⬚ ■ ■ ■     1 1 1 2 2 2 2 2 0 0
        ■ ■ ■ ■ ■     ■ ■ ■ ■ ■

    A sequence may have holes (`1 1 0 1`), and padding may stand between sequences (`1 1 0 2 2`). An object never changes
    once built. Raises `CollateError` unless ids count 1, 2, ... in the order of the sequences; `from_ids` renumbers others.

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
        ids_BS = as_ids(ids)
        wrong_B = (ids_BS != _numbered(ids_BS)[0]).any(axis=1)
        rule = "The n-th sequence of a row has the id n, and sequences stand in order."
        bad = [(b, f"ids {ids_BS[b].tolist()[:24]}") for b in np.flatnonzero(wrong_B).tolist()]
        refuse_rows("segment ids", bad, rule, "Use Segments.from_ids, which renumbers.")
        ready(self._hold(ids_BS))

    def _hold(self, ids_BS: Array) -> Segments:
        """Hold the ids; everything else is computed when it is read."""
        self.array = np.array(ids_BS, np.int32, order="C")
        self.array.flags.writeable = False
        return self

    # --- built from

    @classmethod
    @checked
    def from_lengths(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]] | Values, width: int | None = None, side: Side = "right"
    ) -> Segments:
        """Build from token counts: `[3, 5]` is one sequence a row, `[[3, 2], [5]]` several. `width` defaults to the longest.

        >>> Segments.from_lengths([3, 5]).ids.tolist()
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
        >>> Segments.from_lengths([[3, 2], [4]], width=6, side="left")
        Segments(B=2, S=6, lengths=[3+2, 4], padding='left')
        """
        rows = length_rows(lengths)
        totals = [sum(row) for row in rows]
        width = max(totals, default=0) if width is None else whole_number("width", width)
        bad = [(b, f"lengths {row}") for b, row in enumerate(rows) if totals[b] > width]
        rule = f"The lengths of a row add up to at most the width, {width}."
        refuse_rows("lengths", bad, rule, "Pass a larger width, or truncate the rows.")
        check_places("lengths", len(rows) * width, "Check the lengths and the width.")
        return ready(of_lengths(rows, width, side))

    @classmethod
    def from_keep(cls, keep: Values) -> Segments:
        """Build from a 2D mask `[B, S]`, True or 1 = real: one sequence a row, holes allowed. Inverse of `keep`.

        >>> Segments.from_keep([[False, True, True], [True, True, True]])
        Segments(B=2, S=3, lengths=[2, 3], padding='left')
        """
        keep_BS = host_array("keep", keep)
        check_places("keep", keep_BS.size, OF_A_BATCH)
        if keep_BS.ndim != 2 or not (keep_BS.dtype == bool or ((keep_BS == 0) | (keep_BS == 1)).all()):
            rule = "A keep mask is [B, S] and holds True/False or 1/0 (1 = real token)."
            remedy = "For packing ids (1 1 2 2 0) use Segments.from_ids; for 4D masks derive_segments."
            seen = ", ".join(map(str, np.unique(keep_BS)[:6].tolist()))
            raise CollateError(explain("keep", f"{shape_of(keep_BS)} with values {seen}", rule, remedy))
        return ready(of_keep(keep_BS.astype(bool, copy=False)))

    @classmethod
    def from_ids(cls, ids: Values) -> Segments:
        """Build from numbers `[B, S]`, 0 = padding: each row's are renumbered 1, 2, ... in the order in which they appear.

        Packing masks have this form (`1 1 2 2 0`: LLaMA-Factory's neat_packing, segment_ids of JAX). A number that comes
        back after another sequence began is an error.

        >>> Segments.from_ids([[7, 7, 4, 0]]).ids.tolist()
        [[1, 1, 2, 0]]
        """
        return ready(of_ids(as_ids(ids)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Values, width: int | None = None) -> Segments:
        """Build one flat row `[1, width]` from boundaries `0, 3, 8, ...`, which begin with 0; the rest is padding.

        >>> Segments.from_cu_seqlens([0, 3, 5], width=6).ids.tolist()
        [[1, 1, 1, 2, 2, 0]]
        """
        return cls.from_lengths([np.diff(as_offsets("cu_seqlens", cu_seqlens)).tolist()], width=width)

    @classmethod
    def from_position_ids(cls, position_ids: Values) -> Segments:
        """Build from positions `[B, S]` without padding: a sequence begins at every 0.

        Flat rows of TRL and of transformers' DataCollatorWithFlattening carry their boundaries so. Raises `CollateError`
        where positions do not count 0, 1, 2, ... in every sequence: such positions do not show boundaries.

        >>> Segments.from_position_ids([[0, 1, 2, 0, 1]]).lengths
        ((3, 2),)
        """
        positions_BS = host_array("position_ids", position_ids)
        check_places("position_ids", positions_BS.size, OF_A_BATCH)
        if positions_BS.ndim != 2:
            raise CollateError(explain("position_ids", shape_of(positions_BS), "Positions are [B, S].", "Reshape them."))
        starts_BS, counts_B = sequence_starts(positions_BS, np.ones(positions_BS.shape, bool))
        bad = [(int(b), str(positions_BS[b].tolist()[:24])) for b in np.flatnonzero(~counts_B)]
        rule = "Positions show where sequences begin only if each sequence counts 0, 1, 2, ..."
        refuse_rows("position_ids", bad, rule, "Use Segments.from_ids, from_lengths or from_cu_seqlens.")
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
        """Number of real tokens of each sequence, row by row; `()` for a row of padding alone. Costs no device sync."""
        return tuple(tuple(np.bincount(ids_S)[1:].tolist()) for ids_S in self.array)

    @once
    def sequence_lengths(self) -> tuple[int, ...]:
        """Number of real tokens of each of the N sequences."""
        return tuple(chain.from_iterable(self.lengths))

    @property
    def empty_rows(self) -> tuple[int, ...]:
        """Indices of the rows that hold padding alone."""
        return tuple(b for b, row in enumerate(self.lengths) if not row)

    @property
    def ids(self) -> Tensor:
        """int32 `[B, S]`: 0 is padding, n the n-th sequence of the row."""
        return torch.from_numpy(self.array.copy())

    @once
    def shape(self) -> tuple[int, int]:
        """`(B, S)`: rows and width."""
        B, S = self.array.shape
        return B, S

    @property
    def keep(self) -> Tensor:
        """bool `[B, S]`, True = real token: `attention_mask_2d` of a batch. Inverse of `from_keep` for unpacked rows."""
        return torch.from_numpy(self._keep_BS.copy())

    @once
    def row_lengths(self) -> tuple[int, ...]:
        """Number of real tokens of each row."""
        return tuple(map(sum, self.lengths))

    @property
    def num_sequences(self) -> int:
        """N, the number of sequences in all rows."""
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """T, the number of real tokens in the batch."""
        return sum(self.sequence_lengths)

    @property
    def num_padding(self) -> int:
        """Number of places that are padding, alignment and tail included."""
        return self.shape[0] * self.shape[1] - self.num_tokens

    @property
    def padding_share(self) -> float:
        """Share of places that are padding, 0 to 1."""
        return self.num_padding / max(self.shape[0] * self.shape[1], 1)

    @property
    def max_length(self) -> int:
        """Number of real tokens of the longest sequence; 0 for a batch of padding."""
        return max(map(max, filter(None, self.lengths)), default=0)

    @once
    def cu_seqlens_host(self) -> tuple[int, ...]:
        """Boundaries over the T real tokens, N + 1 numbers on the host: `(0, end of sequence 1, ...)`."""
        return (0, *accumulate(self.sequence_lengths))

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 `[N + 1]`, the boundaries `cu_seqlens_host` as a tensor. Inverse of `from_cu_seqlens` for one flat row."""
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
        because a library that finds sequences by positions would take a reset there for one more sequence
        (transformers 5.23 masking_utils.py:876-882).
        """
        return torch.from_numpy(position_array(self))

    @once
    def padding_side(self) -> PaddingSide:
        """Side of the padding, over all rows; `"mixed"`: both sides, holes, or gaps between sequences."""
        return side_of(self.array != 0)

    @once
    def counts_places(self) -> bool:
        """True if each row is one sequence that begins at its first place, so that position = place."""
        return not self.packed and self.padding_side not in PADS_BEFORE and all(self.lengths)

    @once
    def packed(self) -> bool:
        """True if some row holds several sequences."""
        return max(map(len, self.lengths), default=0) > 1

    @once
    def longest_span(self) -> int:
        """Number of places from the first to the last token of the widest sequence, holes included."""
        return max([end - start for _, start, end in self.spans], default=0)

    @once
    def hole_rows(self) -> tuple[int, ...]:
        """Indices of the rows with padding inside a sequence."""
        return tuple(sorted({b for (b, start, end), n in zip(self.spans, self.sequence_lengths) if end - start > n}))

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


# --- without checks or copies, for callers that have arrays; each property is computed when it is first read


def of_lengths(rows: Sequence[Sequence[int]], width: int, side: Side = "right") -> Segments:
    """Build what `Segments.from_lengths` does, of counts that need no check."""
    segments = object.__new__(Segments)
    segments.shape = len(rows), width
    segments.lengths = tuple([tuple(row) if all(row) else tuple(filter(None, row)) for row in rows])
    segments.row_lengths = tuple(map(sum, segments.lengths))
    segments.padding_side = side_around(segments.row_lengths, width, side)
    spans: list[tuple[int, int, int]] = []
    for b, row in enumerate(segments.lengths):
        start = 0 if side == "right" else width - segments.row_lengths[b]
        for length in row:
            spans += [(b, start, start := start + length)]
    segments.spans, segments.hole_rows = tuple(spans), ()
    return segments


def of_keep(keep_BS: Array) -> Segments:
    """Build what `Segments.from_keep` does, of a bool array."""
    real = np.count_nonzero(keep_BS)
    for side in get_args(Side):
        if real == sum(lengths := one_run(keep_BS, side)):
            segments = of_lengths([[n] for n in lengths], keep_BS.shape[1], side)
            segments._keep_BS = keep_BS.copy()  # whose it is may write to it
            return segments
    return _built(keep_BS)


def of_ids(ids_BS: Array) -> Segments:
    """Build what `Segments.from_ids` does, of an array of whole numbers, with the same errors."""
    if ids_BS.max(initial=0) <= 1:
        return of_keep(ids_BS.astype(bool))
    numbered_BS, starts_BS = _numbered(ids_BS)
    labels = [ids_S[starts_S].tolist() for ids_S, starts_S in zip(ids_BS, starts_BS)]
    bad = [(b, f"ids {ids_BS[b].tolist()[:24]}") for b, row in enumerate(labels) if len(set(row)) < len(row)]
    rule = "The tokens of a sequence stand together: an id does not return after another sequence."
    refuse_rows("segment ids", bad, rule, "Give each sequence of a row its own id.")
    return _built(numbered_BS)


def _built(ids_BS: Array) -> Segments:
    return object.__new__(Segments)._hold(ids_BS)


def ready(segments: Segments) -> Segments:
    """Return `segments` with what compiled code reads computed now: torch cannot trace the search."""
    _ = segments.shape, segments._compiled
    return segments


def keep_array(segments: Segments) -> Array:
    """Return `keep` as a fresh numpy array, bool `[B, S]`."""
    keep_BS: Array = segments._keep_BS.copy()
    return keep_BS


@lru_cache(maxsize=8)
def _places(S: int) -> Array:
    """Return int64 `[S]`: 0, 1, ...; never written to."""
    return np.arange(S)


def positions_match(segments: Segments, positions_BS: Array) -> bool:
    """Return True if `positions_BS` equals the `position_ids` of `segments` at every place."""
    right = _places(segments.shape[1]) if segments.counts_places else position_array(segments)
    return bool((positions_BS == right).all())


def position_array(segments: Segments) -> Array:
    """Return `position_ids` as a fresh numpy array, int64 `[B, S]`."""
    (B, S), spans, lengths = segments.shape, segments.spans, segments.sequence_lengths
    place_S = _places(S)
    if segments.counts_places:
        return np.tile(place_S, (B, 1))
    positions_BS = np.zeros((B, S), np.int64)
    for n, (b, start, end), (next_b, next_start, _) in zip(lengths, spans, (*spans[1:], (B, 0, 0))):
        stop = next_start if next_b == b else S
        positions_BS[b, start:stop] = place_S[: stop - start]
        if end - start > n:  # a place in a hole counts on from the token before it
            real_L = segments.array[b, start:stop] != 0
            last_L = np.maximum.accumulate(place_S[: stop - start] * real_L)
            positions_BS[b, start:stop] += np.cumsum(real_L) - 1 - last_L
    return positions_BS


# --- the algebra of boundaries: lengths, offsets, ids, positions and starts, as arrays and lists


def length_rows(lengths: Any, name: str = "lengths", *, filler: int = 0) -> list[list[int]]:
    """Return the token counts of each row, a `filler` other than 0 left out. Raises for negative numbers and fractions."""
    if not isinstance(lengths, (list, tuple)):
        lengths = host_array(name, lengths)
        if lengths.ndim not in (1, 2):
            raise CollateError(explain(name, shape_of(lengths), "Lengths are [B], or a list for each row.", "Reshape them."))
    rows, bad = list[list[int]](), list[tuple[int, str]]()
    for b, row in enumerate(lengths):
        counts = np.atleast_1d(host_array(name, row))
        counts = counts[counts != filler] if filler and counts.ndim == 1 else counts
        if counts.ndim != 1 or (counts.size and (counts.dtype.kind not in "iu" or (counts < 0).any())):
            bad.append((b, f"lengths {counts.tolist()}"[:80]))
        rows.append(counts.tolist())
    refuse_rows(name, bad, "Lengths are whole numbers, 0 or more.", "Pass token counts.")
    return rows


def as_offsets(name: str, given: Any, width: int | None = None, *, whole: bool = False) -> Array:
    """Return cumulative offsets as int64 `[N + 1]`: 0, then the end of each sequence, in a row of `width` tokens. With
    `whole` the last offset must be the width. One row `[1, N + 1]` is taken too (MindSpeed-MM 57069cd
    fsdp/data/data_utils/func_utils/convert.py:988); -1 may fill its end (Megatron-Bridge 0.3.1 data/datasets/sft.py:963)."""
    offsets = host_array(name, given)
    if offsets.ndim == 2 and len(offsets) == 1:
        offsets = offsets[0][: np.flatnonzero(offsets[0] != -1)[-1] + 1] if (offsets != -1).any() else offsets[0]
    numbers = given if isinstance(given, (list, tuple)) else (given,)
    half = offsets.dtype.kind == "f" and any(getattr(one, "itemsize", 8) < 4 for one in numbers)
    whole_numbers = offsets.dtype.kind in "iuf" and (np.isfinite(offsets) & (offsets == np.round(offsets))).all()
    rising = whole_numbers and offsets.ndim == 1 and len(offsets) > 0 and (offsets[1:] >= offsets[:-1]).all()
    last = int(offsets[-1]) if rising else 0
    most = last if width is None else width
    if width is None:
        check_places(name, last, "Check the last offset.")
    if half or not rising or offsets[0] != 0 or last > most or (whole and last != most):
        of_row = "" if width is None else f" The row has {width} tokens{', and the last offset is its end' * whole}."
        rule = f"Offsets are one row of whole numbers: 0 first, then the end of each sequence, never falling.{of_row}"
        remedy = "Pass [0, *accumulate(lengths)] of this row, the tail counted, not old offsets or those of one rank."
        if offsets.ndim == 2:  # NeMo Automodel 0.7.0 datasets/packing.py:148, one row of offsets for each row of tokens
            remedy = "In a batch of several rows leave it out, and pass segment_ids."
        elif half:
            rule = "Offsets are exact, and a float of one or two bytes rounds numbers."
            remedy = "Keep them int32 from the start: a cast back keeps what was rounded."
        elif rising and offsets[0] > 0:
            remedy = "torch_npu's actual_seq_qlen has no leading 0: put one in front."
        raise CollateError(explain(name, str(offsets.tolist())[:80], rule, remedy))
    return offsets.astype(np.int64, copy=False)


def as_ids(ids: Any) -> Array:
    """Return segment ids as int64 `[B, S]`. Raises `CollateError` for negative ids and other shapes."""
    ids_BS = host_array("segment ids", ids)
    check_places("segment ids", ids_BS.size, OF_A_BATCH)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iub":
        raise CollateError(explain("segment ids", shape_of(ids_BS), "Ids are whole numbers [B, S].", "Pass int32 [B, S]."))
    if ids_BS.size and ids_BS.min() < 0:
        bad = [(int(b), f"the id {ids_BS[b].min()}") for b in np.flatnonzero((ids_BS < 0).any(axis=1))]
        rule = "0 is padding and sequences count from 1; no id is negative."
        refuse_rows("segment ids", bad, rule, "Add 1 to ids that count from -1 or 0.")
    return ids_BS.astype(np.int64, copy=False)


def _numbered(ids_BS: Array) -> tuple[Array, Array]:
    """Return the number of each run of equal ids in a row, 1, 2, ..., and bool `[B, S]`, where runs begin."""
    starts_BS = run_starts(ids_BS, ids_BS != 0, step=0)
    return np.where(ids_BS != 0, np.cumsum(starts_BS, axis=1), 0), starts_BS


def run_starts(values_BS: Array, keep_BS: Array, step: int) -> Array:
    """Return bool `[B, S]`: real tokens whose value is not `step` more than that of the real token before in the row."""
    real_T = np.flatnonzero(keep_BS)
    values_T, rows_T = values_BS.reshape(-1)[real_T], real_T // max(keep_BS.shape[1], 1)
    follows_T = (values_T[1:] == values_T[:-1] + step) & (rows_T[1:] == rows_T[:-1])
    starts_BS: Array = keep_BS.copy()
    starts_BS.reshape(-1)[real_T[1:][follows_T]] = False
    return starts_BS


def sequence_starts(positions_BS: Array, keep_BS: Array) -> tuple[Array, Array]:
    """Return where sequences begin by their positions, bool `[B, S]`, and which rows count 0, 1, 2, bool `[B]`."""
    starts_BS = run_starts(positions_BS, keep_BS, step=1)
    return starts_BS, ~(starts_BS & (positions_BS != 0)).any(axis=1)


def one_run(keep_BS: Array, side: Side) -> list[int]:
    """Return the number of real tokens of each row, as if all padding stood on this side."""
    B, S = keep_BS.shape
    if not S:
        return [0] * B
    if side == "left":
        return [S - at if at or keep_BS[b, 0] else 0 for b, at in enumerate(keep_BS.argmax(axis=1).tolist())]
    return [at or S * int(keep_BS[b, 0]) for b, at in enumerate(keep_BS.argmin(axis=1).tolist())]


def side_around(totals: Sequence[int], width: int, side: Side) -> PaddingSide:
    """Return the padding side of rows that hold `totals` tokens without gaps, at one side of the width."""
    if min(totals, default=width) == width:
        return "none"
    if side == "right" or not any(0 < n < width for n in totals):
        return "right"
    return "left" if all(totals) else "mixed"


def side_of(keep_BS: Array) -> PaddingSide:
    """Return the padding side of all rows together."""
    if keep_BS.all():
        return "none"
    grows, falls = keep_BS[:, 1:] > keep_BS[:, :-1], keep_BS[:, 1:] < keep_BS[:, :-1]
    if not grows.any():
        return "right"
    return "left" if not falls.any() and keep_BS[:, -1].all() else "mixed"
