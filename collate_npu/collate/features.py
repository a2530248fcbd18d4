"""Features: what a batch of samples holds, before any tensor: which keys, what each is, how many tokens.

Samples come as a list of dicts, or as a dict of columns, as a slice of a `datasets.Dataset` is. What a key is follows from
its row in `KEYS` and from the rank and dtype of its values, never from lengths that happen to agree in one batch. One pass
over the samples, O(B) for each key.

Legend: B samples, L tokens of one sample, T of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from os import PathLike
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, dims, entries, host_array
from collate_npu.collate.padding import ON_HOST, Rows, arrays_of, check_lengths, is_ragged, on_host, pad_rows, rank_of
from collate_npu.errors import CollateError, a_type, explain, explain_rows, refuse_rows, shape_of
from collate_npu.keys import KEEP_KEY, KEYS, MASK_KEY, SAMPLE, Key, of_kind
from collate_npu.masks.batch_reader import agreed
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments

Features = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Samples, or columns."""
ColumnKind = Literal["tokens", "axes", "vision", "targets", "sample"]

_RULE = "A batch is built from a list of one or more dicts of features, or a dict of columns."
_EMPTY = "A row without real tokens has no logits, no loss and no last token."
_LOAD = "Load the file, and tokenise it: datasets.load_dataset('json', data_files=path)."
_OF_TOKENS = (
    "Rename the column to input_ids. For Megatron's rows, of one length and with labels already shifted, use "
    "wrap_collator(torch.utils.data.default_collate)."
)
_BOOLS = np.dtype(bool)
_BOOL = "values that are true or false"
_LOOKED_AT = 8
"""How many values of a long list of labels are looked at for floats; the rest is checked where it is packed."""


class Samples(NamedTuple):
    """The columns of a batch of samples, and the kind of each."""

    columns: dict[str, Rows]
    kinds: dict[str, ColumnKind]
    lengths: list[int]
    """Tokens of each sample, padding inside it included."""
    segment_ids: list[Array] | None
    """Segment ids `[L]` of each sample, or None where every sample is one sequence without holes."""


def read_features(features: Features, *, keys: Mapping[str, Key] = KEYS) -> Samples:
    """Sort out the keys of B samples. Raises `CollateError` for every sample that cannot be one row of a batch."""
    columns = _columns(features, keys)
    lengths = _lengths(columns)
    truth = {key: column for key, column in columns.items() if key in keys and keys[key].kind == "truth"}
    held = {key: column for key, column in columns.items() if key not in truth} if truth else columns
    kinds = {key: _kind(key, column, lengths, keys) for key, column in held.items()}
    beside = {key: columns[key] for key in ("input_ids", "labels", "position_ids") if kinds.get(key) == "tokens"}
    segment_ids = own_segments(truth, lengths, beside) if truth or "position_ids" in beside else None
    if 0 in lengths:
        refuse_rows("input_ids", [(b, "no tokens") for b, n in enumerate(lengths) if not n], _EMPTY, "Drop the samples.")
    return Samples(columns=held, kinds=kinds, lengths=lengths, segment_ids=segment_ids)


def sample_segment_ids(features: Sequence[Mapping[str, Any]]) -> tuple[list[Array], list[Array] | None, list[Array] | None]:
    """Token ids, segment ids and labels `[L]` of samples that some other collator pads, read as `read_features` reads them.
    No segment ids where every sample is one sequence without holes."""
    if getattr(features, "batch_size", None) == torch.Size():  # a TensorDict without rows of its own
        return [], None, None
    rows = [_joined(feature) if isinstance(feature, (list, tuple)) else feature for feature in features]
    names = ("input_ids", "tokens")
    held = [(row, name) for row in rows if isinstance(row, Mapping) for name in names if row.get(name) is not None]
    if not held:
        return [], None, None
    name = held[0][1]
    named = [row for row, each in held if each == name]
    tokens = [feature[name] for feature in named]
    lengths = _lengths({"input_ids": Rows(tokens)})
    truth: dict[str, list[Any]] = {}
    for key in of_kind(KEYS, "truth"):
        values = [feature.get(key) for feature in named]
        # A dense mask of a sample is the inner collator's to make a batch of; one that is missing says nothing.
        flat = all(row is None or rank_of(row) == 1 or key == "seq_lengths" for row in values)
        if flat and any(row is not None for row in values):
            whole = [[n] if key == "seq_lengths" else [1] * n for n in lengths]
            truth[key] = [default if row is None else row for row, default in zip(values, whole)]
    labels, ids = Rows(filter(is_ragged, map(_labels_of, named))), Rows(tokens)
    labelled = labels.lengths == lengths and bool(labels.lists or labels.flat) and not _is_targets(labels, lengths)
    beside = {"input_ids": ids} | ({"labels": labels} if labelled and (ids.lists or ids.flat) else {})
    positions = Rows([row["position_ids"] for row in named if is_ragged(row.get("position_ids"))])
    beside |= {"position_ids": positions} if positions.lengths == lengths else {}
    held_labels = [np.asarray(row) for row in labels] if labelled else None
    return arrays_of(name, on_host(name, tokens), True), own_segments(truth, lengths, beside), held_labels


def _labels_of(row: Mapping[str, Any]) -> Any:
    """Return the labels of a sample, or those that its loss mask tells."""
    if row.get("labels") is not None or not is_ragged(row.get("loss_mask")) or row.get("input_ids") is None:
        return row.get("labels")
    weights, ids = np.asarray(row["loss_mask"]), np.asarray(row["input_ids"])
    return np.where(weights != 0, ids, -100) if weights.shape == ids.shape else None


def _joined(samples: Sequence[Any]) -> Mapping[str, Any]:
    """Return the samples that a packing sampler gives for one row (axolotl 0.19.0 utils/collators/batching.py:139-166)."""
    if len(samples) and isinstance(samples[0], int):  # as DataCollatorForLanguageModeling takes them
        return {"input_ids": samples}
    ids, own, _ = sample_segment_ids(samples)
    if not ids or len(ids) != len(samples):
        return {}
    return {"input_ids": np.concatenate(ids), "attention_mask": joined_segment_ids(own or list(map(np.ones_like, ids)))}


def _columns(features: Features, keys: Mapping[str, Key]) -> dict[str, Rows]:
    held = columns_of(features)
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(["input_ids", *held]):
        column, key = held.get(name, []), "labels" if name in ("label", "label_ids") else name
        missing = [b for b, value in enumerate(column) if value is None] if type(None) in set(map(type, column)) else []
        if len(missing) == len(column):
            if name == "input_ids":
                # Preference data (TRL's `chosen_ids`, `rejected_ids`) becomes rows in a collator of its own.
                rule, remedy = "Each sample needs input_ids, and no sample has any.", "Wrap the collator that makes rows of "
                remedy += "these columns: wrap_collator(inner, model=model)."
                if any(isinstance(rows[0], str) for rows in held.values()):
                    remedy = "Tokenise first: [tokenizer(text) for text in texts]."
                if "messages" in held:
                    remedy = "Apply the chat template first: tokenizer.apply_chat_template(messages, return_dict=True)."
                for key in (key for key, rows in held.items() if isinstance(rows[0], Mapping) and "input_ids" in rows[0]):
                    remedy = f"Pass sample[{key!r}] as the sample."
                got = f"samples with {', '.join(map(str, held)) or 'no keys'}"
                raise CollateError(explain("input_ids", got, rule, _OF_TOKENS if "tokens" in held else remedy))
            continue
        if key in columns:
            rows = [(b, f"{name} too") for b in range(len(column))]
            raise CollateError(explain_rows("labels", rows, "A sample has one kind of label.", "Keep labels or label."))
        if missing and keys.get(name, SAMPLE).kind != "vision":
            rule = f"Either every sample has {name}, or none has."
            remedy = "Fill it in, or drop it, where the sample is built."
            raise CollateError(explain_rows(name, [(b, "nothing") for b in missing], rule, remedy))
        columns[key] = column
    foreign = {key for key, column in columns.items() if not ON_HOST.issuperset(map(type, column))}
    by_token = {key for key in foreign if keys.get(key, SAMPLE).kind in ("tokens", "positions", "truth")}
    return {key: on_host(key, column) if key in by_token else Rows(column) for key, column in columns.items()}


def _lengths(columns: dict[str, Rows]) -> list[int]:
    rows = columns["input_ids"]
    if not (rows.lists or rows.flat):
        bad = [(b, shape_of(row)) for b, row in enumerate(rows) if rank_of(row) != 1]
        rule = "input_ids of one sample is a list, array or tensor [L] of token ids."
        refuse_rows("input_ids", bad, rule, "Pass ids, not text, without a batch dimension; one sample is a list of one.")
    if bool in rows.firsts if rows.lists else not rows.flat or _BOOLS in rows.flat:
        bad = [(b, _BOOL) for b, row in enumerate(rows) if np.asarray(row[:1]).dtype == bool]
        rule = "input_ids are whole numbers; a mask of the sample goes under attention_mask."
        refuse_rows("input_ids", bad, rule, "Pass the ids.")
    return rows.lengths


def _kind(key: str, column: Rows, lengths: list[int], keys: Mapping[str, Key]) -> ColumnKind:
    known = keys.get(key)
    if known is None:
        _refuse_unlisted_tokens(key, column, lengths)
        return "sample"
    if known.kind not in ("tokens", "positions"):
        return "vision" if known.kind == "vision" else "sample"
    if known.or_sample and not column.ragged:
        bad = [(b, a_type(row)) for b, row in enumerate(column) if not _is_numeric(row)]
        rule = f"{key} of a sample is a number, or one for each token."
        refuse_rows(key, bad, rule, "Give each class a number where the sample is built.")
        return "sample"
    if known.role == "labels" and (bool in column.firsts or _BOOLS in column.flat):
        rule, remedy = "A label is the id of a token, -100 where nothing is learned.", "np.where(learned, input_ids, -100)."
        raise CollateError(explain(key, _BOOL, rule, f"For a mask of learned tokens: {remedy}"))
    if known.role == "labels" and _is_targets(column, lengths):
        bad = [(b, f"{len(row)} numbers") for b, row in enumerate(column)] if len({len(row) for row in column}) > 1 else []
        refuse_rows(key, bad, "All samples have the same number of targets.", "Give one number for each class.")
        return "targets"
    if known.kind == "positions" and all(rank_of(row) == 2 for row in column):
        _check_axes(key, column, lengths)
        return "axes"
    if not column.ragged:
        bad = [(b, repr(row)[:40]) for b, row in enumerate(column) if not is_ragged(row)]
        rule = f"{key} has one value for each token of its row."
        raise CollateError(explain_rows(key, bad, rule, "Pass a list, an array or a tensor."))
    if column.lengths != lengths:
        check_lengths(key, column, lengths)
    return "tokens"


def _check_axes(key: str, column: list[Any], lengths: list[int]) -> None:
    """Multi-axis positions are `[axes, L]`, arrays or lists."""
    shapes = [host_array(key, row).shape for row in column]
    texts = [f"shape {list(shape)} beside {n} input_ids" for shape, n in zip(shapes, lengths)]
    bad = [(b, text) for b, text in enumerate(texts) if shapes[b][-1] != lengths[b]]
    bad = bad or [*enumerate(texts)] * (len({shape[0] for shape in shapes}) > 1)
    rule = "Positions of several axes are [axes, L], with as many axes in every sample."
    refuse_rows(key, bad, rule, "Build positions and tokens together, before collation.")


def _is_targets(column: Rows, lengths: list[int]) -> bool:
    """Float labels are one vector of targets a sample (multi-label classification), not labels of tokens."""
    if column.flat:
        return all(column.lengths) and {dtype.kind for dtype in column.flat} == {"f"}
    looked_at = slice(_LOOKED_AT if column.lengths == lengths else None)
    first = column[0][looked_at]
    if isinstance(first, list) and {*map(type, first)} <= {int}:
        return False
    with suppress(CollateError):  # raised where they are laid out, with their row
        return all(len(row) and host_array("labels", row[looked_at]).dtype.kind == "f" for row in column)
    return False


def _refuse_unlisted_tokens(key: str, column: list[Any], lengths: list[int]) -> None:
    """Refuse an unlisted key that has one value a token: it would stay unpadded."""
    ragged = all(is_ragged(row) for row in column)
    follows = ragged and len(set(lengths)) > 1 and all(len(row) == n for row, n in zip(column, lengths))
    if follows and _is_numeric(max(column, key=len)):
        rows = [(b, f"{len(row)} values, as many as input_ids") for b, row in enumerate(column)]
        rule = "collate_npu does not guess whether a key has one value for each token."
        remedy = f"Pass keys={{**KEYS, {key!r}: TOKENS}} (from collate_npu.keys), or SAMPLE in place of TOKENS."
        raise CollateError(explain_rows(key, rows, rule, remedy))


def _is_numeric(row: Any) -> bool:
    while isinstance(row, (list, tuple)) and len(row):
        row = row[0]
    return isinstance(row, (int, float, np.number, Tensor)) or (isinstance(row, np.ndarray) and row.dtype.kind in "iubf")


# --- columns, whoever holds them


def columns_of(features: Features) -> dict[str, list[Any]]:
    """Return each key with B values, None where a sample has none. Raises `CollateError` for what is no batch of samples."""
    if not isinstance(features, Mapping):
        return _of_samples(features)
    if type(features).__name__ == "LazyStackedTensorDict":  # its rows may differ in length, and in keys
        return _of_samples(list(features))
    columns = {name: _as_list(name, column) for name, column in entries(features).items()}
    counts = {name: len(column) for name, column in columns.items()}
    if not columns or not max(counts.values()):
        raise CollateError(explain("features", "no samples", _RULE, "Check the dataset and the sampler."))
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{name} {n}" for name, n in counts.items())
        rule = "Every column has one entry for each sample."
        raise CollateError(explain("features", got, rule, "Pass a list of samples, or columns of equal length."))
    return columns


def _of_samples(samples: Any) -> dict[str, list[Any]]:
    listed = type(samples) is list or (isinstance(samples, Sequence) and not isinstance(samples, (str, bytes)))
    if not listed or not samples:
        got = "no samples" if listed else a_type(samples)
        remedy = _LOAD if isinstance(samples, (str, PathLike)) else "Pass a list of samples: check dataset and sampler."
        remedy = "Pass table.to_pylist()." if hasattr(samples, "to_pylist") else remedy
        raise CollateError(explain("features", got, _RULE, remedy))
    if set(map(type, samples)) != {dict}:
        if bad := [(b, a_type(row)) for b, row in enumerate(samples) if not isinstance(row, Mapping)]:
            raise CollateError(explain_rows("features", bad, _RULE, _dicts_of(samples[bad[0][0]])))
        samples = list(map(entries, samples))
    first = samples[0].keys()
    same = all(map(first.__eq__, map(dict.keys, samples)))
    names = first if same else dict.fromkeys(key for sample in samples for key in sample)
    return {name: [sample.get(name) for sample in samples] for name in names}


def _as_list(name: str, column: Any) -> list[Any]:
    if not rank_of(column) and not getattr(column, "batch_size", ()):  # a TensorDict inside one has rows too
        remedy = "Pass a list of samples: one sample is a list of one."
        raise CollateError(explain(name, a_type(column), "A column has one entry for each sample.", remedy))
    try:
        return list(column.unbind(0) if hasattr(column, "unbind") else column)
    except RuntimeError:  # its offsets are of another dimension (verl 0.9.1 maybe_fix_3d_position_ids, rows of one length)
        rule, remedy = "Torch cannot take this tensor apart.", "Pass a list of samples, or the tensor before it was changed."
        raise CollateError(explain(name, a_type(column), rule, remedy)) from None


def _dicts_of(row: Any) -> str:
    """Return how to make dicts of such samples where the dataset is built."""
    if isinstance(row, tuple):
        return 'Make dicts of the tuples, with webdataset: dataset.map(lambda row: dict(zip(("input_ids", "labels"), row))).'
    if isinstance(row, str):
        return "Tokenise first: [tokenizer(text) for text in texts]."
    if isinstance(row, (list, np.ndarray, Tensor)):
        return 'Make dicts of them: [{"input_ids": ids} for ids in samples].'
    if hasattr(row, "to_pylist"):
        return "Pass the rows of the tables: [row for table in samples for row in table.to_pylist()]."
    return "Pass dicts: [vars(sample) for sample in samples]." if is_dataclass(row) else "Check the dataset and the sampler."


# --- own masks: which tokens of a sample are real, by its own mask, packing ids and `seq_lengths`, which must agree


def joined_segment_ids(rows: Sequence[Array]) -> Array:
    """Segment ids of samples one after another in one row: their sequences are numbered on."""
    before = np.cumsum([0, *(row.max(initial=0) for row in rows)])
    return np.concatenate([np.where(row > 0, row + n, 0) for row, n in zip(rows, before)])


def own_segments(truth: Mapping[str, Sequence[Any]], lengths: list[int], beside: Mapping[str, Rows]) -> list[Array] | None:
    """Segment ids `[L]` of each sample, numbered 1, 2, ... in order; None where every sample is one sequence without holes.
    Masks, ids and lengths of `truth`, and tokens, labels, positions `beside` them, are laid in rows, and read as a batch."""
    masks = [key for key in truth if key != "seq_lengths"]
    if all(_all_real(truth[key], lengths) for key in masks):
        masks = []
    if 0 in lengths or not (masks or "seq_lengths" in truth or "position_ids" in beside):
        return None
    told = {key: _own_mask(key, truth[key], lengths) for key in masks} or {MASK_KEY: Rows(map(np.ones, lengths))}
    laid = {key: pad_rows(key, rows, width=max(lengths)) for key, rows in told.items()}
    for key, rows in beside.items():
        laid[key] = pad_rows(key, rows, width=max(lengths), fill=-100 if key == "labels" else 0, whole=True)
    if MASK_KEY in told:  # a sample's own word about itself; only a batch's may be inverted
        laid.setdefault(KEEP_KEY, laid[MASK_KEY] > 0)
    found = agreed(Sources(laid), polarity="keep", pattern=None, padding_free=False)
    if "seq_lengths" in truth:
        found = _with_lengths(found, truth["seq_lengths"], lengths)
    own = [row[:n] for row, n in zip(found.array, lengths)]
    return None if all((row == 1).all() for row in own) else own


def _all_real(column: Sequence[Any], lengths: list[int]) -> bool:
    """Ones throughout, as tokenizers emit them, say what the lengths say."""
    for row, length in zip(column, lengths):
        listed = isinstance(row, (list, tuple))
        try:
            ones = row.count(1) == len(row) == length if listed else dims(row) == (length,) and bool((row == 1).all())
        except (RuntimeError, TypeError, ValueError):  # an array in a list is no number, nor is a record
            return False
        if not ones:
            return False
    return True


def _own_mask(key: str, column: Sequence[Any], lengths: list[int]) -> Rows:
    """Return a sample's own mask: 1 = real, 0 = hole, 1 1 2 2 0 = packed sequences."""
    bad = [(b, f"{rank_of(row)} dimensions") for b, row in enumerate(column) if rank_of(row) != 1]
    rule = "A sample's own mask is [L], one number for each token."
    refuse_rows(key, bad, rule, "Pass 4D masks of a whole batch through wrap_collator.")
    check_lengths(key, column, lengths)
    rows = Rows([host_array(key, row) for row in column])
    wrong = [(b, row) for b, row in enumerate(rows) if ((row < 0) | (row % 1 != 0)).any()]
    rule = "A sample's own mask holds 1 (real) and 0 (padding), or packing ids 1 1 2 2 0."
    bad = [(b, f"values {np.unique(row)[:6].tolist()}") for b, row in wrong]
    refuse_rows(key, bad, rule, "Convert additive masks with (mask == 0) first.")
    remedy = "Drop the samples; or make the masks from the lengths, or invert them (mask == 0)."
    refuse_rows(key, [(b, "no tokens") for b, row in enumerate(rows) if not row.any()], _EMPTY, remedy)
    return rows


def _with_lengths(found: Segments, column: Sequence[Any], lengths: list[int]) -> Segments:
    """Part the samples by their `seq_lengths`, which count holes too. Raises where something else parts them otherwise."""
    parts = [np.atleast_1d(host_array("seq_lengths", row)) for row in column]
    counts = [part.ndim == 1 and (part.dtype.kind in "iu" or not part.size) for part in parts]
    fits = [ok and all(0 <= m <= n for m in part) and part.sum() == n for ok, part, n in zip(counts, parts, lengths)]
    bad = [(b, f"{part.tolist()[:8]}, which sum to {part.sum()}") for b, part in enumerate(parts) if not fits[b]]
    rule = "seq_lengths of a sample are whole numbers that sum to its number of input_ids."
    refuse_rows("seq_lengths", bad, rule, "Count again after truncation.")
    numbers = [np.repeat(np.arange(1, len(part) + 1), part.astype(np.int64)) for part in parts]
    ids_BS = pad_rows("seq_lengths", numbers, width=found.shape[1]).numpy()
    parted = Segments.from_ids(np.where(found.array, ids_BS, 0))
    pairs = enumerate(zip(found.lengths, parted.lengths)) if found.packed else ()
    bad = [(b, f"sequences of {list(by)}, not {list(own)} tokens") for b, (own, by) in pairs if own != by]
    rule = "Packing ids, positions and seq_lengths divide a sample at the same tokens."
    refuse_rows("seq_lengths", bad, rule, "Keep one of them.")
    return parted
