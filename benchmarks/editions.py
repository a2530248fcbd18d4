"""`python -m benchmarks --against DIR`: our own times beside those of another checkout of the library.

Two processes, one for each checkout, take turns within each round, so a slow moment of the machine hits both.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

TURN = 0.02
"""Seconds."""


class Edition:
    """A checkout, measured in a process of its own, which reads its benchmarks and its library from there."""

    def __init__(self, root: Path) -> None:
        settings = {"env": {**os.environ, "PYTHONPATH": str(root)}, "cwd": root, "text": True}
        command = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **settings)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._question, self._answer = self._process.stdin, self._process.stdout

    def ask(self, *question: str) -> Any:
        print(json.dumps(question), file=self._question, flush=True)
        return json.loads(self._answer.readline())

    def end(self) -> None:
        self._process.communicate()


def compare(other: Path, groups: Sequence[str], rounds: int) -> list[tuple[str, str, list[float], list[float]]]:
    """`(group, case, our seconds of each round, theirs)` of every case that both checkouts have."""
    ours, theirs = editions = Edition(Path.cwd()), Edition(other.resolve())
    found = []
    for group in groups:
        names = [each.ask("group", group) for each in editions]
        for name in [name for name in names[0] if name in names[1]]:
            took: dict[Edition, list[float]] = {ours: [], theirs: []}
            for n in range(rounds + 1):  # the first finds out how many calls fill a turn
                for each in editions[:: -1 if n % 2 else 1]:
                    took[each].append(each.ask("case", name))
            found.append((group, name, took[ours][1:], took[theirs][1:]))
    for each in editions:
        each.end()
    return found


def show(found: Sequence[tuple[str, str, list[float], list[float]]]) -> None:
    table = Table("", "before us", "now us", "now / before", "quartiles", box=None)
    for group, name, ours, theirs in found:
        ratios = [one / other for one, other in zip(ours, theirs)]
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        times = (f"{1e6 * median(each):.1f}" for each in (theirs, ours))
        table.add_row(f"{group}: {name}", *times, f"{median(ratios):.2f}", f"{low:.2f} to {high:.2f}")
    Console(width=110 if not sys.stdout.isatty() else None, highlight=False).print(table)


def _answers() -> Iterator[Any]:
    """The other side of `ask`, line by line: the names of a group's cases; the seconds of one call of a case."""
    import benchmarks.measure as measure
    import benchmarks.timing as timing

    measure._begin(1)
    cases: dict[str, Any] = {}
    calls: dict[str, int] = {}
    for line in sys.stdin:
        kind, name = json.loads(line)
        if kind == "group":
            every = import_module(f"benchmarks.groups.{name}").cases(True)
            ours = {case.name: getattr(case, "ours", None) for case in every}
            cases = {key: one for key, one in ours.items() if isinstance(one, timing.Contestant)}  # growth has no such case
            calls.clear()
            yield list(cases)
            continue
        gc.collect()
        gc.disable()
        calls[name] = calls.get(name) or timing._calls(cases[name], TURN)
        yield timing._turn(cases[name], calls[name])
        gc.enable()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peers print goes elsewhere
    sys.path[0] = os.environ["PYTHONPATH"]
    for answer in _answers():
        print(json.dumps(answer), file=answers, flush=True)
