"""Signs: how a cell, a label and a share are written, in columns of text; a number or a sign says what a colour says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from collate_npu.tools.show.attention import Cell, Grid
from collate_npu.tools.show.sheet import COUNTED, IGNORED, ON_PADDING

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
ShareForm = Literal["", "number", "bar"]
"""How a share is told; "bar" is both."""


def block_for(width: int, cells: int) -> int:
    """The least round number of places a cell must stand for, so that a row of `width` has at most so many cells."""
    least = -(-width // max(cells, 1))
    return 1 << max(least - 1, 0).bit_length() if least <= 64 else -(-least // 64) * 64


def percent(share: float) -> str:
    """A part of a whole; 0% and 100% are none and all of it."""
    return f"{min(max(round(100 * share), 1), 99) if 0 < share < 1 else round(100 * share)}%"


def more(number: int, what: str) -> str:
    """`... 28 more rows`."""
    return f"... {number} more {what}{'s' if number > 1 else ''}"


def share_of(share: float, what: str, form: ShareForm = "bar") -> Line:
    """` 40% padding ██░░░░`: the number, and the same as a bar."""
    filled = round(6 * share)
    told = [(f" {percent(share):>4} {what}", "dim")] if form else []
    return [*told, *([(f" {FULL * filled}{EMPTY * (6 - filled)}", "dim")] if form == "bar" else [])]


def cells_of(grid: Grid, r: int, *, numbered: bool = False) -> Line:
    """One row of cells; a sequence's number stands for it where rows hold several."""
    return joined([_cell(cell, owner, numbered) for cell, owner in zip(grid.cells[r].tolist(), grid.owner[r].tolist())])


def _cell(cell: int, owner: int, numbered: bool) -> tuple[str, str]:
    if cell in (Cell.TOO_MUCH, Cell.TOO_LITTLE):
        return GLYPHS[Cell(cell)], "bold red"
    if cell in (Cell.BLOCKED, Cell.ELSEWHERE):
        return GLYPHS[Cell(cell)], "dim"
    if numbered and owner and cell == Cell.WHOLE:
        return "123456789"[(owner - 1) % 9], COLOURS[(owner - 1) % len(COLOURS)]
    return GLYPHS[Cell(cell)], COLOURS[(owner - 1) % len(COLOURS)] if owner else ""


def joined(cells: Sequence[tuple[str, str]]) -> Line:
    """Cells with a space between them; neighbours of one style are one part."""
    out: Line = []
    for at, (glyph, style) in enumerate(cells):
        text = glyph if at == len(cells) - 1 else f"{glyph} "
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return out


def columns(line: Line) -> int:
    """Its width on the terminal; only tokens, which are fitted by rich, hold wide characters."""
    text = string_of(line)
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def string_of(line: Line) -> str:
    """Without its styles."""
    return "".join(part for part, _ in line)


def printable(encoding: str) -> bool:
    """Can this encoding print the signs of a picture?"""
    try:
        "".join(map(chr, ASCII)).encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
