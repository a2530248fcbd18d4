"""Padding: ragged rows to one tensor of one width, or to one flat row.

Each key is one buffer, allocated by numpy (huge pages where the system has them) and written once. Lists of ints go through
`struct`, which checks each value for free and is several times faster than `torch.tensor(list)`.

Legend: B batch rows, S width, T tokens, F trailing dimensions of a token's value (routed_experts: layers, experts).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import methodcaller
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.arrays import MOST_PLACES, Array, Side, check_places, host_array, host_tensor, renumber
from collate_npu.errors import CollateError, explain, explain_rows, shape_of
from collate_npu.masks.offsets import parted_by_positions
from collate_npu.segments import Segments

Row = Sequence[Any] | Array | Tensor
Filler = float | Literal["last"]
"""What padding holds: a number, or what the token beside it does."""

_LISTS = frozenset((list, tuple))
_ARRAYS, _TENSORS, _INTS = {np.ndarray}, {Tensor}, {int}
_NO_TYPES: set[Any] = set()
_HELD = (Tensor, np.ndarray)
_NUMPY = methodcaller("numpy")
_KINDS = {True: set("ib"), False: set("ibf")}
"""Kinds of dtype that need no second look, for whole numbers and for others."""
STRUCT_LIMIT = 1 << 14
"""Longest list packed in one call: beyond it the argument tuple may be a fresh mapping, and page faults take over."""


def round_up(value: int, multiple: int | None) -> int:
    """The next multiple, or the value itself for None."""
    return value if not multiple else -(-value // multiple) * multiple


def is_ragged(value: Any) -> bool:
    """May this be one value a token: a list, a tuple, an array or a tensor with a first dimension?"""
    return isinstance(value, (list, tuple)) or (isinstance(value, (np.ndarray, Tensor)) and value.ndim > 0)


def rank_of(row: Any) -> int:
    """Dimensions of what may be one value a token, 0 of what is not; a list of lists has two."""
    if not isinstance(row, (list, tuple)):
        return row.ndim if isinstance(row, (np.ndarray, Tensor)) else 0
    return 1 + int(bool(row) and is_ragged(row[0]))


class Rows(list[Any]):
    """The values of one key, a sample each, and what they are: looked at once, whoever asks."""

    __slots__ = ("firsts", "flat", "lengths", "lists", "ragged", "types")
    types: set[type]
    lengths: list[int]
    """Of values with a length; none where some have none."""
    firsts: set[type]
    """Types of the first value of each list that has one."""
    lists: bool
    """Is each a plain list or tuple of values, none of which is a list or an array itself?"""
    flat: set[Any]
    """The dtypes, where each is an array `[L]` of numbers."""
    ragged: bool
    """May each be one value a token?"""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        super().__init__(values)
        types = self.types = set(map(type, self))
        self.firsts, self.flat, self.lists = _NO_TYPES, _NO_TYPES, False
        if types == _ARRAYS:
            seen = {(row.ndim, row.dtype) for row in self}
            flat = {dtype for n, dtype in seen if n == 1 and dtype.kind in "iubf"}
            self.flat = flat if len(flat) == len(seen) else _NO_TYPES
        elif types <= _LISTS:
            self.firsts = {type(row[0]) for row in self if row}
            self.lists = self.firsts <= _INTS or not any(row and is_ragged(row[0]) for row in self)
        self.ragged = bool(self.flat) or types <= _LISTS or all(map(is_ragged, self))
        self.lengths = list(map(len, self)) if self.ragged else []

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Rows:
        """These rows; a record of them as it is."""
        return rows if type(rows) is cls else cls(rows)


def on_host(key: str, values: Sequence[Any]) -> Rows:
    """Tensors as the arrays they are, float32 for bfloat16; everything else as it is. Raises for what has no values."""
    types = set(map(type, values))
    plain = types == _TENSORS
    if types <= _LISTS or types == _ARRAYS or not (plain or any(issubclass(kind, Tensor) for kind in types)):
        return Rows.of(values)
    try:
        if plain:
            return Rows(map(_NUMPY, values))
        return Rows([row.numpy() if isinstance(row, Tensor) else row for row in values])
    except (TypeError, RuntimeError):  # on a device, in bfloat16, part of a graph
        return Rows([host_array(key, row) if isinstance(row, Tensor) else row for row in values])


def pad_rows(
    key: str, rows: Sequence[Row], *, width: int, side: Side = "right", fill: Filler = 0, whole: bool = False
) -> Tensor:
    """Rows of `[length, ...F]` to `[B, width, ...F]`, padded with `fill` on one side. Inverse of `unpad` with the lengths.

    int64 for lists of ints (and for `whole` numbers), float32 for lists of floats, the common dtype of arrays.
    """
    rows = Rows.of(rows)
    starts = [*range(0, len(rows) * width, width)] if width else [0] * len(rows)
    if side == "left":
        starts = [start + width - length for start, length in zip(starts, rows.lengths)]
    laid = _laid(key, rows, starts, len(rows) * width, fill, whole)
    return torch.from_numpy(laid.reshape(len(rows), width, *laid.shape[1:]))


def flatten_rows(key: str, rows: Sequence[Row], *, width: int, fill: Filler = 0, whole: bool = False) -> Tensor:
    """Rows of `[length, ...F]` to one row `[1, width, ...F]`, one after another, `fill` in the tail."""
    rows = Rows.of(rows)
    starts = list(accumulate(rows.lengths, initial=0))[:-1]
    return torch.from_numpy(_laid(key, rows, starts, width, fill, whole)[None])


def whole_rows(key: str, rows: Sequence[Row]) -> list[Array]:
    """Each row of whole numbers as an array of its own kind. Raises as `pad_rows` does."""
    return list(_arrays(key, on_host(key, rows), whole=True))


def check_lengths(key: str, rows: Sequence[Row], lengths: Sequence[int]) -> None:
    """Raise where a row of this key has another length than the row's `input_ids`."""
    found = Rows.of(rows).lengths
    if found == lengths:
        return
    bad = [(b, f"{n} values beside {length} input_ids") for b, (n, length) in enumerate(zip(found, lengths)) if n != length]
    longer = key.startswith("attention_mask") and any(found[b] > lengths[b] for b, _ in bad)
    rule = "A mask is as long as its row." if longer else f"{key} has one value for each token of its row."
    remedy = "Cut or build both together, before collation."
    if key.endswith("routed_experts") and all(found[b] == lengths[b] - 1 for b, _ in bad):
        remedy = "A rollout routes all but its last token: repeat the last value once where the sample is built."
    raise CollateError(explain_rows(key, bad, rule, remedy))


def _laid(key: str, rows: Rows, starts: list[int], total: int, fill: Filler, whole: bool) -> Array:
    """`[total, ...F]` with each row at its start, `fill` in between."""
    _check_size(key, total, fill)
    if whole and rows.lists:
        return _packed(key, rows, starts, np.empty(total, np.int64), fill)
    at_once = rows.flat and {dtype.kind for dtype in rows.flat} <= _KINDS[whole] and all(rows.lengths)
    arrays = rows if at_once else _arrays(key, rows, whole)
    shape = (total,) if at_once else (total, *_trailing(key, arrays))
    out, end = np.empty(shape, _dtype(rows.flat if at_once else {row.dtype for row in arrays if len(row)}, whole)), 0
    for start, length, row in zip(starts, rows.lengths, arrays):
        if end != start:
            out[end:start] = _beside(out[:end], row) if fill == "last" else fill
        end = start + length
        if length:
            out[start:end] = row
    out[end:] = _beside(out[:end]) if fill == "last" else fill
    return out


def _packed(key: str, rows: Rows, starts: list[int], out: Array, fill: Filler) -> Array:
    """The same of lists of whole numbers."""
    memory, end = out.data, 0
    try:
        for start, length, row in zip(starts, rows.lengths, rows):
            if end != start:
                out[end:start] = _beside(out[:end], row) if fill == "last" else fill
            end = start + length
            _pack(memory, start, row)
    except struct.error:
        bad = [(b, text) for b, row in enumerate(rows) if (text := _first_bad(row))]
        rule = f"{key} holds whole numbers of at most 64 bits."
        raise CollateError(explain_rows(key, bad, rule, "Convert them where the sample is built.")) from None
    out[end:] = _beside(out[:end]) if fill == "last" else fill
    return out


def _beside(before: Array, after: Sequence[Any] = ()) -> Any:
    return before[-1] if len(before) else after[0] if len(after) else 0


def _check_size(key: str, total: int, fill: Any) -> None:
    if total > MOST_PLACES:
        check_places(key, total, "Look at max_length, pad_to_multiple_of and the widths, or put fewer samples in a batch.")
    if fill != "last" and (not isinstance(fill, (int, float, np.number)) or abs(fill) >= 1 << 63):
        rule = "What padding holds is a number of at most 64 bits."
        raise CollateError(explain(key, f"padding with {fill!r}", rule, "Set pad_token_id and label_pad_token_id to ints."))


def _pack(out: memoryview, start: int, row: Any) -> None:
    if len(row) <= STRUCT_LIMIT:
        partial(struct.pack_into, f"{len(row)}q", out, 8 * start)(*row)
        return
    for low in range(0, len(row), STRUCT_LIMIT):
        _pack(out, start + low, row[low : low + STRUCT_LIMIT])


def _arrays(key: str, rows: Sequence[Row], whole: bool) -> Sequence[Array]:
    arrays: list[Array] = []
    bad: list[tuple[int, str]] = []
    for b, row in enumerate(rows):
        try:
            arrays.append(row if isinstance(row, np.ndarray) else _array(key, row, whole))
        except (ValueError, struct.error):
            arrays.append(np.zeros(0, np.int64))
            bad.append((b, _first_bad(row) if whole and not is_ragged(row[0]) else "nested lists of unequal length"))
    if not {row.dtype.kind for row in arrays} <= _KINDS[whole]:
        started = "{} starting {}"
        kinds = [started.format(shape_of(row), row.reshape(-1)[:3].tolist()) for row in arrays]
        bad += [(b, kind) for b, (row, kind) in enumerate(zip(arrays, kinds)) if not _is_number(row, whole)]
    if bad:
        rule = f"{key} holds {'whole numbers' if whole else 'numbers'}, one for each token."
        raise CollateError(explain_rows(key, sorted(bad), rule, "Convert them where the sample is built."))
    return arrays


def _array(key: str, row: Sequence[Any] | Tensor, whole: bool) -> Array:
    if isinstance(row, Tensor):
        return host_array(key, row)
    if not whole or (len(row) and is_ragged(row[0])):
        return np.asarray(row)
    packed = np.empty(len(row), np.int64)
    _pack(packed.data, 0, row)
    return packed


def _is_number(row: Array, whole: bool) -> bool:
    wraps = row.dtype.kind == "u" and row.dtype.itemsize == 8 and row.size and row.max() > np.iinfo(np.int64).max
    return not row.size or (row.dtype.kind in ("iub" if whole else "iubf") and not wraps)


def _trailing(key: str, arrays: Sequence[Array]) -> tuple[int, ...]:
    shapes = {row.shape[1:] for row in arrays if len(row)}
    if len(shapes) > 1:
        rows = [(b, f"values of shape {list(row.shape[1:])}") for b, row in enumerate(arrays)]
        rule = "All rows of a key have the same number of dimensions, and equal trailing ones."
        raise CollateError(explain_rows(key, rows, rule, "Give each token one value of the same shape in every row."))
    return next(iter(shapes), ())


def _dtype(found: set[Any], whole: bool) -> npt.DTypeLike:
    if whole or not found:
        return np.int64
    common = np.result_type(*found)
    return np.float32 if common == np.float64 else common


def _first_bad(row: Any) -> str:
    for at, value in enumerate(row):
        try:
            struct.pack("q", value)
        except struct.error:
            return f"{value!r} at token {at}"
    return ""


def stack_values(values: Sequence[Any]) -> Any:
    """One value a sample: numbers and 0-d tensors become `[B]`, everything else a list of B."""
    numbers = [v.item() if isinstance(v, np.number) or (isinstance(v, _HELD) and v.ndim == 0) else v for v in values]
    if not all(isinstance(v, (bool, int, float)) for v in numbers):
        return list(values)
    array = np.asarray(numbers)
    return list(values) if array.dtype == object else torch.as_tensor(array)  # an int beyond 64 bits


def concatenate_values(key: str, values: Sequence[Any], *, unit: int = 0) -> Tensor:
    """Tensors, arrays or lists of some rows, joined on the first dimension (pixel_values, image_grid_thw).

    A value of rank `unit` is one image or clip, and becomes a row of its own.
    """
    held = {b: value for b, value in enumerate(values) if value is not None}
    tensors = {b: value if isinstance(value, Tensor) else host_tensor(key, value) for b, value in held.items()}
    try:
        return torch.cat([tensor[None] if tensor.ndim == unit else tensor for tensor in tensors.values()])
    except RuntimeError as error:
        rows = [(b, shape_of(tensor)) for b, tensor in tensors.items()]
        rule = f"Vision values of a batch are joined on their first dimension ({str(error).splitlines()[0]})."
        raise CollateError(explain_rows(key, rows, rule, "Give all samples the same trailing shape.")) from None


# --- own masks: which tokens of a sample are real, by its own mask, packing ids and `seq_lengths`, which must agree


def joined_segment_ids(rows: Sequence[Array]) -> Array:
    """Segment ids of samples one after another in one row: their sequences are numbered on."""
    before = np.cumsum([0, *(row.max(initial=0) for row in rows)])
    return np.concatenate([np.where(row > 0, row + n, 0) for row, n in zip(rows, before)])


def own_segments(columns: Mapping[str, list[Any]], lengths: list[int], positions: Sequence[Any] = ()) -> list[Array] | None:
    """Segment ids `[L]` of each sample by the keys of its truth, numbered 1, 2, ... in order; None where every sample is one
    sequence without holes. Positions `[L]` that restart part what nothing else parts."""
    told = _told(columns, lengths)
    parted = told is not None and any(row.max(initial=0) > 1 for row in told)
    if parted or [len(row) if rank_of(row) == 1 else -1 for row in positions] != lengths:
        return told
    width = max(lengths)
    real = [np.ones(n, np.int32) for n in lengths] if told is None else told
    known = Segments.from_ids(pad_rows("attention_mask", real, width=width))
    found = parted_by_positions(pad_rows("position_ids", positions, width=width).numpy(), known, padding_free=False)
    return told if found is None or not found[0].packed else [row[:n] for row, n in zip(found[0].array, lengths)]


def _told(columns: Mapping[str, list[Any]], lengths: list[int]) -> list[Array] | None:
    masks = [key for key in columns if key != "seq_lengths"]
    if all(_all_real(columns[key], lengths) for key in masks):
        masks = []
    sources = {key: _mask_ids(key, columns[key], lengths) for key in masks}
    if "seq_lengths" in columns:
        sources["seq_lengths"] = _lengths_ids(columns["seq_lengths"], lengths)
    if not sources:
        return None
    _check_agreement(sources)
    rows = [np.stack(row) for row in zip(*sources.values())]
    ids = [np.where((row > 0).all(axis=0), row.max(axis=0), 0) for row in rows]
    numbered_BS = renumber(pad_rows("attention_mask", ids, width=max(lengths, default=0)).numpy())
    return [row[:n].astype(np.int32) for row, n in zip(numbered_BS, lengths)]


def _all_real(column: list[Any], lengths: list[int]) -> bool:
    """Ones throughout, as tokenizers emit them, say what the lengths say."""
    for row, length in zip(column, lengths):
        if isinstance(row, (list, tuple)):
            try:
                if not row.count(1) == len(row) == length:
                    return False
            except (RuntimeError, ValueError):  # an array in the list is not one number
                return False
        elif not (isinstance(row, (np.ndarray, Tensor)) and row.shape == (length,) and bool((row == 1).all())):
            return False
    return True


def _check_agreement(sources: Mapping[str, list[Array]]) -> None:
    """Masks must call the same tokens real; packing ids and lengths must part the sample at the same places."""
    masks = [name for name in sources if name != "seq_lengths"]
    parting = [n for n, rows in sources.items() if n == "seq_lengths" or any(ids.max(initial=0) > 1 for ids in rows)]
    for names, differ, got, rule in (
        (masks, _other_tokens, "another mask", "Both masks of a sample say which of its tokens are real."),
        (parting, _other_parts, "other sequences", "Packing ids and seq_lengths part a sample at the same places."),
    ):
        for name in names[1:]:
            pairs = enumerate(zip(sources[names[0]], sources[name]))
            if bad := [(b, f"{got} than {names[0]}") for b, (ids, others) in pairs if differ(ids, others).any()]:
                raise CollateError(explain_rows(name, bad, rule, "Keep one of them."))


def _other_tokens(ids: Array, others: Array) -> Any:
    return (ids > 0) != (others > 0)


def _other_parts(ids: Array, others: Array) -> Any:
    real = (ids > 0) & (others > 0)
    return (np.diff(ids[real]) != 0) != (np.diff(others[real]) != 0)


def _mask_ids(key: str, column: list[Any], lengths: list[int]) -> list[Array]:
    """A sample's own mask: 1 = real, 0 = hole, 1 1 2 2 0 = packed sequences."""
    if bad := [(b, f"{rank_of(row)} dimensions") for b, row in enumerate(column) if rank_of(row) != 1]:
        rule = "A sample's own mask is [L], one number for each token."
        raise CollateError(explain_rows(key, bad, rule, "Pass 4D masks of a whole batch through wrap_collator."))
    check_lengths(key, column, lengths)
    arrays = [host_array(key, row) for row in column]
    if wrong := [(b, f"values {np.unique(row)[:6].tolist()}") for b, row in enumerate(arrays) if not _is_ids(row)]:
        rule = "A sample's own mask holds 1 (real) and 0 (padding), or packing ids 1 1 2 2 0."
        raise CollateError(explain_rows(key, wrong, rule, "Convert additive masks with (mask == 0) first."))
    return [row.astype(np.int32) for row in arrays]


def _is_ids(row: Array) -> bool:
    return not row.size or (row.dtype.kind in "iubf" and bool((row >= 0).all() and (row == row.astype(np.int32)).all()))


def _lengths_ids(column: list[Any], lengths: list[int]) -> list[Array]:
    parts = [np.atleast_1d(host_array("seq_lengths", row)) for row in column]
    counts = [part.ndim == 1 and (part.dtype.kind in "iu" or not part.size) for part in parts]
    fits = [ok and all(0 <= m <= n for m in part) and part.sum() == n for ok, part, n in zip(counts, parts, lengths)]
    if bad := [(b, f"{part.tolist()[:8]}, which sum to {part.sum()}") for b, part in enumerate(parts) if not fits[b]]:
        rule = "seq_lengths of a sample are whole numbers that sum to its number of input_ids."
        raise CollateError(explain_rows("seq_lengths", bad, rule, "Count again after truncation."))
    return [np.repeat(np.arange(1, len(part) + 1, dtype=np.int32), part.astype(np.int64)) for part in parts]
