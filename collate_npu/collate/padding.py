"""Padding: ragged rows to one tensor: a sample a row, several by best fit, or one flat row.

Each key is one buffer, allocated by numpy (huge pages where the system has them) and written once. Lists of ints go through
`struct`, which checks each value for free and is several times faster than `torch.tensor(list)`.

Legend: B batch rows, S width, T tokens, F trailing dimensions of a token's value (routed_experts: layers, experts).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import MOST_PLACES, Array, Side, check_places, host_array, host_tensor
from collate_npu.errors import CollateError, explain, explain_rows, refuse_rows, shape_of

Row = Sequence[Any] | Array | Tensor
Filler = float | Literal["last"]
"""What padding holds: a number, or what the token beside it does."""

_LISTS = frozenset((list, tuple))
ON_HOST = frozenset((list, tuple, np.ndarray))
"""Types of rows that are read as they are."""
_ARRAYS, _INTS = {np.ndarray}, {int}
_NO_TYPES: set[Any] = set()
_HELD = (Tensor, np.ndarray)
_NO_WHOLE = (struct.error, TypeError, RuntimeError)  # the last two of a tensor among the numbers
_KINDS = {True: set("ib"), False: set("ibf")}
"""Kinds of dtype that need no second look, for whole numbers and for others."""
STRUCT_LIMIT = 1 << 14
"""Longest list packed in one call: beyond it the argument tuple may be a fresh mapping, and page faults take over."""


def is_ragged(value: Any) -> bool:
    """Return True if this may be one value a token: a list, a tuple, an array or a tensor with a dimension, not nested."""
    return isinstance(value, (list, tuple)) or (rank_of(value) > 0 and not getattr(value, "is_nested", False))


def rank_of(row: Any) -> int:
    """Dimensions of what may be one value a token, 0 of what is not; a list of lists has two."""
    if not isinstance(row, (list, tuple)):
        return row.ndim if isinstance(row, (np.ndarray, Tensor)) else 0
    return 1 + int(bool(row) and rank_of(row[0]) > 0)


class Rows(list[Any]):
    """The values of one key, one a sample, and their kind, found once."""

    __slots__ = ("firsts", "flat", "lengths", "lists", "ragged")
    lengths: list[int]
    """Of values with a length; none where some have none."""
    firsts: set[type]
    """Types of the first value of each list that has one."""
    lists: bool
    """True if each is a plain list or tuple of values, none of which is a list or an array."""
    flat: set[Any]
    """The dtypes, where each is an array `[L]` of numbers."""
    ragged: bool
    """True if each may be one value a token."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        super().__init__(values)
        types = set(map(type, self))
        self.firsts, self.flat, self.lists = _NO_TYPES, _NO_TYPES, False
        if types == _ARRAYS:
            seen = {(row.ndim, row.dtype) for row in self}
            flat = {dtype for n, dtype in seen if n == 1 and dtype.kind in "iubf"}
            self.flat = flat if len(flat) == len(seen) else _NO_TYPES
        elif types <= _LISTS:
            self.firsts = {type(row[0]) for row in self if row}
            self.lists = self.firsts <= _INTS or not any(row and rank_of(row[0]) for row in self)
        self.ragged = bool(self.flat) or types <= _LISTS or all(map(is_ragged, self))
        self.lengths = list(map(len, self)) if self.ragged else []


def on_host(key: str, values: Sequence[Any]) -> Rows:
    """Tensors as the arrays they are, float32 for bfloat16; everything else as it is. Raises for what has no values."""
    types = set(map(type, values))
    if not any(issubclass(kind, Tensor) for kind in types):
        return values if isinstance(values, Rows) else Rows(values)
    try:
        mixed = types != {Tensor}
        return Rows([x.numpy() if isinstance(x, Tensor) else x for x in values] if mixed else map(Tensor.numpy, values))
    except (TypeError, RuntimeError):  # on a device, in bfloat16, part of a graph
        return Rows([host_array(key, row) if isinstance(row, Tensor) else row for row in values])


class Slots(NamedTuple):
    """Where the tokens of each sample go in a batch `[B, S]`."""

    order: Sequence[int]
    """The samples as they stand there, row by row."""
    starts: Sequence[int]
    """The place of each sample's first token, counted through all rows."""
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], lengths: Sequence[int], width: int, side: Side = "right") -> Slots:
        """Return the slots of rows whose samples stand side by side, with padding on one side."""
        starts = [0] * len(lengths)
        for at, row in enumerate(rows):
            end = at * width
            for b in row:
                starts[b], end = end, end + lengths[b]
            for b in row if side == "left" else ():
                starts[b] += (at + 1) * width - end
        return cls([b for row in rows for b in row], starts, (len(rows), width))


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The samples of each row of `room` tokens, by best fit decreasing: longest first, each into the row with the least room
    that holds it. Samples of a row stand as in the batch, and rows by their first sample.

    >>> best_fit([1, 7, 5, 4], 10)
    [[0, 2, 3], [1]]
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # sorted: how much room, and in which row
    for b in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        at = bisect_left(free, (lengths[b], 0))
        if at == len(free):
            free.append((room, len(rows)))
            rows.append([])
        left, row = free.pop(at)
        rows[row].append(b)
        insort(free, (left - lengths[b], row))
    return sorted(map(sorted, rows))


def pad_rows(
    key: str, rows: Sequence[Row], *, width: int, side: Side = "right", fill: Filler = 0, whole: bool = False
) -> Tensor:
    """Rows of `[length, ...F]` to `[B, width, ...F]`, padded on one side. Inverse of `unpad` with the lengths."""
    rows = rows if isinstance(rows, Rows) else Rows(rows)
    slots = Slots.of([[b] for b in range(len(rows))], rows.lengths, width, side)
    return lay_rows(key, rows, slots=slots, fill=fill, whole=whole)


def lay_rows(key: str, rows: Sequence[Row], *, slots: Slots, fill: Filler = 0, whole: bool = False) -> Tensor:
    """Rows of `[length, ...F]`, each in its slot of `[B, S, ...F]`, with `fill` in between. int64 for lists of ints (and for
    `whole` numbers), float32 for lists of floats, the common dtype of arrays."""
    rows, total = rows if isinstance(rows, Rows) else Rows(rows), slots.shape[0] * slots.shape[1]
    if total > MOST_PLACES:
        check_places(key, total, "Lower max_length, pad_to_multiple_of or the widths, or put fewer samples in a batch.")
    if fill != "last" and (not isinstance(fill, (int, float, np.number)) or abs(fill) >= 1 << 63):
        rule = "A padding value is a number of at most 64 bits."
        raise CollateError(explain(key, f"padding with {fill!r}", rule, "Set pad_token_id and label_pad_token_id to ints."))
    packs = whole and rows.lists
    at_once = packs or (rows.flat and {dtype.kind for dtype in rows.flat} <= _KINDS[whole] and all(rows.lengths))
    arrays: Sequence[Any] = rows if at_once else arrays_of(key, rows, whole)
    shape = (total,) if at_once else (total, *_trailing(key, arrays))
    found = rows.flat if at_once else {row.dtype for row in arrays if len(row)}
    common = np.dtype(np.int64) if whole or not found else np.result_type(*found)
    out, end = np.empty(shape, np.float32 if common == np.float64 else common), 0
    try:
        for b in slots.order:
            start, row = slots.starts[b], arrays[b]
            if end != start:
                out[end:start] = _beside(out[:end], row) if fill == "last" else fill
            end = start + rows.lengths[b]
            if packs and len(row) <= STRUCT_LIMIT:
                struct.pack_into(f"{len(row)}q", out.data, 8 * start, *row)
            elif packs:
                _pack(out.data, start, row)
            elif end > start:
                out[start:end] = row
    except _NO_WHOLE:
        bad = [(b, text) for b, row in enumerate(rows) if (text := _first_bad(row))]
        rule = f"{key} holds whole numbers of at most 64 bits."
        raise CollateError(explain_rows(key, bad, rule, "Convert them where the sample is built.")) from None
    out[end:] = _beside(out[:end]) if fill == "last" else fill
    return torch.from_numpy(out.reshape(*slots.shape, *out.shape[1:]))


def check_lengths(key: str, rows: Sequence[Row], lengths: Sequence[int]) -> None:
    """Raise where a row of this key has another length than the row's `input_ids`."""
    found = rows.lengths if isinstance(rows, Rows) else Rows(rows).lengths
    if found == lengths:
        return
    bad = [(b, f"{n} values beside {length} input_ids") for b, (n, length) in enumerate(zip(found, lengths)) if n != length]
    rule = f"{key} has one value for each token of its row."
    remedy = "Cut or build both together, before collation."
    if key.endswith("routed_experts") and all(found[b] == lengths[b] - 1 for b, _ in bad):
        remedy = "A rollout has no routes for its last token: repeat the last value once where the sample is built."
    raise CollateError(explain_rows(key, bad, rule, remedy))


def _beside(before: Array, after: Sequence[Any] = ()) -> Any:
    return before[-1] if len(before) else after[0] if len(after) else 0


def _pack(out: memoryview, start: int, row: Any) -> None:
    for low in range(0, len(row), STRUCT_LIMIT):
        part = row[low : low + STRUCT_LIMIT]
        struct.pack_into(f"{len(part)}q", out, 8 * (start + low), *part)


def arrays_of(key: str, rows: Sequence[Row], whole: bool) -> list[Array]:
    """Return each row as an array of its own kind. Raises `CollateError` for what is no number, or no whole one."""
    arrays: list[Array] = []
    bad: list[tuple[int, str]] = []
    for b, row in enumerate(rows):
        try:
            arrays.append(row if isinstance(row, np.ndarray) else _array(key, row, whole))
        except (ValueError, *_NO_WHOLE):
            arrays.append(np.zeros(0, np.int64))
            bad.append((b, _first_bad(row) if whole and not rank_of(row[0]) else "lists of unequal length, or no numbers"))
    if not {row.dtype.kind for row in arrays} <= _KINDS[whole]:
        wrong = [(b, row) for b, row in enumerate(arrays) if not _is_number(row, whole)]
        bad += [(b, f"{shape_of(row)} starting {row.reshape(-1)[:3].tolist()}") for b, row in wrong]
    rule = f"{key} holds {'whole numbers' if whole else 'numbers'}, one for each token."
    refuse_rows(key, bad, rule, "Convert them where the sample is built.")
    return arrays


def _array(key: str, row: Sequence[Any] | Tensor, whole: bool) -> Array:
    if isinstance(row, Tensor):
        return host_array(key, row)
    if not whole or (len(row) and rank_of(row[0])):
        return np.asarray(row)
    packed = np.empty(len(row), np.int64)
    _pack(packed.data, 0, row)
    return packed


def _is_number(row: Array, whole: bool) -> bool:
    wraps = row.dtype.kind == "u" and row.dtype.itemsize == 8 and row.size and row.max() > np.iinfo(np.int64).max
    return not row.size or (row.dtype.kind in ("iub" if whole else "iubf") and not wraps)


def _trailing(key: str, arrays: Sequence[Array]) -> tuple[int, ...]:
    shapes = {row.shape[1:] for row in arrays if len(row)}
    bad = [(b, f"values of shape {list(row.shape[1:])}") for b, row in enumerate(arrays)] if len(shapes) > 1 else []
    rule = "All rows of a key have the same number of dimensions, and equal trailing ones."
    refuse_rows(key, bad, rule, "Give each token one value of the same shape in every row.")
    return next(iter(shapes), ())


def _first_bad(row: Any) -> str:
    for at, value in enumerate(row):
        try:
            struct.pack("q", value)
        except _NO_WHOLE:
            return f"{repr(value)[:80]} at token {at}"
    return ""


def stack_values(values: Sequence[Any]) -> Any:
    """One value a sample: numbers and 0-d tensors become `[B]`, everything else a list of B."""
    numbers = [v.item() if isinstance(v, np.number) or (isinstance(v, _HELD) and v.ndim == 0) else v for v in values]
    if not all(isinstance(v, (bool, int, float)) for v in numbers):
        return list(values)
    array = np.asarray(numbers)
    array = array.astype(np.float32) if array.dtype == np.float64 else array  # a loss of float64 labels has no backward
    return list(values) if array.dtype.kind in "Ou" else torch.as_tensor(array)  # an int beyond 64 bits


def concatenate_values(key: str, values: Sequence[Any], *, unit: int = 0, order: Sequence[int] | None = None) -> Tensor:
    """Tensors, arrays or lists of some rows, joined on the first dimension (pixel_values, image_grid_thw), in this order. A
    value of rank `unit` is one image or clip, and becomes a row of its own."""
    held = {b: value for b, value in enumerate(values) if value is not None}
    tensors = {b: value if isinstance(value, Tensor) else host_tensor(key, value) for b, value in held.items()}
    ordered = [tensors[b] for b in (order or range(len(values))) if b in tensors]
    try:
        return torch.cat([tensor[None] if tensor.ndim == unit else tensor for tensor in ordered])
    except (RuntimeError, ValueError) as error:  # the second of a nested tensor, in torch 2.6
        rows = [(b, shape_of(tensor)) for b, tensor in tensors.items()]
        rule = f"Vision values of a batch are joined on their first dimension ({str(error).splitlines()[0]})."
        raise CollateError(explain_rows(key, rows, rule, "Give all samples the same trailing shape.")) from None
