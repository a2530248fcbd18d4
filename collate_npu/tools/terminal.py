"""Terminal: text and tables of rich on a terminal, whatever its encoding, or as one HTML page that loads nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from html import escape
from importlib import resources
from string import Template
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

from collate_npu.errors import printable

INTERRUPTED = 130
WORDS = {0: "PASS", 1: "FAIL", 2: "NOT PROVED", INTERRUPTED: "INTERRUPTED"}
"""The verdict by exit code."""
RIGHT, WRONG, UNPROVED = ("✔", "green"), ("✘", "bold red"), ("?", "yellow")
"""Sign and style."""
NARROWEST = 20  # columns of a terminal
ASCII = str.maketrans({"✔": "+", "✘": "!", "⬚": ".", "■": "#", "◧": "%", "…": "~"})
"""What each sign is where a terminal's encoding may lack it."""
_BREAK = "\x1e"  # between sections of a page: `put` escapes it, so no text holds one


def screen(**how: Any) -> Console:
    """The terminal, of a width in which something can be drawn, whatever COLUMNS says."""
    console = Console(**how)
    return console if console.width >= NARROWEST else Console(**how, width=NARROWEST)


@contextmanager
def progress(total: int, console: Console | None = None) -> Iterator[Callable[[str, float], None]]:
    """Show what runs and the time left, on stderr if it is a terminal: call it with a text, and with how much is done."""
    console = console or screen(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(20), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=total)
        yield lambda text, done: shown.update(task, description=printable(text), completed=done)


def put(console: Console, *drawn: Text | Table) -> None:
    """Print each on lines of its own, our signs in ASCII where they may not be shown; what a terminal obeys is escaped."""
    signs = ASCII if console.options.ascii_only else {}
    for one in drawn:
        parts = ((printable(text.translate(signs)), style or "") for text, style, _ in console.render(one))
        console.print(Text.assemble(*parts), end="")


def html_of(title: str, sections: Mapping[str, Text | Table]) -> str:
    """Return a page that loads nothing, in the light or dark colours of its reader: what `put` prints, below headings."""
    console = Console(file=io.StringIO(), record=True, width=9999, force_jupyter=False)  # else a notebook shows each line
    for drawn in sections.values():  # a browser folds the lines, but not those of a table
        put(console, drawn)
        console.print(_BREAK)
    export = partial(console.export_html, clear=False)
    light, dark = (export(theme=theme, code_format="{stylesheet}") for theme in (None, MONOKAI))
    code = "\n".join(
        f"<h2>{escape(heading)}</h2>\n<pre{' class=wide' * getattr(drawn, 'show_header', False)}>{text}</pre>"
        for (heading, drawn), text in zip(sections.items(), export(code_format="{code}").split(f"{_BREAK}\n"))
    )
    page = (resources.files("collate_npu") / "tools" / "data" / "page.html").read_text(encoding="utf-8")
    return Template(page).substitute(title=escape(title), light=light, dark=dark, code=code)


def picture_text(words: str) -> Text:
    """Return the text of a picture; what is refused or dangerous stands out."""
    text = Text(words)
    text.highlight_regex(r"⬚", "dim")
    text.highlight_regex(r"(?m)^(.*refused: |hazard: |padding: not known).*$", "bold red")
    return text


def ruled(*titles: str, numbers: Iterable[str] = ()) -> Table:
    """An empty table with these columns, and behind them those of numbers."""
    columns = [Column(title, overflow="fold") for title in titles]
    columns += [Column(title, justify="right", no_wrap=True) for title in numbers]
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), header_style="bold")


class _Folded(TableElement):
    """A table whose long names go on in the next line: rich would cut them, and a reader has to type them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for drawn in super().__rich_console__(console, options):
            for column in drawn.columns if isinstance(drawn, Table) else ():
                column.overflow = "fold"
            yield drawn


class Page(Markdown):
    """A page of the guide, as a terminal shows it."""

    elements = Markdown.elements | {"table_open": _Folded}


def terms(lines: Iterable[tuple[str, str]]) -> Table:
    """Return a label, and the text beside it, on each line."""
    grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for label, text in lines:
        grid.add_row(Text(f"  {label}", "bold yellow" if label[:2].isupper() else "cyan"), Text(text))
    return grid


def verdict_line(code: int, sentence: str) -> Text:
    """Return the first line of what a command found: its sign, and a sentence that begins with its word."""
    sign, style = {0: RIGHT, 1: WRONG}.get(code, UNPROVED)
    return Text(f"{sign} {sentence}", f"bold {style}")


def verdict_json(code: int, **found: Any) -> dict[str, Any]:
    """Return what a command found for machines: `passed` and its word first. Numbers that are not finite are words."""
    told = json.dumps({"passed": code == 0, "verdict": WORDS[code], "exit_code": code, **found})
    return json.loads(told, parse_constant=lambda word: str(float(word)))  # type: ignore[no-any-return]


def number(error: float) -> str:
    """`6.2e-06`, `4.04`, `nan`."""
    return f"{error:.1e}" if error < 0.01 or error >= 1000 else f"{error:.2f}"
