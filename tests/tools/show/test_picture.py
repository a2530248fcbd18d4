"""Pictures of a batch say what its masks say."""

import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Pattern, Segments
from collate_npu.masks import dense
from collate_npu.masks.find import segments_from_batch
from collate_npu.tools.show import picture

FEATURES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]


def test_segments_one_row_and_what_is_wide_is_folded():
    assert picture(Segments.from_lengths([3, 5], side="left")) == "⬚ ⬚ ■ ■ ■\n■ ■ ■ ■ ■"
    assert picture(Segments.from_lengths([[2, 1]], width=4)) == "1 1 2 ⬚"
    square = dense(Segments.from_lengths([2, 3], side="left"))
    assert picture(square, row=1) == "■ ⬚ ⬚\n■ ■ ⬚\n■ ■ ■"
    assert picture(square, row=1, limit=2).startswith("◧ ⬚\n■ ■\n◧ a part of the block; 2 places a cell")
    assert picture(Segments.from_lengths([3, 5]), limit=3).startswith("■ ◧ ⬚\n■ ■ ■\n")
    assert picture(Segments.from_lengths([3, 5]), limit=1).startswith("◧\n■\n")


def test_a_batch_shows_both_masks():
    text = picture(PaddingCollator(pad_token_id=0, padding_side="left")(FEATURES))
    assert text.startswith("attention_mask_2d\n■ ■ ■\n⬚ ⬚ ■\n\nattention_mask\n")


def test_a_mapping_shows_the_square_of_each_kind_of_layer():
    truth = Segments.from_lengths([1, 2])
    mapping = {"full_attention": dense(truth), "linear_attention": truth.keep}
    text = picture({"input_ids": truth.ids, "attention_mask_2d": truth.keep, "attention_mask": mapping})
    assert text == "attention_mask_2d\n■ ⬚\n■ ■\n\nfull_attention\n■ ⬚   ■ ⬚\n■ ⬚   ■ ■"


SLIDING = dense(Segments.from_lengths([4]), pattern=Pattern.sliding(2))
BAND = "■ ⬚ ⬚ ⬚\n■ ■ ⬚ ⬚\n⬚ ■ ■ ⬚\n⬚ ⬚ ■ ■"


@pytest.mark.parametrize(
    ("masks", "drawn"),
    [
        ({"attention_mask": SLIDING}, BAND),
        ({"attention_mask": ~SLIDING}, BAND),
        ({"attention_mask_2d": torch.tensor([[0, 0, 0], [0, 1, 1]])}, "⬚ ⬚ ⬚\n⬚ ■ ■"),
        ({"attention_mask_2d": torch.ones(2, 2).bool(), "attention_mask": dense(Segments.from_lengths([1, 2]))},
         "■ ⬚   ■ ⬚\n■ -   ■ ■"),
        ({"attention_mask": dense(Segments.from_lengths([3]), polarity="bias") + torch.arange(3.0)}, ""),
    ],
    ids=["another pattern", "turned", "a row of padding", "two that disagree", "values as well"],
)  # fmt: skip
def test_what_is_refused_is_drawn_as_it_stands_with_the_reason(masks, drawn):
    first = next(iter(masks.values()))
    batch = {"input_ids": torch.ones(len(first), first.shape[-1]), **masks}
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    text = picture(batch)
    assert text.startswith(f"refused: {error.value}\n\n")
    assert all(f"\n\n{key}\n" in text for key in masks)
    assert text.endswith(drawn)


def test_a_mask_alone():
    text = picture(torch.ones(1, 1, 2, 2))
    assert text.startswith("■ ■\n■ ■\n\nrefused: attention_mask: got float32 [1, 1, 2, 2]. Both readings")
    bias = dense(Segments.from_lengths([2])).logical_not() * -10000.0  # Megatron's fill
    assert picture(bias) == "■ ⬚\n■ ■"
    assert picture(torch.ones(1, 1, 2, 3)).startswith("■ ■ ■\n■ ■ ■\n\nrefused: ")
    with pytest.raises(CollateError, match="two to four dimensions"):
        picture(torch.ones(3))
    with pytest.raises(CollateError, match="two to four dimensions"):
        picture(torch.ones(1, 1, 1, 2, 2))


def test_it_is_text_and_knows_its_page(tmp_path):
    drawn = picture(PaddingCollator(pad_token_id=0, padding_side="left")(FEATURES))
    assert pickle.loads(pickle.dumps(str(drawn))) == drawn
    pytest.importorskip("rich")
    assert repr(drawn) == str(drawn)  # what a cell or a prompt shows
    drawn.save(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == drawn.html


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_notebook_shows_each_token_without_scrolling(side):
    """What rich prints by itself in a kernel, line by line, stays away."""
    pytest.importorskip("rich")
    rows = [{"input_ids": [65] * 300}, {"input_ids": [66, 67]}]
    batch = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")(rows)
    drawn = picture(batch, tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))))
    text = re.sub(r"<style>.*?</style>|<[^>]+>", "", drawn._repr_html_(), flags=re.S)
    row = next(line for line in text.splitlines() if line.startswith("  1 "))
    assert row.rstrip().endswith("BC")
    assert max(map(len, text.splitlines())) <= 88


def test_token_ids_are_shown_as_numbers_and_not_as_a_mask():
    ids = torch.tensor([[256, 256, 72], [1, 0, 1]])
    assert picture(ids) == "numbers, not a mask; picture(batch) draws all of it\n256 256 72\n1 0 1"
    assert picture(torch.tensor([[-100, 7]])).endswith("\n-100 7")
    wide = torch.cat([torch.full((1, 200), 256), torch.tensor([[72, 101]])], 1)
    assert picture(wide, limit=20).splitlines()[1] == "256 256 256 256 ... 256 256 72 101"
    assert picture(torch.tensor([[0, 1, 1], [1, 1, 1]])) == "⬚ ■ ■\n■ ■ ■"


def test_without_rich_a_notebook_shows_the_text(monkeypatch):
    def lost(name):
        raise ImportError(name)

    monkeypatch.setattr("collate_npu.tools.show.find_spec", lambda name: None)
    monkeypatch.setattr("collate_npu.tools.show.import_module", lost)
    drawn = picture(Segments.from_lengths([1, 2]))
    assert drawn._repr_html_() is None
    with pytest.raises(CollateError, match="pip install rich"):
        drawn.html  # noqa: B018
