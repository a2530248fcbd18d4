"""A sheet as lines: never wider than the terminal, and every sign counted."""

import tracemalloc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from strategies import free, sided

from collate_npu import Segments
from collate_npu.masks import dense
from collate_npu.tools.show.sheet import Tokens, escaped, sheet_of

pytest.importorskip("rich")
from rich.cells import cell_len

from collate_npu.tools.show.drawing import _Drawing, fitted, lines, percent

WIDTHS = st.integers(20, 200)


def drawn(sheet, width=80):
    return "\n".join(line.plain for line in lines(sheet, width))


def widest(out):
    return max((line.cell_len for line in out), default=0)


def named(lengths, letters, **more):
    """Left padded rows with a tokenizer of one token."""
    truth = Segments.from_lengths(lengths, side="left")
    batch = {"input_ids": truth.ids, "attention_mask_2d": truth.keep, **more}
    return replace(sheet_of(batch), tokens=Tokens(lambda numbers: letters * len(numbers), truth.ids))


@given(free(rows=4, width=30), WIDTHS)
def test_no_line_is_wider_than_the_terminal(truth, width):
    assert widest(lines(sheet_of(truth), width)) <= width


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=40), st.sampled_from([80, 120]))
def test_long_and_many_rows_are_folded_and_counted(lengths, width):
    out = lines(sheet_of(Segments.from_lengths([41, *lengths], side="left")), width)
    assert len(out) <= 75
    assert widest(out) <= width
    more = f"... {len(lengths) - 15} more row"
    assert any(line.plain.startswith(more) for line in out) == (len(lengths) > 15)


@given(sided(rows=1, longest=12))
def test_signs_are_counted(truth):
    text = drawn(sheet_of(truth), 120).rpartition("row 0")[2].rpartition("\n\n")[0]
    full = dense(truth)
    assert text.count("■") == full.sum()
    assert text.count("⬚") == full.numel() - full.sum()


def test_a_cell_says_how_many_places_it_stands_for():
    text = drawn(sheet_of(Segments.from_lengths([4096])))
    assert "(192 places a cell)" in text
    assert "(256 places a cell)" in text
    assert "◧ a part of the block" in text
    assert "a cell" not in drawn(sheet_of(Segments.from_lengths([8])))
    assert "(2 places a cell)" in drawn(sheet_of(Segments.from_lengths([40])))


def squares(sheet, width):
    """Places a cell, and the lines."""
    block, out = _Drawing(sheet, width)._squares(sheet.panels[-1].squares)
    return block, [line.plain for line in out]


@pytest.mark.parametrize(
    ("S", "width", "block"), [(8, 21, 1), (8, 20, 2), (20, 45, 1), (20, 44, 2), (40, 85, 1), (40, 84, 4), (41, 200, 4)]
)
def test_a_square_is_folded_where_it_does_not_fit(S, width, block):
    assert squares(sheet_of(Segments.from_lengths([S])), width)[0] == block
    if S == 8:  # a token and a space take nine columns
        folded, out = squares(named([S], "abcdefghij"), width + 9)
        assert (folded, out[1]) == (block, "   0 abcdefg… " + " ".join("■" + "⬚" * 7 if block == 1 else "◧⬚⬚⬚"))


@pytest.mark.parametrize(("S", "width", "across", "more"), [(20, 91, 2, 3), (20, 90, 1, 4), (64, 75, 2, 1), (64, 74, 1, 3)])
def test_squares_stand_side_by_side_where_they_fit(S, width, across, more):
    block, out = squares(sheet_of(Segments.from_lengths([S] * 5)), width)
    assert out[0].count("row") == across
    assert across == 1 or out[0].index("row 1") == (width + 3) // 2
    assert [int(line[:4]) for line in out[1 : S // block + 1]] == [*range(0, S, block)]
    assert out[-1] == f"... {more} more square{'s' * (more > 1)}"
    assert len(squares(sheet_of(Segments.from_lengths([S] * across)), width)[1]) == S // block + 1


@pytest.mark.parametrize(
    ("letters", "S", "width", "block"),
    [("", 22, 61, 1), ("", 22, 60, 2), ("", 15, 39, 1), ("", 15, 40, 2), ("中文", 12, 61, 1), ("中文", 13, 61, 2)],
)
def test_a_row_is_folded_where_it_does_not_fit(letters, S, width, block):
    sheet = named([S], letters) if letters else sheet_of(Segments.from_lengths([S]))
    folded, (line,) = _Drawing(sheet, width)._rows(sheet.panels[0].ids, None)
    assert folded == block
    assert (" padding" in line.plain) == (width >= 40)
    assert line.cell_len == width or not letters


def test_more_rows_of_numbers_are_counted():
    assert drawn(sheet_of(torch.full((18, 3), 256))).count("256 256 256\n") == 16
    assert "... 2 more rows" in drawn(sheet_of(torch.full((18, 3), 256)))


def test_labels_that_are_ignored_and_labels_on_padding():
    ids = torch.tensor([[0, 5, 6, 7, 0, 0]])
    batch = {"input_ids": ids, "attention_mask_2d": ids > 0, "labels": torch.tensor([[3, -100, 6, 7, -100, -100]])}
    line = lines(sheet_of(batch), 120)[2]
    assert line.plain.split() == ["!", "×", "o", "o"]
    styles = {line.plain[span.start]: span.style for span in line.spans}
    assert (styles["×"], styles["!"]) == ("red", "bold red")


def test_the_legend_explains_what_is_drawn_and_no_more():
    legend = drawn(sheet_of(Segments.from_lengths([2, 3]))).splitlines()[-1]
    assert legend == "■ attends, real   ⬚ blocked, padding"
    wrong = dense(Segments.from_lengths([5, 5]))
    wrong[0, 0, 2, 4] = True
    legend = " ".join(drawn(sheet_of(wrong)).split("■ attends, real")[-1].split())
    assert legend == "⬚ blocked, padding + attends and ought not to"
    assert "1 wrong" in drawn(sheet_of(wrong))


def test_packed_rows_are_numbered_and_coloured():
    sheet = sheet_of(Segments.from_lengths([[2, 1], [3]], width=4))
    first = lines(sheet, 80)[1]
    assert first.plain == "  0 1 1 2 ⬚  25% padding"
    assert len({span.style for span in first.spans if first.plain[span.start : span.end] in ("1", "2")}) == 2
    assert "the first, the second sequence" in drawn(sheet)


@pytest.mark.parametrize("width", [20, 31, 60, 61, 80, 100])
@pytest.mark.parametrize("lengths", [[2, 3], [4096, 3000, 100, 7]])
def test_tokens_are_named_and_fitted(width, lengths):
    out = lines(named(lengths, "中文😀", labels=torch.ones(len(lengths), max(lengths)).long()), width)
    assert widest(out) <= width
    assert "中文😀  " in "\n".join(line.plain for line in out)
    assert ("% padding  中文" in drawn(named([3], "中文"), width)) == (width > 60)


@given(st.text(), st.integers(0, 20))
def test_a_token_takes_exactly_its_columns(text, columns):
    assert cell_len(fitted(escaped(text), columns)) == columns


@pytest.mark.parametrize(
    ("text", "columns", "drawn"),
    [
        ("the", 5, "the  "),
        ("longer", 4, "lon…"),
        ("中文", 4, "中文"),
        ("中文字", 4, "中 …"),
        ("😀", 3, "😀 "),
        ("ab", 1, "…"),
        ("a", 0, ""),
    ],
)
def test_wide_letters_take_two_columns(text, columns, drawn):
    assert fitted(text, columns) == drawn


@pytest.mark.parametrize(("share", "told"), [(0, "0%"), (1e-9, "1%"), (0.5, "50%"), (0.999, "99%"), (1, "100%")])
def test_none_and_all_are_told_from_almost(share, told):
    assert percent(share) == told


def test_eight_rows_of_4096_build_no_square():
    sheet = sheet_of(Segments.from_lengths([4096, 3000, 100, 2000, 4000, 4096, 10, 7], side="left"))
    tracemalloc.start()
    lines(sheet, 120)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096 * 4096 / 2
