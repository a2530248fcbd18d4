"""Verdict: a report in words: the line that comes first, what it rests on, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collate_npu.integrations.delivery.alone import TIMES
from collate_npu.tools.audit.case import DUMPED, Finding, Whose
from collate_npu.tools.audit.report import INTERRUPTED, WORDS, Report, largest
from collate_npu.tools.audit.ways import listed, shortened, way_of

Told = tuple[str, str]
"""A short label, and what is said under it."""

_NEXT = {
    0: "nothing to do; --verbose shows every case, --html FILE writes a page with pictures",
    2: "each line NOT RUN or CANNOT TELL says what to change; then run it again",
    INTERRUPTED: "run it again for the rest; --model NAME, --batches 1 or --no-gradients take less time",
}
_NEXT_OURS = "do not train with this yet; report it to collate_npu, with this text and what `collate-npu env` prints"
_NEXT_YOURS = "each line YOURS says what to change; then run it again"


def headline(report: Report) -> str:
    """One sentence after the word."""
    return f"{WORDS[report.exit_code]}: {_SENTENCES[report.exit_code](report)}"


def _passed(report: Report) -> str:
    yours = len(report.measured("yours"))
    also = f" and all {yours} of {_yours(report)}" if yours else ""
    return f"all {len(report.measured('ours'))} cases of ours{also} give the numbers of each sample alone."


def _failed(report: Report) -> str:
    wrong = [f"{_wrong(report, whose)} of {name}" for whose, name in _judged(report) if report.astray(whose)]
    one = len(report.astray("ours", "yours")) == 1
    right = [f" All {len(report.measured(w))} of {name} are right." for w, name in _judged(report) if _all_right(report, w)]
    return f"{' and '.join(wrong)} {'is' if one else 'are'} wrong.{''.join(right)}"


def _unproved(report: Report) -> str:
    measured = report.measured("ours", "yours")
    if not any(f.logits is not None for f in measured):
        return "nothing of ours could be measured."
    ran = report.not_run or report.lacking
    why = "not everything named could run" if ran else "a wrong mask would not have been seen everywhere"
    return f"{len(measured)} of {len(measured)} cases are right, but {why}."


def _stopped(report: Report) -> str:
    measured, wrong = report.measured("ours", "yours"), report.astray("ours", "yours")
    if not measured:
        return "nothing was measured."
    return f"{len(measured) - len(wrong)} of {len(measured)} cases measured until then are right."


_SENTENCES = {0: _passed, 1: _failed, 2: _unproved, INTERRUPTED: _stopped}


def _judged(report: Report) -> tuple[tuple[Whose, str], ...]:
    return ("ours", "ours"), ("yours", _yours(report))


def _yours(report: Report) -> str:
    """A collator, or a batch that was dumped."""
    dumped = all(f.column == DUMPED for f in report.findings if f.whose == "yours")
    return "YOUR batch" if dumped else "YOUR collator"


def _wrong(report: Report, whose: Whose) -> str:
    wrong, of = len(report.astray(whose)), len(report.measured(whose))
    return f"{wrong} of {of} cases"


def _all_right(report: Report, whose: Whose) -> bool:
    return bool(report.measured(whose)) and not report.astray(whose)


def facts(report: Report) -> Iterator[Told]:
    """What the verdict rests on, and what to do next."""
    for whose, name in _judged(report):
        if wrong := report.astray(whose):
            ways, models = listed(way_of(f).title for f in wrong), listed((shortened(f.model, 48) for f in wrong), 4)
            yield "wrong", f"{name} ({ways}) on {models}: {_off(wrong)}"
    others, astray = report.measured("elsewhere"), report.astray("elsewhere")
    if others:
        by = f", by up to {_size(astray)} in a logit" if astray else ""
        yield "elsewhere", f"{len(astray)} of {len(others)} are wrong without an error{by}"
    settings = report.settings
    where = f"on {settings['device']} in {settings['dtype']}"
    yield "measured", f"{where}, torch {settings['torch']}, transformers {settings['transformers']}"
    limit = f"{TIMES} times the rounding noise measured on each model"
    yield "passes", f"up to {limit if report.tolerance is None else f'{report.tolerance:g} (--tolerance)'}"
    yield "next", "; ".join(_next(report))


def _off(wrong: Sequence[Finding]) -> str:
    """By how much: a logit as it is, loss and gradient in parts of themselves."""
    if not any(f.logits is not None for f in wrong):
        return "it raises"
    loss, gradient = (largest(getattr(f, measure) for f in wrong) for measure in ("loss", "gradient"))
    and_gradient = f", the gradient by {number(gradient)}" if gradient or gradient != gradient else ""
    return f"a logit is off by up to {_size(wrong)}, the loss by {number(loss)}{and_gradient}"


def _size(found: Sequence[Finding]) -> str:
    return number(largest(f.logits for f in found))


def _next(report: Report) -> Iterator[str]:
    if report.exit_code == 1:
        yield from [_NEXT_OURS] if report.astray("ours") else []
        yield from [_NEXT_YOURS] if report.astray("yours") else []
    else:
        yield _NEXT[report.exit_code]


def told(report: Report, place: str, before: int) -> str:
    """A model that is done, in half a line: what of `findings` is new."""
    counted = {id(f) for f in report.measured("ours", "yours")}
    new = [f for f in report.findings[before:] if id(f) in counted]
    wrong = [f for f in new if not f.within(report.tolerance)]
    missed = [why for name, why in report.not_run.items() if name.startswith(place) or f" on {place}" in name]
    parts = [f"{len(wrong)} of {len(new)} WRONG" if wrong else f"{len(new)} of {len(new)} right"] if new else []
    parts += [f"worst {number(largest(f.logits for f in new))}"] if any(f.logits is not None for f in new) else []
    parts += [f"NOT RUN, {missed[0]}"] if missed else []
    return ", ".join(parts) or "nothing to measure"


def number(error: float) -> str:
    """`6.2e-06`, `4.04`, `nan`."""
    return f"{error:.1e}" if error < 0.01 or error >= 1000 else f"{error:.2f}"
