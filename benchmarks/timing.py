"""One way of timing: contestants take turns within each round, forwards, then backwards; ratios are medians of rounds.

A slow moment of the machine hits both sides of a ratio. The garbage collector is off while a round runs, as in `timeit`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from operator import truediv
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Literal

Work = Callable[[Any], Any]
Fresh = Callable[[], Any]
Against = Literal["peer", "floor"]


def nothing() -> None:
    """The input of work that needs none."""


def untested(ours: Any, theirs: Any) -> None:
    """For floors, which answer nothing."""


@dataclass(frozen=True, eq=False)
class Contestant:
    """Work, and where its input comes from: `fresh`, outside the clock, for each call, as some peers write into theirs."""

    name: str
    work: Work
    fresh: Fresh = nothing
    against: Against = "peer"
    agrees: Callable[[Any, Any], None] = untested
    """Asserts that its output and ours say the same."""
    target: float | None = None
    """A peer must take at least so many times our time; we must take at most so many times a floor's."""


@dataclass(frozen=True)
class Absent:
    """A contestant that cannot run here, or not on this input, and why."""

    name: str
    why: str
    case: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the report: seconds of both sides, and the ratio: theirs by ours, or ours by the floor's."""

    group: str
    case: str
    name: str
    against: Against
    ours: float
    theirs: float | None
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    target: float | None = None
    unit: Literal["x", "us", ""] = "x"
    """Of the target; "" where `ratio` is another number, such as an exponent."""
    rounds: int = 0
    made: tuple[int, int] = (0, 0)
    """Bytes of the tensors in both outputs."""
    facts: tuple[dict[str, float], dict[str, float]] = ({}, {})
    """What else both measured of themselves."""

    @property
    def met(self) -> bool | None:
        """None without a target."""
        if self.target is None:
            return None
        value = self.ours * 1e6 if self.unit == "us" else self.ratio
        assert value is not None
        return value >= self.target if self.against == "peer" else value <= self.target


@dataclass
class Case:
    """What we do, and who does it too. `limit` is for our time itself, in microseconds."""

    group: str
    name: str
    ours: Contestant | Absent
    rivals: Sequence[Contestant | Absent]
    limit: float | None = None
    absent: list[Absent] = field(default_factory=list)
    made: dict[Contestant, int] = field(default_factory=dict)
    facts: dict[Contestant, dict[str, float]] = field(default_factory=dict)

    def ready(self) -> list[Contestant]:
        """Everyone who can run, after one call each; an output that differs from ours is an error, not a figure."""
        self.made = {}
        mine = self._output(self.ours)
        for one in self.rivals if self.ours in self.made else ():
            theirs = self._output(one)
            if one in self.made:
                one.agrees(mine, theirs)
        return list(self.made)

    def _output(self, one: Contestant | Absent) -> Any:
        """None where it cannot run."""
        if isinstance(one, Absent):
            return self.gone(one.name, one.why)
        try:
            output = one.work(one.fresh())
        except Exception as error:  # it does not take this input
            return self.gone(one.name, first_line(error))
        self.made[one] = size_of(output)
        self.facts[one] = getattr(output, "facts", {})
        return output

    def gone(self, name: str, why: str) -> None:
        self.absent.append(Absent(name, why, f"{self.group}, {self.name}"))

    def rows(self, seconds: dict[Contestant, list[float]]) -> list[Row]:
        ours, *rivals = seconds
        mine = seconds[ours]
        found = []
        if self.limit is not None:
            took = median(mine)
            found.append(Row(self.group, self.name, "", "floor", took, None, None, None, self.limit, "us", len(mine)))
        for rival in rivals:
            pairs = zip(mine, seconds[rival]) if rival.against == "floor" else zip(seconds[rival], mine)
            one = row(self.group, self.name, rival, mine, seconds[rival], list(starmap(truediv, pairs)))
            facts = self.facts.get(ours, {}), self.facts.get(rival, {})
            found.append(replace(one, made=(self.made[ours], self.made[rival]), facts=facts))
        return found


def row(group: str, case: str, rival: Contestant, mine: list[float], theirs: list[float], ratios: list[float]) -> Row:
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Row(
        group, case, rival.name, rival.against, median(mine), median(theirs), median(ratios), (low, high), rival.target,
        rounds=len(ratios),
    )  # fmt: skip


def size_of(output: Any) -> int:
    """Bytes of the tensors and arrays of an output, which is what crosses from a worker to the trainer."""
    values = output.values() if isinstance(output, Mapping) else [output]
    return sum(value.nbytes for value in values if hasattr(value, "nbytes"))


def race(contestants: Sequence[Contestant], pace: Pace) -> dict[Contestant, list[float]]:
    """Seconds of one call, for each contestant and round. The warm-up round finds out how many calls fill a turn."""
    gc.collect()
    gc.disable()
    try:
        calls = {one: _calls(one, pace.turn) for one in contestants}
        spent = sum(calls[one] * _turn(one, calls[one]) for one in contestants)
        took: dict[Contestant, list[float]] = {one: [] for one in contestants}
        for n in range(pace.rounds_for(spent)):
            for one in contestants[:: -1 if n % 2 else 1]:
                took[one].append(_turn(one, calls[one]))
        return took
    finally:
        gc.enable()


@dataclass(frozen=True)
class Pace:
    """Rounds of a case, fewer where they would take longer than `budget` seconds, and the seconds of one turn."""

    rounds: int = 15
    least: int = 5
    budget: float = 3.5
    turn: float = 0.01

    def rounds_for(self, seconds: float) -> int:
        return min(self.rounds, max(self.least, int(self.budget / seconds)))


def _calls(one: Contestant, least: float) -> int:
    calls = 1
    while (seconds := calls * _turn(one, calls)) < least:
        calls = max(2 * calls, min(int(calls * least / max(seconds, 1e-9)), 10 * calls))
    return calls


def _turn(one: Contestant, calls: int) -> float:
    """Seconds of one call, over `calls` of them, each with an input of its own."""
    work, inputs = one.work, [one.fresh() for _ in range(calls)]
    start = perf_counter()
    for given in inputs:
        work(given)
    return (perf_counter() - start) / calls


def first_line(error: Exception) -> str:
    """Its kind and first line; of an error in a worker, the last, where the error itself stands."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught"):
        return lines[-1][:160]
    return f"{type(error).__name__}: {lines[0]}"[:160]
