"""Show: a batch, its Segments or a mask, drawn with `■` (attends, real) and `⬚` (blocked, padding).

For people: what is wide is folded by blocks, which costs O(Q * K) time for each square, and tensors are read back to the
host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from collate_npu.arrays import whole_number
from collate_npu.errors import CollateError, explain, printable
from collate_npu.segments import Segments
from collate_npu.tools.describe import Description
from collate_npu.tools.show.sheet import SIGNS, Cell, Grid, Panel, Sheet, block_for, drawable, row_grid, sheet_of

NOTEBOOK = 88
"""Columns of a page in a notebook, which fit beside its prompt: behind an edge nobody looks for tokens."""


class Picture(Description):
    """Text to print; in a notebook a page in colours, which `html` holds and `save` writes."""

    __slots__ = ("sheet",)
    sheet: Sheet

    @property
    def html(self) -> str:
        """One self-contained page. Needs rich."""
        return str(_drawing().html_of(self.sheet))

    def save(self, path: str | Path) -> None:
        """Write that page. Needs rich."""
        _drawing().save(self.sheet, Path(path))

    def _repr_html_(self) -> str | None:
        """For notebooks; without rich they show the text."""
        return str(_drawing().html_of(self.sheet, columns=NOTEBOOK)) if find_spec("rich") else None


def picture(
    shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, limit: int = 64, tokenizer: Any = None
) -> Picture:
    """A batch, its `Segments`, or a mask, drawn.

    Segments: one line a row of the batch, digits where a row holds several sequences. A 4D mask: one square for each row
    (or for `row`), side by side, True drawn as it attends where its polarity can be proved and as True where not. A mask
    that is refused is drawn too, with the reason: `+` attends where it ought not to, `-` is blocked where it ought to
    attend. What is wider than `limit` places is folded: a cell stands for a block of places, `◧` where only some of them
    attend. With a `tokenizer` the page in a notebook names the tokens.

        >>> print(picture(Segments.from_lengths([3, 5], side="left")))
        ⬚ ⬚ ■ ■ ■
        ■ ■ ■ ■ ■
    """
    limit = whole_number("limit", limit, least=1)
    sheet = sheet_of(shown, row=row, tokenizer=tokenizer)
    drawn = Picture(text_of(sheet, limit))
    drawn.sheet = sheet
    return drawn


def text_of(sheet: Sheet, limit: int = 64) -> str:
    """A sheet in words and signs, without what is derived."""
    return printable("\n\n".join("\n".join(_bare(panel, sheet, limit)) for panel in sheet.panels if not panel.derived))


def _bare(panel: Panel, sheet: Sheet, limit: int) -> Iterator[str]:
    """A panel without captions, folded where it is wider than `limit` cells."""
    block = 1
    if panel.refused:
        yield f"refused: {panel.refused}"
    if panel.heading:
        yield panel.heading
    if panel.ids is not None:
        block = block_for(panel.ids.shape[1], limit)
        yield from (_cells(row_grid(ids_S, block), 0, sheet.packed) for ids_S in panel.ids)
    if panel.squares:
        block, drawn = block_for(max(panel.squares[0].shape), limit), drawable(panel.squares, len(panel.squares))
        grids = [square.grid(block) for square in panel.squares[:drawn]]
        yield from ("   ".join(_cells(grid, r) for grid in grids) for r in range(len(grids[0].cells) if grids else 0))
        if drawn < len(panel.squares):
            yield f"{len(panel.squares) - drawn} too large to be drawn"
    if block > 1:
        yield f"◧ {SIGNS[Cell.PART][2]}; {block} places a cell, each way"


def _cells(grid: Grid, r: int, numbered: bool = False) -> str:
    return " ".join(sign for sign, _ in grid.signs(r, numbered=numbered))


def _drawing() -> Any:
    try:
        return import_module("collate_npu.tools.show.drawing")
    except ImportError:
        rule = "Pages and figures are drawn by rich, which is not installed."
        raise CollateError(explain("picture", "no rich", rule, "pip install rich.")) from None
