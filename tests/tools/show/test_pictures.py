"""Pictures and words of a batch say what its masks say."""

from __future__ import annotations

import pickle

import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Pattern, Segments, dense
from collate_npu.masks.find import segments_from_batch
from collate_npu.tools.describe import describe
from collate_npu.tools.show.pictures import picture

FEATURES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]


def drawn(text):
    return [line.split() for line in text.splitlines()]


def test_segments_and_a_doctest():
    assert picture(Segments.from_lengths([3, 5], side="left")) == "⬚ ⬚ ■ ■ ■\n■ ■ ■ ■ ■"
    assert picture(Segments.from_lengths([[2, 1]], width=4)) == "1 1 2 ⬚"


@pytest.mark.parametrize("polarity", ["keep", "masked", "bias"])
def test_every_polarity_draws_the_same_square(polarity):
    square = picture(dense(Segments.from_lengths([2, 3], side="left"), polarity=polarity))
    assert square == "⬚ ⬚ ⬚   ■ ⬚ ⬚\n⬚ ■ ⬚   ■ ■ ⬚\n⬚ ■ ■   ■ ■ ■"


def test_one_row_and_what_is_wide_is_folded():
    square = dense(Segments.from_lengths([2, 3], side="left"))
    assert picture(square, row=1) == "■ ⬚ ⬚\n■ ■ ⬚\n■ ■ ■"
    assert picture(square, row=1, limit=2).startswith("◧ ⬚\n■ ■\n◧ a part of the block; 2 places a cell")
    assert picture(Segments.from_lengths([3, 5]), limit=3).startswith("■ ◧ ⬚\n■ ■ ■\n")


def test_a_batch_shows_both_masks():
    text = picture(PaddingCollator(pad_token_id=0, padding_side="left")(FEATURES))
    assert text.startswith("attention_mask_2d\n■ ■ ■\n⬚ ⬚ ■\n\nattention_mask\n")


def test_a_mapping_shows_the_square_of_each_kind_of_layer():
    truth = Segments.from_lengths([1, 2])
    mapping = {"full_attention": dense(truth), "linear_attention": truth.keep}
    text = picture({"input_ids": truth.ids, "attention_mask_2d": truth.keep, "attention_mask": mapping})
    assert text == "attention_mask_2d\n■ ⬚\n■ ■\n\nfull_attention\n■ ⬚   ■ ⬚\n■ ⬚   ■ ■"


REFUSED = {
    "two masks that disagree": {
        "attention_mask_2d": torch.ones(2, 2, dtype=torch.bool),
        "attention_mask": dense(Segments.from_lengths([1, 2])),
    },
    "a mask of another pattern": {"attention_mask": dense(Segments.from_lengths([4]), pattern=Pattern.sliding(2))},
    "a mask that is turned around": {"attention_mask_2d": torch.tensor([[0, 0, 0], [0, 1, 1]])},
    "values as well": {"attention_mask": dense(Segments.from_lengths([3]), polarity="bias") + torch.arange(3.0)},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_is_drawn_all_the_same_with_the_reason(why):
    masks = REFUSED[why]
    first = next(iter(masks.values()))
    batch = {"input_ids": torch.ones(len(first), first.shape[-1]), **masks}
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    text = picture(batch)
    assert text.startswith(f"refused: {error.value}\n\n")
    assert all(f"\n\n{key}\n" in text for key in masks)
    assert f"padding: not known. {error.value}" in describe(batch)


def test_a_refused_mask_is_drawn_as_it_stands():
    assert picture({"input_ids": torch.ones(2, 3), **REFUSED["a mask that is turned around"]}).endswith("⬚ ⬚ ⬚\n⬚ ■ ■")
    sliding = {"input_ids": torch.ones(1, 4), **REFUSED["a mask of another pattern"]}
    square = "■ ⬚ ⬚ ⬚\n■ ■ ⬚ ⬚\n⬚ ■ ■ ⬚\n⬚ ⬚ ■ ■"
    assert picture(sliding).endswith(square)
    assert picture({**sliding, "attention_mask": ~sliding["attention_mask"]}).endswith(square)


def test_a_mask_alone_that_has_two_readings():
    text = picture(torch.ones(1, 1, 2, 2))
    assert text.startswith("■ ■\n■ ■\n\nrefused: attention_mask: got float32 [1, 1, 2, 2]. Both readings")


def test_megatrons_fill_is_blocked():
    bias = dense(Segments.from_lengths([2])).logical_not() * -10000.0
    assert picture(bias) == "■ ⬚\n■ ■"


def test_words():
    text = describe(PaddingCollator(pad_token_id=0, padding_side="left")(FEATURES))
    assert "attention_mask: bool [2, 1, 3, 3]" in text
    assert "2 sequences, 4 real tokens of 6 (67%)" in text
    assert "no mask is not exact: padding stands on the left" in text
    assert "no mask is exact" in describe(PaddingCollator(pad_token_id=0)(FEATURES))
    assert "params: object" in describe({"input_ids": torch.ones(2, 3), "params": object()})
    assert "padding: not known" in describe({"input_ids": torch.ones(2, 3)})
    assert "2 sequences, 4 real tokens of 4" in describe(PaddingCollator(padding_free=True)(FEATURES))


def test_what_is_no_mask_is_refused():
    with pytest.raises(CollateError, match="two to four dimensions"):
        picture(torch.ones(3))


def test_it_is_text_and_knows_its_page():
    drawn = picture(PaddingCollator(pad_token_id=0, padding_side="left")(FEATURES))
    assert isinstance(drawn, str)
    assert str(drawn) == drawn
    assert pickle.loads(pickle.dumps(str(drawn))) == drawn
    pytest.importorskip("matplotlib")
    assert drawn.html.startswith("<!doctype html>")
    assert drawn._repr_html_().count("<svg") == 1


def test_without_matplotlib_a_notebook_shows_the_text(monkeypatch):
    monkeypatch.setattr("collate_npu.tools.show.figure.find_spec", lambda name: None)
    drawn = picture(Segments.from_lengths([1, 2]))
    assert drawn._repr_html_() is None
    with pytest.raises(CollateError, match=r"pip install 'collate-npu\[plots\]'"):
        drawn.html  # noqa: B018
