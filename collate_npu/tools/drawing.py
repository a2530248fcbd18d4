"""Drawing: a sheet as lines of rich, for a terminal or for a page of so many columns.

Squares and rows that are too wide are folded by blocks, those too many are counted.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from collate_npu.arrays import Array
from collate_npu.tools.sheet import SIGNS, Attention, Grid, Panel, Sheet, block_for, drawable, row_grid, sign_of
from collate_npu.tools.terminal import WIDTH, check_place, page, put, recorder

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
