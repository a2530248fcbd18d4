"""Figures and pages say what the terminal says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Segments, dense, picture
from collate_npu.tools.show import figure
from collate_npu.tools.show.saving import check_out
from collate_npu.tools.show.sheet import sheet_of
from collate_npu.tools.show.tokens import Tokens

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

BATCH = PaddingCollator(pad_token_id=0, padding_side="left", consumer="megatron", model_type="qwen3_next")(
    [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8] * 6, "labels": [8] * 6}]
)


class Letters:
    """A tokenizer of six tokens, some of which a page must escape, or a font may lack."""

    def decode(self, ids):
        return "".join({0: "<pad>", 5: "a&b", 6: "中", 7: "$x$", 8: "\n"}[i] for i in ids)


def shown(batch=BATCH, **settings):
    return picture(batch, tokenizer=Letters(), **settings)


def words_of(svg):
    return [text for element in ET.fromstring(svg).iter() if (text := (element.text or "").strip())]


def test_a_png_is_a_png(tmp_path):
    shown().save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_svg_names_tokens_shares_and_masks(tmp_path):
    shown().save(tmp_path / "a.svg")
    words = words_of((tmp_path / "a.svg").read_bytes())
    assert {"a&b", "中", "$x$", "\\n", "<pad>"} <= set(words)
    assert "row 0: 83% blocked" in words
    assert "row 1: 42% blocked" in words
    assert "50% padding" in words
    assert any(word.startswith("attention_mask: bool [2, 1, 6, 6], True is blocked") for word in words)
    assert words.count("×") == 1  # the first label of the padded row


def test_a_page_is_one_file_that_loads_nothing():
    page = shown().html
    HTMLParser().feed(page)
    assert not re.search(r'(src|href)="(?!#|data:)', page.partition("<svg")[2].replace("xlink:href", "href"))
    assert "<script" not in page
    assert page.count("<svg") == 1
    assert '<td class="ignored" title="place 3, sequence 1">×a&amp;b</td>' in page
    assert page.count('class="padding"') == 3


def test_places_that_are_wrong_are_signed_and_the_refusal_is_text():
    batch = {**BATCH, "attention_mask": BATCH["attention_mask"].clone()}
    batch["attention_mask"][1, 0, 2, 5] = False
    page = shown(batch).html
    assert page.count("refused: ") == 1
    assert "row 1: 39% blocked, 1 wrong" in page
    assert ">+</text>" in page


def test_a_long_batch_is_folded():
    words = words_of(figure.drawn(sheet_of(Segments.from_lengths([[2000, 1000], [4096]] * 9)), "svg"))
    assert "... 2 more rows" in words
    assert "... 14 more squares" in words
    assert any("(64 x 64 a cell)" in word for word in words)
    assert {"1", "2"} <= set(words)


def test_every_sequence_of_a_row_is_numbered():
    words = words_of(figure.drawn(sheet_of(Segments.from_lengths([[2, 1, 3]])), "svg"))
    assert {"1", "2", "3"} <= set(words)


def test_letters_that_no_font_has_are_escaped_in_a_png():
    sheet = sheet_of(BATCH)
    sheet = type(sheet)(panels=sheet.panels, tokens=Tokens(Letters().decode, BATCH["input_ids"]))
    without = figure._Drawing(sheet, ["DejaVu Sans"])
    assert without._token(0, 4, 9) == "\\u4e2d"
    assert figure._Drawing(sheet, None)._token(0, 4, 9) == "中"


@pytest.mark.parametrize("name", ["a.gif", "a", "a.HTML5"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(CollateError, match=r"Figures are written as \.png, \.svg, \.html"):
        shown().save(tmp_path / name)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CollateError, match="Name a folder that exists"):
        shown().save(tmp_path / "no" / "a.png")


def test_without_matplotlib_the_remedy_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    with pytest.raises(CollateError, match=r"pip install 'collate-npu\[plots\]'"):
        check_out(tmp_path / "a.png")


def test_no_window_and_no_global_setting():
    import matplotlib

    before = dict(matplotlib.rcParams), matplotlib.get_backend()
    figure.drawn(sheet_of(dense(Segments.from_lengths([2, 3]))), "png")
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == before


def test_masks_of_every_rank_are_drawn():
    for mask in (torch.ones(2, 3), torch.ones(1, 1, 2, 2), dense(Segments.from_lengths([2]), polarity="bias")):
        assert figure.drawn(sheet_of(mask), "png")
