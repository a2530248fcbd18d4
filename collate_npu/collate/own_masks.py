"""Own masks: which tokens of a sample are real, by its own mask, packing ids and `seq_lengths`, which must agree.

Legend: B samples, L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, host_array, renumber
from collate_npu.collate.padding import check_lengths, pad_rows, rank_of
from collate_npu.errors import CollateError, explain_rows
from collate_npu.masks.offsets import parted_by_positions
from collate_npu.segments import Segments


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
