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
from collate_npu.tools import paper
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


SAID = ["refused: attention_mask", "a&b", "中", "$x$", "\\n", "50% padding", "39% blocked 1 wrong", "+ att"]
"""Of a batch that is refused."""


@pytest.mark.parametrize("ending", ["txt", "html", "svg"])
def test_a_file_says_all_and_loads_nothing(tmp_path, ending, monkeypatch):
    for name, value in (("COLUMNS", "20"), ("NO_COLOR", "1")):  # of the terminal, which it is not for
        monkeypatch.setenv(name, value)
    shown().save(tmp_path / f"a.{ending}")
    text = (tmp_path / f"a.{ending}").read_text(encoding="utf-8")
    for said in SAID:
        assert said in (text_of(text) if ending != "txt" else " ".join(text.split())), said
    assert not re.search(r"url\([^#]|@import|<script|<link|<img|\b(src|href)=", re.sub(r"url\(#", "", text))
    assert ending == "txt" or text.count("#800000")  # red


def test_what_becomes_a_file_is_not_printed_in_a_notebook(monkeypatch):
    """rich shows each line by itself where it finds a kernel."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert Console().is_jupyter
    assert not paper.recorder().is_jupyter


def test_letters_of_a_page_keep_their_columns():
    page = shown().html
    assert {"<bdi>■</bdi>", "<bdi>⬚</bdi>", "<bdi class=wide>中</bdi>"} <= set(re.findall(r"<bdi[^>]*>.</bdi>", page))
    assert not re.search(r"[^\x00-\x7f]", re.sub(r"<bdi( class=wide)?>.</bdi>", "", page))
    assert re.sub(".", paper._in_columns, "é中\u0301") == "<bdi>é</bdi><bdi class=wide>中</bdi>\u0301"


@pytest.fixture
def figures(monkeypatch):
    """Those that were saved."""
    figure, saved = pytest.importorskip("matplotlib.figure").Figure, []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda *args, **how: saved.append(args[0]) or save(*args, **how))
    return saved


def test_a_png_has_cells_as_squares_and_leaves_no_setting_behind(figures, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams), matplotlib.get_backend()
    for drawn in (torch.ones(2, 3), torch.ones(1, 1, 2, 2), BATCH):
        shown(drawn).save(tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == before
    (axes,) = figures[-1].axes
    words = " ".join(" ".join(text.get_text() for text in axes.texts).split())
    for said in ("refused: attention_mask", "50% padding", "1 wrong", "中", "$x$", "+ attends and ought not to"):
        assert said in words, said
    squares = [square.grid(1) for panel in shown(BATCH).sheet.panels for square in panel.squares]
    green = [patch for patch in axes.patches if patch.get_facecolor()[1] > 0.5 > patch.get_facecolor()[0]]
    assert len(green) == sum((grid.cells == 1).sum() for grid in squares) + (BATCH["attention_mask_2d"]).sum()


@pytest.mark.parametrize("drawn", [[], [Text("ab" * 50), Text("c")], [Text("中文")] * 3])
def test_a_png_is_ten_pixels_a_column_and_has_a_margin(figures, drawn):
    png, columns = paper._png(drawn), max((line.cell_len for line in drawn), default=0)
    assert [int.from_bytes(png[at : at + 4], "big") for at in (16, 20)] == [10 * (columns + 2), 20 * (len(drawn) + 1)]
    (axes,) = figures[0].axes
    assert (axes.get_position().bounds, axes.axison) == ((0, 0, 1, 1), False)
    assert (axes.get_xlim(), axes.get_ylim()) == ((-1, columns + 1), (len(drawn), -1))


def test_letters_and_cells_of_a_png_have_their_styles(figures, recwarn):
    paper._png([Text("a"), Text.assemble(("中", "bold"), ("b", "dim"), ("■", "red"), "\ue000")])
    assert UserWarning not in {each.category for each in recwarn}  # of a letter that no font has
    (axes,) = figures[0].axes
    styles = [(text.get_text(), text.get_weight(), text.get_alpha()) for text in axes.texts]
    assert styles == [("a", "normal", 1), ("中", "bold", 1), ("b", "normal", 0.5), ("\ue000", "normal", 1)]
    assert {(text.get_fontfamily()[0], text.get_size(), text.get_parse_math()) for text in axes.texts} == {
        ("DejaVu Sans Mono", 8, False)
    }
    (square,) = axes.patches
    assert (*square.get_xy(), square.get_width(), square.get_height()) == (3, 0.55, 1.8, 0.9)
    assert (square.get_linewidth(), square.get_alpha(), square.get_facecolor()[0] > 0.4) == (0, 0.9, True)


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_a_terminal_without_the_signs_gets_others(encoding):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=40)
    paper.put(console, Text("✔ ⬚ ■ "))
    console.file.flush()
    assert raw.getvalue().decode(encoding) == "+ . # \n"
    assert all(chr(sign).translate(paper.ASCII).isascii() for sign in paper.ASCII)


def test_what_a_terminal_would_obey_is_escaped_and_keeps_its_colour():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False, width=40)
    paper.put(console, Text("\x1b[2J", "red", end=""))
    assert console.file.getvalue() == "\x1b[31m\\x1b[2J\x1b[0m"


def test_a_place_that_is_no_figure_is_refused_with_what_is_one(monkeypatch, tmp_path):
    (tmp_path / "a.svg").mkdir()
    for name in ("a.gif", "a", "a.HTML5"):
        with pytest.raises(CollateError, match=r"Figures are written as \.png, \.svg, \.html, \.txt"):
            shown().save(tmp_path / name)
    for path in (tmp_path / "no" / "a.txt", tmp_path / "a.svg"):
        with pytest.raises(CollateError, match="Name a file in a folder that exists"):
            shown().save(path)
    monkeypatch.setattr(paper, "find_spec", lambda name: None)
    with pytest.raises(CollateError, match="pip install matplotlib"):
        paper.check_figure(tmp_path / "a.png")
    paper.check_figure(tmp_path / "b.svg")


def test_a_pipe_that_nobody_reads_is_refused_before_anything_is_drawn(tmp_path):
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(CollateError, match="got a pipe"):
        paper.check_place(tmp_path / "pipe.html")
    paper.check_place(tmp_path / "new.html")


def test_each_part_of_a_drawn_line_stands_in_its_column(monkeypatch):
    pytest.importorskip("matplotlib")
    written = []
    monkeypatch.setattr(paper, "_write", lambda axes, x, y, text, style: written.append((x, y, text)))
    paper._png([Text("ab■中c"), Text("d")])
    assert written == [(0, 0, "ab"), (2, 0, "■"), (3, 0, "中"), (5, 0, "c"), (0, 1, "d")]
