"""Inputs: a batch to show, from lengths or from rows of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collate_npu.arrays import Side
from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wire import Layout
from collate_npu.errors import CollateError, explain
from collate_npu.parallel import ContextParallel
from collate_npu.tools.audit.data import encoded, read_rows

MOST_PLACES = 1 << 28
"""Places of a dense mask beyond which none is built to be looked at: the 2D mask says the same."""

MOST_TOKENS = 1 << 22
"""Places of `--lengths`."""


def features_of_lengths(lengths: str) -> list[dict[str, Any]]:
    """`3,5`: two rows of 3 and of 5 tokens; `3+2,5`: two sequences in the first."""
    try:
        rows = [[int(n) for n in row.split("+")] for row in lengths.split(",")]
    except ValueError:
        raise CollateError(explain("--lengths", lengths, "Lengths are whole numbers.", "Write 3,5 or 3+2,5.")) from None
    if len(rows) * max(map(sum, rows)) > MOST_TOKENS or min(map(min, rows)) < 0:
        rule = f"Lengths are 0 or more, and at most {MOST_TOKENS} places are drawn."
        raise CollateError(explain("--lengths", lengths[:80], rule, "Write shorter ones: a picture shows the same."))
    return [{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows]


def features_of_data(path: Path, tokenizer: Any, rows: int, max_length: int) -> list[dict[str, Any]]:
    """Its first rows as a trainer of a language model has them: where a row has no labels, every token is one."""
    features = [encoded(row, tokenizer, max_length) for row in read_rows(path)[:rows]]
    if not any(feature["input_ids"] for feature in features):
        raise CollateError(explain("--data", "no line with tokens", "A batch has rows.", "Name a file with text."))
    return [{"labels": list(feature["input_ids"]), **feature} for feature in features if feature["input_ids"]]


def reader_of(folder: Path | None, *, bytes_too: bool) -> Any:
    """What reads the tokens, if anything does."""
    if folder is not None:
        from collate_npu.tools.audit.candidates import load_tokenizer

        return load_tokenizer(folder)
    from collate_npu.testing import byte_tokenizer

    return byte_tokenizer() if bytes_too else None


def collated(
    features: list[dict[str, Any]], *, side: Side, packed: bool, ranks: ContextParallel | None, pad_token_id: int = 0
) -> dict[str, Any]:
    """In rows that the ranks can share out, flat ones sequence by sequence."""
    widest = max(len(feature["input_ids"]) for feature in features)
    collate = PaddingCollator(
        pad_token_id=pad_token_id,
        padding_side=side,
        padding_free=packed,
        pad_to_multiple_of=None if ranks is None else ranks.multiple,
        attention_mask="2d" if len(features) * widest**2 > MOST_PLACES and not packed else "auto",
        layout=Layout(sequence_multiple=ranks.document_multiple if ranks is not None and ranks.documents else None),
    )
    return collate(list(features))
