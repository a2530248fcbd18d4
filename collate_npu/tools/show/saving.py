"""Page: a sheet as one self-contained HTML page, or as a file by its ending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from collate_npu.errors import CollateError, explain
from collate_npu.tools.show.figure import drawn, has_matplotlib
from collate_npu.tools.show.sheet import IGNORED, ON_PADDING, Rows, Sheet
from collate_npu.tools.show.signs import LABELS

ENDINGS = (".png", ".svg", ".html")
MOST_ROWS, MOST_PLACES = 16, 64
"""Of the table of tokens."""

STYLE = """
.collate-npu { font: 14px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; padding: 8px }
.collate-npu svg { width: 100%; height: auto }
.collate-npu .scroll { overflow-x: auto }
.collate-npu table { border-collapse: separate; border-spacing: 2px; margin: 8px 0 }
.collate-npu td { padding: 2px 5px; background: #dcefe6; white-space: pre; text-align: center; font-size: 13px }
.collate-npu td.packed { background: #d8e6f8 }
.collate-npu td.padding { background: #f0f0f0; color: #999 }
.collate-npu td.ignored, .collate-npu .refused { color: #c00 }
.collate-npu p.refused { white-space: pre-line }
.collate-npu th { font-weight: normal; color: #666; text-align: right; white-space: nowrap }
"""


def check_out(path: Path) -> None:
    """Raise for an ending that names no figure, and where matplotlib is missing, before anything is read."""
    if path.suffix not in ENDINGS:
        rule = f"Figures are written as {', '.join(ENDINGS)}."
        raise CollateError(explain(str(path), repr(path.suffix), rule, "End the name with one of them."))
    if not has_matplotlib():
        rule = "Figures are drawn by matplotlib, which is not installed."
        raise CollateError(explain(str(path), "no matplotlib", rule, "pip install 'collate-npu[plots]'."))


def save(sheet: Sheet, path: Path) -> None:
    """Write the sheet as `.png`, `.svg` or `.html`."""
    check_out(path)
    written = html_of(sheet).encode() if path.suffix == ".html" else drawn(sheet, path.suffix[1:])
    try:
        path.write_bytes(written)
    except OSError as error:
        rule = "The figure is written there."
        raise CollateError(explain(str(path), str(error.strerror), rule, "Name a folder that exists.")) from None


def html_of(sheet: Sheet) -> str:
    """A page that loads nothing: the figure inline, the refusals as text, and a table of the tokens."""
    said = [panel for panel in sheet.panels if panel.refused and not panel.title]
    figure = drawn(
        replace(sheet, panels=tuple(panel for panel in sheet.panels if not panel.refused or panel.title)), "svg"
    ).decode()
    parts = [f'<p class="refused">refused: {escape(panel.refused)}</p>' for panel in said]
    told = next((panel for panel in sheet.panels if panel.rows is not None and panel.rows.held is None), None)
    table = "" if told is None or told.rows is None else _table(told.rows, sheet)
    body = "\n".join([*parts, figure[figure.index("<svg") :], table])
    head = f'<!doctype html><meta charset="utf-8"><title>collate-npu show</title><style>{STYLE}</style>'
    return f'{head}<div class="collate-npu">{body}</div>\n'


def _table(rows: Rows, sheet: Sheet) -> str:
    """A line for each row of the batch, a cell for each place: its token, else the number of its sequence."""
    lines = [f"<tr><th>row {b}</th>{''.join(_tokens(rows, sheet, b))}</tr>" for b in range(min(len(rows.ids), MOST_ROWS))]
    more = [f"{n - most} more {what}" for n, most, what in zip(rows.ids.shape, (MOST_ROWS, MOST_PLACES), ("rows", "places"))
            if n > most]  # fmt: skip
    note = f"<p>... {', '.join(more)}</p>" if more else ""
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{note}'


def _tokens(rows: Rows, sheet: Sheet, b: int) -> Iterator[str]:
    for s, number in enumerate(rows.ids[b, :MOST_PLACES].tolist()):
        text = str(number) if sheet.tokens is None else sheet.tokens.one(b, s)
        label = 0 if rows.labels is None else int(rows.labels[b, s])
        wrong = label in (IGNORED, ON_PADDING)
        kinds = ["padding"] * (number == 0) + ["ignored"] * wrong + ["packed"] * (number > 0 and number % 2 == 0)
        told = f"place {s}, " + (f"sequence {number}" if number else "padding")
        yield f'<td class="{" ".join(kinds)}" title="{told}">{LABELS[label] if wrong else ""}{escape(text)}</td>'
