"""Columns: what a batch is collated from, as one list of B values a key, whoever holds it.

A list of samples; a table of Arrow, whose rows are slices of its buffers; a dict of columns, as a slice of a
`datasets.Dataset` is; or flat tokens, one row of values a key beside `seq_lengths`. What the values mean is for `features`.

Legend: B samples, T tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from operator import methodcaller
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.collate.padding import is_ragged
from collate_npu.errors import CollateError, explain, explain_rows, shape_of
from collate_npu.host import host_array
from collate_npu.keys import KEYS, SAMPLE, Key

Features = Sequence[Mapping[str, Any]] | Mapping[str, Any] | Any
"""Samples, columns, or whatever speaks Arrow's C interface (`pa.Table`, `pa.RecordBatch`, polars)."""

_KEYS = methodcaller("keys")
_RULE = "A batch is built from a list of one or more dicts of features, a dict of columns, or an Arrow table."
_FLAT = "Flat tokens are one row of values a key, and seq_lengths, the tokens of each sample."


def columns_of(features: Features, keys: Mapping[str, Key] = KEYS) -> dict[str, list[Any]]:
    """Each key with B values, None where a sample has none of it. Raises `CollateError` for what is no batch of samples."""
    if isinstance(features, list):
        return _of_samples(features)
    if hasattr(features, "__arrow_c_stream__") or hasattr(features, "__arrow_c_array__"):
        return _of_rows(_of_arrow(features, keys))
    if isinstance(features, Mapping):
        tokens = features.get("input_ids")
        return _of_flat(features, keys) if _is_flat(tokens) else _of_rows({k: _as_list(k, v) for k, v in features.items()})
    return _of_samples(features)


def _of_samples(samples: Any) -> dict[str, list[Any]]:
    if not isinstance(samples, (list, tuple, Sequence)) or isinstance(samples, (str, bytes)) or not len(samples):
        got = "no samples" if isinstance(samples, Sequence) and not samples else f"a {type(samples).__name__}"
        raise CollateError(explain("features", got, _RULE, "Check the dataset and the sampler."))
    if bad := [
        (b, f"a {type(sample).__name__}") for b, sample in enumerate(samples) if not isinstance(sample, (dict, Mapping))
    ]:
        raise CollateError(explain_rows("features", bad, _RULE, "Check the dataset and the sampler."))
    first = samples[0].keys()
    same = all(map(first.__eq__, map(_KEYS, samples)))
    names = first if same else dict.fromkeys(key for sample in samples for key in sample)
    return {name: [sample.get(name) for sample in samples] for name in names}


def _of_rows(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    counts = {name: len(column) for name, column in columns.items()}
    if not columns or not max(counts.values()):
        raise CollateError(explain("features", "no samples", _RULE, "Check the dataset and the sampler."))
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{name} {n}" for name, n in counts.items())
        rule = "Every column has one entry for each sample."
        raise CollateError(explain("features", got, rule, "Pass a list of samples, or columns of equal length."))
    return columns


def _as_list(name: str, column: Any) -> list[Any]:
    """The rows of an array or tensor are views of it."""
    if not is_ragged(column):
        remedy = "Pass a list of samples: one sample is a list of one."
        raise CollateError(explain(name, f"a {type(column).__name__}", "A column has one entry for each sample.", remedy))
    return list(column)


# --- Arrow


def _of_arrow(table: Any, keys: Mapping[str, Key]) -> dict[str, list[Any]]:
    pyarrow: Any = import_module("pyarrow")
    whole = table if isinstance(table, pyarrow.Table) else pyarrow.table(table)
    rows = {name: keys.get(name, SAMPLE).kind in ("tokens", "positions", "truth") for name in whole.column_names}
    return {name: _arrow_rows(whole[name]) if rows[name] else whole[name].to_pylist() for name in whole.column_names}


def _arrow_rows(column: Any) -> list[Any]:
    """Slices of the values where a column is lists of numbers without nulls; whatever else it is, Python's own values."""
    types: Any = import_module("pyarrow.types")
    kind = column.type
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)) or column.null_count:
        values: list[Any] = column.to_pylist()
        return values
    return [row for chunk in column.chunks for row in _chunk_rows(chunk, types.is_fixed_size_list(kind))]


def _chunk_rows(chunk: Any, fixed: bool) -> list[Any]:
    if chunk.values.null_count:
        values: list[Any] = chunk.to_pylist()
        return values
    numbers = chunk.values.to_numpy()  # what a slice of the chunk leaves out is in it, and its offsets know
    if fixed:
        size, first = chunk.type.list_size, chunk.offset
        return [numbers[n * size : (n + 1) * size] for n in range(first, first + len(chunk))]
    return [numbers[low:high] for low, high in pairwise(chunk.offsets.to_numpy().tolist())]


# --- flat tokens


def _is_flat(tokens: Any) -> bool:
    """One row of numbers, and not one row a sample."""
    if isinstance(tokens, (np.ndarray, Tensor)):
        return tokens.ndim == 1 and tokens.dtype != object
    return isinstance(tokens, (list, tuple)) and bool(tokens) and not is_ragged(tokens[0])


def _of_flat(columns: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, list[Any]]:
    parts = columns.get("seq_lengths")
    if parts is None:
        remedy = "Add seq_lengths [B]; a single sample is a list of one: [sample]."
        raise CollateError(explain("input_ids", shape_of(columns["input_ids"]), _FLAT, remedy))
    nested = isinstance(parts, (list, tuple)) and any(map(is_ragged, parts))
    lengths = [int(host_array("seq_lengths", part).sum()) for part in parts] if nested else _whole(parts)
    out = {"seq_lengths": list(parts)} if nested else {}
    for name, column in columns.items():
        if keys.get(name, SAMPLE).kind in ("tokens", "positions", "truth"):
            out |= {name: _cut(name, column, lengths)} if name != "seq_lengths" else {}
        else:
            out[name] = _as_list(name, column)
    return _of_rows(out)


def _whole(lengths: Any) -> list[int]:
    counts = host_array("seq_lengths", lengths)
    if counts.ndim != 1 or (counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0)):
        remedy = "Count the tokens of each sample."
        raise CollateError(explain("seq_lengths", f"{counts.tolist()}"[:80], _FLAT, remedy))
    whole: list[int] = counts.tolist()
    return whole


def _cut(name: str, values: Any, lengths: list[int]) -> list[Any]:
    if not is_ragged(values) or len(values) != sum(lengths):
        got = shape_of(values) if isinstance(values, (np.ndarray, Tensor)) else f"{len(values)} values"
        remedy = f"The lengths sum to {sum(lengths)}: cut both together."
        raise CollateError(explain(name, got, _FLAT, remedy))
    return [values[low:high] for low, high in pairwise(accumulate(lengths, initial=0))]
