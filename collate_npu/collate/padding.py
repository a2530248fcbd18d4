"""Padding: ragged rows to one tensor of one width, or to one flat row.

Buffers are allocated once by numpy (huge pages where the system has them) and written once; lists of ints go through
`struct`, which checks each value for free and is several times faster than `torch.tensor(list)`.

Legend: B batch rows, S width, T tokens, F trailing dimensions of a token's value (routed_experts: layers, experts).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain_rows, shape_of
from collate_npu.segments import Side

Array = npt.NDArray[Any]
Row = Sequence[Any] | Array | Tensor

STRUCT_LIMIT = 1 << 15
"""Longest list packed in one call: beyond it the argument tuple is a fresh mapping and page faults take over."""


def round_up(value: int, multiple: int | None) -> int:
    """The next multiple, or the value itself for None."""
    return value if not multiple else -(-value // multiple) * multiple


def is_ragged(value: Any) -> bool:
    """May this be one value a token: a list, a tuple, an array or a tensor with a first dimension?"""
    return isinstance(value, (list, tuple)) or (isinstance(value, (np.ndarray, Tensor)) and value.ndim > 0)


def pad_rows(
    key: str, rows: Sequence[Row], *, width: int, side: Side = "right", fill: float = 0, whole: bool = False
) -> Tensor:
    """Rows of `[length, ...F]` to `[B, width, ...F]`, padded with `fill` on one side. Inverse of `unpad` with the lengths.

    int64 for lists of ints (and for `whole` numbers), float32 for lists of floats, the common dtype of arrays.
    """
    arrays = _arrays(key, rows, whole)
    out = np.empty((len(rows), width, *_trailing(key, arrays)), _dtype(arrays, whole))
    places = []
    for b, row in enumerate(arrays):
        start, stop = (0, len(row)) if side == "right" else (width - len(row), width)
        out[b, :start], out[b, stop:] = fill, fill
        places.append(out[b, start:stop])
    _write(key, places, arrays)
    return torch.from_numpy(out)


def flatten_rows(key: str, rows: Sequence[Row], *, width: int, fill: float = 0, whole: bool = False) -> Tensor:
    """Rows of `[length, ...F]` to one row `[1, width, ...F]`, one after another, `fill` in the tail."""
    arrays = _arrays(key, rows, whole)
    out = np.empty((1, width, *_trailing(key, arrays)), _dtype(arrays, whole))
    ends = np.cumsum([len(row) for row in arrays]).tolist()
    out[0, ends[-1] if ends else 0 :] = fill
    _write(key, [out[0, end - len(row) : end] for end, row in zip(ends, arrays)], arrays)
    return torch.from_numpy(out)


def pad_positions(rows: Sequence[Row], *, width: int, side: Side = "right") -> Tensor:
    """Multi-axis positions (mRoPE), rows of `[axes, length]`, to `[axes, B, width]`, 0 at padding."""
    padded = pad_rows("position_ids", [_tokens_first(row) for row in rows], width=width, side=side, whole=True)
    return padded.movedim(-1, 0).contiguous()


def flatten_positions(rows: Sequence[Row], *, width: int) -> Tensor:
    """Multi-axis positions of samples that stand in one row, `[axes, 1, width]`, 0 in the tail."""
    return flatten_rows("position_ids", list(map(_tokens_first, rows)), width=width, whole=True).movedim(-1, 0).contiguous()


def _tokens_first(row: Row) -> Array:
    return np.ascontiguousarray(np.moveaxis(np.asarray(row), 0, -1))


def check_lengths(key: str, rows: Sequence[Row], lengths: Sequence[int]) -> None:
    """Raise where a row of this key has another length than the row's `input_ids`."""
    bad = [
        (b, f"{len(row)} values beside {length} input_ids")
        for b, (row, length) in enumerate(zip(rows, lengths))
        if len(row) != length
    ]
    if bad:
        longer = key.startswith("attention_mask") and any(len(rows[b]) > lengths[b] for b, _ in bad)
        rule = "A mask is as long as its row." if longer else f"{key} has one value for each token of its row."
        raise CollateError(explain_rows(key, bad, rule, "Cut or build both together, before collation."))


def _arrays(key: str, rows: Sequence[Row], whole: bool) -> list[Sequence[Any] | Array]:
    """Tensors as arrays, nested lists as arrays, flat lists as they are (struct reads them)."""
    arrays: list[Sequence[Any] | Array] = []
    bad: list[tuple[int, str]] = []
    for b, row in enumerate(rows):
        try:
            arrays.append(_array(row, whole))
        except ValueError:
            bad.append((b, "nested lists of unequal length"))
            continue
        if not _is_number(arrays[-1], whole):
            bad.append((b, _kind(arrays[-1])))
    if bad:
        lists = [(b, _first_bad(row)) for b, row in enumerate(rows) if isinstance(row, (list, tuple))]
        bad += [(b, text) for b, text in lists if text and b not in dict(bad)]
        rule = f"{key} holds {'whole numbers' if whole else 'numbers'}, one for each token."
        raise CollateError(explain_rows(key, bad, rule, "Convert them where the sample is built."))
    return arrays


def _array(row: Row, whole: bool) -> Sequence[Any] | Array:
    if isinstance(row, Tensor):
        host = row.detach().cpu()
        return (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    if isinstance(row, np.ndarray):
        return row
    nested = bool(len(row)) and isinstance(row[0], (list, tuple, np.ndarray, Tensor))
    return row if whole and not nested else np.asarray(row)


def _is_number(row: Sequence[Any] | Array, whole: bool) -> bool:
    kinds = "iub" if whole else "iubf"
    if not isinstance(row, np.ndarray) or not row.size:
        return True
    wraps = row.dtype.kind == "u" and row.dtype.itemsize == 8 and row.max() > np.iinfo(np.int64).max
    return row.dtype.kind in kinds and not wraps


def _kind(row: Sequence[Any] | Array) -> str:
    return f"{shape_of(row)} starting {np.asarray(row).reshape(-1)[:3].tolist()}"


def _trailing(key: str, arrays: Sequence[Sequence[Any] | Array]) -> tuple[int, ...]:
    shapes = [row.shape[1:] if isinstance(row, np.ndarray) else () for row in arrays]
    if len({shape for shape, row in zip(shapes, arrays) if len(row)}) > 1:
        rows = [(b, f"values of shape {list(shape)}") for b, shape in enumerate(shapes)]
        rule = "All rows of a key have the same number of dimensions, and equal trailing ones."
        raise CollateError(explain_rows(key, rows, rule, "Give each token one value of the same shape in every row."))
    return next((shape for shape, row in zip(shapes, arrays) if len(row)), ())


def _dtype(arrays: Sequence[Sequence[Any] | Array], whole: bool) -> npt.DTypeLike:
    found = {row.dtype if isinstance(row, np.ndarray) else np.dtype(np.int64) for row in arrays if len(row)}
    if whole or not found:
        return np.int64
    common = np.result_type(*found)
    return np.float32 if common == np.float64 else common


def _write(key: str, places: Sequence[Array], arrays: Sequence[Sequence[Any] | Array]) -> None:
    bad = []
    for b, (place, row) in enumerate(zip(places, arrays)):
        if isinstance(row, np.ndarray):
            place[:] = row
            continue
        try:
            _pack(place, row)
        except struct.error:
            bad.append((b, _first_bad(row) or repr(row[:3])))
    if bad:
        rule = f"{key} holds whole numbers of at most 64 bits."
        raise CollateError(explain_rows(key, bad, rule, "Convert them where the sample is built."))


def _pack(place: Array, row: Sequence[Any]) -> None:
    for start in range(0, len(row), STRUCT_LIMIT):
        part = row[start : start + STRUCT_LIMIT]
        struct.pack_into(f"={len(part)}q", place.data, start * 8, *part)


def _first_bad(row: Sequence[Any]) -> str:
    for at, value in enumerate(row):
        try:
            struct.pack("q", value)
        except struct.error:
            return f"{value!r} at token {at}"
    return ""


def stack_values(key: str, values: Sequence[Any]) -> Any:
    """One value a sample: numbers and 0-d tensors become `[B]`, everything else a list of B."""
    if all(isinstance(v, (bool, int, float, np.number)) or (isinstance(v, Tensor) and v.ndim == 0) for v in values):
        return torch.as_tensor(np.asarray([v.item() if isinstance(v, (Tensor, np.number)) else v for v in values]))
    return list(values)


def concatenate_values(key: str, values: Sequence[Any], *, unit: int = 0) -> Tensor:
    """Tensors, arrays or lists of some rows, joined on the first dimension (pixel_values, image_grid_thw).

    A value of rank `unit` is one image or clip, and becomes a row of its own.
    """
    tensors = {
        b: torch.as_tensor(np.asarray(value) if isinstance(value, list) else value)
        for b, value in enumerate(values)
        if value is not None
    }
    try:
        return torch.cat([tensor[None] if tensor.ndim == unit else tensor for tensor in tensors.values()])
    except RuntimeError as error:
        rows = [(b, shape_of(tensor)) for b, tensor in tensors.items()]
        rule = f"Vision values of a batch are joined on their first dimension ({str(error).splitlines()[0]})."
        raise CollateError(explain_rows(key, rows, rule, "Give all samples the same trailing shape.")) from None
