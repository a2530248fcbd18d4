"""Rows to a table that fits 100 columns, and to JSON with what a figure depends on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import versions
from benchmarks.timing import Absent, Row
from collate_npu import __version__

Result = dict[str, Any]
MARK = {True: "[green]met[/]", False: "[red bold]MISSED[/]", None: ""}


def result(rows: Sequence[Row], absent: Sequence[Absent], *, threads: int, seconds: float, quick: bool) -> Result:
    """All of a run; times in seconds."""
    return {
        "collate_npu": __version__,
        "commit": _commit(),
        "versions": versions(),
        "python": platform.python_version(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system(), "huge pages": _huge_pages()},
        "torch threads": threads,
        "quick": quick,
        "seconds": round(seconds, 1),
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "absent": [asdict(one) for one in dict.fromkeys(absent)],
    }


def progress(text: str) -> None:
    """On a terminal, one line that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def show(result: Result, console: Console | None = None) -> None:
    """A table a group, what was missed, who was absent."""
    progress("")
    console = console or Console(width=100 if not sys.stdout.isatty() else None, highlight=False)
    console.print(_where(result), markup=False)
    for group, rows in groupby(result["rows"], key=lambda row: row["group"]):
        found = list(rows)
        console.print(_steps(found) if group == "step" else _table(group, found))
    _verdict(result["rows"], console)
    _absent(result["absent"], console)


def _table(group: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=group, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    table.add_column("", width=46, no_wrap=True)
    for name in ("time", "faster", "over floor"):
        table.add_column(name, justify="right", width=10)
    table.add_column("target", width=16, no_wrap=True)
    for case, lines in groupby(rows, key=lambda row: row["case"]):
        _add_case(table, case, list(lines))
    return table


def _steps(rows: list[dict[str, Any]]) -> Table:
    """Ways to train on the same rows; `sent` are the bytes of the batches, `memory` what a pass adds at its peak."""
    table = Table(title="step", title_justify="left", title_style="bold", box=None, padding=(0, 1))
    table.add_column("", width=38, no_wrap=True)
    for name in ("a pass", "tokens/s", "times ours", "padding", "sent", "memory"):
        table.add_column(name, justify="right", width=10)
    for case, lines in groupby(rows, key=lambda row: row["case"]):
        found = list(lines)
        table.add_row(f"[cyan]{case}[/]")
        table.add_row("  ours, adapted", *_step(found[0]["ours"], found[0]["facts"][0], found[0]["made"][0]))
        for row in found:
            slower = "" if row["ratio"] is None else times(row["ratio"])
            table.add_row(f"  {row['name']}", *_step(row["theirs"], row["facts"][1], row["made"][1], slower))
    return table


def _step(seconds: float, facts: dict[str, float], made: int, slower: str = "") -> tuple[str, ...]:
    speed = f"{facts['tokens'] / seconds:,.0f}"
    passed = time(seconds) + (f" ({time(facts['on the device'])} on the device)" if "on the device" in facts else "")
    return passed, speed, slower, f"{facts['padding']:.0%}", f"{made / 1e6:.2f} MB", f"{facts['peak'] / 1e6:.0f} MB"


def _add_case(table: Table, case: str, rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    limit = _target(first) if first["unit"] == "us" else ""
    table.add_row(f"[cyan]{case}[/]{_made(first, 0)}", time(first["ours"]), "", "", limit)
    for row in rows:
        ratio = f"{row['ratio']:.4g}" if row["unit"] == "" else times(row["ratio"])
        columns = (ratio, "") if row["against"] == "peer" else ("", ratio)
        if row["theirs"] is not None or row["unit"] == "":
            table.add_row(f"  {row['name']}{_made(row, 1)}", time(row["theirs"]), *columns, _target(row))


def _made(row: dict[str, Any], side: int) -> str:
    """Megabytes of an output, in the group where they are the point."""
    return f", {row['made'][side] / 1e6:.1f} MB" if row["group"] == "neutral" and row["made"][side] else ""


def _verdict(rows: list[dict[str, Any]], console: Console) -> None:
    judged = [row for row in rows if row["target"] is not None]
    missed = [row for row in judged if not row["met"]]
    console.print(f"\ntargets: {len(judged) - len(missed)} met, {len(missed)} missed")
    for row in missed:
        found = time(row["ours"]) if row["unit"] == "us" else f"{row['ratio']:.4g}{row['unit']}"
        console.print(f"  {row['group']}, {row['case']}, {row['name'] or 'ours'}: {found}, {_target(row)}")


def _absent(absent: list[dict[str, str]], console: Console) -> None:
    """Each reason once, with the cases it is for."""
    for (name, why), ones in groupby(sorted(absent, key=_reason), key=_reason):
        cases = [one["case"] for one in ones]
        more = f" and {len(cases) - 2} more" if len(cases) > 2 else ""
        console.print(f"absent: {name} in {'; '.join(cases[:2])}{more}: {why}", markup=False)


def _reason(one: dict[str, str]) -> tuple[str, str]:
    return one["name"], one["why"]


def _target(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    sign = ">=" if row["against"] == "peer" else "<="
    unit = " us" if row["unit"] == "us" else ""
    return f"{sign} {row['target']:g}{unit} {MARK[row['met']]}"


def time(seconds: float | None) -> str:
    """In the unit that leaves one to three digits before the point."""
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"


def _where(result: Result) -> str:
    found = result["versions"]
    peers = ", ".join(f"{name} {number}" for name, number in found.items())
    machine = result["machine"]
    return (
        f"collate_npu {result['collate_npu']} ({result['commit']}), Python {result['python']}, {result['torch threads']} "
        f"thread(s), {machine['cpu']}, {machine['cores']} cores, {result['seconds']:.0f} s\n{peers}\n"
        "faster: their time by ours. over floor: our time by that of work that must be done at least. Medians of rounds.\n"
    )


def _commit() -> str:
    root = Path(__file__).parents[1]
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no commit"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _huge_pages() -> str:
    """The choice in brackets: large masks depend on it."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return "unknown"
