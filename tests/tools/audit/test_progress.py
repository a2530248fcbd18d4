"""Progress: a bar on a terminal, and a line a model where there is none."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from rich.console import Console

from collate_npu.tools.audit.progress import Steps


def shown(**settings):
    console = Console(file=io.StringIO(), width=80, **settings)
    with Steps(console, 2, 2).shown() as steps:
        for name in ("first (sdpa)", "x" * 100 + " (sdpa)"):
            with steps.model(name, lambda: "3 of 3 right"):
                steps.advance()
    return console.file.getvalue()


def test_a_line_a_model_where_there_is_no_terminal():
    first, second = shown().splitlines()
    assert first.startswith("[1/2] first (sdpa): 3 of 3 right (0.")
    assert second.startswith("[2/2] xxx")
    assert "...xxx" in second


def test_a_bar_on_a_terminal_and_lines_on_a_dumb_one(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert "3 of 3 right" not in shown(force_terminal=True)
    assert "━" in shown(force_terminal=True)
    monkeypatch.setenv("TERM", "dumb")
    assert shown(force_terminal=True).startswith("[1/2] first")


def test_a_model_that_is_interrupted_has_no_line():
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt), Steps(console, 1, 1).shown() as steps, steps.model("m", lambda: "done"):
        raise KeyboardInterrupt
    assert not console.file.getvalue()
