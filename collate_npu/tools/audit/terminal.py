"""Terminal: a report as text, by rich, as wide as the terminal and no wider.

Nothing is said by colour alone: each sign stands beside a word or a number, and where the encoding of the terminal has no
such sign, ASCII takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu.tools.audit.notes import notes
from collate_npu.tools.audit.report import Report, State
from collate_npu.tools.audit.tables import MEASURES, WHOSE, Cell, ModelTable, legend, model_tables, summary, titles
from collate_npu.tools.audit.verdict import facts, headline
from collate_npu.tools.audit.ways import KINDS, shortened

_SIGNS: dict[State, tuple[str, str]] = {"right": ("✔", "+"), "wrong": ("✘", "!"), "unproved": ("?", "?")}
_COLOURS: dict[State, str] = {"right": "green", "wrong": "bold red", "unproved": "yellow"}
_STATES: dict[int, State] = {0: "right", 1: "wrong"}


def sign(console: Console, state: State) -> str:
    """`✔`, `✘` or `?`, or ASCII where the terminal's encoding has no such letter."""
    fine, plain = _SIGNS[state]
    try:
        fine.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return plain
    return fine


def print_report(console: Console, report: Report, *, verbose: bool = False) -> None:
    """The verdict, what it rests on, a line a model, and the tables of those that need a look (`verbose`: of all)."""
    state = _STATES.get(report.exit_code, "unproved")
    console.print(Text(f"{sign(console, state)} {headline(report)}", style=f"bold {_COLOURS[state]}"))
    _print_told(console, facts(report))
    if report.findings or report.not_run:
        console.print("", _summary(console, report), "")
    _print_told(console, notes(report, verbose=verbose))
    shown = list(model_tables(report, every=verbose))
    for table in shown:
        _print_table(console, table)
    if shown:
        console.print(Text(f"\nWhat the words mean ({sign(console, 'wrong')} marks what is wrong)", style="bold"))
        _print_told(console, legend(report, shown))


def _print_told(console: Console, told: Iterable[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in told:
        grid.add_row(Text(f"  {label}", style="dim" if label.islower() else "bold yellow"), Text(text))
    console.print(grid)


def _summary(console: Console, report: Report) -> Table:
    table = _table()
    first, *others = titles(report)
    table.add_column(first, overflow="fold", vertical="bottom")
    for title in others:
        words = title in ("attention", "padding")
        table.add_column(title, justify="left" if words else "right", no_wrap=not words)
    for row in report.rows():
        model, *cells = summary(report, row)
        name = shortened(model, max(16, console.width - 62))
        table.add_row(Text(sign(console, row.state), style=_COLOURS[row.state]), Text(name), *map(Text, cells))
    return table


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("", no_wrap=True)
    return table


def _print_table(console: Console, table: ModelTable) -> None:
    """In pieces of equal width where the terminal is too narrow for all cases."""
    console.print(Text(f"\n{shortened(table.model, console.width - 40)}: {KINDS[table.kind]}", style="bold"))
    unbounded = console.options.update(width=10_000)
    for size in range(len(table.cases), 0, -1):
        pieces = [_piece(console, table, slice(start, start + size)) for start in range(0, len(table.cases), size)]
        if all(console.measure(piece, options=unbounded).maximum <= console.width for piece in pieces):
            break
    for n, piece in enumerate(pieces):
        console.print(*([""] if n else []), piece)


def _piece(console: Console, table: ModelTable, cases: slice) -> Table:
    drawn = _table()
    drawn.add_column("handed over by", no_wrap=True)
    for c in table.cases[cases]:
        drawn.add_column(f"{MEASURES[c.measure][0]}\n{shortened(c.attn, 20)}\n{c.side}", justify="right", no_wrap=True)
    last = ""
    for whose, title, cells in table.rows:
        first = WHOSE[whose][0] if whose != last else ""
        drawn.add_row(first, Text(shortened(title, 32)), *(_written(console, cell) for cell in cells[cases]))
        last = whose
    return drawn


def _written(console: Console, cell: Cell) -> Text:
    if cell.state is None:
        return Text(f"{cell.text}  ", style="dim")
    mark = sign(console, "wrong") if cell.state == "wrong" else " "
    return Text(f"{cell.text} {mark}", style=_COLOURS[cell.state])
