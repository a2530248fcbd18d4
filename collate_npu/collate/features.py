"""Features: what a list of samples holds, before any tensor: which keys, how many tokens, which of them are real.

One pass over the samples, O(B) for each key; values are not touched. Legend: B samples, L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from collate_npu.collate.padding import WHOLE_NUMBER_KEYS, check_lengths, is_ragged
from collate_npu.errors import CollateError, explain, explain_rows, shape_of

Array = npt.NDArray[Any]
Kind = Literal["tokens", "axes", "vision", "values"]

TOKEN_KEYS = WHOLE_NUMBER_KEYS | {"loss_scale", "loss_mask", "completion_mask", "routed_experts", "mm_token_type_ids"}
"""Always one value a token: another length is an error, never a reason to pass the key on as a list."""
VISION_KEYS = frozenset(
    {"pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "input_features", "second_per_grid_ts"}
)
"""Joined on their first dimension, from the samples that have them."""
TRUTH_KEYS = ("attention_mask", "attention_mask_2d", "seq_lengths")
"""Read as the truth of a sample, and not passed on as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The columns of a batch of features, sorted by what becomes of them."""

    columns: dict[str, list[Any]]
    kinds: dict[str, Kind]
    lengths: list[int]
    """Tokens of each sample, padding inside it included."""
    ids: list[Array] | None
    """Segment ids `[L]` of each sample, or None where every sample is one sequence without holes."""


def read_features(features: Sequence[Mapping[str, Any]], *, allow_empty: bool = False) -> Samples:
    """Sort out the keys of B samples. Raises `CollateError` for every sample that cannot be one row of a batch."""
    columns = _columns(features)
    lengths = _lengths(columns)
    ids = _truth(columns, lengths)
    real = lengths if ids is None else [int((row > 0).sum()) for row in ids]
    if 0 in real and not allow_empty:
        rows = [(b, "no tokens") for b, n in enumerate(real) if not n]
        rule = "A row without real tokens has no logits, no loss and no last token."
        raise CollateError(explain_rows("input_ids", rows, rule, "Drop the samples, or pass allow_empty=True."))
    columns = {key: column for key, column in columns.items() if key not in TRUTH_KEYS}
    kinds = {key: _kind(key, column, lengths) for key, column in columns.items()}
    return Samples(columns=columns, kinds=kinds, lengths=lengths, ids=ids)


def _columns(features: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    if not features or not all(isinstance(feature, Mapping) for feature in features):
        got = "no samples" if not features else f"a {type(next(iter(features))).__name__}"
        rule = "A batch is built from one or more dicts of features."
        raise CollateError(explain("features", got, rule, "Check the dataset and the sampler."))
    names = list(dict.fromkeys(["input_ids", *(key for feature in features for key in feature)]))
    columns: dict[str, list[Any]] = {}
    for name in names:
        column = [feature.get(name) for feature in features]
        missing = [(b, "nothing") for b, value in enumerate(column) if value is None]
        if len(missing) == len(features) and name != "input_ids":
            continue
        if _renamed(name) in columns:
            rows = [(b, f"{name} too") for b in range(len(features))]
            raise CollateError(explain_rows("labels", rows, "A sample has one kind of label.", "Keep labels or label."))
        if missing and name not in VISION_KEYS:
            rule = f"{name} stands in every sample or in none."
            raise CollateError(explain_rows(name, missing, rule, "Fill it in, or drop it, where the sample is built."))
        columns[_renamed(name)] = column
    return columns


def _renamed(name: str) -> str:
    return "labels" if name in ("label", "label_ids") else name


def _lengths(columns: dict[str, list[Any]]) -> list[int]:
    rows = columns["input_ids"]
    bad = [(b, shape_of(row)) for b, row in enumerate(rows) if not _is_flat(row)]
    if bad:
        rule = "input_ids of one sample is a list, array or tensor [L] of token ids."
        raise CollateError(explain_rows("input_ids", bad, rule, "Drop the batch dimension; pass ids, not text."))
    return [len(row) for row in rows]


def _is_flat(row: Any) -> bool:
    return is_ragged(row) and getattr(row, "ndim", 1) == 1 and not (len(row) and is_ragged(row[0]))


def _kind(key: str, column: list[Any], lengths: list[int]) -> Kind:
    if key in VISION_KEYS:
        return "vision"
    if key == "position_ids" and all(_is_axes(row, n) for row, n in zip(column, lengths)):
        return "axes"
    ragged = all(is_ragged(row) for row in column)
    if key in TOKEN_KEYS and ragged and not (key == "labels" and _is_targets(column)):
        check_lengths(key, column, lengths)
        return "tokens"
    if ragged and all(len(row) == n for row, n in zip(column, lengths)) and all(_is_numeric(row) for row in column):
        return "tokens"
    return "values"


def _is_axes(row: Any, length: int) -> bool:
    return isinstance(row, (np.ndarray, Tensor)) and row.ndim == 2 and row.shape[1] == length


def _is_targets(column: list[Any]) -> bool:
    """Float labels are one vector of targets a sample (multi-label classification), not labels of tokens."""
    return all(np.asarray(row).dtype.kind == "f" and np.asarray(row).size for row in column)


def _is_numeric(row: Any) -> bool:
    if isinstance(row, (np.ndarray, Tensor)):
        return isinstance(row, Tensor) or row.dtype.kind in "iubf"
    while isinstance(row, (list, tuple)) and len(row):
        row = row[0]
    return isinstance(row, (bool, int, float, np.number, np.ndarray, Tensor))


# --- truth


def _truth(columns: dict[str, list[Any]], lengths: list[int]) -> list[Array] | None:
    """Segment ids of each sample from its own mask and sequence lengths, which must agree."""
    sources = [_mask_ids(key, columns[key], lengths) for key in TRUTH_KEYS[:2] if key in columns]
    if "seq_lengths" in columns:
        sources.append(_lengths_ids(columns["seq_lengths"], lengths))
    if not sources:
        return None
    _check_agreement(columns, sources)
    ids = sources[0]
    for other in sources[1:]:
        ids = [_merged(mine, theirs) for mine, theirs in zip(ids, other)]
    return ids


def _merged(mine: Array, theirs: Array) -> Array:
    merged: Array = np.where((mine > 0) & (theirs > 0), np.maximum(mine, theirs), 0)
    return merged


def _check_agreement(columns: dict[str, list[Any]], sources: list[list[Array]]) -> None:
    if "attention_mask" in columns and "attention_mask_2d" in columns:
        pairs = enumerate(zip(sources[0], sources[1]))
        bad = [(b, "another mask than attention_mask") for b, (x, y) in pairs if ((x > 0) != (y > 0)).any()]
        if bad:
            rule = "Both masks of a sample say which of its tokens are real."
            raise CollateError(explain_rows("attention_mask_2d", bad, rule, "Keep one of them."))
    if "seq_lengths" in columns:
        masks = [source for source in sources[:-1] if any(ids.max(initial=0) > 1 for ids in source)]
        wrong = {b for source in masks for b, ids in enumerate(source) if _differ(ids, sources[-1][b])}
        bad = [(b, "other sequences than the packing ids") for b in wrong]
        if bad:
            rule = "Packing ids and seq_lengths cut a sample at the same places."
            raise CollateError(explain_rows("seq_lengths", bad, rule, "Keep one of them."))


def _differ(ids: Array, cut: Array) -> bool:
    real = ids > 0
    return bool(((np.diff(ids[real]) != 0) != (np.diff(cut[real]) != 0)).any())


def _mask_ids(key: str, column: list[Any], lengths: list[int]) -> list[Array]:
    """A sample's own mask: 1 = real, 0 = hole, 1 1 2 2 0 = packed sequences."""
    bad = [(b, f"{np.ndim(row)} dimensions") for b, row in enumerate(column) if np.ndim(row) != 1]
    if bad:
        rule = "A sample's own mask is [L], one number for each token."
        raise CollateError(explain_rows(key, bad, rule, "Pass 4D masks of a whole batch through wrap_collator."))
    check_lengths(key, column, lengths)
    arrays = [np.asarray(row) for row in column]
    wrong = [(b, f"values {np.unique(row)[:6].tolist()}") for b, row in enumerate(arrays) if not _is_ids(row)]
    if wrong:
        rule = "A sample's own mask holds 1 (real) and 0 (padding), or packing ids 1 1 2 2 0."
        raise CollateError(explain_rows(key, wrong, rule, "Convert additive masks with (mask == 0) first."))
    return [row.astype(np.int32) for row in arrays]


def _is_ids(row: Array) -> bool:
    return not row.size or (
        row.dtype.kind in "iubf" and bool((row >= 0).all()) and bool((row == row.astype(np.int32)).all())
    )


def _lengths_ids(column: list[Any], lengths: list[int]) -> list[Array]:
    parts = [np.atleast_1d(np.asarray(row)) for row in column]
    whole = [part.dtype.kind in "iu" and bool((part >= 0).all()) for part in parts]
    wrong = [b for b, part in enumerate(parts) if not whole[b] or part.sum() != lengths[b]]
    if wrong:
        bad = [(b, f"{parts[b].tolist()[:8]}, which sum to {parts[b].sum()}") for b in wrong]
        rule = "seq_lengths of a sample are whole numbers that sum to its number of input_ids."
        raise CollateError(explain_rows("seq_lengths", bad, rule, "Count again after truncation."))
    return [np.repeat(np.arange(1, len(part) + 1, dtype=np.int32), part) for part in parts]
