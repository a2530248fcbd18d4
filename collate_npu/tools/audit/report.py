"""Report: all that an audit found, what follows from it as an exit code, and both as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from collate_npu.segments import Segments
from collate_npu.testing.yardstick import Yardstick
from collate_npu.tools.audit.case import Finding, Whose

State = Literal["right", "wrong", "unproved"]

INTERRUPTED = 130
WORDS = {0: "PASS", 1: "FAIL", 2: "NOT PROVED", INTERRUPTED: "INTERRUPTED"}
"""By exit code: all measured and right; something of ours or yours is wrong; something named could not be run or told
apart; somebody stopped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A model in the summary."""

    model: str
    state: State
    findings: tuple[Finding, ...]


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
    batches: dict[str, tuple[str, Segments]] = field(default_factory=dict)
    """By layout: the first model that read it, and what was real in its first batch."""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """130 before 1 before 2 before 0."""
        if self.interrupted:
            return INTERRUPTED
        measured = self.measured("ours", "yours")
        if not all(f.within(self.tolerance) for f in measured):
            return 1
        ran = any(f.logits is not None for f in measured)
        return 0 if ran and not (self.not_run or self.blind or self.lacking) else 2

    def measured(self, *whose: Whose) -> list[Finding]:
        """Cases that count: what was refused or has no kernel here does not; what raised counts as ours or yours."""
        found = (f for f in self.findings if f.whose in whose and not f.refused and not f.no_kernel)
        return [f for f in found if f.whose != "elsewhere" or f.logits is not None]

    def astray(self, *whose: Whose) -> list[Finding]:
        """Those of them that are wrong."""
        return [f for f in self.measured(*whose) if not f.within(self.tolerance)]

    def worst(self, whose: Whose) -> Finding | None:
        """The case whose largest difference of a logit is the largest; NaN is larger than any."""
        found = [f for f in self.findings if f.whose == whose and f.logits is not None]
        return max(found, key=lambda f: math.inf if f.logits is None or f.logits != f.logits else f.logits, default=None)

    @property
    def lacking(self) -> list[Finding]:
        """What could not run for want of a kernel."""
        return [f for f in self.findings if f.no_kernel and f.whose != "elsewhere"]

    @property
    def blind(self) -> list[str]:
        """Where a layer that ignores its mask would not have been seen."""
        return [name for name, yardstick in self.yardsticks.items() if not yardstick.tells(self.tolerance)]

    def rows(self) -> list[Row]:
        """The summary: a row for each model, those too that did not run at all."""
        unproved = {place.rpartition(" (")[0] for place in [*self.not_run, *self.blind]} | {f.model for f in self.lacking}
        wrong = {f.model for f in self.astray("ours", "yours")}
        found: dict[str, list[Finding]] = {f.model: [] for f in self.findings}
        for f in self.findings:
            found[f.model].append(f)
        return [
            Row(
                model=name,
                state="wrong" if name in wrong else "unproved" if name in unproved else "right",
                findings=(*each,),
            )
            for name, each in {**found, **{name: [] for name in unproved - found.keys()}}.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """For machines. Numbers that are not finite are words ("nan"): JSON has none.

        `passed` (true with exit code 0 alone), `verdict` (a word of `WORDS`), `exit_code`, `interrupted`; `settings` and
        versions, `tolerance` (null: by the yardstick); `findings`, a case each (fields of `Finding`); `worst`, for ours,
        yours and elsewhere the worst of them with its error at each token (`by_position`: a list a sequence) or null;
        `yardsticks` by place; `cannot_tell`, places; `left_out` and `not_run`, the reason by place; `kernels` by model.
        """
        kinds: tuple[Whose, ...] = ("ours", "yours", "elsewhere")
        worst = {whose: self.worst(whose) for whose in kinds}
        found = {
            "passed": self.exit_code == 0, "verdict": WORDS[self.exit_code], "exit_code": self.exit_code,
            "interrupted": self.interrupted, "settings": dict(self.settings), "tolerance": self.tolerance,
            "findings": [_without_positions(f) for f in self.findings],
            "worst": {whose: f and asdict(f) for whose, f in worst.items()},
            "yardsticks": {place: asdict(yardstick) for place, yardstick in self.yardsticks.items()},
            "cannot_tell": self.blind, "left_out": self.left_out, "not_run": self.not_run, "kernels": self.kernels,
        }  # fmt: skip
        return {key: _finite(value) for key, value in found.items()}


def largest(values: Iterable[float | None]) -> float:
    """NaN if one is: Python's max drops one that is not first."""
    found = [value for value in values if value is not None]
    return next((value for value in found if value != value), max(found, default=0.0))


def _without_positions(finding: Finding) -> dict[str, Any]:
    return {key: value for key, value in asdict(finding).items() if key != "by_position"}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
