"""Segments: which sequence each token of a batch belongs to; 0 is padding.

The smallest thing from which every mask, offset and position follows. It lives on the CPU, costs four bytes a token,
and is built where the lengths are known (the collator) or derived, with proof, from a mask someone else built.

Legend: B batch rows, S width, T tokens without padding, N sequences in the whole batch.
`■` is a real token, `⬚` padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain, explain_rows, shape_of

Side = Literal["left", "right"]
PaddingSide = Literal["none", "left", "right", "mixed"]
IntArray = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """`ids`, int32 `[B, S]`: 0 is padding, n >= 1 is the n-th sequence of the row.

    Two sequences of 3 and 5 tokens, one row each, then both in one row of ten::

        right         left          packed
        ■ ■ ■ ⬚ ⬚     ⬚ ⬚ ■ ■ ■     1 1 1 2 2 2 2 2 0 0
        ■ ■ ■ ■ ■     ■ ■ ■ ■ ■

    A sequence may have holes (`1 1 0 1`), and padding may stand between sequences (`1 1 0 2 2`). Raises `CollateError`
    where ids are not whole numbers from 1 upwards in the order of the sequences; `from_ids` renumbers any labels.
    """

    ids: Tensor

    def __post_init__(self) -> None:
        ids_BS = _as_ids(self.ids)
        _check_order(ids_BS)
        object.__setattr__(self, "ids", torch.from_numpy(np.ascontiguousarray(ids_BS, np.int32)))

    # --- built from

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor, width: int | None = None, side: Side = "right"
    ) -> Segments:
        """From token counts: `[3, 5]` is one sequence a row, `[[3, 2], [5]]` several. `width` defaults to the longest."""
        lengths = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        rows = [[int(row)] if isinstance(row, (int, np.integer)) else [int(n) for n in row] for row in lengths]
        totals = [sum(row) for row in rows]
        width = max(totals, default=0) if width is None else width
        bad = [(b, f"lengths {row}") for b, row in enumerate(rows) if min(row, default=0) < 0 or totals[b] > width]
        if bad:
            rule = f"Lengths are not negative and a row's lengths fit the width, {width}."
            raise CollateError(explain_rows("lengths", bad, rule, "Pass a larger width, or truncate the rows."))
        if side not in ("left", "right"):
            raise CollateError(explain("side", repr(side), "Padding goes to one side.", "Pass 'left' or 'right'."))
        ids_BS = np.zeros((len(rows), width), np.int32)
        for b, row in enumerate(rows):
            start = 0 if side == "right" else width - totals[b]
            for n, length in enumerate((n for n in row if n), start=1):
                ids_BS[b, start : start + length] = n
                start += length
        return cls._built(ids_BS)

    @classmethod
    def from_keep(cls, keep: Tensor | npt.ArrayLike) -> Segments:
        """From `[B, S]` bool or 0/1, True = real token: one sequence a row, holes allowed. Inverse of `keep`."""
        keep_BS = _host_array(keep)
        if keep_BS.ndim != 2 or not np.isin(keep_BS, (0, 1)).all():
            rule = "A keep mask is [B, S] and holds True/False or 1/0 (1 = real token)."
            remedy = "For packing ids (1 1 2 2 0) use Segments.from_ids; for 4D masks derive_segments."
            raise CollateError(explain("keep", _values(keep_BS), rule, remedy))
        return cls._built(keep_BS.astype(np.int32))

    @classmethod
    def from_ids(cls, ids: Tensor | npt.ArrayLike) -> Segments:
        """From `[B, S]` ints, 0 = padding: any labels, renumbered 1, 2, ... in order of appearance in each row.

        Packing masks (`1 1 2 2 0`, LLaMA-Factory's neat_packing; JAX segment_ids) are this form. A label that comes
        back after another sequence began is an error, not a new sequence.
        """
        ids_BS = _as_ids(ids)
        return cls._built(_renumber(ids_BS))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor | npt.ArrayLike, width: int | None = None) -> Segments:
        """One flat row `[1, width]` from cumulative offsets `0, 3, 8, ...` (leading 0 present); the tail is padding."""
        offsets = _host_array(cu_seqlens).astype(np.int64)
        if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            rule = "cu_seqlens is one row of offsets: 0 first, then the end of each sequence, never falling."
            remedy = "torch_npu's actual_seq_qlen has no leading 0: put one in front."
            raise CollateError(explain("cu_seqlens", str(offsets.tolist()[:16]), rule, remedy))
        return cls.from_lengths([np.diff(offsets).tolist()], width=width)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor | npt.ArrayLike) -> Segments:
        """From `[B, S]` positions without padding: a sequence begins wherever the position does not grow by one.

        That is how padding-free batches carry their boundaries (TRL, transformers' DataCollatorWithFlattening).
        """
        positions_BS = _host_array(position_ids)
        if positions_BS.ndim != 2:
            raise CollateError(explain("position_ids", shape_of(positions_BS), "Positions are [B, S].", "Reshape them."))
        ids_BS = np.ones(positions_BS.shape, np.int32)
        ids_BS[:, 1:] += np.cumsum(np.diff(positions_BS, axis=1) != 1, axis=1, dtype=np.int32)
        return cls._built(ids_BS)

    @classmethod
    def _built(cls, ids_BS: IntArray) -> Segments:
        segments = object.__new__(cls)
        object.__setattr__(segments, "ids", torch.from_numpy(np.ascontiguousarray(ids_BS, np.int32)))
        return segments

    # --- read off

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, S)`."""
        return self.ids.shape[0], self.ids.shape[1]

    @cached_property
    def keep(self) -> Tensor:
        """bool `[B, S]`, True = real token: the wire's `attention_mask_2d`. Inverse of `from_keep` for unpacked rows."""
        return torch.from_numpy(self._array != 0)

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Real tokens of each sequence, row by row; `()` for a row of padding alone. Host numbers, no device sync."""
        flat = iter(self._lengths_N.tolist())
        return tuple(tuple(next(flat) for _ in range(n)) for n in self._counts_B.tolist())

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return tuple(sum(row) for row in self.lengths)

    @property
    def num_sequences(self) -> int:
        """N, over all rows."""
        return int(self._counts_B.sum())

    @property
    def num_tokens(self) -> int:
        """T, real tokens of the batch."""
        return int(self._lengths_N.sum())

    @property
    def max_length(self) -> int:
        """The longest sequence, 0 for a batch of padding."""
        return int(self._lengths_N.max(initial=0))

    @cached_property
    def cu_seqlens_host(self) -> tuple[int, ...]:
        """`(0, end of sequence 1, ...)` over the T real tokens, N + 1 numbers, on the host."""
        return (0, *np.cumsum(self._lengths_N).tolist())

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 `[N + 1]`, the same offsets as a tensor. Inverse of `from_cu_seqlens` for one flat row."""
        return torch.tensor(self.cu_seqlens_host, dtype=torch.int32)

    @cached_property
    def indices(self) -> Tensor:
        """int64 `[T]`, where the real tokens stand in the flattened `[B * S]` batch, in order."""
        return torch.from_numpy(np.flatnonzero(self._array))

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 `[B, S]`: real tokens count from 0 in their own sequence, so left padding starts at 0.

        Padding before the first token is 0; padding after a token keeps counting (3 tokens in a row of 5: `0 1 2 3 4`),
        because a reset there would read as one more document to whoever infers packing from positions
        (transformers 5.23 masking_utils.py:876-882). May be a read-only expanded view: clone before writing to it.
        """
        B, S = self.shape
        if self.padding_side in ("none", "right") and not self.packed:
            return torch.arange(S).expand(B, S)
        return torch.from_numpy(_positions(self._array, self._sequence_T, self._lengths_N))

    @cached_property
    def padding_side(self) -> PaddingSide:
        """Where padding stands, over all rows: `"mixed"` means both sides, holes, or gaps between sequences."""
        keep_BS = self._array != 0
        if keep_BS.all():
            return "none"
        grows, falls = keep_BS[:, 1:] > keep_BS[:, :-1], keep_BS[:, 1:] < keep_BS[:, :-1]
        if not grows.any():
            return "right"
        return "left" if not falls.any() and keep_BS[:, -1].all() else "mixed"

    @property
    def packed(self) -> bool:
        """True where some row holds more than one sequence."""
        return bool((self._counts_B > 1).any())

    @property
    def empty_rows(self) -> tuple[int, ...]:
        """Rows of padding alone."""
        return tuple(np.flatnonzero(self._counts_B == 0).tolist())

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """`(row, first index, last index + 1)` of each of the N sequences, holes included."""
        S = self.shape[1]
        starts = np.cumsum(self._lengths_N) - self._lengths_N
        at = np.flatnonzero(self._array)
        first, last = at[starts], at[starts + self._lengths_N - 1]
        return tuple(zip((first // max(S, 1)).tolist(), (first % max(S, 1)).tolist(), (last % max(S, 1) + 1).tolist()))

    # --- the arrays behind them

    @property
    def _array(self) -> IntArray:
        array: IntArray = self.ids.numpy()
        return array

    @cached_property
    def _counts_B(self) -> IntArray:
        B, S = self.shape
        counts: IntArray = self._array.max(axis=1) if S else np.zeros(B, np.int32)
        return counts

    @cached_property
    def _sequence_T(self) -> IntArray:
        offsets_B = np.cumsum(self._counts_B) - self._counts_B
        numbered: IntArray = (self._array + offsets_B[:, None].astype(np.int64) - 1)[self._array != 0]
        return numbered

    @cached_property
    def _lengths_N(self) -> IntArray:
        return np.bincount(self._sequence_T, minlength=int(self._counts_B.sum()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and torch.equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        B, S = self.shape
        lengths = ", ".join("+".join(map(str, row)) or "0" for row in self.lengths[:8]) + (", ..." if B > 8 else "")
        return f"Segments(B={B}, S={S}, lengths=[{lengths}], padding={self.padding_side!r})"


def _host_array(values: Tensor | npt.ArrayLike) -> IntArray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _values(array: IntArray) -> str:
    seen = ", ".join(map(str, np.unique(array)[:6].tolist()))
    return f"{array.dtype} {list(array.shape)} with values {seen}"


def _as_ids(ids: Tensor | npt.ArrayLike) -> IntArray:
    ids_BS = _host_array(ids)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iub":
        rule = "Segment ids are a [B, S] tensor of whole numbers."
        raise CollateError(explain("segment ids", shape_of(ids_BS), rule, "Pass an int32 tensor."))
    bad = [(int(b), f"the id {ids_BS[b].min()}") for b in np.flatnonzero((ids_BS < 0).any(axis=1))]
    if bad:
        rule = "0 is padding and sequences count from 1; no id is negative."
        raise CollateError(explain_rows("segment ids", bad, rule, "Add 1 to ids that count from -1 or 0."))
    return ids_BS.astype(np.int64)


def _previous_real(ids_BS: IntArray) -> IntArray:
    """For each place, the id of the nearest real token before it in the row, 0 if there is none."""
    B, S = ids_BS.shape
    last_BS = np.maximum.accumulate(np.where(ids_BS != 0, np.arange(S), -1), axis=1)
    before_BS = np.concatenate([np.full((B, 1), -1), last_BS[:, :-1]], axis=1)[:, :S]
    previous: IntArray = np.where(before_BS >= 0, np.take_along_axis(ids_BS, np.maximum(before_BS, 0), axis=1), 0)
    return previous


def _check_order(ids_BS: IntArray) -> None:
    step_BS = np.where(ids_BS != 0, ids_BS - _previous_real(ids_BS), 0)
    bad = np.flatnonzero(((step_BS < 0) | (step_BS > 1)).any(axis=1))
    if len(bad):
        rule = "The n-th sequence of a row has the id n, and sequences stand in order."
        rows = [(int(b), f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Use Segments.from_ids, which renumbers."))


def _renumber(ids_BS: IntArray) -> IntArray:
    starts_BS = (ids_BS != 0) & (ids_BS != _previous_real(ids_BS))
    numbered_BS = np.where(ids_BS != 0, np.cumsum(starts_BS, axis=1), 0)
    distinct_B = np.array([len(np.unique(row[row != 0])) for row in ids_BS], np.int64)
    bad = np.flatnonzero(starts_BS.sum(axis=1) != distinct_B)
    if len(bad):
        rule = "A sequence's tokens stand together; its label does not come back after another sequence."
        rows = [(int(b), f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Give each sequence of a row a label of its own."))
    return numbered_BS


def _positions(ids_BS: IntArray, sequence_T: IntArray, lengths_N: IntArray) -> IntArray:
    S = ids_BS.shape[1]
    starts_N = np.cumsum(lengths_N) - lengths_N
    positions_BS = np.zeros(ids_BS.shape, np.int64)
    positions_BS[ids_BS != 0] = np.arange(len(sequence_T)) - starts_N[sequence_T]
    columns_S = np.arange(S)
    last_BS = np.maximum.accumulate(np.where(ids_BS != 0, columns_S, -1), axis=1)
    carried_BS = np.take_along_axis(positions_BS, np.maximum(last_BS, 0), axis=1) + columns_S - last_BS
    filled: IntArray = np.where(last_BS >= 0, carried_BS, 0)
    return filled
