"""Batches drawn from lengths and from rows of data."""

import pytest

from collate_npu import CollateError, Segments
from collate_npu.masks.find import segments_from_batch
from collate_npu.parallel import ContextParallel
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.show.inputs import collated, features_of_data, features_of_lengths

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")


def batch_of(lengths, side="left", packed=False, ranks=None):
    return collated(features_of_lengths(lengths), side=side, packed=packed, ranks=ranks)


@pytest.mark.parametrize(("ranks", "width"), [(None, 6), (ContextParallel(2, 0), 8)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_lengths(ranks, width, side):
    found = segments_from_batch(batch_of("3+2,6", side=side, ranks=ranks))
    assert found == Segments.from_lengths([[3, 2], [6]], width=width, side=side)


def test_flat_rows_and_what_is_too_large_to_be_looked_at(monkeypatch):
    ranks = ContextParallel(2, 0).for_documents()
    assert batch_of("3,6", packed=True, ranks=ranks)["cu_seq_lens_q"].tolist() == [0, 4, 12]
    monkeypatch.setattr("collate_npu.tools.show.inputs.MOST_PLACES", 32)
    assert [batch_of(lengths)["attention_mask"].ndim for lengths in ("3,4", "3,5")] == [4, 2]
    for none in ("3,x", "", "3,,5"):
        with pytest.raises(CollateError, match=r"Write 3,5 or 3\+2,5"):
            features_of_lengths(none)


def test_lengths_that_are_none_and_more_than_are_drawn(monkeypatch):
    monkeypatch.setattr("collate_npu.tools.show.inputs.MOST_TOKENS", 8)
    assert [len(feature["input_ids"]) for feature in features_of_lengths("4,0")] == [4, 0]
    for lengths in ("4,5", "2+3,1", "-1,3", "3+-1,3"):
        with pytest.raises(CollateError, match="0 or more, and at most 8 places"):
            features_of_lengths(lengths)


@pytest.mark.models
def test_lines_are_cut_and_every_token_is_a_label(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "lines.txt").write_text("abcdef\nab\nmore\n", encoding="utf-8")
    found = features_of_data(tmp_path / "lines.txt", byte_tokenizer(), 2, 4)
    assert [feature["labels"] for feature in found] == [[97, 98, 99, 100], [97, 98]]
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    with pytest.raises(CollateError, match="Name a file with text"):
        features_of_data(tmp_path / "empty.jsonl", byte_tokenizer(), 2, 4)
