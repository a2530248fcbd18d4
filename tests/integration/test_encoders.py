"""Padding invariance of encoders through the public API: padded left and right, by an adapter, wrapped, and flat.

Half of these count positions from `padding_idx + 1` over the ids themselves, so that positions from 0 are wrong even on a
row without padding; and all attend both ways, so that a causal mask is wrong on every row.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
from tiny_text import PAD, logits_of, samples, text_model
from transformers import default_data_collator

from collate_npu import BatchAdapter, CollateError, PaddingCollator, wrap_collator
from collate_npu.consumers.forwards import reads_dense_mask

TOLERANCE = 1e-4
ENCODERS = ["bert", "roberta", "xlm-roberta", "mpnet", "esm", "modernbert"]
encoder = pytest.mark.parametrize("name", ENCODERS)
side_of = pytest.mark.parametrize("side", ["left", "right"])


@cache
def model_of(name):
    return text_model(name, causal=False)


ROWS = samples(5, 12, 1)
FEATURES = [{"input_ids": row.tolist()} for row in ROWS]
SETTINGS = {"pad_token_id": PAD, "pattern": "bidirectional"}


def alone(model, rows=ROWS):
    return [logits_of(model, row[None], attention_mask=torch.ones(1, len(row)).long())[0] for row in rows]


@torch.no_grad()
def difference(model, batch, side, rows=ROWS):
    logits, width = model(**batch).logits, batch["input_ids"].shape[1]
    starts = [width - len(row) if side == "left" else 0 for row in rows]
    pieces = [logits[b, start : start + len(row)] for b, (start, row) in enumerate(zip(starts, rows))]
    return float(
        torch.cat([(a - b).abs().flatten() for a, b in zip(pieces, alone(model, rows))]).nan_to_num(torch.inf).max()
    )


@encoder
@side_of
def test_a_padded_batch_of_the_collator(name, side):
    model = model_of(name)
    batch = PaddingCollator(padding_side=side, model=model, **SETTINGS)(FEATURES)
    assert difference(model, batch, side) <= TOLERANCE


@encoder
@pytest.mark.parametrize("length", [1, 7])
def test_a_single_row_without_padding(name, length):
    model, rows = model_of(name), samples(length)
    batch = PaddingCollator(model=model, **SETTINGS)([{"input_ids": row.tolist()} for row in rows])
    assert difference(model, batch, "right", rows) <= TOLERANCE


@encoder
@side_of
def test_a_batch_on_the_wire_through_the_adapter(name, side):
    model = model_of(name)
    wire = PaddingCollator(padding_side=side, **SETTINGS)(FEATURES)
    assert difference(model, BatchAdapter(model, pattern="bidirectional")(wire), side) <= TOLERANCE


@encoder
@side_of
def test_a_batch_of_a_wrapped_collator(name, side):
    model, width = model_of(name), max(map(len, ROWS))
    padded = []
    for row in ROWS:
        left = width - len(row) if side == "left" else 0
        right = width - len(row) - left
        ids, mask = left * [PAD] + row.tolist() + right * [PAD], left * [0] + len(row) * [1] + right * [0]
        padded.append({"input_ids": ids, "attention_mask": mask})
    wrapped = wrap_collator(default_data_collator, model=model, pattern="bidirectional")
    assert difference(model, wrapped(padded), side) <= TOLERANCE


@encoder
def test_a_flat_row_keeps_its_sequences_apart_or_is_refused(name):
    """transformers finds packed positions for causal masks alone, so that a dense mask is what keeps these apart."""
    model = model_of(name)
    try:
        batch = PaddingCollator(padding_free=True, model=model, **SETTINGS)(FEATURES)
    except CollateError:
        assert not reads_dense_mask(model)
        return
    with torch.no_grad():
        logits = model(**batch).logits[0]
    assert float((logits - torch.cat(alone(model))).abs().max().nan_to_num(torch.inf)) <= TOLERANCE
