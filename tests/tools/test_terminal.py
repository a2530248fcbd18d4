"""What a terminal would obey is escaped, and progress is drawn on a terminal alone."""

import io

import pytest

pytest.importorskip("rich")
from rich.console import Console
from rich.text import Text

from collate_npu.tools import terminal


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
