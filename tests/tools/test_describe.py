"""A batch in words."""

import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Pattern, Segments
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.tools.describe import describe
from collate_npu.tools.show import picture

FEATURES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]


def test_a_notebook_and_a_prompt_show_lines():
    for text in (show(PaddingCollator(pad_token_id=0, attention_mask="2d")(FEATURES)) for show in (describe, picture)):
        assert repr(text) == str(text) != str.__repr__(text)
        assert type(str(text)) is str
        assert len(repr(text).splitlines()) > 1


def test_a_refused_batch_is_described_with_the_reason():
    batch = {"input_ids": torch.ones(1, 4), "attention_mask": dense(Segments.from_lengths([4]), pattern=Pattern.sliding(2))}
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    assert f"padding: not known. {error.value}" in describe(batch)


def test_sparse_masks_are_read_and_rows_of_their_own_lengths_named():
    segments = Segments.from_lengths([2, 1], side="left")
    batch = {"input_ids": segments.ids, "attention_mask": segments.keep}
    assert "attention_mask: bool [2, 2]\n" in describe(batch)
    for mask in (segments.keep, dense(segments).to(torch.int8), dense(segments, polarity="bias")):
        assert describe({**batch, "attention_mask": mask.to_sparse()}) == describe({**batch, "attention_mask": mask})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert "padding: not known. input_ids: got a nested" in describe({**batch, "input_ids": nested})
