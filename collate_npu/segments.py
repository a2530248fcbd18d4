"""Segments: which sequence each token of a batch belongs to; 0 is padding.

The smallest thing from which every mask, offset and position follows. It lives on the host, costs four bytes a token,
and is built where the lengths are known (the collator) or derived, with proof, from a mask someone else built.
Every tensor it gives is a fresh one: writing to it changes nothing else.

Legend: B batch rows, S width, T tokens without padding, N sequences in the whole batch.
`■` is a real token, `⬚` padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain, explain_rows, shape_of
from collate_npu.host import Array, host_array, whole_number

Side = Literal["left", "right"]
PaddingSide = Literal["none", "left", "right", "mixed"]
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
    """

    def __init__(self, ids: Values) -> None:
        ids_BS = _as_ids(ids)
        _check_order(ids_BS)
        self._set(ids_BS)

    def _set(self, ids_BS: Array) -> None:
        """What compiled code reads is computed here, not when it is first asked for."""
        array = np.array(ids_BS, np.int32, order="C")
        array.flags.writeable = False
        self.array = array
        """int32 `[B, S]`, read-only: for the library's own use; callers take `ids`."""
        self._counts_B: Array = array.max(axis=1) if array.size else np.zeros(len(array), np.int32)
        self._indices_T = np.flatnonzero(array)
        starts_B = np.cumsum(self._counts_B) - self._counts_B
        self._sequence_T: Array = (array + (starts_B - 1)[:, None])[array != 0]
        self._lengths_N = np.bincount(self._sequence_T, minlength=int(self._counts_B.sum()))
        self._ends_N = self._indices_T[np.cumsum(self._lengths_N) - 1]
        self._compiled = torch.from_numpy(self._indices_T), torch.from_numpy(self._ends_N)
        self.sequence_lengths: tuple[int, ...] = tuple(self._lengths_N.tolist())
        """Real tokens of each of the N sequences."""
        self.empty_rows: tuple[int, ...] = tuple(np.flatnonzero(self._counts_B == 0).tolist())
        """Rows of padding alone."""

    # --- built from

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]] | Values, width: int | None = None, side: Side = "right"
    ) -> Segments:
        """From token counts: `[3, 5]` is one sequence a row, `[[3, 2], [5]]` several. `width` defaults to the longest."""
        rows = _length_rows(lengths)
        totals = [sum(row) for row in rows]
        width = max(totals, default=0) if width is None else whole_number("width", width)
        bad = [(b, f"lengths {row}") for b, row in enumerate(rows) if totals[b] > width]
        if bad:
            rule = f"A row's lengths fit the width, {width}."
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
    def from_keep(cls, keep: Values) -> Segments:
        """From `[B, S]` bool or 0/1, True = real token: one sequence a row, holes allowed. Inverse of `keep`."""
        keep_BS = host_array("keep", keep)
        if keep_BS.ndim != 2 or not np.isin(keep_BS, (0, 1)).all():
            rule = "A keep mask is [B, S] and holds True/False or 1/0 (1 = real token)."
            remedy = "For packing ids (1 1 2 2 0) use Segments.from_ids; for 4D masks derive_segments."
            raise CollateError(explain("keep", _values(keep_BS), rule, remedy))
        return cls._built(keep_BS.astype(np.int32))

    @classmethod
    def from_ids(cls, ids: Values) -> Segments:
        """From `[B, S]` ints, 0 = padding: any labels, renumbered 1, 2, ... in order of appearance in each row.

        Packing masks (`1 1 2 2 0`, LLaMA-Factory's neat_packing; JAX segment_ids) are this form. A label that comes
        back after another sequence began is an error, not a new sequence.
        """
        return cls._built(_renumber(_as_ids(ids)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Values, width: int | None = None) -> Segments:
        """One flat row `[1, width]` from cumulative offsets `0, 3, 8, ...` (leading 0 present); the tail is padding."""
        offsets = host_array("cu_seqlens", cu_seqlens)
        whole = offsets.dtype.kind in "iu" or (offsets == np.round(offsets)).all()
        if offsets.ndim != 1 or not len(offsets) or not whole or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            rule = "cu_seqlens is one row of offsets: 0 first, then the end of each sequence, never falling."
            remedy = "torch_npu's actual_seq_qlen has no leading 0: put one in front."
            raise CollateError(explain("cu_seqlens", str(offsets.tolist())[:80], rule, remedy))
        return cls.from_lengths([np.diff(offsets.astype(np.int64)).tolist()], width=width)

    @classmethod
    def from_position_ids(cls, position_ids: Values) -> Segments:
        """From `[B, S]` positions without padding: a sequence begins at every 0.

        That is how padding-free batches carry their boundaries (TRL, transformers' DataCollatorWithFlattening). Raises
        where positions do not count 0, 1, 2, ... in every sequence: custom positions say nothing of boundaries.
        """
        positions_BS = host_array("position_ids", position_ids)
        if positions_BS.ndim != 2:
            raise CollateError(explain("position_ids", shape_of(positions_BS), "Positions are [B, S].", "Reshape them."))
        starts_BS, counts_B = sequence_starts(positions_BS, np.ones(positions_BS.shape, bool))
        bad = [(int(b), str(positions_BS[b].tolist()[:24])) for b in np.flatnonzero(~counts_B)]
        if bad:
            rule = "Positions tell sequences apart where each of them counts 0, 1, 2, ..."
            remedy = "Use Segments.from_ids, from_lengths or from_cu_seqlens."
            raise CollateError(explain_rows("position_ids", bad, rule, remedy))
        return cls._built(np.cumsum(starts_BS, axis=1))

    @classmethod
    def _built(cls, ids_BS: Array) -> Segments:
        segments = object.__new__(cls)
        segments._set(ids_BS)
        return segments

    # --- read off

    @property
    def ids(self) -> Tensor:
        """int32 `[B, S]`: 0 is padding, n the n-th sequence of the row."""
        return torch.from_numpy(self.array.copy())

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, S)`."""
        return self.array.shape[0], self.array.shape[1]

    @property
    def keep(self) -> Tensor:
        """bool `[B, S]`, True = real token: the wire's `attention_mask_2d`. Inverse of `from_keep` for unpacked rows."""
        return torch.from_numpy(self.array != 0)

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
        return len(self._lengths_N)

    @property
    def num_tokens(self) -> int:
        """T, real tokens of the batch."""
        return len(self._indices_T)

    @property
    def num_padding(self) -> int:
        """Places of the batch that are padding, alignment and tail included: computed, and thrown away."""
        return self.array.size - self.num_tokens

    @property
    def padding_share(self) -> float:
        """The part of all places that is padding, 0 to 1: what a throughput in tokens is to be corrected by."""
        return self.num_padding / max(self.array.size, 1)

    @property
    def max_length(self) -> int:
        """The longest sequence, 0 for a batch of padding."""
        return int(self._lengths_N.max(initial=0))

    @cached_property
    def cu_seqlens_host(self) -> tuple[int, ...]:
        """`(0, end of sequence 1, ...)` over the T real tokens, N + 1 numbers, on the host."""
        return (0, *np.cumsum(self._lengths_N).tolist())

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 `[N + 1]`, the same offsets as a tensor. Inverse of `from_cu_seqlens` for one flat row."""
        return torch.tensor(self.cu_seqlens_host, dtype=torch.int32)

    @property
    def indices(self) -> Tensor:
        """int64 `[T]`, where the real tokens stand in the flattened `[B * S]` batch, in order."""
        return _fresh(self._indices_T, self._compiled[0])

    @property
    def last_indices(self) -> Tensor:
        """int64 `[N]`, where the last real token of each sequence stands in the flattened `[B * S]` batch."""
        return _fresh(self._ends_N, self._compiled[1])

    @property
    def position_ids(self) -> Tensor:
        """int64 `[B, S]`: real tokens count from 0 in their own sequence, so left padding starts at 0.

        Padding before the first token is 0; padding after a token keeps counting (3 tokens in a row of 5: `0 1 2 3 4`),
        because a reset there would read as one more sequence to whoever infers packing from positions
        (transformers 5.23 masking_utils.py:876-882).
        """
        B, S = self.shape
        if self.padding_side in ("none", "right") and not self.packed:
            return torch.from_numpy(np.tile(np.arange(S), (B, 1)))
        return torch.from_numpy(_positions(self.array, self._sequence_T, self._lengths_N))

    @cached_property
    def padding_side(self) -> PaddingSide:
        """Where padding stands, over all rows: `"mixed"` means both sides, holes, or gaps between sequences."""
        keep_BS = self.array != 0
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
    def longest_span(self) -> int:
        """Places from the first to the last token of the widest sequence, holes counted."""
        return max((end - start for _, start, end in self.spans), default=0)

    @property
    def hole_rows(self) -> tuple[int, ...]:
        """Rows in which padding stands inside a sequence."""
        wide = {b for (b, start, end), n in zip(self.spans, self.sequence_lengths) if end - start > n}
        return tuple(sorted(wide))

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """`(row, first index, last index + 1)` of each of the N sequences, holes included."""
        S = max(self.shape[1], 1)
        starts = np.cumsum(self._lengths_N) - self._lengths_N
        first, last = self._indices_T[starts], self._indices_T[starts + self._lengths_N - 1]
        return tuple(zip((first // S).tolist(), (first % S).tolist(), (last % S + 1).tolist()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and np.array_equal(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        B, S = self.shape
        lengths = ", ".join("+".join(map(str, row)) or "0" for row in self.lengths[:8]) + (", ..." if B > 8 else "")
        return f"Segments(B={B}, S={S}, lengths=[{lengths}], padding={self.padding_side!r})"


def _fresh(array: Array, compiled: Tensor) -> Tensor:
    """A tensor of its own: from the array under a FakeTensorMode, from the tensor where torch traces."""
    return compiled.clone() if torch.compiler.is_compiling() else torch.from_numpy(array).clone()


def sequence_starts(positions_BS: Array, keep_BS: Array) -> tuple[Array, Array]:
    """Where sequences begin by their positions, bool `[B, S]`; in which rows each counts 0, 1, 2, ..., bool `[B]`."""
    real_T = np.flatnonzero(keep_BS)
    values_T, rows_T = positions_BS.reshape(-1)[real_T], real_T // max(keep_BS.shape[1], 1)
    follows_T = np.zeros(len(real_T), bool)
    follows_T[1:] = (values_T[1:] == values_T[:-1] + 1) & (rows_T[1:] == rows_T[:-1])
    starts_BS = np.zeros(keep_BS.shape, bool)
    starts_BS.reshape(-1)[real_T[~follows_T]] = True
    custom_BS = starts_BS & (positions_BS != 0)
    return starts_BS, ~custom_BS.any(axis=1)


def _length_rows(lengths: Any) -> list[list[int]]:
    """One list of token counts for each row of the batch; raises for what is no count."""
    if isinstance(lengths, (Tensor, np.ndarray)):
        lengths = host_array("lengths", lengths)
    rows: list[list[int]] = []
    bad: list[tuple[int, str]] = []
    for b, row in enumerate(lengths):
        counts = np.atleast_1d(host_array("lengths", row)) if np.ndim(row) == 0 or len(row) else np.zeros(0, np.int64)
        if counts.dtype.kind not in "iu" or counts.ndim != 1 or (counts < 0).any():
            bad.append((b, f"lengths {counts.tolist()}"))
        rows.append(counts.tolist())
    if bad:
        raise CollateError(explain_rows("lengths", bad, "Lengths are whole numbers, 0 or more.", "Count the tokens again."))
    return rows


def _values(array: Array) -> str:
    seen = ", ".join(map(str, np.unique(array)[:6].tolist()))
    return f"{array.dtype} {list(array.shape)} with values {seen}"


def _as_ids(ids: Values) -> Array:
    ids_BS = host_array("segment ids", ids)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iub":
        rule = "Segment ids are a [B, S] tensor of whole numbers."
        raise CollateError(explain("segment ids", shape_of(ids_BS), rule, "Pass an int32 tensor."))
    bad = [(int(b), f"the id {ids_BS[b].min()}") for b in np.flatnonzero((ids_BS < 0).any(axis=1))]
    if bad:
        rule = "0 is padding and sequences count from 1; no id is negative."
        raise CollateError(explain_rows("segment ids", bad, rule, "Add 1 to ids that count from -1 or 0."))
    return ids_BS.astype(np.int64)


def _previous_real(ids_BS: Array) -> Array:
    """For each place, the id of the nearest real token before it in the row, 0 if there is none."""
    B, S = ids_BS.shape
    last_BS = np.maximum.accumulate(np.where(ids_BS != 0, np.arange(S), -1), axis=1)
    before_BS = np.concatenate([np.full((B, 1), -1), last_BS[:, :-1]], axis=1)[:, :S]
    previous: Array = np.where(before_BS >= 0, np.take_along_axis(ids_BS, np.maximum(before_BS, 0), axis=1), 0)
    return previous


def _check_order(ids_BS: Array) -> None:
    step_BS = np.where(ids_BS != 0, ids_BS - _previous_real(ids_BS), 0)
    bad = np.flatnonzero(((step_BS < 0) | (step_BS > 1)).any(axis=1))
    if len(bad):
        rule = "The n-th sequence of a row has the id n, and sequences stand in order."
        rows = [(int(b), f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Use Segments.from_ids, which renumbers."))


def _renumber(ids_BS: Array) -> Array:
    starts_BS = (ids_BS != 0) & (ids_BS != _previous_real(ids_BS))
    numbered_BS = np.where(ids_BS != 0, np.cumsum(starts_BS, axis=1), 0)
    distinct_B = np.array([len(np.unique(row[row != 0])) for row in ids_BS], np.int64)
    bad = np.flatnonzero(starts_BS.sum(axis=1) != distinct_B)
    if len(bad):
        rule = "A sequence's tokens stand together; its label does not come back after another sequence."
        rows = [(int(b), f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Give each sequence of a row a label of its own."))
    return numbered_BS


def _positions(ids_BS: Array, sequence_T: Array, lengths_N: Array) -> Array:
    S = ids_BS.shape[1]
    starts_N = np.cumsum(lengths_N) - lengths_N
    positions_BS = np.zeros(ids_BS.shape, np.int64)
    positions_BS[ids_BS != 0] = np.arange(len(sequence_T)) - starts_N[sequence_T]
    columns_S = np.arange(S)
    last_BS = np.maximum.accumulate(np.where(ids_BS != 0, columns_S, -1), axis=1)
    carried_BS = np.take_along_axis(positions_BS, np.maximum(last_BS, 0), axis=1) + columns_S - last_BS
    filled: Array = np.where(last_BS >= 0, carried_BS, 0)
    return filled
