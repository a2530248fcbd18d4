"""Report: what the audit found as a verdict in one line, and as tables people can read, by rich.

A number that is wrong carries a `!`, and the verdict is a word: nothing is said by colour alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu.integrations.delivery.alone import TIMES
from collate_npu.testing.yardstick import Yardstick
from collate_npu.tools.audit.case import Finding

K = TypeVar("K")
V = TypeVar("V")

WIDTH = 1000
"""More than any table needs: lines that a narrow terminal wraps read better than numbers cut short."""
WORDS = ("PASS", "FAIL", "NOT PROVED")
"""By exit code: all measured and right; something of ours is wrong; something named could not be run or told apart."""


@dataclass(slots=True, kw_only=True)
class Report:
    """All an audit found. `left_out` was known not to be testable; `not_run` was meant to run, and did not."""

    settings: Mapping[str, Any]
    tolerance: float | None = None
    """An absolute one, in place of the yardstick."""
    findings: list[Finding] = field(default_factory=list)
    yardsticks: dict[str, Yardstick] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    """By model: the package that each function of its recurrent layers was found in, where flat rows were asked for."""

    @property
    def exit_code(self) -> int:
        """1 before 2 before 0."""
        measured = self._measured
        if not all(f.within(self.tolerance) for f in [*measured, *(f for f in self.findings if f.whose == "yours")]):
            return 1
        lacking = any(f.no_kernel for f in self.findings if f.ours)
        ran = any(f.logits is not None for f in measured)
        return 0 if ran and not (self.not_run or self.blind or lacking) else 2

    @property
    def _measured(self) -> list[Finding]:
        return [f for f in self.findings if f.ours and not f.refused and not f.no_kernel]

    @property
    def blind(self) -> list[str]:
        """Where a layer that ignores its mask would not have been seen."""
        return [name for name, yardstick in self.yardsticks.items() if not yardstick.tells(self.tolerance)]

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines. Numbers that are not finite are words: JSON has none."""
        found = {"verdict": WORDS[self.exit_code], "exit_code": self.exit_code, **asdict(self), "cannot_tell": self.blind}
        return {key: _finite(value) for key, value in found.items()}

    def verdict(self) -> str:
        """One line: a word, ours, elsewhere, where."""
        ours = self._measured
        right = sum(f.within(self.tolerance) for f in ours)
        others = [f for f in self.findings if not f.ours and f.logits is not None]
        astray = [f.logits for f in others if not f.within(self.tolerance) and f.logits is not None]
        limit = f"{TIMES} times the noise" if self.tolerance is None else f"{self.tolerance:g}"
        head = f"{WORDS[self.exit_code]}  ours: {right} of {len(ours)} cases within {limit}"
        tail = f"elsewhere: {len(astray)} of {len(others)} wrong without an error, by up to {_largest(astray):.2f}"
        return f"{head} (worst {_largest(f.logits for f in ours):.1e}); {tail}.  [{self._where()}]"

    def _where(self) -> str:
        names = ("torch", "transformers")
        return ", ".join([self.settings["device"], self.settings["dtype"], *(f"{n} {self.settings[n]}" for n in names)])

    def lines(self) -> Iterator[str]:
        """What was refused, raised, left out or not proved, and why."""
        said = [f for f in self.findings if f.note]
        for (what, note), found in _grouped(((_what(f), _unnamed(f)), f) for f in said):
            columns, models = (", ".join(dict.fromkeys(each)) for each in zip(*((f.column, f.model) for f in found)))
            yield f"{what}: {columns} on {models}: {note}"
        for listed, names in _grouped((_listed(packages), model) for model, packages in self.kernels.items()):
            yield f"recurrent kernels of {', '.join(names)}: {listed}"
        for word, told in (("left out", self.left_out), ("NOT RUN", self.not_run)):
            for why, names in _grouped((why, name) for name, why in told.items()):
                yield f"{word}: {', '.join(names)}: {why}"
        for name in self.blind:
            yield f"CANNOT TELL: {name}: {_why_blind(self.yardsticks[name], self.tolerance)}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unnamed(finding: Finding) -> str:
    """Its note without the model's name, so that one line says it of several."""
    return re.sub(rf"\b{re.escape(finding.model)}(_text)?\b", "...", finding.note)


def _listed(packages: Mapping[str, str]) -> str:
    """Where the functions of recurrent layers come from."""
    if set(packages.values()) == {"torch"}:
        return "none, torch alone"
    return ", ".join(f"{function}: {package}" for function, package in packages.items())


def _what(finding: Finding) -> str:
    if finding.no_kernel:
        return "NOT RUN" if finding.ours else "refused by transformers"
    if finding.whose == "yours" and finding.logits is not None:
        return "YOURS is wrong"
    return "refused" if finding.refused else "raises" if finding.logits is None else "not finite"


def _why_blind(yardstick: Yardstick, tolerance: float | None) -> str:
    wrong = yardstick.wrong
    if wrong is None:
        return "nothing wrong could be run beside it, so nothing says that a wrong mask or a lost boundary would show"
    if tolerance is not None:
        return (
            f"what is wrong moves a logit by {wrong.largest:.1e}, within the tolerance of {tolerance:g}: give a smaller one"
        )
    noise = yardstick.noise
    return (
        f"what is wrong moves the logits by {wrong.logits:.1e} and the gradient by {wrong.gradient:.1e}, and rounding by "
        f"{noise.logits:.1e} and {noise.gradient:.1e}: too close. Use a wider --dtype, or text with more padding"
    )


def print_report(console: Console, report: Report) -> None:
    """The verdict, what it rests on, and a table of logits and one of gradients."""
    console.print(Text(report.verdict(), style="bold green" if report.exit_code == 0 else "bold red"))
    for line in report.lines():
        console.print(Text(line, style="dim"))
    console.width = max(console.width, WIDTH)
    for kind, title in _KINDS.items():
        findings = [finding for finding in report.findings if _kind(finding) == kind]
        for measure, what in (("logits", "largest difference of a logit"), ("gradient", "relative error of the gradient")):
            if any(getattr(finding, measure) is not None for finding in findings):
                console.print(Text(f"{title}: {what} (! is wrong)", style="italic"))
                console.print(_table(findings, measure, report.tolerance))


_KINDS = {
    "padded": "Padded batch against each sample alone",
    "packed": "Flat row against each sample alone",
    "cp": "Batch shared out between ranks against each sample alone",
}
"""A table for each kind of case: the ways of handing over differ."""


def _kind(finding: Finding) -> str:
    return "padded" if finding.side in ("left", "right") else finding.side.partition(" ")[0]


def _largest(values: Iterable[float | None]) -> float:
    """NaN if one is: Python's max drops one that is not first."""
    found = [value for value in values if value is not None]
    return next((value for value in found if value != value), max(found, default=0.0))


def _grouped(pairs: Iterable[tuple[K, V]]) -> list[tuple[K, list[V]]]:
    groups: dict[K, dict[V, None]] = {}
    for key, value in pairs:
        groups.setdefault(key, {})[value] = None
    return [(key, list(values)) for key, values in groups.items()]


def _table(findings: Sequence[Finding], measure: str, tolerance: float | None) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("model", "attn", "side"):
        table.add_column(name, no_wrap=True)
    ours = {finding.column: finding.ours for finding in findings}
    columns = sorted(ours, key=lambda column: not ours[column])
    for column in columns:
        table.add_column(column, justify="right", min_width=8, header_style="green" if ours[column] else "yellow")
    last = ""
    for (name, attn, side), row in _rows(findings):
        if last and name != last:
            table.add_section()
        cells = [_cell(row.get(column), measure, tolerance) for column in columns]
        table.add_row(name if name != last else "", attn, side, *cells)
        last = name
    return table


def _rows(findings: Sequence[Finding]) -> Iterator[tuple[tuple[str, str, str], dict[str, Finding]]]:
    rows: dict[tuple[str, str, str], dict[str, Finding]] = {}
    for f in findings:
        rows.setdefault((f.model, f.attn_implementation, f.side), {})[f.column] = f
    yield from rows.items()


def _cell(finding: Finding | None, measure: str, tolerance: float | None) -> Text:
    if finding is None:
        return Text("")
    error = getattr(finding, measure)
    if error is None:
        return Text(_absent(finding), style="dim")
    number = f"{error:.1e}" if error < 0.01 else f"{error:.2f}"
    return Text(number, style="green") if finding.within(tolerance) else Text(f"{number} !", style="bold red")


def _absent(finding: Finding) -> str:
    """What stands in the place of a number."""
    if finding.no_kernel:
        return "no kernel"
    return "refused" if finding.refused else "raises" if finding.note else "-"
