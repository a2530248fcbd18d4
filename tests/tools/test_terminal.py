"""Files say what the terminal says, load nothing, and need no font of their own."""

import html
import io
import os
import re

import pytest
import torch

pytest.importorskip("rich")
from rich.console import Console
from rich.text import Text

from collate_npu import CollateError, Segments
from collate_npu.masks import dense
from collate_npu.tools import files, terminal
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


def text_of(written):
    return " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "", written, flags=re.S)).split())


def shown(shown=BATCH):
    return picture(shown, tokenizer=Letters())


SAID = ["refused: attention_mask", "a&b", "中", "$x$", "\\n", "row 1, 1 wrong", "+ att"]
"""Of a batch that is refused."""


def test_a_page_says_all_and_loads_nothing(tmp_path, monkeypatch):
    for name, value in (("COLUMNS", "20"), ("NO_COLOR", "1")):  # of the terminal, which it is not for
        monkeypatch.setenv(name, value)
    shown().save(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert [said for said in SAID if said not in text_of(text)] == []
    assert not re.search(r"url\(|@import|<script|<link|<img|\b(src|href)=", text)
    assert text.count("#800000")  # red


def test_what_becomes_a_file_is_not_printed_in_a_notebook(monkeypatch):
    """rich shows each line by itself where it finds a kernel."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert Console().is_jupyter
    assert not terminal.recorder().is_jupyter


def test_letters_of_a_page_keep_their_columns():
    page = shown().html
    assert {"<bdi>■</bdi>", "<bdi>⬚</bdi>", "<bdi class=wide>中</bdi>"} <= set(re.findall(r"<bdi[^>]*>.</bdi>", page))
    assert not re.search(r"[^\x00-\x7f]", re.sub(r"<bdi( class=wide)?>.</bdi>", "", page))
    assert re.sub(".", terminal._in_columns, "é中\u0301") == "<bdi>é</bdi><bdi class=wide>中</bdi>\u0301"


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_a_terminal_without_the_signs_gets_others(encoding):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=40)
    terminal.put(console, Text("✔ ⬚ ■ "))
    console.file.flush()
    assert raw.getvalue().decode(encoding) == "+ . # \n"
    assert all(chr(sign).translate(terminal.ASCII).isascii() for sign in terminal.ASCII)


def test_what_a_terminal_would_obey_is_escaped_and_keeps_its_colour():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False, width=40)
    terminal.put(console, Text("\x1b[2J", "red", end=""))
    assert console.file.getvalue() == "\x1b[31m\\x1b[2J\x1b[0m"


def test_a_place_that_is_no_page_is_refused_with_what_is_one(tmp_path):
    (tmp_path / "a.html").mkdir()
    for name in ("a.gif", "a.svg", "a", "a.HTML5"):
        with pytest.raises(CollateError, match=r"A page is written as \.html"):
            shown().save(tmp_path / name)
    for path in (tmp_path / "no" / "a.html", tmp_path / "a.html"):
        with pytest.raises(CollateError, match="Name a file in a folder that exists"):
            shown().save(path)


def test_a_pipe_that_nobody_reads_is_refused_before_anything_is_drawn(tmp_path):
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(CollateError, match="got a pipe"):
        files.check_place(tmp_path / "pipe.html")
    files.check_place(tmp_path / "new.html")
