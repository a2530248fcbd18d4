"""Figure: a sheet drawn by matplotlib, without a display: the same rows, squares, shares and signs as in a terminal.

Legend: B batch, S width, R and C rows and columns of cells.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np

from collate_npu.errors import CollateError, explain
from collate_npu.host import Array
from collate_npu.tools.show.attention import Attention, Cell, Grid, row_grid
from collate_npu.tools.show.sheet import IGNORED, ON_PADDING, Panel, Rows, Sheet
from collate_npu.tools.show.signs import LABEL_MEANINGS, LABELS, MEANINGS, block_for, more, percent

WIDTH = 12.0
"""Inches."""
SEQUENCES = ("#2a9d6f", "#3b7dd8", "#c98a12", "#8e5bc0", "#1f9aa8", "#8a6d3b")
"""Of the sequences of a row, in turn; red is for what is wrong."""
PADDING, WRONG, ELSEWHERE = "#e4e4e4", "#d62728", "#ffffff"
MOST_ROWS, MOST_SQUARES, MOST_CELLS, MOST_SIDE, NAMED_CELLS = 16, 4, 128, 64, 24
MOST_RINGS = 8
"""What a figure holds at most; up to `NAMED_CELLS` cells tokens stand beside them."""
FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Microsoft YaHei", "PingFang SC", "SimHei",
         "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Arial Unicode MS", "Noto Emoji")  # fmt: skip
"""Asked for letters that matplotlib's own font has not, in this order."""


def has_matplotlib() -> bool:
    """Is it installed?"""
    return find_spec("matplotlib") is not None


def drawn(sheet: Sheet, kind: str) -> bytes:
    """The figure as `png` or `svg`. Raises where matplotlib is not installed."""
    if not has_matplotlib():
        rule = "Figures are drawn by matplotlib, which is not installed."
        raise CollateError(explain("figure", "no matplotlib", rule, "pip install 'collate-npu[plots]'."))
    matplotlib, out = import_module("matplotlib"), BytesIO()
    fonts = ["DejaVu Sans", *_installed(FONTS)]
    with matplotlib.rc_context({"font.family": fonts, "svg.fonttype": "none", "font.size": 9}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of a svg: the reader's fonts have it
        _Drawing(sheet, fonts if kind == "png" else None).figure().savefig(out, format=kind, dpi=150)
    return out.getvalue()


class _Drawing:
    """One figure: parts one below another, each of a height in inches."""

    def __init__(self, sheet: Sheet, fonts: Sequence[str] | None) -> None:
        self.sheet = sheet
        self.letters = None if fonts is None else _letters(fonts)

    def figure(self) -> Any:
        """The whole sheet as a figure of matplotlib."""
        parts = [part for panel in self.sheet.panels for part in self._parts(panel)]
        heights = [height for height, _ in parts]
        total = sum(heights) + 0.6
        figure = import_module("matplotlib.figure").Figure(figsize=(WIDTH, total))
        top = total - 0.15
        for height, draw in parts:
            draw(figure, top / total, height / total)
            top -= height
        self._legend(figure, 0.3 / total)
        return figure

    def _parts(self, panel: Panel) -> Iterator[tuple[float, Any]]:
        """`(height, what draws it at (figure, top, height))`."""
        title = ": ".join(filter(None, (panel.title, panel.facts)))
        block = block_for(max(panel.squares[0].shape), MOST_SIDE) if panel.squares else 1
        if title:
            yield self._words(title + (f" ({block} x {block} a cell)" if block > 1 else ""), "black", "bold")
        if panel.refused:
            yield self._words(f"refused: {panel.refused}", WRONG, "normal")
        if panel.rows is not None:
            yield from self._rows_parts(panel.rows)
        across, squares = self._across(panel), panel.squares[:MOST_SQUARES]
        for at in range(0, len(squares), across):
            tall = _tall(squares[0], across)
            yield tall + 0.75, partial(self._squares, squares=squares[at : at + across], across=across)
        if len(panel.squares) > MOST_SQUARES:
            yield self._words(more(len(panel.squares) - MOST_SQUARES, "square"), "grey", "normal")

    def _rows_parts(self, rows: Rows) -> Iterator[tuple[float, Any]]:
        shown = min(len(rows.ids), MOST_ROWS)
        each = 0.5 if rows.labels is not None else 0.34
        yield 0.35 + each * shown, partial(self._rows, rows=rows)
        if len(rows.ids) > shown:
            yield self._words(more(len(rows.ids) - shown, "row"), "grey", "normal")

    def _across(self, panel: Panel) -> int:
        """Squares side by side: fewer where tokens stand beside them, which takes room."""
        named = self.sheet.tokens is not None and bool(panel.squares) and 8 < panel.squares[0].shape[1] <= NAMED_CELLS
        return 2 if named else MOST_SQUARES

    def _words(self, text: str, colour: str, weight: str) -> tuple[float, Any]:
        lines = [part for line in text.splitlines() for part in textwrap.wrap(self._safe(line), 150)]

        def draw(figure: Any, top: float, height: float) -> None:
            figure.text(0.02, top, "\n".join(lines), color=colour, weight=weight, va="top", parse_math=False)

        return 0.16 * len(lines) + 0.1, draw

    def _rows(self, figure: Any, top: float, height: float, *, rows: Rows) -> None:
        """A strip a row, the number of each sequence in its middle, the share of padding as a bar at its right."""
        shown, block = min(len(rows.ids), MOST_ROWS), block_for(rows.ids.shape[1], MOST_CELLS)
        grids = [row_grid(ids, block, rows.held) for ids in rows.ids[:shown]]
        foot = 0.3 / figure.get_figheight()
        axes = figure.add_axes((0.06, top - height + foot, 0.72, height - foot))
        cells = np.concatenate([grid.cells for grid in grids])
        axes.imshow(_colours(cells, np.concatenate([grid.owner for grid in grids])), aspect="auto", interpolation="nearest")
        _ticks(axes, cells.shape, block, 8)
        axes.set_yticks(range(shown), [f"row {b}" for b in range(shown)])
        for b in range(1, shown):
            axes.axhline(b - 0.5, color="white", lw=2)
        self._named(axes, rows, grids, block)
        if rows.labels is not None:
            _label_signs(axes, rows.labels[:shown], block)
        _bars(figure.add_axes((0.80, top - height + foot, 0.14, height - foot), sharey=axes), grids)

    def _named(self, axes: Any, rows: Rows, grids: Sequence[Grid], block: int) -> None:
        """The token in each cell where there is room, else the number of each sequence in the middle of its run."""
        tokens = self.sheet.tokens
        for b, grid in enumerate(grids):
            if tokens is not None and block == 1 and len(rows.ids[b]) <= NAMED_CELLS:
                wide = max(int(150 / len(rows.ids[b])), 2)
                for s in range(len(rows.ids[b])):
                    axes.text(s, b, self._token(b, s, wide), ha="center", va="center", fontsize=7, parse_math=False)
            elif self.sheet.packed:
                owner_C = grid.owner[0] * (grid.cells[0] != Cell.ELSEWHERE)
                for run in np.split(np.arange(len(owner_C)), np.flatnonzero(np.diff(owner_C)) + 1):
                    if number := owner_C[run[0]]:
                        middle = run[len(run) // 2]
                        axes.text(middle, b, str(number), ha="center", va="center", fontsize=8, color="white")

    def _squares(self, figure: Any, top: float, height: float, *, squares: Sequence[Attention], across: int) -> None:
        inch = 1 / figure.get_figheight()
        for at, square in enumerate(squares):
            tall = _tall(square, across)
            place = (0.06 + at * 0.92 / across, top - (0.4 + tall) * inch, _wide(across), tall * inch)
            self._square(figure.add_axes(place), square)

    def _square(self, axes: Any, square: Attention) -> None:
        grid = square.grid(block_for(max(square.shape), MOST_SIDE))
        axes.imshow(_colours(grid.cells, grid.owner), aspect="auto", interpolation="nearest")
        for sign, cell in (("+", Cell.TOO_MUCH), ("-", Cell.TOO_LITTLE)):
            _wrong(axes, np.argwhere(grid.cells == cell).tolist(), sign, small=len(grid.cells) > NAMED_CELLS)
        _ticks(axes, grid.cells.shape, grid.block, 4)
        self._captions(axes, square, grid)
        wrong = f", {grid.wrong} wrong" if grid.wrong else ""
        axes.set_title(f"row {square.b}: {percent(grid.share)} blocked{wrong}", fontsize=9, pad=8, loc="left",
                       color=WRONG if grid.wrong else "black")  # fmt: skip
        bar = {"transform": axes.transAxes, "clip_on": False, "lw": 0}
        patches = import_module("matplotlib.patches")
        drop = 0.07 / (axes.get_position().height * axes.figure.get_figheight())
        axes.add_patch(patches.Rectangle((0, 1 + drop / 4), 1, drop / 2, color=PADDING, **bar))
        axes.add_patch(patches.Rectangle((0, 1 + drop / 4), grid.share, drop / 2, color="#7a7a7a", **bar))

    def _captions(self, axes: Any, square: Attention, grid: Grid) -> None:
        """Places, and tokens beside the queries of a square that is not folded."""
        R = len(grid.cells)
        if grid.block > 1 or R > NAMED_CELLS:
            step = max(R // 8, 1)
            axes.set_yticks(range(0, R, step), [str(square.place(r * grid.block)) for r in range(0, R, step)])
            return
        named = [f"{self._token(square.b, square.place(q), 9)} {square.place(q)}" for q in range(R)]
        axes.set_yticks(range(R), named, fontsize=7, parse_math=False)

    def _token(self, b: int, s: int, most: int) -> str:
        if self.sheet.tokens is None:
            return ""
        text = self._safe(self.sheet.tokens.one(b, s))
        return text if len(text) <= most else text[: most - 1] + "…"

    def _safe(self, text: str) -> str:
        """With letters that no font has escaped: `\\u4e2d`."""
        if self.letters is None:
            return text
        return "".join(c if ord(c) in self.letters else c.encode("unicode_escape").decode() for c in text)

    def _legend(self, figure: Any, bottom: float) -> None:
        """The colours and signs, at the foot."""
        patches = import_module("matplotlib.patches")
        colours = {Cell.WHOLE: SEQUENCES[0], Cell.BLOCKED: PADDING, Cell.PART: _lighter(SEQUENCES[0]), Cell.TOO_MUCH: WRONG}
        held = [patches.Patch(color=colour, label=MEANINGS[cell]) for cell, colour in colours.items()]
        held[-1].set_label("wrong: + attends, - is blocked")
        if any(panel.rows is not None and panel.rows.labels is not None for panel in self.sheet.panels):
            text = f"{LABELS[IGNORED]} {LABEL_MEANINGS[IGNORED]}, {LABELS[ON_PADDING]} {LABEL_MEANINGS[ON_PADDING]}"
            held.append(patches.Patch(color="none", label=text))
        figure.legend(handles=held, loc="lower left", bbox_to_anchor=(0.02, 0), ncols=len(held), frameon=False, fontsize=8)


def _colours(cells: Array, owner: Array) -> Array:
    """float `[R, C, 3]`."""
    rgb = import_module("matplotlib.colors").to_rgb
    whole = np.array([rgb(SEQUENCES[max(number - 1, 0) % len(SEQUENCES)]) for number in range(owner.max(initial=0) + 1)])
    out = whole[owner]
    out[cells == Cell.PART] = (out[cells == Cell.PART] + 1) / 2
    for cell, colour in (
        (Cell.BLOCKED, PADDING),
        (Cell.ELSEWHERE, ELSEWHERE),
        (Cell.TOO_MUCH, WRONG),
        (Cell.TOO_LITTLE, WRONG),
    ):
        out[cells == cell] = rgb(colour)
    return out


def _lighter(colour: str) -> Any:
    return tuple((part + 1) / 2 for part in import_module("matplotlib.colors").to_rgb(colour))


def _wrong(axes: Any, cells: list[list[int]], sign: str, *, small: bool) -> None:
    """The sign in each cell; where cells are too small for it a ring around the few, one sign amid the many."""
    if small and 0 < len(cells) <= MOST_RINGS:
        for r, c in cells:
            axes.plot(c, r, marker="o", ms=9, mfc="none", mec="white", mew=4, clip_on=False)
            axes.plot(c, r, marker="o", ms=9, mfc="none", mec=WRONG, mew=2, clip_on=False)
            halo = {"facecolor": "white", "lw": 0, "pad": 0.5}
            axes.annotate(sign, (c, r), (9, 5), textcoords="offset points", color=WRONG, weight="bold", bbox=halo)
        return
    for r, c in cells[len(cells) // 2 :][:1] if small else cells:
        axes.text(c, r, sign, ha="center", va="center", color="white", weight="bold", fontsize=12 if small else 8)


def _wide(across: int) -> float:
    """A square's part of the figure's width."""
    return (0.92 - 0.05 * across) / across


def _tall(square: Attention, across: int) -> float:
    """Inches."""
    return _wide(across) * WIDTH * min(square.shape[0] / max(square.shape[1], 1), 1)


def _bars(axes: Any, grids: Sequence[Grid]) -> None:
    """The share of padding of each row."""
    axes.barh(range(len(grids)), [grid.share for grid in grids], color="#9a9a9a", height=0.5)
    for b, grid in enumerate(grids):
        axes.text(grid.share + 0.03, b, f"{percent(grid.share)} padding", va="center", fontsize=8)
    axes.set_xlim(0, 1.6)
    axes.axis("off")


def _ticks(axes: Any, shape: tuple[int, ...], block: int, most: int) -> None:
    """Places along the keys, thin lines between few cells."""
    R, C = shape
    step = max(C // most, 1)
    axes.set_xticks(range(0, C, step), [str(c * block) for c in range(0, C, step)], fontsize=7)
    axes.tick_params(length=2)
    if C <= 2 * NAMED_CELLS:
        axes.set_xticks(np.arange(-0.5, C), minor=True)
        axes.set_yticks(np.arange(-0.5, R), minor=True)
        axes.grid(which="minor", color="white", lw=1)
        axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _label_signs(axes: Any, labels_BS: Array, block: int) -> None:
    """Ignored labels of real tokens, and labels on padding, in red under the cells."""
    starts = np.arange(0, labels_BS.shape[1], block)
    worst_BC = np.maximum.reduceat(labels_BS, starts, axis=1)
    for code in (IGNORED, ON_PADDING):
        for b, c in zip(*np.nonzero(worst_BC == code)):
            axes.text(c, b + 0.36, LABELS[code], color=WRONG, ha="center", va="center", fontsize=8, weight="bold",
                      bbox={"facecolor": "white", "lw": 0, "pad": 0.8})  # fmt: skip


def _installed(names: Sequence[str]) -> list[str]:
    held = {font.name for font in import_module("matplotlib.font_manager").fontManager.ttflist}
    return [name for name in names if name in held]


def _letters(fonts: Sequence[str]) -> set[int]:
    """Every letter that one of these fonts has."""
    manager = import_module("matplotlib.font_manager")
    paths = [manager.findfont(name, fallback_to_default=False) for name in fonts]
    return {letter for path in paths for letter in manager.get_font(path).get_charmap()}
