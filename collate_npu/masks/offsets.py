"""Offsets: the sequences of one flat row by the numbers that kernels take, real and physical ones kept apart.

Physical offsets say where sequences stand in the row, real ones how many tokens each has: `0 4 8` and `0 3 5` for two
sequences of 3 and 2, each padded to 4 (Megatron's core/packed_seq_params.py). Legend: B rows, S width, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collate_npu.errors import CollateError, explain, explain_rows
from collate_npu.host import Array, host_array
from collate_npu.keys import KEYS, with_role
from collate_npu.segments import Segments

_REMEDY = "Keep one set of them, of this very batch: a collator or a split may have left old ones behind."


def segments_from_offsets(batch: Mapping[str, Any], shape: tuple[int, int]) -> tuple[str, Segments] | None:
    """The key that tells, and the `Segments` of the offsets, lengths and sequence numbers of a batch; None without any.

    Of a padded batch of several rows they say nothing of places: their lengths are checked where a mask tells the rest.
    Raises `CollateError` where two of them differ, or they do not fit the row.
    """
    offsets = _read(batch)
    lengths = _lengths(batch)
    B, S = shape
    if B != 1 or not offsets:
        return _from_lengths(lengths, shape) if lengths is not None else None
    name, physical, real = _kept_apart(offsets)
    if physical[-1] > S:
        rule = f"The row has {S} tokens."
        raise CollateError(explain(name, f"offsets up to {physical[-1]}", rule, _REMEDY))
    real_N = _real_lengths(name, physical, real, lengths)
    starts_N, held = physical[:-1], real_N > 0
    if np.array_equal(starts_N[held], np.cumsum(real_N[held]) - real_N[held]):
        return name, Segments.laid_out([real_N[held].tolist()], S)
    ids_S = np.zeros(S, np.int64)
    for n, (start, length) in enumerate(zip(starts_N[held].tolist(), real_N[held].tolist()), start=1):
        ids_S[start : start + length] = n
    return name, Segments.numbered(ids_S[None])


def check_offsets(batch: Mapping[str, Any], segments: Segments) -> None:
    """Raise where the lengths or sequence numbers of a batch speak of other sequences than its `Segments`."""
    lengths = _lengths(batch)
    if lengths is not None:
        rows = lengths if len(lengths) == segments.shape[0] else [[n for row in lengths for n in row]]
        held = enumerate(zip(rows, segments.lengths))
        bad = [(b, f"{row}, not {list(real)}") for b, (row, real) in held if [n for n in row if n] != list(real)]
        bad = [(b, text) for b, text in bad if len(rows[b]) > 1 or rows[b] != [segments.row_lengths[b]]]
        if bad:
            raise CollateError(explain_rows("seq_lens", bad, "Lengths count the real tokens of each sequence.", _REMEDY))
    for key in with_role(batch, "sequence_index"):
        if batch[key] is not None:
            _check_numbers(key, host_array(key, batch[key]), segments)


def _read(batch: Mapping[str, Any]) -> dict[str, Array]:
    params = batch.get("packed_seq_params")
    named = {key: batch[key] for key in with_role(batch, "offsets", "padded_offsets")}
    listed = () if params is None else with_role(KEYS, "offsets", "padded_offsets")
    found = {**{f"packed_seq_params.{key}": getattr(params, key, None) for key in listed}, **named}
    read = {key: host_array(key, value).astype(np.int64) for key, value in found.items() if value is not None}
    for key, ends in read.items():
        if ends.ndim != 1 or not len(ends) or ends[0] != 0 or (np.diff(ends) < 0).any():
            rule = "Offsets are one row of numbers: 0 first, then the end of each sequence, never falling."
            remedy = "torch_npu's actual_seq_qlen has no leading 0: put one in front."
            raise CollateError(explain(key, str(ends.tolist())[:80], rule, remedy))
    return read


def _lengths(batch: Mapping[str, Any]) -> list[list[int]] | None:
    """`seq_lens`, as one list of lengths for each row; a flat list is of one row, or one length for each row."""
    held = next((batch[key] for key in with_role(batch, "lengths") if batch[key] is not None), None)
    if held is None:
        return None
    rows = held if isinstance(held, (list, tuple)) else host_array("seq_lens", held).tolist()
    return [list(map(int, row)) if isinstance(row, (list, tuple)) else [int(row)] for row in rows]


def _from_lengths(lengths: list[list[int]], shape: tuple[int, int]) -> tuple[str, Segments] | None:
    """Lengths tell the batch alone only where nothing is padding; else a mask tells where they stand."""
    B, S = shape
    rows = lengths if len(lengths) == B else [[n for row in lengths for n in row]] if B == 1 else []
    if not rows:
        rule = f"The batch has {B} rows."
        raise CollateError(explain("seq_lens", f"{len(lengths)} entries", rule, _REMEDY))
    return ("seq_lens", Segments.from_lengths(rows, S)) if all(sum(row) == S for row in rows) else None


def _kept_apart(offsets: dict[str, Array]) -> tuple[str, Array, Array | None]:
    """`(key, physical, real or None)`; every offset must be one of the two."""
    padded = {key for key in offsets if key.endswith("padded")}
    name = next((key for key in offsets if key in padded), next(iter(offsets)))
    physical = offsets[name]
    others = {key: ends for key, ends in offsets.items() if not np.array_equal(ends, physical)}
    real_name, real = next(iter(others.items()), ("", None))
    for key, ends in others.items():
        if not padded or key in padded or real is None or not np.array_equal(ends, real) or len(ends) != len(physical):
            rule = f"It differs from {name}, {physical.tolist()[:8]}" + (
                f", and from {real_name}." if key != real_name else "."
            )
            raise CollateError(explain(key, str(ends.tolist()[:8]), rule, _REMEDY))
    return name, physical, real


def _real_lengths(name: str, physical: Array, real: Array | None, lengths: list[list[int]] | None) -> Array:
    places_N = np.diff(physical)
    real_N = places_N if real is None else np.diff(real)
    if lengths is not None:
        told_N = np.array([n for row in lengths for n in row if n], np.int64)
        held_N = real_N[real_N > 0]
        tail = real is None and len(told_N) == len(held_N) - 1 and np.array_equal(told_N, held_N[:-1])
        padded = real is None and len(told_N) == len(held_N) and (told_N <= held_N).all()
        if not (tail or padded or np.array_equal(told_N, held_N)):
            rule = f"{name} says {held_N.tolist()[:8]}."
            raise CollateError(explain("seq_lens", str(told_N.tolist()[:8]), rule, _REMEDY))
        real_N = real_N.copy()
        real_N[real_N > 0] = np.append(told_N, 0) if tail else told_N
    if (real_N > places_N).any():
        rule = f"{name} leaves room for {places_N.tolist()[:8]}."
        raise CollateError(explain("cu_seqlens", f"lengths {real_N.tolist()[:8]}", rule, _REMEDY))
    return real_N


def _check_numbers(key: str, numbers_BS: Array, segments: Segments) -> None:
    """`seq_idx` changes where a new sequence begins, for the layers that read it instead of offsets."""
    same = numbers_BS.shape == segments.shape
    rows = zip(numbers_BS, segments.array) if same else ()
    if not same or any(((np.diff(n[ids > 0]) != 0) != (np.diff(ids[ids > 0]) != 0)).any() for n, ids in rows):
        rule = "It numbers other sequences than the rest of the batch tells."
        raise CollateError(explain(key, str(numbers_BS.tolist())[:80], rule, _REMEDY))
