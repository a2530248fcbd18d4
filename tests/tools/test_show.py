"""`collate-npu show` and `picture`: what is drawn is what the Segments, the mask and each consumer say."""

import html
import re

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
from hypothesis import given
from strategies import segments as any_segments
from typed import typed

from collate_npu import CollateError, Pattern, Segments
from collate_npu.masks import dense
from collate_npu.tools.show import MOST, ROWS, WIDE, WIDEST, picture

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


def test_masks_stand_side_by_side_and_one_that_is_refused_as_it_came():
    assert picture(dense(LEFT)).splitlines() == ["⬚ ⬚ ⬚   ■ ⬚ ⬚", "⬚ ■ ⬚   ■ ■ ⬚", "⬚ ■ ■   ■ ■ ■"]
    broken = dense(LEFT)
    broken[1, 0, 1, 2] = True
    assert re.match(r"⬚ ⬚ ⬚   ■ ⬚ ⬚\n⬚ ■ ⬚   ■ ■ ■\n⬚ ■ ■   ■ ■ ■\nrefused: attention_mask", picture(broken))
    batch = {"input_ids": LEFT.ids, "attention_mask": dense(LEFT, pattern=Pattern.sliding(2)), "labels": None}
    assert picture(batch).startswith("refused: ")
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


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--lengths 3,5 --side left", 0, "⬚ ⬚ ■ ■ ■\n■ ■ ■ ■ ■"),
        ("--lengths 3,5 --side left", 0, "attention_mask: bool [2, 1, 5, 5], True = blocked"),
        (f"--lengths 3,{WIDEST} --side left", 0, f"attention_mask: bool [2, 1, {WIDEST}, {WIDEST}]"),
        (f"--lengths 3,{WIDEST + 1} --side left", 0, f"attention_mask: bool [2, {WIDEST + 1}]"),
        (f"--lengths=1,{MOST // 2}", 0, f"int64 [2, {MOST // 2}]"),
        *((f"--lengths={n}", 2, f"at most {MOST} places are drawn") for n in (f"1,{MOST // 2 + 1}", "9999999")),
        ("--lengths 3+2,5", 0, "1 1 1 2 2\n1 1 1 1 1"),
        ("--batch left.pt", 0, "attention_mask: bool [2, 1, 3, 3], True = attends"),
        ("--batch refused.pt", 1, "padding: not known. "),
        ("--lengths a", 2, "Lengths are whole numbers."),
        ("--lengths=-3", 2, "-3"),
        ("", 2, "One thing is shown"),
        ("--lengths 3 --batch left.pt", 2, "One thing is shown"),
        ("--lengths 3 --out page.svg", 2, "End the name with .html."),
    ],
)
def test_a_command_line_draws_or_says_why_not(line, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = dense(LEFT)
    broken[1, 0, 1, 2] = True
    ids = torch.tensor([[9, 4, 5], [6, 7, 8]])
    keep = {"input_ids": ids, "attention_mask_2d": LEFT.keep}
    torch.save({**keep, "attention_mask": dense(LEFT)}, "left.pt")
    torch.save({**keep, "attention_mask": broken}, "refused.pt")
    done = typed("show", *line.split(), COLUMNS="250")
    assert (done.exit_code, words in done.output, "Traceback" in done.output) == (code, True, False), done.output


def test_a_page_holds_what_the_terminal_says_and_loads_nothing(tmp_path):
    done = typed("show", "--lengths", "3,5", "--side", "left", "--out", tmp_path / "a.html", COLUMNS="250")
    page = (tmp_path / "a.html").read_text("utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert " ".join(done.stdout.split()) in " ".join(text.split())
    assert not re.search(r"url\(|@import|<script|<link|<img|\b(src|href)=", page)
