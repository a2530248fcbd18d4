"""`collate-npu guide`: what people read in a terminal is what ships."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from collate_npu.__main__ import main
from collate_npu.tools.cli import app, guide


def run(*args: str):
    return CliRunner().invoke(app, ["guide", *args])


def test_the_list_has_every_page_with_a_line():
    done = run()
    assert done.exit_code == 0
    named = dict(line.removeprefix("* `").split("`: ") for line in done.output.splitlines() if line.startswith("* "))
    pages = {path.relative_to(guide.GUIDE).with_suffix("").as_posix() for path in guide.GUIDE.rglob("*.md")}
    assert set(named) == pages - {"index"}
    assert all(len(line) > 10 for line in named.values())
    assert done.output.startswith("## Your trainer\n")


@pytest.mark.parametrize("name", ["ms-swift.md", "MS-Swift", "zh/ascend", "index"])
def test_a_page_is_plain_text_where_it_is_piped(name):
    done = run(name)
    path = guide.GUIDE / f"{name.removesuffix('.md').lower()}.md"
    assert (done.exit_code, done.output) == (0, path.read_text(encoding="utf-8"))


def test_on_a_terminal_markdown_is_drawn(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawn = run("polarity")
    assert drawn.exit_code == 0
    assert "\x1b[" in drawn.output
    assert "# Polarity" not in drawn.output
    assert "Polarity: what True means" in drawn.output


@pytest.mark.parametrize(("wrong", "near"), [("ms-swfit", "ms-swift"), ("zh/asend", "zh/ascend"), ("../../secrets", "")])
def test_a_wrong_name_ends_with_2_and_the_nearest(wrong, near):
    done = run(wrong)
    assert done.exit_code == 2
    assert (f"Did you mean {near}?" in done.output) == bool(near)
    assert "`collate-npu guide` lists them" in done.output
    assert "Traceback" not in done.output


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
        "import sys\nfrom typer.testing import CliRunner\nfrom collate_npu.tools.cli import app\n"
        "assert CliRunner().invoke(app, ['guide', 'trl']).exit_code == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
