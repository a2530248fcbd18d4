"""The report of an audit: an exit code, JSON, the verdict in words, and tables for a terminal or one HTML page.

The words are the line that comes first, what it rests on, what to do next, and what did not run and why. A line of a table
is a model, or a case of it. Nothing is said by colour alone. A page needs nothing else: it opens offline, and can be
attached to an issue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu.proof.measure import TIMES, Yardstick
from collate_npu.tools.audit.case import WAYS, Finding, Whose, size
from collate_npu.tools.terminal import (
    INTERRUPTED,
    RIGHT,
    UNPROVED,
    WORDS,
    WRONG,
    html_fragment,
    html_page,
    join_names,
    largest,
    number,
    put,
    recorder,
    ruled,
    shortened,
    terms,
    verdict_json,
    verdict_line,
)

_MOST = 4
"""Names in a brief line."""


@dataclass(slots=True, kw_only=True)
class Report:
    """All an audit found. `left_out` was known not to be testable; `not_run` was meant to run, and did not.

    A place is a model, its attention and what of it: `m (sdpa)`, `m (sdpa) packed`, `m (sdpa) my_collator`.
    """

    settings: Mapping[str, Any]
    tolerance: float | None = None
    """An absolute one, in place of the yardstick."""
    findings: list[Finding] = field(default_factory=list)
    yardsticks: dict[str, Yardstick] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    """By model: the package that each function of its recurrent layers was found in, where flat rows were asked for."""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """130 before 1 before 2 before 0."""
        if self.interrupted:
            return INTERRUPTED
        if self.wrong("ours", "yours"):
            return 1
        ran = any(f.logits is not None for f in self.measured("ours", "yours"))
        return 0 if ran and not (self.not_run or self.blind) else 2

    def measured(self, *whose: Whose) -> list[Finding]:
        """Cases that count: what was refused does not; what raised counts as ours or yours."""
        found = (f for f in self.findings if f.whose in whose and not f.refused)
        return [f for f in found if f.whose != "elsewhere" or f.logits is not None]

    def wrong(self, *whose: Whose) -> list[Finding]:
        """The measured cases that are wrong."""
        return [f for f in self.measured(*whose) if not f.right]

    def worst(self, whose: Whose) -> Finding | None:
        """The case whose largest difference of a logit is the largest; NaN is larger than any."""
        found = [f for f in self.findings if f.whose == whose and f.logits is not None]
        return max(found, key=lambda f: size(f.logits or 0.0), default=None)

    @property
    def blind(self) -> list[str]:
        """The places where a layer that ignores its mask would not have been seen."""
        return [name for name, yardstick in self.yardsticks.items() if not yardstick.tells(self.tolerance)]

    def signs(self) -> dict[str, tuple[str, str]]:
        """Return the sign of each model, of those too that did not run, with its style."""
        signs = {f.model: RIGHT for f in self.findings}
        signs |= {place.rpartition(" (")[0]: UNPROVED for place in [*self.not_run, *self.blind]}
        return signs | {f.model: WRONG for f in self.wrong("ours", "yours")}

    def as_json(self) -> dict[str, Any]:
        """Return the report for machines. Numbers that are not finite are words ("nan").

        `passed` (true with exit code 0 alone), `verdict` (a word of `WORDS`), `exit_code`, `interrupted`; `settings` and
        versions, `tolerance` (null: by the yardstick); `findings`, a case each (fields of `Finding`); `worst`, for ours,
        yours and elsewhere the worst of them with its error at each token (`by_position`: a list a sequence) or null;
        `yardsticks` by place; `cannot_tell`, places; `left_out` and `not_run`, the reason by place; `kernels` by model.
        """
        worst = {whose: self.worst(whose) for whose in get_args(Whose)}
        return verdict_json(
            self.exit_code, interrupted=self.interrupted, settings=dict(self.settings), tolerance=self.tolerance,
            findings=[{key: x for key, x in _fields(f).items() if key != "by_position"} for f in self.findings],
            worst={whose: f and _fields(f) for whose, f in worst.items()},
            yardsticks={place: asdict(yardstick) for place, yardstick in self.yardsticks.items()},
            cannot_tell=self.blind, left_out=self.left_out, not_run=self.not_run, kernels=self.kernels,
        )  # fmt: skip


def _fields(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "right": finding.right}


# --- the verdict in words

Line = tuple[str, str]
"""A short label, and the text beside it."""
_TAILS = {
    0: ": they give the numbers of each sample alone", 1: "", 2: ", but a wrong mask would not have been seen everywhere",
    INTERRUPTED: ", as far as it came",
}  # fmt: skip
_NEXT = {
    0: "nothing to do; --verbose shows every case",
    2: "each line NOT RUN or CANNOT TELL says what to change; then run it again",
    INTERRUPTED: "run it again for the rest; --model NAME, --batches 1 or --no-gradients take less time",
}
_NEXT_WRONG: dict[Whose, str] = {
    "ours": "do not train with this yet; report it to collate_npu, with this text and what `collate-npu env` prints",
    "yours": "each line YOURS says what to change; then run it again",
}


def headline(report: Report) -> str:
    """One sentence after the verdict's word."""
    counted = {whose: (len(report.measured(whose)), len(report.wrong(whose))) for whose in _NEXT_WRONG}
    shares = " and ".join(f"{of - wrong} of {of} cases of {whose}" for whose, (of, wrong) in counted.items() if of)
    tail = ", but not everything named could run" if report.not_run else _TAILS[report.exit_code]
    return f"{WORDS[report.exit_code]}: {f'{shares} are right{tail}' if shares else 'nothing of ours was measured'}."


def facts(report: Report) -> Iterator[Line]:
    """What the verdict rests on, and what to do next."""
    steps = []
    for whose, step in _NEXT_WRONG.items():
        if wrong := report.wrong(whose):
            ways, models = join_names(f.column for f in wrong), join_names((shortened(f.model) for f in wrong), _MOST)
            yield "wrong", f"{whose} ({ways}) on {models}: {_errors_of(wrong)}"
            steps.append(step)
    if others := report.measured("elsewhere"):
        wrong = report.wrong("elsewhere")
        by = f", by up to {number(largest(f.logits for f in wrong))} in a logit" if wrong else ""
        yield "elsewhere", f"{len(wrong)} of {len(others)} are wrong without an error{by}"
    settings = report.settings
    where = f"on {settings['device']} in {settings['dtype']}"
    yield "measured", f"{where}, torch {settings['torch']}, transformers {settings['transformers']}"
    limit = f"{TIMES} times the rounding noise measured on each model"
    yield "passes", f"up to {limit if report.tolerance is None else f'{report.tolerance:g} (--tolerance)'}"
    yield "next", _NEXT.get(report.exit_code) or "; ".join(steps)


def _errors_of(wrong: Sequence[Finding]) -> str:
    """By how much they are wrong: a logit as it is, loss and gradient relative to themselves."""
    if not any(f.logits is not None for f in wrong):
        return "it raises"
    logit, loss, gradient = (largest(getattr(f, measure) for f in wrong) for measure in MEASURES)
    by_gradient = f", the gradient by {number(gradient)}" if gradient else ""
    return f"a logit is off by up to {number(logit)}, the loss by {number(loss)}{by_gradient}"


def notes(report: Report, *, verbose: bool) -> Iterator[Line]:
    """What was refused, raised, left out or not proved, and why: a line a reason, in full where `verbose`."""
    most = 0 if verbose else _MOST
    for (label, why), found in _grouped(((_label(f), _why(f, verbose)), f) for f in report.findings if f.note):
        models, (sides, ways) = (shortened(f.model) for f in found), zip(*((f.side, f.column) for f in found))
        yield label, f"{join_names(models, most)}, {join_names(sides)} ({join_names(ways)}): {why}"
    for label, reasons in (("NOT RUN", report.not_run), ("left out", report.left_out)):
        for why, places in _grouped((why, place) for place, why in reasons.items()):
            yield label, f"{join_names(map(shortened, places))}: {why}"
    for place in report.blind:
        yield "CANNOT TELL", f"{shortened(place)}: {_why_blind(report.yardsticks[place], report.tolerance)}"
    for model, packages in report.kernels.items() if verbose else ():
        yield "kernels", f"{shortened(model)}: {join_names(f'{name} of {package}' for name, package in packages.items())}"


def _label(finding: Finding) -> str:
    if finding.logits is None:
        return "refused" if finding.refused else "raises"
    return "YOURS is wrong" if finding.whose == "yours" else "wrong"


def _why(finding: Finding, verbose: bool) -> str:
    """Its note; of a refusal the rule alone, which is the same for several models."""
    if verbose or not finding.refused:
        return finding.note
    return re.sub(r"^[\w\[\]]+: got .*?\. ", "", finding.note).partition(". ")[0]


def _why_blind(yardstick: Yardstick, tolerance: float | None) -> str:
    wrong, noise = yardstick.wrong, yardstick.noise
    if wrong is None:
        return "nothing wrong could be run beside it, so nothing says that a wrong mask or a lost boundary would show"
    if tolerance is not None:
        return f"what is wrong moves a logit by {wrong.largest:.1e}: give a smaller tolerance than {tolerance:g}"
    moves = f"what is wrong moves the logits by {wrong.logits:.1e} and the gradient by {wrong.gradient:.1e}, and rounding"
    return f"{moves} by {noise.logits:.1e} and {noise.gradient:.1e}: use a wider --dtype, or text with more padding"


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    """Values by their keys, both in the order they came in."""
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return [*groups.items()]


# --- tables

MEASURES = {
    "logits": "largest difference of a logit, at a real token, from the same sample alone",
    "loss": "relative error of the loss",
    "gradient": "relative error of the gradient, over all parameters at once",
}
WHOSE: dict[Whose, tuple[str, str]] = {
    "ours": ("ours", "batches made by collate_npu"),
    "yours": ("YOURS", "batches of your own collator, or your own batch"),
    "elsewhere": ("elsewhere", "batches as other code makes them; wrong there is why this package exists"),
}
SUMMED_UP = "right, wrong: cases, of all that ran; worst: the largest difference of a logit; elsewhere: as other code does"


def print_report(console: Console, report: Report, *, verbose: bool = False) -> None:
    """Print the verdict, what it rests on, a line a model, the reasons, and the tables of the models that need a look
    (`verbose`: of all)."""
    put(console, verdict_line(report.exit_code, headline(report)), terms(facts(report)))
    if report.findings or report.not_run:
        put(console, Text(), summary(report), Text(SUMMED_UP, "dim"), Text())
    put(console, terms(notes(report, verbose=verbose)))
    shown = looked_at(report, every=verbose)
    for (model, attention), found in _grouped(((f.model, f.attention), f) for f in shown):
        title = f"\n{shortened(model, console.width - 30)}: {shortened(attention, 20)}"
        put(console, Text(title, "bold"), table(found))
    if shown:
        put(console, Text("\nWhat the words mean", "bold"), terms(legend(shown)))


def summary(report: Report) -> Table:
    """A line a model: how much of ours, and of yours, is right; the worst of both; how much of what others make is wrong."""
    whose: list[Whose] = ["ours", "yours"] if report.measured("yours") else ["ours"]
    rights = (f"{WHOSE[one][0]}\nright" for one in whose)
    drawn = ruled("", "model", "attention", "side", numbers=(*rights, "worst", "elsewhere\nwrong"))
    for model, sign in report.signs().items():
        found = [f for f in report.findings if f.model == model]
        right = [[bool(f.right) for f in report.measured(one) if f.model == model] for one in whose]
        wrong = [not f.right for f in report.measured("elsewhere") if f.model == model]
        judged = [f.logits for f in found if f.whose != "elsewhere" and f.logits is not None]
        numbers = (*map(_share, right), number(largest(judged)) if judged else "-", _share(wrong))
        about = (join_names(f.attention for f in found), join_names(f.side for f in found))
        drawn.add_row(Text(*sign), Text(shortened(model, 38)), *map(Text, about), *numbers)
    return drawn


def _share(counted: Sequence[bool]) -> str:
    return f"{sum(counted)} of {len(counted)}" if counted else "-"


def looked_at(report: Report, *, every: bool) -> list[Finding]:
    """Return the cases of the models that need a look, or of all. In an interrupted report the last model needs one."""
    last = report.findings[-1].model if report.interrupted and report.findings else None
    signs = report.signs()
    return [f for f in report.findings if every or signs[f.model] != RIGHT or f.model == last]


def table(found: Sequence[Finding]) -> Table:
    """A line a case: its errors, and what of them is wrong, or why there are none."""
    drawn = ruled("", "handed over by", "side", numbers=MEASURES)
    drawn.add_column("", overflow="fold")
    for f in sorted(found, key=lambda f: [*WHOSE].index(f.whose)):
        cells = (getattr(f, measure) for measure in MEASURES)
        numbers = ("-" if error is None else number(error) for error in cells)
        drawn.add_row(WHOSE[f.whose][0], Text(shortened(f.column, 29)), f.side, *numbers, _verdict(f))
    return drawn


def _verdict(finding: Finding) -> Text:
    if finding.logits is None:
        return Text(_label(finding), "dim")
    sign, style = RIGHT if finding.right else WRONG
    return Text(f"{sign} {', '.join(finding.astray)}".rstrip(), style)


def legend(found: Sequence[Finding]) -> Iterator[Line]:
    """What each word of these tables means, once."""
    yield from MEASURES.items()
    for whose, words in WHOSE.items():
        if of := [f for f in found if f.whose == whose]:
            yield words
            yield from dict.fromkeys((f"  {f.column}", WAYS[f.side][f.column].meaning) for f in of if whose != "yours")
    if any(f.refused for f in found):
        yield "refused", "collate_npu refuses this, and a line above says why; neither right nor wrong"


def page(report: Report) -> str:
    """Return the whole report as a page, with what was asked for."""
    console = recorder()
    print_report(console, report, verbose=True)
    put(console, Text("\nSettings", "bold"), terms((key, str(value)) for key, value in report.settings.items()))
    return html_page(f"collate-npu audit: {headline(report)}", html_fragment(console))
