"""Terminal: a report as rich prints it: the verdict, a line a model, and tables of the models that need a look.

A table has a row a way of handing over and a column a measure and side; there is one for each attention, which fits 80
columns. Nothing is said by colour alone. A page is the same as one HTML file that needs nothing else: it opens offline, and
can be attached to an issue; with the error at each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu.tools import paper
from collate_npu.tools.audit.case import Finding, Whose, size
from collate_npu.tools.audit.report import KINDS, Report, State, facts, headline, largest, listed, notes, number, shortened
from collate_npu.tools.kernels import tables
from collate_npu.tools.paper import put, ruled
from collate_npu.tools.show.sheet import block_for

MEASURES = {
    "logits": "largest difference of a logit, at a real token, from the same sample alone",
    "loss": "relative error of the loss",
    "gradient": "relative error of the gradient, over all parameters at once",
}
"""Of a table the first, and the gradient, or the loss where no gradient was measured."""
WHOSE: dict[Whose, tuple[str, str]] = {
    "ours": ("ours", "batches made by collate_npu"),
    "yours": ("YOURS", "batches of your own collator, or your own batch"),
    "elsewhere": ("elsewhere", "batches as other code makes them; wrong there is why this package exists"),
}
SIGNS: dict[State, tuple[str, str]] = {"right": ("✔", "green"), "wrong": ("✘", "bold red"), "unproved": ("?", "yellow")}
"""Sign and style."""
SUMMED_UP = "right, wrong: cases, of all that ran; worst: the largest difference of a logit; elsewhere: as other code does"
_BARS = "▁▂▃▄▅▆▇█"
_READ = (
    "The largest difference of a logit from the sample alone, at each of its tokens. A bar grows by an eighth with each "
    "power of ten, from 1e-08 (▁) to 0.1 and more (█); · is no difference, × a number that is not finite."
)
_MOST = 80
"""Bars in a line."""


def print_report(console: Console, report: Report, *, verbose: bool = False) -> None:
    """The verdict, what it rests on, a line a model, and the tables of those that need a look (`verbose`: of all)."""
    state: State = "right" if report.exit_code == 0 else "wrong" if report.exit_code == 1 else "unproved"
    sign, style = SIGNS[state]
    put(console, Text(f"{sign} {headline(report)}", f"bold {style}"), terms(facts(report)))
    if report.findings or report.not_run:
        put(console, Text(), summary(report), Text(SUMMED_UP, "dim"), Text())
    put(console, terms(notes(report, verbose=verbose)))
    put(console, *tables([run for run in report.operators if verbose or run.state == "wrong"]))
    shown = looked_at(report, every=verbose)
    for (model, attn, kind), found in shown.items():
        title = f"\n{shortened(model, console.width - 40)}: {kind}, {shortened(attn, 20)}"
        put(console, Text(title, "bold"), table(found, report.tolerance))
    if shown:
        put(console, Text(f"\nWhat the words mean ({SIGNS['wrong'][0]} marks what is wrong)", "bold"))
        put(console, terms(legend([f for found in shown.values() for f in found])))


def terms(told: Iterable[tuple[str, str]]) -> Table:
    """A label, and what is said under it, on each line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in told:
        grid.add_row(Text(f"  {label}", "bold yellow" if label[:2].isupper() else "dim"), Text(text))
    return grid


def summary(report: Report) -> Table:
    """A line a model: how much of ours, and of yours, is right; the worst of both; how much of what others make is wrong."""
    whose: list[Whose] = ["ours", "yours"] if report.measured("yours") else ["ours"]
    rights = (f"{WHOSE[one][0]}\nright" for one in whose)
    drawn = ruled("", "model", "attention", "side", numbers=(*rights, "worst", "elsewhere\nwrong"))
    for model, state in report.states().items():
        found = [f for f in report.findings if f.model == model]
        shares = [_share([f.within(report.tolerance) for f in report.measured(one) if f.model == model]) for one in whose]
        judged = [f.logits for f in found if f.whose != "elsewhere" and f.logits is not None]
        wrong = [not f.within(report.tolerance) for f in report.measured("elsewhere") if f.model == model]
        attns, sides = listed(f.attention for f in found), listed(f.side for f in found)
        shares += [number(largest(judged)) if judged else "-", _share(wrong)]
        drawn.add_row(Text(*SIGNS[state]), Text(shortened(model, 38)), Text(attns), sides, *shares)
    return drawn


def _share(told: Sequence[bool]) -> str:
    return f"{sum(told)} of {len(told)}" if told else "-"


def looked_at(report: Report, *, every: bool) -> dict[tuple[str, str, str], list[Finding]]:
    """The cases of the models that need a look, or of every one, by model, attention and kind.

    Of an interrupted report the last model needs one. Where nothing of ours ran, a note says why, and no table.
    """
    last = report.findings[-1].model if report.interrupted and report.findings else None
    states, out = report.states(), dict[tuple[str, str, str], list[Finding]]()
    for f in report.findings:
        if every or states[f.model] != "right" or f.model == last:
            out.setdefault((f.model, f.attention, KINDS[f.side]), []).append(f)
    ran = {place: any(f.logits is not None for f in found if f.whose != "elsewhere") for place, found in out.items()}
    return {place: found for place, found in out.items() if every or ran[place]}


def table(found: Sequence[Finding], tolerance: float | None) -> Table:
    """What one model gives with one attention: a number, marked where it is wrong, or the word that stands in its place."""
    measures = _measures(found)
    columns = [(m, side) for m in measures for side in dict.fromkeys(f.side for f in found)]
    drawn, last = ruled("", "handed over by", numbers=(f"{m}\n{side}" for m, side in columns)), ""
    at = {(f.whose, f.column, f.side): f for f in found}
    for whose, column in dict.fromkeys((one, f.column) for one in WHOSE for f in found if f.whose == one):
        cells = [_cell(at.get((whose, column, side)), m, measures, tolerance) for m, side in columns]
        drawn.add_row(WHOSE[whose][0] if whose != last else "", Text(shortened(column, 29)), *cells)
        last = whose
    return drawn


def _measures(found: Sequence[Finding]) -> list[str]:
    if not any(f.logits is not None for f in found):
        return ["logits"]
    return ["logits", "gradient" if any(f.gradient is not None for f in found) else "loss"]


def _cell(finding: Finding | None, measure: str, measures: Sequence[str], tolerance: float | None) -> Text:
    if finding is None:
        return Text()
    error: float | None = getattr(finding, measure)
    if error is None:
        word = "refused" if finding.refused else "raises" if finding.note else "-"
        return Text(word, "dim")
    shown = {*finding.astray} & {*measures}  # where the loss alone is wrong and has no column, both are marked
    wrong = (not shown or measure in shown) if tolerance is None else not error <= tolerance
    if finding.within(tolerance) or not wrong:
        return Text(number(error), SIGNS["right"][1])
    return Text(f"{number(error)} {SIGNS['wrong'][0]}", SIGNS["wrong"][1])


def legend(found: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """What each word of these tables means, once."""
    yield from ((measure, MEASURES[measure]) for measure in _measures(found))
    for whose, said in WHOSE.items():
        if of := [f for f in found if f.whose == whose]:
            yield said
            yield from ((f"  {title}", meaning) for title, meaning in dict.fromkeys((f.column, f.meaning) for f in of))
    if any(f.refused for f in found):
        yield "refused", "collate_npu refuses this, and a line above says why; neither right nor wrong"


def page(report: Report) -> str:
    """The whole page."""
    console = paper.recorder()
    print_report(console, report, verbose=True)
    put(console, Text("\nThe error at each token", "bold underline"), Text(_READ), *errors(report))
    put(console, Text("\nSettings", "bold"), terms((key, str(value)) for key, value in report.settings.items()))
    return paper.page(console, f"collate-npu audit: {headline(report)}")


def errors(report: Report) -> Iterator[Text]:
    """The worst case of ours, yours and elsewhere: a line a sample, bold the one with the largest error."""
    for whose, (name, _) in WHOSE.items():
        finding = report.worst(whose)
        if finding is None or not finding.by_position:
            continue
        where = f"{shortened(finding.model, 40)}, {finding.attention}, {finding.side}"
        yield Text(f"\n{name}, the worst: {finding.column} on {where}", "bold")
        largest = [max(row, key=size, default=0.0) for row in finding.by_position]
        worst = max(range(len(largest)), key=lambda n: size(largest[n]))
        block = block_for(max(map(len, finding.by_position)), _MOST)
        for n, (row, error) in enumerate(zip(finding.by_position, largest)):
            bars = "".join(_bar(max(row[at : at + block], key=size)) for at in range(0, len(row), block))
            yield Text(f"  sample {n + 1:<3} {bars} {number(error)}", "bold" if n == worst else "")


def _bar(error: float) -> str:
    if not math.isfinite(error):
        return "×"
    return _BARS[min(max(math.floor(math.log10(error)) + 8, 0), 7)] if error else "·"
