"""Tables: what stands in the summary and in the table of a model. Printed by `terminal`, and on a page by `page`.

Rows are the ways of handing over, columns the cases, so that a table is as high as there are ways and can be cut where a
terminal ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from collate_npu.tools.audit.case import Finding, Whose
from collate_npu.tools.audit.report import Report, Row, State, largest
from collate_npu.tools.audit.verdict import number
from collate_npu.tools.audit.ways import KINDS, kind_of, listed, way_of

MEASURES: dict[Literal["logits", "gradient"], tuple[str, str]] = {
    "logits": ("logit", "largest difference of a logit, at a real token, from the same sample alone"),
    "gradient": ("gradient", "relative error of the gradient, over all parameters at once"),
}
WHOSE: dict[Whose, tuple[str, str]] = {
    "ours": ("ours", "batches made by collate_npu"),
    "yours": ("YOURS", "batches of your own collator, or your own batch"),
    "elsewhere": ("elsewhere", "batches as other code makes them; wrong there is why this package exists"),
}


class Cell(NamedTuple):
    """A number or a word; a word in the place of a number has no state."""

    text: str
    state: State | None


class Case(NamedTuple):
    """A column of a table."""

    measure: Literal["logits", "gradient"]
    attn: str
    side: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """One model, one kind of case."""

    model: str
    kind: str
    cases: list[Case]
    rows: list[tuple[Whose, str, dict[Case, Cell]]]
    """Whose, the title of the way, a cell a case."""


def model_tables(report: Report, *, every: bool) -> Iterator[ModelTable]:
    """The tables of the models that need a look, or of every one. An interrupted one is the last that was measured."""
    last = report.findings[-1].model if report.interrupted and report.findings else None
    for row in report.rows():
        looked_at = every or row.state != "right" or row.model == last
        groups: dict[str, list[Finding]] = {}
        for f in row.findings if looked_at else ():
            groups.setdefault(kind_of(f), []).append(f)
        for kind, found in groups.items():
            if every or not all(f.logits is None for f in found if f.whose != "elsewhere"):  # else one line says why
                yield _model_table(row.model, kind, found, report.tolerance)


def _model_table(model: str, kind: str, found: Sequence[Finding], tolerance: float | None) -> ModelTable:
    at = {(f.column, f.attn_implementation, f.side): f for f in found}
    where = list(dict.fromkeys((f.attn_implementation, f.side) for f in found))
    measures = [m for m in MEASURES if any(getattr(f, m) is not None for f in found)] or ["logits"]
    cases = [Case(m, *place) for m in measures for place in where]
    ways = {f.column: f for whose in WHOSE for f in found if f.whose == whose}
    rows = [
        (f.whose, way_of(f).title, {c: _cell(at.get((column, c.attn, c.side)), c.measure, tolerance) for c in cases})
        for column, f in ways.items()
    ]
    return ModelTable(model=model, kind=kind, cases=cases, rows=rows)


def _cell(finding: Finding | None, measure: Literal["logits", "gradient"], tolerance: float | None) -> Cell:
    if finding is None:
        return Cell("", None)
    error: float | None = getattr(finding, measure)
    if error is not None:
        return Cell(number(error), "wrong" if _is_wrong(finding, measure, error, tolerance) else "right")
    if finding.no_kernel:
        return Cell("no kernel", None)
    return Cell("refused" if finding.refused else "raises" if finding.note else "-", None)


def _is_wrong(finding: Finding, measure: str, error: float, tolerance: float | None) -> bool:
    """Is that the number which is wrong? Where the loss alone is, which has no column, both are marked."""
    if finding.within(tolerance):
        return False
    shown = {*finding.astray} & {"logits", "gradient"} if tolerance is None else set()
    return measure in shown if shown else tolerance is None or not error <= tolerance


SUMMARY = ("model", "attention", "padding", "ours\nright", "worst", "elsewhere\nwrong")


def summary(report: Report, row: Row) -> list[str]:
    """What stands beside a model, under `SUMMARY`; with a collator of yours, its share before the worst of both."""
    judged = [f for f in row.findings if f.whose != "elsewhere"]
    others = [f for f in row.findings if f.whose == "elsewhere" and f.logits is not None]
    yours = [_share(report, row, "yours")] if report.measured("yours") else []
    wrong = sum(not f.within(report.tolerance) for f in others)
    worst = [f.logits for f in judged if f.logits is not None]
    return [
        row.model, listed(f.attn_implementation for f in row.findings), listed(f.side for f in row.findings),
        _share(report, row, "ours"), *yours, number(largest(worst)) if worst else "-",
        f"{wrong} of {len(others)}" if others else "-",
    ]  # fmt: skip


def titles(report: Report) -> list[str]:
    """What stands above `summary`."""
    yours = ["YOURS\nright"] if report.measured("yours") else []
    return [*SUMMARY[:4], *yours, *SUMMARY[4:]]


def _share(report: Report, row: Row, whose: Whose) -> str:
    counted = [f for f in row.findings if f.whose == whose and not f.refused and not f.no_kernel]
    right = sum(f.within(report.tolerance) for f in counted)
    return f"{right} of {len(counted)}" if counted else "-"


def legend(report: Report, shown: Sequence[ModelTable]) -> Iterator[tuple[str, str]]:
    """What each word of these tables means, once."""
    kinds = {table.kind for table in shown}
    for title, meaning in MEASURES.values():
        if any(MEASURES[case.measure][0] == title for table in shown for case in table.cases):
            yield title, meaning
    found = [f for f in report.findings if kind_of(f) in kinds]
    for whose, (title, meaning) in WHOSE.items():
        of = [f for f in found if f.whose == whose]
        if of:
            yield title, meaning
        meanings: dict[str, dict[str, str]] = {}
        for f in of:
            meanings.setdefault(way_of(f).title, {}).setdefault(way_of(f).meaning, KINDS[kind_of(f)])
        for title, by_kind in meanings.items():
            for meaning, kind in by_kind.items():
                yield f"  {title}", meaning if len(by_kind) == 1 else f"{kind}: {meaning}"
    if any(f.refused for f in found):
        yield "refused", "collate_npu refuses this, and a line above says why; neither right nor wrong"
