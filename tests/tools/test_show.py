"""Pictures and words of a batch say what its masks say."""

from __future__ import annotations

import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Segments, dense
from collate_npu.tools.show import describe, picture

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


def test_one_row_and_a_limit():
    square = dense(Segments.from_lengths([2, 3], side="left"))
    assert picture(square, row=1) == "■ ⬚ ⬚\n■ ■ ⬚\n■ ■ ■"
    assert picture(square, row=1, limit=2) == "■ ⬚ ...\n■ ■ ..."


def test_a_batch_shows_both_masks():
    text = picture(PaddingCollator(pad_token_id=0, padding_side="left")(FEATURES))
    assert text.startswith("attention_mask_2d\n■ ■ ■\n⬚ ⬚ ■\n\nattention_mask\n")
    mapping = {"full_attention": dense(Segments.from_lengths([1, 2])), "linear_attention": torch.ones(2, 2)}
    assert "full_attention\n" in picture(
        {"input_ids": torch.ones(2, 2), "attention_mask_2d": torch.ones(2, 2), "attention_mask": mapping}
    )


def test_words():
    text = describe(PaddingCollator(pad_token_id=0, padding_side="left")(FEATURES))
    assert "attention_mask: bool [2, 1, 3, 3]" in text
    assert "2 sequences, 4 real tokens of 6 (67%)" in text
    assert "no mask is not exact: padding stands on the left" in text
    assert "no mask is exact" in describe(PaddingCollator(pad_token_id=0)(FEATURES))
    assert "padding: not known" in describe({"input_ids": torch.ones(2, 3)})
    assert "2 sequences, 4 real tokens of 4" in describe(PaddingCollator(padding_free=True)(FEATURES))


def test_what_is_no_mask_is_refused():
    with pytest.raises(CollateError, match="two to four dimensions"):
        picture(torch.ones(3))
