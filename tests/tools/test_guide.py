"""`collate-npu guide`: what people read in a terminal is what ships."""

import ast
import io
import json
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("rich")

from rich.console import Console
from typed import typed

from collate_npu.__main__ import main
from collate_npu.releases import KERNELS_TOLD
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
    assert {name for name in named if not name.startswith("examples/")} == pages - {"index"}
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


def test_examples_are_listed_and_a_script_is_printed_whole():
    scripts = {f"examples/{path.stem}": path for path in guide.GUIDE.glob("examples/*.py")}
    assert re.findall(r"^\* `(.+?)`: \w.+\.$", run("examples").output, flags=re.M) == sorted(scripts)
    for name, path in scripts.items():
        assert run(name).output == f"```python\n{path.read_text(encoding='utf-8')}```\n\nTo run it: {path}\n"


def test_on_a_terminal_markdown_is_drawn(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawn = run("masks")
    assert drawn.exit_code == 0
    assert "\x1b[" in drawn.output
    assert "# Which mask" not in drawn.output
    assert "Which mask does my stack want?" in drawn.output


def test_no_name_of_a_table_is_cut_on_a_narrow_terminal():
    with Console(width=50, record=True, file=io.StringIO()) as console:
        console.print(Page(guide.read_page("masks")))
    assert "…" not in console.export_text()


@pytest.mark.parametrize("word", ["deepspeed", "LoRA", "FSDP2"])
def test_a_word_of_the_list_finds_what_is_said_of_it_and_not_the_list(word):
    found = run(word).output
    assert "# index" not in found
    places = re.findall(r"^\* `(.*)`: .* \(\d+\)$", found, flags=re.M)
    assert len(places) > 1
    assert all(word.casefold() in guide.read_page(place).casefold() for place in places)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("left padding", "* `errors#causal-kernel`: "),
        ("左填充", "* `zh/errors#"),
        ("lora deepspeed", "# training\n"),
        ("mask", "* `masks#"),
    ],
)
def test_words_find_one_section_or_a_list_of_them_best_first(words, first):
    text = run(words).output
    assert text.startswith(first)
    assert text.count("\n* ") <= guide.MOST


@pytest.mark.parametrize("typed", ["Can only concatenate tensors but got NoneType", "can’t keep packed sequences apart"])
def test_an_error_is_found_as_somebody_types_it(typed):
    assert run(*typed.split()).output.startswith("# errors\n")


def test_the_line_of_a_log_is_known_by_an_error_of_nine_letters_or_more(monkeypatch, tmp_path):
    monkeypatch.setattr(guide, "GUIDE", tmp_path)
    for error, code in (("IndexErr", 2), ("IndexErro", 0)):
        (tmp_path / "errors.md").write_text(f"## One\n\n**Says:** `{error}`\n", encoding="utf-8")
        assert run(f"[rank 3] {error}: out of range").exit_code == code


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("ms-swfit", "Did you mean ms-swift"),
        ("deepsped", "Did you mean DeepSpeed"),
        ("zh/asend", "Did you mean zh/ascend or"),
        ("errors#polaritty", "Did you mean polarity"),
        ("errors#nothing-like-it", "`collate-npu guide errors` shows the whole page."),
        ("../../secrets", "`collate-npu guide` lists them."),
        ("`", "`collate-npu guide` lists them."),
    ],
)
def test_a_wrong_name_ends_with_2_and_the_nearest(wrong, says):
    done = run(wrong)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.output
    assert "Traceback" not in done.output


ANCHORS = re.findall(r'<a id="([\w-]+)">', (guide.GUIDE / "errors.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", ["zh/errors#polarity", "errors.md#refused-here", "ascend#versions", *(f"errors#{x}" for x in ANCHORS)]
)
def test_a_section_is_shown_alone(name):
    first, *lines = guide.read_page(name).splitlines()
    level = first.partition(" ")[0]
    assert level in ("##", "###")
    assert [line for line in lines if line.startswith("#") and not line.startswith(f"{level}#")] == []
    whole = re.sub(r'<a id="[\w-]+"></a>', "", guide.read_page(name.partition("#")[0]))
    assert guide.read_page(name) in whole
    assert "<a id=" not in guide.read_page(name)


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
        "import sys\nfrom collate_npu.tools.cli import run_command_line\n"
        "assert run_command_line(['guide', 'trl']) == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# --- notebooks

NOTEBOOKS = sorted(guide.GUIDE.glob("*.ipynb"))


def ran(code, names):
    """What a cell prints, and the text of its last line, as a kernel shows them."""
    out, body = io.StringIO(), ast.parse(code).body
    with redirect_stdout(out):
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return "\n".join(text.strip("\n") for text in (out.getvalue(), "" if value is None else repr(value)) if text)


@pytest.mark.models
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_cell_prints_what_it_holds(path):
    """Cell by cell, without Jupyter; `nox -s docs` runs them in a kernel."""
    pytest.importorskip("transformers")
    names = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            found = ran("".join(cell["source"]), names)
            assert found == guide.printed(cell) or not KERNELS_TOLD.holds()  # older releases call kernels by other names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_short_and_every_output_is_stored(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(cells) <= 10
    assert max(len(line) for cell in code for line in "".join(cell["source"]).splitlines()) <= 80
    assert all(map(guide.printed, code))
    assert not any(each.get("name") == "stderr" for cell in cells for each in cell.get("outputs", ()))


def test_a_page_of_it(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stderr", "text": ["noise\n"]},
        {"output_type": "stream", "name": "stdout", "text": ["one\n", "two\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["3"], "text/html": ["<b>3</b>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["x = 3\n", "x"], "outputs": outputs},
        {"cell_type": "code", "source": ["pass"], "outputs": []},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page = "# Title\ntext\n\n```python\nx = 3\nx\n```\n\n```text\none\ntwo\n3\n```\n\n```python\npass\n```\n"
    assert guide.as_markdown(tmp_path / "a.ipynb") == page
    outputs[1]["text"] = "word " * 16 + "\n" + "word " * 40
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    said = guide.as_markdown(tmp_path / "a.ipynb").splitlines()
    assert max(map(len, said)) <= 80
    assert "word " * 16 in said
