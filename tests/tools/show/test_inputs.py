"""Batches drawn from lengths and from rows of data."""

from __future__ import annotations

import pytest

from collate_npu import CollateError, PaddingCollator, Segments
from collate_npu.masks.find import segments_from_batch
from collate_npu.parallel import ContextParallel
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.show.inputs import batch_of_lengths, batch_of_rows, collator_of


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cp", [None, ContextParallel(2, 0)])
def test_lengths(side, cp):
    batch = batch_of_lengths("3+2,6", collator_of(side=side, packed=False, context_parallel=cp))
    width = 6 if cp is None else 8
    assert segments_from_batch(batch) == Segments.from_lengths([[3, 2], [6]], width=width, side=side)


def test_lengths_of_a_flat_row_that_ranks_share_out():
    cp = ContextParallel(2, 0).for_documents()
    batch = batch_of_lengths("3,6", collator_of(side="right", packed=True, context_parallel=cp))
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 12]


@pytest.mark.parametrize("lengths", ["3,x", "", "3,,5"])
def test_lengths_that_are_none(lengths):
    with pytest.raises(CollateError, match=r"Write 3,5 or 3\+2,5"):
        batch_of_lengths(lengths, PaddingCollator(pad_token_id=0))


def test_no_square_is_built_that_is_too_large_to_be_looked_at(monkeypatch):
    monkeypatch.setattr("collate_npu.tools.show.inputs.MOST_PLACES", 40)
    collate = collator_of(side="left", packed=False, context_parallel=None)
    assert batch_of_lengths("3,4", collate)["attention_mask"].ndim == 4
    assert batch_of_lengths("3,5", collate)["attention_mask"].ndim == 2


@pytest.mark.models
def test_lines_are_cut_and_every_token_is_a_label():
    pytest.importorskip("transformers")
    tokenizer = byte_tokenizer()
    collate = collator_of(side="right", packed=False, context_parallel=None, tokenizer=tokenizer)
    batch = batch_of_rows(["abcdef", "ab"], tokenizer, collate, max_length=4)
    assert batch["labels"].tolist() == [[97, 98, 99, 100], [97, 98, -100, -100]]
    with pytest.raises(CollateError, match="Name a file with text"):
        batch_of_rows([""], tokenizer, collate, max_length=4)
