"""Text: a sheet as lines for a terminal, in colours where there are some; a number or a sign says the same.

`plain` is the bare picture. `lines` fits a screen: squares and rows that are too wide are folded by blocks, those too many
are counted. Width and height are columns and lines of the terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from collate_npu.host import Array
from collate_npu.tools.show.attention import Attention, Cell, Grid, row_grid
from collate_npu.tools.show.sheet import COUNTED, IGNORED, ON_PADDING, Panel, Rows, Sheet
from collate_npu.tools.show.tokens import Token, fitted

Line = list[tuple[str, str]]
"""Parts of a line: what stands there, and its style, in rich's words."""

GLYPHS = {
    Cell.BLOCKED: "⬚",
    Cell.WHOLE: "■",
    Cell.PART: "◧",
    Cell.TOO_MUCH: "+",
    Cell.TOO_LITTLE: "-",
    Cell.ELSEWHERE: "·",
}
MEANINGS = {
    Cell.WHOLE: "attends, real",
    Cell.BLOCKED: "blocked, padding",
    Cell.PART: "a part of the block",
    Cell.TOO_MUCH: "attends and ought not to",
    Cell.TOO_LITTLE: "is blocked and ought to attend",
    Cell.ELSEWHERE: "on another rank",
}
LABELS = {0: " ", COUNTED: "o", IGNORED: "×", ON_PADDING: "!"}
LABEL_MEANINGS = {IGNORED: "label ignored", COUNTED: "label counts", ON_PADDING: "label on padding"}
COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "bright_cyan")
"""Of the sequences of a row, in turn; red is for what is wrong."""
FULL, EMPTY = "█", "░"
ASCII = str.maketrans({"⬚": ".", "■": "#", "◧": "%", "·": "_", "×": "x", "…": "~", FULL: "#", EMPTY: "."})
"""What each sign is where the terminal's encoding has none of them."""


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
        yield from (_string(_cells(grid, 0, numbered=sheet.packed)) for grid in grids)
    if panel.squares:
        block = block_for(max(panel.squares[0].shape), limit)
        grids = [square.grid(block) for square in panel.squares]
        for r in range(len(grids[0].cells)):
            yield "   ".join(_string(_cells(grid, r)) for grid in grids)
    if block > 1:
        yield f"{GLYPHS[Cell.PART]} {MEANINGS[Cell.PART]}; a cell is {block} places a side"


def block_for(width: int, cells: int) -> int:
    """The least round number of places a cell must stand for, so that a row of `width` has at most so many cells."""
    least = -(-width // max(cells, 1))
    return 1 << max(least - 1, 0).bit_length() if least <= 64 else -(-least // 64) * 64


# --- for a screen


def lines(sheet: Sheet, width: int, height: int) -> list[Line]:
    """The whole sheet in `width` columns, meant to fit `height` lines where one view is asked for."""
    squares = [panel for panel in sheet.panels if panel.squares]
    most_rows = max(2, height // 6) if squares else height - 4
    out: list[Line] = []
    drawn: list[list[Line]] = []
    for panel in sheet.panels:
        if panel.refused and not panel.title:
            out += [*_words(f"refused: {panel.refused}", width, "bold red"), []]
        elif panel.rows is not None and not panel.squares:
            out += [*_heading(panel, width), *_rows(panel.rows, sheet, width, most_rows), []]
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
    out = _heading(panel, width)
    if panel.refused:
        return [*out, *_words(f"refused: {panel.refused}", width, "bold red")]
    if panel.rows is not None:
        out += _rows(panel.rows, sheet, width, 2)
    caption, widest = _caption_width(sheet), max(panel.squares[0].shape)
    cells = (width - caption) // 2
    if widest > cells or widest > 40:
        beside_each_other = 1 if len(panel.squares) == 1 else 2
        cells = min((width - 3) // beside_each_other // 2 - caption // 2 - 1, max(height - len(out) - 4, 8))
    block = block_for(widest, max(cells, 4))
    blocks = (_square(square, block, sheet, caption) for square in panel.squares)
    one = max(caption + 2 * -(-panel.squares[0].shape[1] // block) - 1, 26)
    across = max(1, (width + 3) // (one + 3))
    down = max(1, (height - len(out) - 1) // (-(-panel.squares[0].shape[0] // block) + 3))
    shown = [block for _, block in zip(range(across * down), blocks)]
    for at in range(0, len(shown), across):
        out += beside(shown[at : at + across])
    return out + _more(len(panel.squares) - len(shown), "squares")


def _heading(panel: Panel, width: int) -> list[Line]:
    text = f"{panel.title}: {panel.facts}" if panel.title and panel.facts else panel.title or panel.facts
    return _words(text, width, "bold")


def _words(text: str, width: int, style: str) -> list[Line]:
    return [[(part, style)] for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]]


def _more(number: int, what: str) -> list[Line]:
    return [[(f"... {number} more {what}", "dim")]] if number > 0 else []


def _rows(rows: Rows, sheet: Sheet, width: int, most: int) -> list[Line]:
    """A line for each row of the batch: cells, share of padding, and the beginning of its text; its labels below."""
    B, S = rows.ids.shape
    side = 24
    text = sheet.token is not None and width > 60
    cells = max((width - side - (20 if text else 0)) // 2, 8)
    block = block_for(S, cells)
    out: list[Line] = []
    for b in range(min(B, most)):
        grid = row_grid(rows.ids[b], block, rows.held)
        line: Line = [(f"{b:>3} ", "dim"), *_cells(grid, 0, numbered=sheet.packed), *_share(grid.share, "padding")]
        left = width - sum(len(part) for part, _ in line) - 2
        if text and sheet.token is not None and left > 6:
            line.append(("  " + fitted(_beginning(sheet.token, b, rows, left), left).rstrip(), "italic"))
        out.append(line)
        if rows.labels is not None:
            out.append([("    ", ""), *_labels(rows.labels[b], block)])
    return out + _more(B - most, "rows")


def _beginning(token: Token, b: int, rows: Rows, columns: int) -> str:
    real = np.flatnonzero(rows.ids[b] > 0)[:columns]
    return "".join(token(b, int(s)) for s in real)


def _labels(labels_S: Array, block: int) -> Line:
    """The worst label of each block: one on padding, one that is ignored, one that counts."""
    starts = np.arange(0, len(labels_S), block)
    worst_C = np.maximum.reduceat(labels_S, starts) if len(starts) else labels_S
    styles = {0: "", COUNTED: "dim", IGNORED: "red", ON_PADDING: "bold red"}
    return _joined([(LABELS[int(code)], styles[int(code)]) for code in worst_C])


def _square(square: Attention, block: int, sheet: Sheet, caption: int) -> list[Line]:
    grid = square.grid(block)
    head: Line = [(f"row {square.b}", "bold"), *_share(grid.share, "blocked")]
    if grid.wrong:
        head.append((f" {grid.wrong} wrong", "bold red"))
    body = [
        [(fitted_caption(square, r * block, sheet, caption), "dim"), *_cells(grid, r)] for r in range(len(grid.cells))
    ]
    return [head, *body]


def fitted_caption(square: Attention, q: int, sheet: Sheet, columns: int) -> str:
    """The place of a query in its row, and its token."""
    place = f"{square.place(q):>{columns - 1 if sheet.token is None else 4}} "
    return place if sheet.token is None else place + fitted(sheet.token(square.b, square.place(q)), columns - 6) + " "


def _caption_width(sheet: Sheet) -> int:
    return 5 if sheet.token is None else 14


def _share(share: float, what: str) -> Line:
    """` 40% padding ██░░░░`: the number, and the same as a bar."""
    filled = round(6 * share) if 0 < share < 1 else int(share) * 6
    return [(f" {100 * share:3.0f}% {what} ", "dim"), (FULL * filled + EMPTY * (6 - filled), "dim")]


def _cells(grid: Grid, r: int, *, numbered: bool = False) -> Line:
    """One row of cells; a sequence's number stands for it where rows hold several."""
    return _joined([_cell(cell, owner, numbered) for cell, owner in zip(grid.cells[r].tolist(), grid.owner[r].tolist())])


def _cell(cell: int, owner: int, numbered: bool) -> tuple[str, str]:
    if cell in (Cell.TOO_MUCH, Cell.TOO_LITTLE):
        return GLYPHS[Cell(cell)], "bold red"
    if cell in (Cell.BLOCKED, Cell.ELSEWHERE):
        return GLYPHS[Cell(cell)], "dim"
    if numbered and owner and cell == Cell.WHOLE:
        return "123456789"[(owner - 1) % 9], COLOURS[(owner - 1) % len(COLOURS)]
    return GLYPHS[Cell(cell)], COLOURS[(owner - 1) % len(COLOURS)] if owner else ""


def _joined(cells: Sequence[tuple[str, str]]) -> Line:
    """Cells with a space between them; neighbours of one style are one part."""
    out: Line = []
    for at, (glyph, style) in enumerate(cells):
        text = glyph if at == len(cells) - 1 else f"{glyph} "
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return out


def beside(blocks: Sequence[list[Line]], gap: int = 3) -> list[Line]:
    """Blocks of lines side by side."""
    widths = [max((columns(line) for line in block), default=0) for block in blocks]
    out: list[Line] = []
    for at in range(max(map(len, blocks), default=0)):
        line: Line = []
        for block, wide in zip(blocks, widths):
            part = block[at] if at < len(block) else []
            line += [*part, (" " * (wide - columns(part) + gap), "")]
        out.append(line[:-1])
    return out


def columns(line: Line) -> int:
    """Its width on the terminal; only tokens, which are fitted by rich, hold wide characters."""
    text = _string(line)
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _legend(sheet: Sheet, drawn: Sequence[Line], width: int) -> list[Line]:
    """What the signs mean that were drawn."""
    told = {GLYPHS[cell]: meaning for cell, meaning in MEANINGS.items()}
    told |= {LABELS[code]: meaning for code, meaning in LABEL_MEANINGS.items()}
    signs = {*told, " ", *"123456789"}
    used = {sign for line in drawn for part, _ in line if set(part) <= signs for sign in part}
    numbers = ["1 2 .. the first, the second sequence of its row"] if sheet.packed else []
    return _words("   ".join([f"{sign} {meaning}" for sign, meaning in told.items() if sign in used] + numbers), width, "dim")


def _string(line: Line) -> str:
    return "".join(part for part, _ in line)


# --- where there are few signs


def printable(encoding: str) -> bool:
    """Can this encoding print the signs of a picture?"""
    try:
        "".join(map(chr, ASCII)).encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def encodable(sheet: Sheet, encoding: str) -> Sheet:
    """With tokens and words that this encoding can print: other letters are escaped, `\\u4e2d`."""

    def told(text: str) -> str:
        return text.encode(encoding, "backslashreplace").decode(encoding)

    token = sheet.token
    panels = [replace(panel, facts=told(panel.facts), refused=told(panel.refused)) for panel in sheet.panels]
    read = None if token is None else lambda b, s: told(token(b, s).replace("·", "_"))
    return Sheet(panels=tuple(panels), token=read)
