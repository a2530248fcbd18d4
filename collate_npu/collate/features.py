"""Features: what a list of samples holds, before any tensor: which keys, how many tokens, which of them are real.

What a key is follows from its row in `KEYS` and from the rank and dtype of its values, never from lengths that happen to
agree in one batch. One pass over the samples, O(B) for each key. Legend: B samples, L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from collate_npu.collate.columns import Features, columns_of
from collate_npu.collate.padding import are_flat, are_lists, are_ragged, check_lengths, is_ragged, on_host, whole_rows
from collate_npu.errors import CollateError, explain, explain_rows, shape_of
from collate_npu.host import Array, host_array
from collate_npu.keys import KEYS, SAMPLE, Key, of_kind

ColumnKind = Literal["tokens", "axes", "vision", "targets", "sample"]


_LOOKED_AT = 8
"""How many values of a long list of labels tell whether they are floats; the rest is checked where it is packed."""


class Samples(NamedTuple):
    """The columns of a batch of features, sorted by what becomes of them."""

    columns: dict[str, list[Any]]
    kinds: dict[str, ColumnKind]
    lengths: list[int]
    """Tokens of each sample, padding inside it included."""
    segment_ids: list[Array] | None
    """Segment ids `[L]` of each sample, or None where every sample is one sequence without holes."""


def read_features(features: Features, *, allow_empty: bool = False, keys: Mapping[str, Key] = KEYS) -> Samples:
    """Sort out the keys of B samples, handed over as `columns` takes them.

    Raises `CollateError` for every sample that cannot be one row of a batch.
    """
    columns = _columns(features, keys)
    lengths = _lengths(columns)
    truth = of_kind(columns, "truth", keys=keys)
    segment_ids = _own_segments(columns, lengths) if truth else None
    real = lengths if segment_ids is None else [int((row > 0).sum()) for row in segment_ids]
    if 0 in real and not allow_empty:
        rows = [(b, "no tokens") for b, n in enumerate(real) if not n]
        rule = "A row without real tokens has no logits, no loss and no last token."
        raise CollateError(explain_rows("input_ids", rows, rule, "Drop the samples, or pass allow_empty=True."))
    kinds = {key: _kind(key, column, lengths, keys) for key, column in columns.items() if key not in truth}
    columns = {key: columns[key] for key in kinds}
    return Samples(columns=columns, kinds=kinds, lengths=lengths, segment_ids=segment_ids)


def sample_segment_ids(features: Sequence[Mapping[str, Any]]) -> tuple[list[Array], list[Array] | None]:
    """Token ids and segment ids `[L]` of samples that some other collator pads, read as `read_features` reads them.

    No segment ids where every sample is one sequence without holes.
    """
    rows = [_joined(feature) if isinstance(feature, (list, tuple)) else feature for feature in features]
    named = [row for row in rows if isinstance(row, Mapping) and row.get("input_ids") is not None]
    if not named:
        return [], None
    columns = {"input_ids": [feature["input_ids"] for feature in named]}
    lengths = _lengths(columns)
    for key in of_kind(KEYS, "truth"):
        told = [feature.get(key) for feature in named]
        # A dense mask of a sample is the inner collator's to make a batch of; one that is missing says nothing.
        flat = all(row is None or _dimensions(row) == 1 or key == "seq_lengths" for row in told)
        if flat and any(row is not None for row in told):
            whole = [[n] if key == "seq_lengths" else [1] * n for n in lengths]
            columns[key] = [default if row is None else row for row, default in zip(told, whole)]
    return whole_rows("input_ids", columns["input_ids"]), _own_segments(columns, lengths)


def _joined(samples: Sequence[Any]) -> Mapping[str, Any]:
    """The samples that a packing sampler hands over for one row (axolotl 0.19.0 utils/collators/batching.py:139-166)."""
    ids, own = sample_segment_ids(samples)
    if not ids or len(ids) != len(samples):
        return {}
    return {"input_ids": np.concatenate(ids), "attention_mask": joined_segment_ids(own or list(map(np.ones_like, ids)))}


def joined_segment_ids(rows: Sequence[Array]) -> Array:
    """Segment ids of samples one after another in one row: their sequences are numbered on."""
    before = np.cumsum([0, *(row.max(initial=0) for row in rows)])
    return np.concatenate([np.where(row > 0, row + n, 0) for row, n in zip(rows, before)])


def _columns(features: Features, keys: Mapping[str, Key]) -> dict[str, list[Any]]:
    held = columns_of(features, keys)
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(["input_ids", *held]):
        column, key = held.get(name, []), _renamed(name)
        missing = [b for b, value in enumerate(column) if value is None]
        if len(missing) == len(column):
            if name == "input_ids":
                raise _no_tokens(held)
            continue
        if key in columns:
            rows = [(b, f"{name} too") for b in range(len(column))]
            raise CollateError(explain_rows("labels", rows, "A sample has one kind of label.", "Keep labels or label."))
        if missing and keys.get(name, SAMPLE).kind != "vision":
            rule = f"{name} stands in every sample or in none."
            remedy = "Fill it in, or drop it, where the sample is built."
            raise CollateError(explain_rows(name, [(b, "nothing") for b in missing], rule, remedy))
        known = keys.get(key, SAMPLE).kind
        columns[key] = on_host(column) if known in ("tokens", "positions", "truth") else column
    return columns


def _no_tokens(columns: Mapping[str, Any]) -> CollateError:
    """Preference data (TRL's `prompt_ids`, `chosen_ids`, `rejected_ids`) becomes rows in a collator of its own."""
    names = ", ".join(map(str, columns))
    rule = "A row of a batch is the input_ids of a sample, and no sample has any."
    remedy = (
        "Wrap the collator that makes rows of these columns: wrap_collator(DataCollatorForPreference(...), model=model)."
    )
    return CollateError(explain("input_ids", f"samples of {names or 'nothing'}", rule, remedy))


def _renamed(name: str) -> str:
    return "labels" if name in ("label", "label_ids") else name


def _lengths(columns: dict[str, list[Any]]) -> list[int]:
    rows = columns["input_ids"]
    flat = are_lists(rows) or are_flat(rows)
    bad = [] if flat else [(b, shape_of(row)) for b, row in enumerate(rows) if not _is_flat(row)]
    if bad:
        rule = "input_ids of one sample is a list, array or tensor [L] of token ids."
        raise CollateError(explain_rows("input_ids", bad, rule, "Drop the batch dimension; pass ids, not text."))
    return [len(row) for row in rows]


def _is_flat(row: Any) -> bool:
    return is_ragged(row) and getattr(row, "ndim", 1) == 1 and not (len(row) and is_ragged(row[0]))


def _kind(key: str, column: list[Any], lengths: list[int], keys: Mapping[str, Key]) -> ColumnKind:
    known = keys.get(key)
    if known is None:
        _refuse_unlisted_tokens(key, column, lengths)
        return "sample"
    if known.kind == "vision":
        return "vision"
    ragged = are_ragged(column)
    if known.role == "labels" and not ragged:
        return "sample"
    if known.role == "labels" and _is_targets(column, lengths):
        return "targets"
    if known.kind == "positions" and all(_rank(row) == 2 for row in column):
        _check_axes(key, column, lengths)
        return "axes"
    if known.kind in ("tokens", "positions"):
        if not ragged:
            bad = [(b, repr(row)[:40]) for b, row in enumerate(column) if not is_ragged(row)]
            rule = f"{key} has one value for each token of its row."
            raise CollateError(explain_rows(key, bad, rule, "Pass a list, an array or a tensor."))
        check_lengths(key, column, lengths)
        return "tokens"
    return "sample"


def _rank(row: Any) -> int:
    return row.ndim if isinstance(row, (np.ndarray, Tensor)) else 1 + int(bool(len(row)) and is_ragged(row[0]))


def _check_axes(key: str, column: list[Any], lengths: list[int]) -> None:
    """Multi-axis positions are `[axes, L]`, arrays or lists."""
    shapes = [np.shape(row) for row in column]
    bad = [
        (b, f"shape {list(shape)} beside {n} input_ids")
        for b, (shape, n) in enumerate(zip(shapes, lengths))
        if shape[-1] != n
    ]
    if bad or len({shape[0] for shape in shapes}) > 1:
        bad = bad or [(b, f"{shape[0]} axes") for b, shape in enumerate(shapes)]
        rule = "Positions of several axes are [axes, L], the same axes in every sample."
        raise CollateError(explain_rows(key, bad, rule, "Build them with the tokens, before collation."))


def _is_targets(column: list[Any], lengths: list[int]) -> bool:
    """Float labels are one vector of targets a sample (multi-label classification), not labels of tokens."""
    looked_at = slice(_LOOKED_AT if list(map(len, column)) == lengths else None)
    return all(len(row) and np.asarray(row[looked_at]).dtype.kind == "f" for row in column)


def _refuse_unlisted_tokens(key: str, column: list[Any], lengths: list[int]) -> None:
    """A key nobody listed is passed on as it is; a list that follows the tokens through unequal rows would stay unpadded."""
    ragged = all(is_ragged(row) for row in column)
    if ragged and len(set(lengths)) > 1 and all(len(row) == n for row, n in zip(column, lengths)) and _is_numeric(column[0]):
        rows = [(b, f"{len(row)} values, as many as input_ids") for b, row in enumerate(column)]
        rule = "Which keys have one value a token is listed, not guessed."
        remedy = f"Pass keys={{**KEYS, {key!r}: TOKENS}} (or SAMPLE, if it is none) from collate_npu.keys."
        raise CollateError(explain_rows(key, rows, rule, remedy))


def _is_numeric(row: Any) -> bool:
    while isinstance(row, (list, tuple)) and len(row):
        row = row[0]
    return isinstance(row, (bool, int, float, np.number, Tensor)) or (
        isinstance(row, np.ndarray) and row.dtype.kind in "iubf"
    )


# --- which tokens are real


def _own_segments(columns: dict[str, list[Any]], lengths: list[int]) -> list[Array] | None:
    """Segment ids of each sample from its own mask and sequence lengths, which must agree."""
    masks = [key for key in of_kind(columns, "truth") if key != "seq_lengths"]
    if all(_all_real(columns[key], lengths) for key in masks):
        masks = []
    sources = [_mask_ids(key, columns[key], lengths) for key in masks]
    _check_same_tokens(masks, sources)
    if "seq_lengths" in columns:
        sources.append(_lengths_ids(columns["seq_lengths"], lengths))
    if not sources:
        return None
    _check_same_parts(masks, sources)
    ids = sources[0]
    for other in sources[1:]:
        ids = [_merged(mine, theirs) for mine, theirs in zip(ids, other)]
    return ids


def _all_real(column: list[Any], lengths: list[int]) -> bool:
    """Ones throughout, as tokenizers emit them, say what the lengths say."""
    for row, length in zip(column, lengths):
        if isinstance(row, (list, tuple)):
            ones = row.count(1) == len(row) == length
        else:
            ones = isinstance(row, (np.ndarray, Tensor)) and row.shape == (length,) and bool((row == 1).all())
        if not ones:
            return False
    return True


def _merged(mine: Array, theirs: Array) -> Array:
    merged: Array = np.where((mine > 0) & (theirs > 0), np.maximum(mine, theirs), 0)
    return merged


def _check_same_tokens(masks: list[str], sources: list[list[Array]]) -> None:
    for key, source in list(zip(masks, sources))[1:]:
        pairs = enumerate(zip(sources[0], source))
        bad = [(b, f"another mask than {masks[0]}") for b, (x, y) in pairs if ((x > 0) != (y > 0)).any()]
        if bad:
            rule = "Both masks of a sample say which of its tokens are real."
            raise CollateError(explain_rows(key, bad, rule, "Keep one of them."))


def _check_same_parts(masks: list[str], sources: list[list[Array]]) -> None:
    """Packing ids and lengths, each of which parts the sample, must part it at the same places."""
    names = [*masks, "seq_lengths"][: len(sources)]
    parting = [(n, s) for n, s in zip(names, sources) if n == "seq_lengths" or any(ids.max(initial=0) > 1 for ids in s)]
    for name, source in parting[1:]:
        bad = [
            (b, f"other sequences than {parting[0][0]}") for b, ids in enumerate(source) if _differ(parting[0][1][b], ids)
        ]
        if bad:
            rule = "Packing ids and seq_lengths part a sample at the same places."
            raise CollateError(explain_rows(name, bad, rule, "Keep one of them."))


def _differ(ids: Array, cut: Array) -> bool:
    real = (ids > 0) & (cut > 0)
    return bool(((np.diff(ids[real]) != 0) != (np.diff(cut[real]) != 0)).any())


def _mask_ids(key: str, column: list[Any], lengths: list[int]) -> list[Array]:
    """A sample's own mask: 1 = real, 0 = hole, 1 1 2 2 0 = packed sequences."""
    bad = [(b, f"{_dimensions(row)} dimensions") for b, row in enumerate(column) if _dimensions(row) != 1]
    if bad:
        rule = "A sample's own mask is [L], one number for each token."
        raise CollateError(explain_rows(key, bad, rule, "Pass 4D masks of a whole batch through wrap_collator."))
    check_lengths(key, column, lengths)
    arrays = [host_array(key, row) for row in column]
    wrong = [(b, f"values {np.unique(row)[:6].tolist()}") for b, row in enumerate(arrays) if not _is_ids(row)]
    if wrong:
        rule = "A sample's own mask holds 1 (real) and 0 (padding), or packing ids 1 1 2 2 0."
        raise CollateError(explain_rows(key, wrong, rule, "Convert additive masks with (mask == 0) first."))
    return [row.astype(np.int32) for row in arrays]


def _dimensions(row: Any) -> int:
    return row.ndim if isinstance(row, (np.ndarray, Tensor)) else 0 if not is_ragged(row) else _rank(row)


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
