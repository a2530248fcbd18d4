"""Inputs: a batch to show, from lengths, from a file that holds one, or from text; or a mask alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collate_npu.collate.collators import PaddingCollator
from collate_npu.errors import CollateError, explain
from collate_npu.parallel import ContextParallel
from collate_npu.rows import Side
from collate_npu.tools.audit.data import Row
from collate_npu.tools.audit.samples import encoded

MOST_PLACES = 1 << 28
"""Places of a dense mask beyond which none is built to be looked at: the 2D mask says the same."""


def collator_of(
    *, side: Side, packed: bool, context_parallel: ContextParallel | None, tokenizer: Any = None
) -> PaddingCollator:
    """What collates lengths and text: rows that the ranks can share out, flat ones sequence by sequence."""
    documents = context_parallel is not None and context_parallel.documents
    return PaddingCollator(
        pad_token_id=0 if tokenizer is None else tokenizer.pad_token_id,
        padding_side=side,
        padding_free=packed,
        pad_to_multiple_of=None if context_parallel is None else context_parallel.multiple,
        sequence_multiple=context_parallel.document_multiple if context_parallel is not None and documents else None,
    )


def batch_of_lengths(lengths: str, collate: PaddingCollator) -> dict[str, Any]:
    """`3,5`: two rows of 3 and of 5 tokens; `3+2,5`: two sequences in the first."""
    try:
        rows = [[int(n) for n in row.split("+")] for row in lengths.split(",")]
    except ValueError:
        raise CollateError(explain("--lengths", lengths, "Lengths are whole numbers.", "Write 3,5 or 3+2,5.")) from None
    return _collated([{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows], collate)


def batch_of_rows(rows: Sequence[Row], tokenizer: Any, collate: PaddingCollator, *, max_length: int) -> dict[str, Any]:
    """Rows of data as a trainer of a language model has them: where a row has no labels, every token is one."""
    features = [feature for row in rows if (feature := encoded(row, tokenizer, max_length))["input_ids"]]
    if not features:
        raise CollateError(explain("--data", "no line with tokens", "A batch has rows.", "Name a file with text."))
    return _collated([{"labels": list(feature["input_ids"]), **feature} for feature in features], collate)


def _collated(features: list[dict[str, Any]], collate: PaddingCollator) -> dict[str, Any]:
    widest = max(len(feature["input_ids"]) for feature in features)
    if len(features) * widest**2 > MOST_PLACES and not collate.padding_free:
        object.__setattr__(collate, "attention_mask", "2d")
    return collate(features)
