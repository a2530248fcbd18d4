"""`collate-npu guide`: what people read in a terminal is what ships."""

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from rich.console import Console
from typed import typed

from collate_npu.__main__ import main
from collate_npu.errors import CollateError
from collate_npu.tools import guide
from collate_npu.tools.terminal import Page


def run(*args: str):
    return typed("guide", *args)


def test_the_list_has_every_page_with_a_line():
    done = run()
    assert done.exit_code == 0
    named = dict(line.removeprefix("* `").split("`: ") for line in done.output.splitlines() if line.startswith("* "))
    pages = {path.relative_to(guide.GUIDE).with_suffix("").as_posix() for path in guide.GUIDE.rglob("*.md")}
    pages |= {path.stem for path in guide.GUIDE.glob("*.ipynb")}
    assert set(named) == pages - {"index"}
    assert all(len(line) > 10 for line in named.values())
    assert done.output.startswith("## Start\n")


@pytest.mark.parametrize("name", ["ms-swift.md", "MS-Swift", "zh/ascend", "index"])
def test_a_page_is_plain_text_where_it_is_piped(name):
    done = run(name)
    path = guide.GUIDE / f"{name.removesuffix('.md').lower()}.md"
    assert (done.exit_code, done.output) == (0, path.read_text(encoding="utf-8"))


def test_a_notebook_is_a_page_and_says_where_it_lies():
    done = run("try-it")
    assert done.exit_code == 0
    assert "```python\nimport torch\n\n" in done.output
    assert "```text\nlogits are off by 4\n```" in done.output
    assert Path(done.output.rsplit("To run it: ", 1)[1].strip()).is_file()


def test_on_a_terminal_markdown_is_drawn(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawn = run("masks")
    assert drawn.exit_code == 0
    assert "\x1b[" in drawn.output
    assert "# Which mask" not in drawn.output
    assert "Which mask does my stack want?" in drawn.output


def test_no_name_of_a_table_is_cut_on_a_narrow_terminal():
    with Console(width=50, record=True, file=io.StringIO()) as console:
        console.print(Page(guide.page("consumers")))
    assert "…" not in console.export_text()


@pytest.mark.parametrize("word", ["deepspeed", "LoRA", "FSDP2"])
def test_a_word_of_the_list_finds_what_is_said_of_it_and_not_the_list(word):
    found = run(word).output
    assert "# index" not in found
    assert word.casefold() in found.partition("\n")[2].casefold()


@pytest.mark.parametrize("typed", ["Can only concatenate tensors but got NoneType", "can’t keep packed sequences apart"])
def test_an_error_is_found_as_somebody_types_it(typed):
    assert run(*typed.split()).output.startswith("# errors\n")


def test_the_line_of_a_log_is_known_by_an_error_of_nine_letters_or_more():
    for error, known in (("IndexErr", False), ("IndexErro", True)):
        assert guide._tells(f"[rank 3] {error}: out of range", f"## One\n\n**Says:** `{error}`\n", str) == known


@pytest.mark.parametrize(
    ("wrong", "near"), [("ms-swfit", "ms-swift"), ("zh/asend", "zh/ascend"), ("../../secrets", ""), ("`", "")]
)
def test_a_wrong_name_ends_with_2_and_the_nearest(wrong, near):
    done = run(wrong)
    assert done.exit_code == 2
    assert (f"Did you mean {near}?" in done.output) == bool(near)
    assert "`collate-npu guide` lists them" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("errors#polarity", "### `PolarityError`", "```"),
        ("zh/errors#polarity", "### `PolarityError`", "```"),
        ("errors.md#refused-here", "## Refused here", "```"),
        ("ascend#versions", "## ", ""),
    ],
)
def test_a_section_is_shown_alone(name, first, last):
    lines = guide.page(name).splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].endswith(last)
    assert "<a id=" not in "".join(lines)
    level = lines[0].partition(" ")[0]
    assert [line for line in lines[1:] if line.startswith("#") and not line.startswith(f"{level}#")] == []
    whole = guide.page(name.partition("#")[0])
    assert guide.page(name) in re.sub(r'<a id="[\w-]+"></a>', "", whole)


def test_sections_of_a_page_are_the_page():
    text = guide.page("errors")
    names = re.findall(r'<a id="([\w-]+)">', text)
    parts = {name: guide.page(f"errors#{name}") for name in names}
    assert len(parts) > 20
    for name, part in parts.items():
        assert part in re.sub(r'<a id="[\w-]+"></a>', "", text), name
        assert part.count("\n### ") == 0


def test_a_section_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(CollateError, match=r"Did you mean polarity[?] `collate-npu guide errors` shows"):
        guide.page("errors#polaritty")


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


def test_reading_loads_no_torch():
    code = (
        "import sys\nfrom collate_npu.tools.cli import run\n"
        "assert run(['guide', 'trl']) == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
