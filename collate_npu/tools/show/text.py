"""Text: a sheet as lines for a terminal, in colours where there are some; a number or a sign says the same.

`plain` is the bare picture. `lines` fits a screen: squares and rows that are too wide are folded by blocks, those too many
are counted. Width and height are columns and lines of the terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from collate_npu.host import Array
from collate_npu.tools.show.attention import Attention, Cell, row_grid
from collate_npu.tools.show.sheet import COUNTED, IGNORED, ON_PADDING, Panel, Rows, Sheet
from collate_npu.tools.show.signs import (
    GLYPHS,
    LABEL_MEANINGS,
    LABELS,
    MEANINGS,
    Line,
    ShareForm,
    block_for,
    cells_of,
    columns,
    joined,
    more,
    share_of,
    string_of,
)
from collate_npu.tools.show.tokens import fitted

NAMED = "italic dim"
"""The style of tokens and their places."""
MOST_SQUARES = 16
"""Of one view, on the largest screen."""


def plain(sheet: Sheet, limit: int) -> str:
    """The panels that came with the batch, without captions, folded where they are wider than `limit` cells."""
    return "\n\n".join("\n".join(_bare(panel, sheet, limit)) for panel in sheet.panels if not panel.derived)


def _bare(panel: Panel, sheet: Sheet, limit: int) -> Iterator[str]:
    if panel.refused:
        yield f"refused: {panel.refused}"
    if panel.title:
        yield panel.title
    block = 1
    if panel.rows is not None:
        block = block_for(panel.rows.ids.shape[1], limit)
        grids = [row_grid(ids, block, panel.rows.held) for ids in panel.rows.ids]
        yield from (string_of(cells_of(grid, 0, numbered=sheet.packed)) for grid in grids)
    if panel.squares:
        block = block_for(max(panel.squares[0].shape), limit)
        grids = [square.grid(block) for square in panel.squares]
        for r in range(len(grids[0].cells)):
            yield "   ".join(string_of(cells_of(grid, r)) for grid in grids)
    if block > 1:
        yield f"{GLYPHS[Cell.PART]} {MEANINGS[Cell.PART]}; {block} places a cell, each way"


def lines(sheet: Sheet, width: int, height: int) -> list[Line]:
    """The whole sheet in `width` columns, meant to fit `height` lines where one view is asked for."""
    squares = [panel for panel in sheet.panels if panel.squares]
    lines_each = 2 if any(panel.rows is not None and panel.rows.labels is not None for panel in sheet.panels) else 1
    most_rows = max(2, (height // 6 if squares else height - 4) // lines_each)
    out: list[Line] = []
    drawn: list[list[Line]] = []
    for panel in sheet.panels:
        if panel.refused and not panel.title:
            out += [*_words(f"refused: {panel.refused}", width, "bold red"), []]
        elif panel.rows is not None and not panel.squares:
            out += [*_rows(panel.rows, sheet, width, most_rows, title=_heading(panel)), []]
    across = _across(sheet, squares, width)
    for panel in sheet.panels:
        if panel.squares or (panel.refused and panel.title):
            drawn.append(_view(panel, sheet, (width - 3 * (across - 1)) // across, height - len(out) - 2))
    for at in range(0, len(drawn), across):
        out += [*beside(drawn[at : at + across]), []]
    return [*out, *_legend(sheet, out, width)]


def _across(sheet: Sheet, squares: Sequence[Panel], width: int) -> int:
    """How many views stand side by side."""
    views = sum(bool(panel.squares or (panel.refused and panel.title)) for panel in sheet.panels)
    if views < 2 or not squares:
        return 1
    cells = min(max(square.shape[1] for panel in squares for square in panel.squares), 12)
    return max(1, min(views, (width + 3) // (max(_caption_width(sheet) + 2 * cells, 34) + 3)))


def _view(panel: Panel, sheet: Sheet, width: int, height: int) -> list[Line]:
    """A panel of squares: its facts, the places it holds, and as many of its squares as fit."""
    if panel.refused:
        return [*_words(panel.title, width, "bold"), *_words(f"refused: {panel.refused}", width, "bold red")]
    held = [] if panel.rows is None else _rows(panel.rows, sheet, width, 2)
    caption, (Q, K) = _caption_width(sheet), panel.squares[0].shape
    block = _block(max(Q, K), len(panel.squares), width, height - len(held) - 4, caption)
    out = [*_words(_heading(panel) + _folded(f"{block} x {block}", block), width, "bold"), *held]
    squares = [_square(square, block, sheet, caption) for square in panel.squares[:MOST_SQUARES]]
    across = max(1, (width + 3) // (max(columns(line) for square in squares for line in square) + 3))
    down = max(1, (height - len(out) - 1) // (-(-Q // block) + 1))
    shown = squares[: across * down]
    for at in range(0, len(shown), across):
        out += beside(shown[at : at + across])
    return out + _more(len(panel.squares) - len(shown), "square")


def _block(widest: int, squares: int, width: int, height: int, caption: int) -> int:
    """1 where a square stands in the width unfolded, and not more than 40 lines; else so that two stand side by side."""
    cells = (width - caption) // 2
    if widest > min(cells, 40):
        two = width if squares == 1 else (width - 3) // 2
        cells = max(min((two - caption) // 2, height), 4)
    return block_for(widest, cells)


def _heading(panel: Panel) -> str:
    return f"{panel.title}: {panel.facts}" if panel.title and panel.facts else panel.title or panel.facts


def _words(text: str, width: int, style: str) -> list[Line]:
    return [[(part, style)] for line in text.splitlines() for part in textwrap.wrap(line, width)]


def _more(number: int, what: str) -> list[Line]:
    return [[(more(number, what), "dim")]] if number > 0 else []


def _rows(rows: Rows, sheet: Sheet, width: int, most: int, *, title: str = "") -> list[Line]:
    """A line for each row of the batch: cells, share of padding, and the beginning of its text; its labels below."""
    B, S = rows.ids.shape
    text = sheet.tokens is not None and rows.held is None and width > 60
    share, room = _shown_share(width - 4 - (20 if text else 0), S)
    block = block_for(S, max(room // 2, 6))
    out = _words(f"{title}{_folded(f'{block} places', block)}".strip(), width, "bold")
    for b in range(min(B, most)):
        grid = row_grid(rows.ids[b], block, rows.held)
        cells = cells_of(grid, 0, numbered=sheet.packed)
        line: Line = [(f"{b:>3} ", "dim"), *cells, *share_of(grid.share, "padding", share)]
        left = width - columns(line) - 2
        if text and sheet.tokens is not None and left > 6:
            real = np.flatnonzero(rows.ids[b] > 0)[:left].tolist()
            line.append(("  " + fitted(sheet.tokens.text(b, real), left).rstrip(), NAMED))
        out.append(line)
        if rows.labels is not None:
            out.append([("    ", ""), *_labels(rows.labels[b], block)])
    return out + _more(B - most, "row")


def _folded(what: str, block: int) -> str:
    """What a cell stands for, where it is more than a place."""
    return f" ({what} a cell)" if block > 1 else ""


def _labels(labels_S: Array, block: int) -> Line:
    """The worst label of each block: one on padding, one that is ignored, one that counts."""
    starts = np.arange(0, len(labels_S), block)
    worst_C = np.maximum.reduceat(labels_S, starts) if len(starts) else labels_S
    styles = {0: "", COUNTED: "dim", IGNORED: "red", ON_PADDING: "bold red"}
    return joined([(LABELS[int(code)], styles[int(code)]) for code in worst_C])


def _square(square: Attention, block: int, sheet: Sheet, caption: int) -> list[Line]:
    grid = square.grid(block)
    head: Line = [(f"row {square.b}", "bold"), *share_of(grid.share, "blocked")]
    if grid.wrong:
        head.append((f" {grid.wrong} wrong", "bold red"))
    body = [[(_caption(square, r * block, sheet, caption), NAMED), *cells_of(grid, r)] for r in range(len(grid.cells))]
    return [head, *body]


def _caption(square: Attention, q: int, sheet: Sheet, wide: int) -> str:
    """The place of a query in its row, and its token."""
    place = square.place(q)
    if sheet.tokens is None:
        return f"{place:>{wide - 1}} "
    return f"{place:>4} " + fitted(sheet.tokens.one(square.b, place), wide - 6) + " "


def _caption_width(sheet: Sheet) -> int:
    """Tokens stand beside the queries where there is a tokenizer."""
    return 5 if sheet.tokens is None else 14


def _shown_share(width: int, cells: int) -> tuple[ShareForm, int]:
    """How a share is told, and the columns that it leaves: cells are not folded for it where they fit without."""
    forms: tuple[tuple[ShareForm, int], ...] = (("bar", 20), ("number", 13), ("", 0))
    fitting = [(form, width - taken) for form, taken in forms if 2 * cells <= width - taken]
    return next(iter(fitting), ("bar" if width > 46 else "number", width - (20 if width > 46 else 13)))


def beside(blocks: Sequence[list[Line]], gap: int = 3) -> list[Line]:
    """Blocks of lines side by side."""
    widths = [max((columns(line) for line in block), default=0) for block in blocks]
    out: list[Line] = []
    for at in range(max(map(len, blocks), default=0)):
        line: Line = []
        for block, wide in zip(blocks, widths):
            part = block[at] if at < len(block) else []
            line += [*part, (" " * (wide - columns(part) + gap), "")]
        while line and not line[-1][0].strip():
            line.pop()
        out.append(line)
    return out


def _legend(sheet: Sheet, drawn: Sequence[Line], width: int) -> list[Line]:
    """What the signs mean that were drawn."""
    told = {GLYPHS[cell]: meaning for cell, meaning in MEANINGS.items()}
    told |= {LABELS[code]: meaning for code, meaning in LABEL_MEANINGS.items()}
    signs = {*told, " ", *"123456789"}
    cells = [part for line in drawn for part, style in line if style not in ("bold", NAMED) and set(part) <= signs]
    used = set("".join(cells))
    numbers = ["1 2 .. the first, the second sequence of its row"] if sheet.packed else []
    said = [f"{sign} {meaning}" for sign, meaning in told.items() if sign in used]
    return _words("   ".join([*said, *numbers]), width, "dim")


def encodable(sheet: Sheet, encoding: str) -> Sheet:
    """With tokens and words that this encoding can print: other letters are escaped, `\\u4e2d`."""

    def told(text: str) -> str:
        return text.encode(encoding, "backslashreplace").decode(encoding)

    panels = [replace(panel, facts=told(panel.facts), refused=told(panel.refused)) for panel in sheet.panels]
    tokens = None if sheet.tokens is None else replace(sheet.tokens, decode=_then(sheet.tokens.decode, told))
    return Sheet(panels=tuple(panels), tokens=tokens)


def _then(first: Callable[[list[int]], str], second: Callable[[str], str]) -> Callable[[list[int]], str]:
    return lambda numbers: second(first(numbers))
