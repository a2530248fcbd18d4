"""Files say what the terminal says, load nothing, and need no font of their own."""

import html
import io
import re

import pytest
import torch

pytest.importorskip("rich")
from rich.console import Console
from rich.text import Text

from collate_npu import Segments
from collate_npu.masks import dense
from collate_npu.tools import terminal
from collate_npu.tools.show import picture

TRUTH = Segments.from_lengths([3, 6], side="left")
TOKENS = torch.tensor([[0, 0, 0, 5, 6, 7], [8] * 6])
BATCH = {"input_ids": TOKENS, "labels": TOKENS, "attention_mask_2d": TRUTH.keep,
         "attention_mask": dense(TRUTH, polarity="masked")}  # fmt: skip
BATCH["attention_mask"][1, 0, 2, 5] = False


class Letters:
    """A tokenizer of six tokens, some of which a page must escape, or a font may lack."""

    def decode(self, ids):
        return "".join({0: "<pad>", 5: "a&b", 6: "中", 7: "$x$", 8: "\n"}[i] for i in ids)


SAID = ["refused: attention_mask", "a&b", "中", "$x$", "\\n", "row 1, 1 wrong", "+ att"]
"""Of a batch that is refused."""


def test_a_page_says_all_and_loads_nothing(tmp_path, monkeypatch):
    for name, value in (("COLUMNS", "20"), ("NO_COLOR", "1")):  # of the terminal, which it is not for
        monkeypatch.setenv(name, value)
    picture(BATCH, tokenizer=Letters()).save(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    told = " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "", text, flags=re.S)).split())
    assert [said for said in SAID if said not in told] == []
    assert not re.search(r"url\(|@import|<script|<link|<img|\b(src|href)=", text)
    assert text.count("#d93025")  # red


def test_what_becomes_a_file_is_not_printed_in_a_notebook(monkeypatch):
    """rich shows each line by itself where it finds a kernel."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert Console().is_jupyter
    assert not terminal.recorder().is_jupyter


def test_letters_of_a_page_keep_their_columns():
    page = picture(BATCH, tokenizer=Letters()).html
    assert {"<bdi>■</bdi>", "<bdi>⬚</bdi>", "<bdi class=wide>中</bdi>"} <= set(re.findall(r"<bdi[^>]*>.</bdi>", page))
    assert not re.search(r"[^\x00-\x7f]", re.sub(r"<bdi( class=wide)?>.</bdi>", "", page))
    assert re.sub(".", terminal._in_columns, "é中\u0301") == "<bdi>é</bdi><bdi class=wide>中</bdi>\u0301"


def test_what_a_terminal_would_obey_is_escaped_and_keeps_its_colour():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False, width=40)
    terminal.put(console, Text("\x1b[2J", "red", end=""))
    assert console.file.getvalue() == "\x1b[31m\\x1b[2J\x1b[0m"


def test_progress_is_drawn_on_a_terminal_and_nowhere_else():
    for terminal_or_not, drawn in ((True, "what runs \u2501"), (False, "")):
        console = Console(file=io.StringIO(), force_terminal=terminal_or_not, width=80, color_system=None)
        with terminal.progress(2, console) as show:
            show("what runs", 1)
        assert drawn in console.file.getvalue()
        assert ("0:00:0" in console.file.getvalue() or "-:--:--" in console.file.getvalue()) is bool(drawn)


def test_a_number_has_an_exponent_where_it_is_small_or_large():
    assert [*map(terminal.number, (0.009, 0.01, 999.9, 1000))] == ["9.0e-03", "0.01", "999.90", "1.0e+03"]
