"""Show and describe: a batch, its Segments and its masks, drawn and in words, are what the library says of them.

The lines of `collate-npu show` stand in test_cli.
"""

import html
import re

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
from hypothesis import given
from strategies import segments as any_segments
from typed import typed

from collate_npu import CollateError, PaddingCollator, Pattern, Segments, describe
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.tools.show import ROWS, WIDE, picture

SIGNS = {"■": 1, "⬚": 0}


def read(lines):
    """The cells of lines as numbers."""
    return np.array([[SIGNS[cell] if cell in SIGNS else int(cell) for cell in line.split()] for line in lines])


@given(any_segments(rows=4, width=12))
def test_a_picture_of_segments_holds_them(segments):
    cells, digits = read(picture(segments).splitlines()), (segments.array - 1) % 9 + 1  # behind the 9 stands a 1 again
    assert np.array_equal(cells, (digits if segments.packed else 1) * (segments.array > 0))


@given(any_segments(rows=2, width=6))
@pytest.mark.parametrize("polarity", ["keep", "masked", "bias"])
def test_a_picture_of_a_batch_holds_its_mask_in_any_polarity(polarity, segments):
    batch = {"input_ids": segments.ids, "attention_mask": dense(segments, polarity=polarity)}
    batch |= {"attention_mask_2d": segments.keep, "segment_ids": segments.ids}
    B, S = segments.shape
    text = str(picture(batch)).splitlines()
    squares = read(text[2 + B : 2 + B + S]).reshape(S, B, S).transpose(1, 0, 2)
    wanted = dense(segments)[:, 0].numpy()
    assert np.array_equal(squares[segments.array > 0], wanted[segments.array > 0])


LEFT = Segments.from_lengths([2, 3], side="left")


def test_masks_stand_side_by_side_and_one_that_is_refused_is_drawn_as_it_is():
    assert picture(dense(LEFT)).splitlines() == ["⬚ ⬚ ⬚   ■ ⬚ ⬚", "⬚ ■ ⬚   ■ ■ ⬚", "⬚ ■ ■   ■ ■ ■"]
    assert picture(LEFT.keep) == picture(LEFT)
    broken = dense(LEFT)
    broken[1, 0, 1, 2] = True
    assert re.match(r"⬚ ⬚ ⬚   ■ ⬚ ⬚\n⬚ ■ ⬚   ■ ■ ■\n⬚ ■ ■   ■ ■ ■\nrefused: attention_mask", picture(broken))
    rows = {"attention_mask_2d": torch.tensor([[1, 1, 0]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    first, *_, key, row, other_key, other_row = picture({"input_ids": torch.ones(1, 3), **rows}).splitlines()
    assert (first[:9], row, other_row) == ("refused: ", "■ ■ ⬚", "⬚ ■ ■")
    assert (key, other_key) == tuple(f"{name}: int64 [1, 3]" for name in rows)
    with pytest.raises(CollateError, match="two to four dimensions"):
        picture(torch.ones(3))


@pytest.mark.parametrize(("width", "block"), [(WIDE, 1), (WIDE + 1, 2), (4 * WIDE, 4), (4 * WIDE + 1, 8)])
def test_what_is_wide_is_folded_and_many_rows_are_counted(width, block):
    text = picture(Segments.from_lengths([width - 1] * (ROWS + 2), width=width))
    lines = text.splitlines()
    assert max(map(len, lines)) < 2 * WIDE
    assert lines[0].endswith("⬚" if (width - 1) % block == 0 else "◧")
    assert lines[ROWS:] == ["... 2 more", *[f"{block} places a cell"] * (block > 1)]
    square = picture(dense(Segments.from_lengths([width]))).splitlines()
    assert len(square) == -(-width // block) + (block > 1)


def test_a_page_holds_what_the_terminal_says(tmp_path):
    """That it loads nothing: test_audit, whose page is made by the same function."""
    done = typed("show", "--lengths", "3,5", "--side", "left", "--out", tmp_path / "a.html", COLUMNS="250")
    text = html.unescape(re.sub(r"<[^>]+>", "", (tmp_path / "a.html").read_text("utf-8")))
    assert " ".join(done.stdout.split()) in " ".join(text.split())


# --- a batch in words

FEATURES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
BATCH = {"input_ids": LEFT.ids, "attention_mask": LEFT.keep}


@pytest.mark.parametrize("words_of", [describe, picture])
def test_a_notebook_and_a_prompt_show_lines_which_no_terminal_obeys(words_of):
    text = words_of(PaddingCollator(pad_token_id=0, attention_mask="2d")(FEATURES))
    assert repr(text) == str(text) != str.__repr__(text)
    assert type(str(text)) is str
    assert len(repr(text).splitlines()) > 1
    evil = "a\x1b[2J\x9b31mb\u202ec"
    words = words_of({"input_ids": torch.ones(1, 3), evil: evil, "attention_mask": {evil: torch.ones(1, 1, 3, 3)}})
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", words)


def test_a_refused_batch_is_described_with_the_reason():
    batch = {"input_ids": torch.ones(1, 4), "attention_mask": dense(Segments.from_lengths([4]), pattern=Pattern.sliding(2))}
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    assert f"padding: not known. {error.value}" in describe(batch)
    assert picture(batch).startswith(f"refused: {error.value}")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert "padding: not known. input_ids: got a nested" in describe({**BATCH, "input_ids": nested})


def test_sparse_masks_are_read():
    assert "attention_mask: bool [2, 3]\n" in describe(BATCH)
    for mask in (LEFT.keep, dense(LEFT).to(torch.int8), dense(LEFT, polarity="bias")):
        assert describe({**BATCH, "attention_mask": mask.to_sparse()}) == describe({**BATCH, "attention_mask": mask})
