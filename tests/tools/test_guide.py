"""`collate-npu guide`: what people read in a terminal is what ships."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from collate_npu.tools.cli import app, guide


def run(*args: str):
    return CliRunner().invoke(app, ["guide", *args])


def test_the_list_has_every_page_with_a_line():
    done = run()
    assert done.exit_code == 0
    named = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.output.splitlines() if line.startswith("  ")}
    pages = {path.relative_to(guide.GUIDE).with_suffix("").as_posix() for path in guide.GUIDE.rglob("*.md")}
    assert set(named) == pages - {"index"}
    assert all(len(line) > 10 for line in named.values())
    assert "\nYour trainer\n" in f"\n{done.output}"


@pytest.mark.parametrize("name", ["ms-swift", "ms-swift.md", "MS-Swift", "zh/ascend", "index"])
def test_a_page_is_plain_text_where_it_is_piped(name):
    done = run(name)
    path = guide.GUIDE / f"{name.removesuffix('.md').lower()}.md"
    assert done.exit_code == 0
    assert done.output == path.read_text(encoding="utf-8")


def test_on_a_terminal_markdown_is_drawn(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawn = run("polarity")
    assert drawn.exit_code == 0
    assert "\x1b[" in drawn.output
    assert "# Polarity" not in drawn.output
    assert "Polarity: what True means" in drawn.output


@pytest.mark.parametrize(("wrong", "near"), [("ms-swfit", "ms-swift"), ("zh/asend", "zh/ascend"), ("polarty", "polarity")])
def test_a_wrong_name_ends_with_2_and_the_nearest(wrong, near):
    done = run(wrong)
    assert done.exit_code == 2
    assert f"Did you mean {near}?" in done.output
    assert "Traceback" not in done.output


def test_a_name_like_no_other_is_told_where_the_list_is():
    done = run("../../secrets")
    assert done.exit_code == 2
    assert "Did you mean" not in done.output
    assert "`collate-npu guide`" in done.output


def test_reading_loads_no_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom collate_npu.tools.cli import app\n"
        "assert CliRunner().invoke(app, ['guide', 'trl']).exit_code == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
