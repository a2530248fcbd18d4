"""Drawing: what the tools show, as lines of rich on a terminal, or as one HTML page that loads nothing.

Squares and rows that are too wide are folded by blocks, those too many are counted.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME as THEME
from rich.text import Text

from collate_npu.arrays import Array
from collate_npu.errors import CollateError, explain, printable
from collate_npu.tools.sheet import SIGNS, Attention, Grid, Panel, Sheet, block_for, drawable, row_grid, sign_of

WIDTH, NARROWEST = 120, 20
"""Columns of a file, and of a terminal at least."""
ASCII = str.maketrans({"✔": "+", "✘": "!", "⬚": ".", "■": "#", "◧": "%", "·": "_", "×": "x", "…": "~"})
"""What each sign is where a terminal's encoding has not all of them."""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>TITLE</title>
<style>
.collate-npu {{overflow-x: auto; padding: 1rem; color: {foreground}; background: {background}}}
.collate-npu pre {{font: 14px/1.3 Menlo, "DejaVu Sans Mono", Consolas, monospace; margin: 0}}
.collate-npu bdi {{display: inline-block; width: 1ch}}
.collate-npu bdi.wide {{width: 2ch}}
</style></head>
<body><div class="collate-npu"><pre>{code}</pre></div></body></html>
"""


def screen(**how: Any) -> Console:
    """The terminal, of a width in which something can be drawn, whatever COLUMNS says."""
    console = Console(**how)
    return console if console.width >= NARROWEST else Console(**how, width=NARROWEST)


def put(console: Console, *drawn: Text | Table) -> None:
    """Print each on lines of its own; with signs of ASCII where the encoding of the console has not all of ours, and with
    the escape of whatever a terminal would obey: names and texts come from files."""
    try:
        fine = bool("".join(map(chr, ASCII)).encode(console.encoding))
    except (UnicodeEncodeError, LookupError):
        fine = False
    for one in drawn:
        parts = [(text if fine else text.translate(ASCII), style or "") for text, style, _ in console.render(one)]
        if fine and all(printable(text) == text for text, _ in parts):
            console.print(one)
        else:
            console.print(Text.assemble(*((printable(text), style) for text, style in parts)), end="")


def ruled(*titles: str, numbers: Iterable[str] = ()) -> Table:
    """An empty table with these columns, and behind them those of numbers."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    for title in titles:
        drawn.add_column(title, overflow="fold")
    for title in numbers:
        drawn.add_column(title, justify="right", no_wrap=True)
    return drawn


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


def recorder() -> Console:
    """A console that prints nowhere: what is put on it becomes a file."""
    return Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)  # else a notebook shows each line


def page(console: Console, title: str) -> str:
    """What was recorded, as an HTML page on which letters of whatever font keep their columns."""
    written = console.export_html(theme=THEME, code_format=PAGE.replace("TITLE", title), inline_styles=True)
    return re.sub(r"[^\x00-\x7f]", _in_columns, written)


def _in_columns(found: re.Match[str]) -> str:
    return ("", "<bdi>{}</bdi>", "<bdi class=wide>{}</bdi>")[cell_len(found[0])].format(found[0]) or found[0]


def check_place(path: Path, ending: str = "") -> None:
    """Refuse a file that could not be written, before anything is read or measured for it; a link, behind which another
    file would be; and a name that ends otherwise."""
    if not path.name.endswith(ending):
        rule, remedy = f"A page is written as {ending}.", f"End the name with {ending}."
        raise CollateError(explain(str(path), repr(path.suffix), rule, remedy))
    if path.is_symlink():
        raise CollateError(explain(str(path), f"a link to {path.readlink()}", "It is one file.", "Name that file itself."))
    if path.is_dir() or path.is_fifo() or not path.absolute().parent.is_dir():
        got = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "no folder of that name"
        raise CollateError(explain(str(path), got, "It is one file.", "Name a file in a folder that exists."))


TITLE = "collate-npu show"
NAMED = "italic dim"
"""The style of tokens and their places."""
UNFOLDED, FOLDED = 40, 16
"""Cells of the side of a square: the most of one that is not folded, and of one that is."""
MOST_ROWS, MOST_SQUARES, MOST_LINES = 16, 16, 40
"""Of a panel; its squares take so many lines."""
GAP = 3
"""Columns between what stands side by side."""


def lines(sheet: Sheet, width: int) -> list[Text]:
    """The whole sheet in `width` columns."""
    return _Drawing(sheet, width).lines()


def html_of(sheet: Sheet, *, columns: int = WIDTH) -> str:
    """As one page that loads nothing."""
    console = recorder()
    put(console, *lines(sheet, columns))
    return page(console, TITLE)


def save(sheet: Sheet, path: Path) -> None:
    """Write that page."""
    check_place(path, ".html")
    path.write_bytes(html_of(sheet).encode())


class _Drawing:
    def __init__(self, sheet: Sheet, width: int) -> None:
        self.sheet, self.width = sheet, width
        widest = max((square.shape[1] for panel in sheet.panels for square in panel.squares), default=0)
        self.digits = max(len(str(widest)), 4)
        self.caption = self.digits + (1 if sheet.tokens is None else 10)
        self.used: set[str] = set()
        """Signs that were drawn."""

    def lines(self) -> list[Text]:
        """Panel by panel, and what the signs mean that were drawn."""
        drawn = [line for panel in self.sheet.panels for line in (*self._panel(panel), Text())]
        said = [f"{sign} {meaning}" for sign, _, meaning in SIGNS.values() if sign in self.used]
        said += ["1 2 .. the first, the second sequence of its row"] if self.sheet.packed else []
        return [*drawn, *self._words("   ".join(said), "dim")]

    def _panel(self, panel: Panel) -> list[Text]:
        refused = self._words(f"refused: {panel.refused}", "bold red") if panel.refused else []
        block, drawn = 1, list[Text]()
        if panel.ids is not None:
            block, drawn = self._rows(panel.ids, panel.labels)
        elif panel.squares:
            block, drawn = self._squares(panel.squares)
        folded = f" ({block} places a cell)" if block > 1 else ""
        heading = ": ".join(filter(None, (panel.heading, panel.facts)))
        return [*self._words(heading + folded, "bold"), *refused, *drawn]

    def _squares(self, squares: Sequence[Attention]) -> tuple[int, list[Text]]:
        """Places a cell, and as many squares as fit, side by side."""
        Q, K = squares[0].shape
        cells = min((self.width - self.caption) // 2, UNFOLDED)
        block = block_for(max(Q, K), cells if max(Q, K) <= cells else min(cells, FOLDED))
        grids = [(square, square.grid(block)) for square in squares[: drawable(squares, MOST_SQUARES)]]
        if not grids:
            return 1, self._words(f"too large to be drawn: {Q} queries, {K} keys", "")
        wide = max(self.caption + 2 * -(-K // block) - 1, *(_head(*one).cell_len for one in grids))
        across = max(1, (self.width + GAP) // (wide + GAP))
        shown = grids[: across * max(1, MOST_LINES // (-(-Q // block) + 1))]
        drawn = [[_head(*one), *self._square(*one, block)] for one in shown]
        out = [line for at in range(0, len(drawn), across) for line in beside(drawn[at : at + across])]
        return block, out + _more(len(squares) - len(shown), "square")

    def _square(self, square: Attention, grid: Grid, block: int) -> list[Text]:
        """A line for each row of cells: the place of its first query, its token, and the cells."""
        out = []
        for r in range(len(grid.cells)):
            place, tokens = int(square.queries[r * block]), self.sheet.tokens
            token = "" if tokens is None else fitted(tokens.one(square.b, place), 8) + " "
            out.append(Text.assemble((f"{place:>{self.digits}} {token}", NAMED), self._cells(grid.signs(r))))
        return out

    def _rows(self, ids: Array, labels: Array | None) -> tuple[int, list[Text]]:
        """Places a cell, and for each row its cells, share of padding, and the beginning of its text; its labels below."""
        B, S = ids.shape
        tokens = self.sheet.tokens if self.width > 60 else None
        of = " padding" if self.width >= 40 else ""
        block = block_for(S, max((self.width - len(f"  0   40%{of}") - (20 if tokens else 0)) // 2, 4))
        out = []
        for b, ids_S in enumerate(ids[:MOST_ROWS]):
            grid = row_grid(ids_S, block)
            cells = self._cells(grid.signs(0, numbered=self.sheet.packed))
            out.append(Text.assemble((f"{b:>3} ", "dim"), cells, (f" {percent(grid.share):>4}{of}", "dim")))
            left = self.width - out[-1].cell_len - 2
            if tokens is not None:
                text = tokens.text(b, np.flatnonzero(ids_S > 0)[:left].tolist())
                out[-1].append("  " + fitted(text, left).rstrip(), NAMED)
            if labels is not None:  # the worst of each block: one on padding, one that is ignored, one that counts
                worst = np.maximum.reduceat(labels[b], np.arange(0, S, block))
                out.append(Text("    ").append(self._cells([sign_of(code) if code else (" ", "") for code in worst])))
        return block, out + _more(B - MOST_ROWS, "row")

    def _cells(self, signs: Sequence[tuple[str, str]]) -> Text:
        """Cells with a space between them."""
        self.used.update(sign for sign, _ in signs)
        return Text(" ").join(Text(sign, style) for sign, style in signs)

    def _words(self, text: str, style: str) -> list[Text]:
        return [Text(part, style) for line in text.splitlines() for part in textwrap.wrap(line, self.width)]


def beside(blocks: Sequence[list[Text]]) -> list[Text]:
    """Blocks of lines side by side."""
    widths = [max((line.cell_len for line in block), default=0) + GAP for block in blocks]
    out = []
    for parts in zip_longest(*blocks, fillvalue=Text()):
        line = Text()
        for part, wide in zip(parts, widths):
            line.append(part).append(" " * (wide - part.cell_len))
        line.rstrip()
        out.append(line)
    return out


def fitted(text: str, columns: int) -> str:
    """Exactly so many columns wide: cut with `…`, or filled with spaces."""
    if cell_len(text) > columns:
        text = set_cell_size(text, max(columns - 1, 0)) + "…"
    return set_cell_size(text, columns)


def percent(share: float) -> str:
    """A part of a whole; 0% and 100% are none and all of it."""
    return f"{min(max(round(100 * share), 1), 99) if 0 < share < 1 else round(100 * share)}%"


def _head(square: Attention, grid: Grid) -> Text:
    """Above a square: its row, how much of it is blocked, and how many places are wrong."""
    head = Text.assemble((f"row {square.b}", "bold"), (f" {percent(grid.share):>4} blocked", "dim"))
    return head.append(f" {grid.wrong} wrong", "bold red") if grid.wrong else head


def _more(number: int, what: str) -> list[Text]:
    """`... 28 more rows`."""
    return [Text(f"... {number} more {what}{'s' if number > 1 else ''}", "dim")] if number > 0 else []


# --- numbers and names in words


def largest(values: Iterable[float | None]) -> float:
    """NaN if one is: Python's max drops one that is not first."""
    found = [value for value in values if value is not None]
    return next((value for value in found if value != value), max(found, default=0.0))


def finite(value: Any) -> Any:
    """For JSON: numbers that are not finite as words."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(error: float) -> str:
    """`6.2e-06`, `4.04`, `nan`."""
    return f"{error:.1e}" if error < 0.01 or error >= 1000 else f"{error:.2f}"


def shortened(text: str, most: int = 48) -> str:
    """Of at most so many letters: what is left out of a long path is its middle."""
    if len(text) <= most:
        return text
    tail = (most - 3) * 2 // 3
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"


def listed(names: Iterable[str], most: int = 0) -> str:
    """Each name once; after the first few, how many more (`most` 0: all)."""
    unique = list(dict.fromkeys(names))
    more = len(unique) - most
    return ", ".join(unique) if not most or more <= 1 else f"{', '.join(unique[:most])} and {more} more"
