"""Guide: what people read in a terminal is what ships. Which words lead where: test_cli. Notebooks: `nox -s docs`."""

import io
import re
import signal

import pytest

pytest.importorskip("rich")

from rich.console import Console
from rich.text import Text
from typed import typed

from collate_npu.__main__ import main
from collate_npu.tools import guide, terminal

PAGES = {name: path.read_text("utf-8") for name, path in guide.pages().items() if path.suffix == ".md"}
SCRIPTS = {name: path.read_text("utf-8") for name, path in guide.pages().items() if path.suffix == ".py"}


def test_the_first_page_names_every_other():
    assert typed("guide").stdout == PAGES["index"]
    named = set(re.findall(r"\]\(([\w/.-]+)\.(?:md|ipynb|py)[#)]", PAGES["index"]))
    assert set(guide.pages()) - {"index"} <= named


@pytest.mark.parametrize("name", ["deepspeed", "LoRA", "UnsupportedFormError", "左填充"])
def test_each_section_of_a_list_has_the_word(name):
    places = re.findall(r"^\* `(.*)`: ", typed("guide", name).stdout, flags=re.M)
    assert len(places) > 1
    assert all(name.casefold() in guide.read_page(place).casefold() for place in places)
    assert {place.startswith("zh/") for place in places} == {name >= "\u4e00"}, "each language has pages of its own"


def test_a_page_is_printed_as_it_is_and_a_script_as_a_block():
    for name in ("ms-swift", "zh/index"):
        assert typed("guide", name).stdout == PAGES[name]
    for name, text in SCRIPTS.items():
        assert typed("guide", name).stdout == f"```python\n{text}```\n\nTo run it: {guide.pages()[name]}\n"


def test_on_a_terminal_markdown_is_drawn_and_no_name_is_cut():
    done = typed("guide", "masks", FORCE_COLOR="1", COLUMNS="50").stdout
    assert "\x1b[" in done
    assert "# Which mask" not in done
    assert "Which mask does my stack want?" in done
    assert "…" not in done


def test_the_line_of_a_log_is_known_by_an_error_of_nine_letters_or_more_whatever_its_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(guide, "GUIDE", tmp_path)
    for error, code in (("IndexErr", 2), ("IndexErro", 0), ("Index 7 of 9", 0)):
        (tmp_path / "errors.md").write_text(f"## One\n\n**Says:** `{error}`\n", encoding="utf-8")
        assert typed("guide", f"rank3:{error.replace('7', '12')}:").exit_code == code


def test_a_section_ends_where_the_next_begins():
    for anchor in re.findall(r'<a id="([\w-]+)">', PAGES["errors"]):
        text = guide.read_page(f"errors#{anchor}")
        level = re.match("(###?) ", text)[1]
        assert not re.search(rf"\n#{{1,{len(level)}}} ", text), anchor
        assert text in re.sub(r'<a id="[\w-]+"></a>', "", PAGES["errors"]), anchor


def test_a_terminal_of_another_encoding_ends_no_command(monkeypatch):
    """The page holds a sign that it has not."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="gbk") for _ in range(2)]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    monkeypatch.setattr("sys.argv", ["collate-npu", "guide", "zh/index"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main()
    assert signal.signal(signal.SIGTERM, before) is signal.default_int_handler
    streams[0].flush()
    assert end.value.code == 0
    assert r"\u2b1a" in streams[0].buffer.getvalue().decode("gbk")


def test_what_a_terminal_would_obey_is_escaped_and_keeps_its_colour():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False, width=40)
    terminal.put(console, Text("\x1b[2J", "red", end=""))
    assert console.file.getvalue() == "\x1b[31m\\x1b[2J\x1b[0m"


def test_progress_is_drawn_on_a_terminal_and_nowhere_else():
    for terminal_or_not in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal_or_not, width=80, color_system=None)
        with terminal.progress(2, console) as show:
            show("what runs", 1)
        printed = console.file.getvalue()
        assert bool(re.search("what runs \u2501.*(0:00:0|-:--:--)", printed)) == bool(printed) == terminal_or_not
