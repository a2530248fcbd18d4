"""Terminal: a report as text, by rich, as wide as the terminal and no wider.

Nothing is said by colour alone: each sign stands beside a word or a number, and where the encoding of the terminal has no
such sign, ASCII takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu.tools.audit.notes import notes
from collate_npu.tools.audit.report import Report, State
from collate_npu.tools.audit.tables import MEASURES, WHOSE, Case, Cell, ModelTable, legend, model_tables, summary, titles
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
        grid.add_row(Text(f"  {label}", style="bold yellow" if label[:4].isupper() else "dim"), Text(text))
    console.print(grid)


def _summary(console: Console, report: Report) -> Table:
    """A line a model; where that is too wide, its attentions and sides stand under its name."""
    wide = _table()
    narrow = _table()
    first, attention, padding, *numbers = titles(report)
    for title in (first, attention, padding):
        wide.add_column(title, no_wrap=True)
    narrow.add_column(first, overflow="fold")
    for table in (wide, narrow):
        for title in numbers:
            table.add_column(title, justify="right", no_wrap=True)
    for row in report.rows():
        state = Text(sign(console, row.state), style=_COLOURS[row.state])
        model, attns, sides, *cells = summary(report, row)
        name = shortened(model, 38)
        wide.add_row(state, Text(name), attns, sides, *cells)
        under = Text(f"{attns}; {sides}" if attns else "", style="dim")
        narrow.add_row(state, Text("\n" if attns else "").join([Text(name), under]), *cells)
    return wide if _fits(console, wide) else narrow


def _fits(console: Console, table: Table) -> bool:
    return console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("", no_wrap=True)
    return table


def _print_table(console: Console, table: ModelTable) -> None:
    console.print(Text(f"\n{shortened(table.model, console.width - 40)}: {KINDS[table.kind]}", style="bold"))
    for n, piece in enumerate(_pieces(console, table)):
        console.print(*([""] if n else []), piece)


def _pieces(console: Console, table: ModelTable) -> Iterator[Table]:
    """One, where the terminal is wide enough; else those of each measure, as many cases as there is room for in each."""
    whole = _piece(console, table, table.cases)
    if _fits(console, whole):
        yield whole
        return
    for measure in MEASURES:
        rest = [case for case in table.cases if case.measure == measure]
        while rest:
            room = next((n for n in range(len(rest), 1, -1) if _fits(console, _piece(console, table, rest[:n]))), 1)
            yield _piece(console, table, rest[:room])
            rest = rest[room:]


def _piece(console: Console, table: ModelTable, cases: Sequence[Case]) -> Table:
    drawn = _table()
    drawn.add_column("handed over by", no_wrap=True)
    for c in cases:
        drawn.add_column(f"{MEASURES[c.measure][0]}\n{shortened(c.attn, 20)}\n{c.side}", justify="right", no_wrap=True)
    last = ""
    for whose, title, cells in table.rows:
        first = WHOSE[whose][0] if whose != last else ""
        drawn.add_row(first, Text(shortened(title, 32)), *(_written(console, cells[case]) for case in cases))
        last = whose
    return drawn


def _written(console: Console, cell: Cell) -> Text:
    if cell.state is None:
        return Text(cell.text, style="dim")
    mark = f" {sign(console, 'wrong')}" if cell.state == "wrong" else ""
    return Text(cell.text + mark, style=_COLOURS[cell.state])
