"""Tokens keep columns aligned, whatever they hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collate_npu import CollateError
from collate_npu.tools.show.tokens import Tokens, escaped, fitted

cells = pytest.importorskip("rich.cells")


@given(st.text(), st.integers(0, 20))
def test_a_token_takes_exactly_its_columns(text, columns):
    assert cells.cell_len(fitted(escaped(text), columns)) == columns


@pytest.mark.parametrize(
    ("text", "columns", "drawn"),
    [("the", 5, "the  "), ("longer", 4, "lon…"), ("中文", 4, "中文"), ("中文字", 4, "中 …"), ("😀", 3, "😀 "), ("a", 0, "")],
)
def test_wide_letters_take_two_columns(text, columns, drawn):
    assert fitted(text, columns) == drawn


@given(st.text())
def test_nothing_that_is_printed_moves_the_cursor(text):
    assert all(letter.isprintable() or letter == "\u200d" for letter in escaped(text))


def test_spaces_and_lines_are_seen():
    assert [escaped(text) for text in (" the", "a b ", "\n", "\t", "  ")] == ["·the", "a b·", "\\n", "\\t", "··"]


def test_what_is_no_text_by_itself_is_its_id():
    texts = {(7,): "seven", (8,): "\ufffd", (9,): "", (7, 8): "seven \n"}
    read = Tokens(lambda numbers: texts[tuple(numbers)], torch.tensor([[7, 8, 9]]))
    assert [read.one(0, s) for s in range(3)] == ["seven", "#8", "#9"]
    assert read.text(0, [0, 1]) == "seven \\n"


def test_without_rich_the_remedy_names_the_extra(monkeypatch):
    def lost(name):
        raise ImportError(name)

    monkeypatch.setattr("collate_npu.tools.show.tokens.import_module", lost)
    with pytest.raises(CollateError, match=r"pip install 'collate-npu\[audit\]'"):
        fitted("a", 3)
