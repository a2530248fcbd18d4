"""Verdict: a report in words: the line that comes first, what it rests on, what to do next, and what did not run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from collate_npu.integrations.delivery.alone import TIMES
from collate_npu.tools.audit.case import Finding, Whose
from collate_npu.tools.audit.report import INTERRUPTED, WORDS, Report, largest
from collate_npu.tools.audit.ways import KINDS, kind_of, listed, shortened, way_of
from collate_npu.tools.audit.yardstick import Yardstick

K = TypeVar("K")
V = TypeVar("V")

Told = tuple[str, str]
"""A short label, and what is said under it."""

_NEXT = {
    0: "nothing to do; --verbose shows every case, --html FILE writes a page with pictures",
    2: "each line NOT RUN or CANNOT TELL says what to change; then run it again",
    INTERRUPTED: "run it again for the rest; --model NAME, --batches 1 or --no-gradients take less time",
}
_NEXT_OURS = "do not train with this yet; report it to collate_npu, with this text and what `collate-npu env` prints"
_NEXT_YOURS = 'wrap your collator: wrap_collator(yours, consumer="transformers", model=model); audit that again'
_MOST = 4
"""Names in a brief line."""


def headline(report: Report) -> str:
    """One sentence after the word."""
    return f"{WORDS[report.exit_code]}: {_SENTENCES[report.exit_code](report)}"


def _passed(report: Report) -> str:
    yours = len(report.measured("yours"))
    also = f" and all {yours} of YOUR collator" if yours else ""
    return f"all {len(report.measured('ours'))} cases of ours{also} give the numbers of each sample alone."


def _failed(report: Report) -> str:
    wrong = [f"{_wrong(report, whose)} of {name}" for whose, name in _JUDGED if report.astray(whose)]
    one = len(report.astray("ours", "yours")) == 1
    right = [f" All {len(report.measured(w))} of {name} are right." for w, name in _JUDGED if _all_right(report, w)]
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
_JUDGED: tuple[tuple[Whose, str], ...] = (("ours", "ours"), ("yours", "YOUR collator"))


def _wrong(report: Report, whose: Whose) -> str:
    wrong, of = len(report.astray(whose)), len(report.measured(whose))
    return f"{wrong} of {of} cases"


def _all_right(report: Report, whose: Whose) -> bool:
    return bool(report.measured(whose)) and not report.astray(whose)


def facts(report: Report) -> Iterator[Told]:
    """What the verdict rests on, and what to do next."""
    for whose, name in _JUDGED:
        if wrong := report.astray(whose):
            ways, models = listed(way_of(f).title for f in wrong), listed((_short(f.model) for f in wrong), _MOST)
            ran = any(f.logits is not None for f in wrong)
            yield "wrong", f"{name} ({ways}) on {models}: {f'a logit is off by up to {_size(wrong)}' if ran else 'it raises'}"
    others, astray = report.measured("elsewhere"), report.astray("elsewhere")
    if others:
        by = f"; a logit is off by up to {_size(astray)}" if astray else ""
        yield "elsewhere", f"{len(astray)} of {len(others)} cases are wrong and raise no error{by}"
    settings = report.settings
    where = f"on {settings['device']} in {settings['dtype']}"
    yield "measured", f"{where}, torch {settings['torch']}, transformers {settings['transformers']}"
    limit = f"{TIMES} times the rounding noise measured on each model"
    yield "passes", f"what differs by at most {limit if report.tolerance is None else f'{report.tolerance:g} (--tolerance)'}"
    yield "next", "; ".join(_next(report))


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
    missed = [why for name, why in report.not_run.items() if name.startswith(place)]
    parts = [f"{len(wrong)} of {len(new)} WRONG" if wrong else f"{len(new)} of {len(new)} right"] if new else []
    parts += [f"worst {number(largest(f.logits for f in new))}"] if any(f.logits is not None for f in new) else []
    parts += [f"NOT RUN, {missed[0]}"] if missed else []
    return ", ".join(parts) or "nothing to measure"


def number(error: float) -> str:
    """`6.2e-06`, `4.04`, `nan`."""
    return f"{error:.1e}" if error < 0.01 or error >= 1000 else f"{error:.2f}"


def notes(report: Report, *, verbose: bool) -> Iterator[Told]:
    """What was refused, raised, left out or not proved, and why: a line a reason, in full where `verbose`."""
    yield from _said(report, verbose)
    for why, names in grouped((why, name) for name, why in report.not_run.items()):
        yield "NOT RUN", f"{listed(map(_short, names))}: {why}"
    for name in report.blind:
        yield "CANNOT TELL", f"{_short(name)}: {_why_blind(report.yardsticks[name], report.tolerance)}"
    if verbose:
        for why, names in grouped((why, name) for name, why in report.left_out.items()):
            yield "left out", f"{listed(map(_short, names))}: {why}"
        for packages, names in grouped((_packages(packages), model) for model, packages in report.kernels.items()):
            yield "kernels", f"recurrent layers of {listed(map(_short, names))} run on {packages}"
    elif report.left_out:
        names = (name.rpartition(" (")[0] for name in report.left_out)
        yield "left out", f"{listed(map(_short, names))}: known not to be testable (--verbose says why)"


def _said(report: Report, verbose: bool) -> Iterator[Told]:
    noted = [f for f in report.findings if f.note]
    for (label, why), found in grouped(((_label(f), _why(f, verbose)), f) for f in noted):
        least = 0 if verbose or label == "NOT RUN" else _MOST
        where = listed(KINDS[kind_of(f)] for f in found)
        models = listed((_short(f.model) for f in found), least)
        yield label, f"{models}, {where} ({listed(way_of(f).title for f in found)}): {why}"


def _label(finding: Finding) -> str:
    if finding.no_kernel:
        return "refused" if finding.whose == "elsewhere" else "NOT RUN"
    return "refused" if finding.refused else "raises" if finding.logits is None else "not finite"


def _why(finding: Finding, verbose: bool) -> str:
    """Its note, without what differs between models, so that one line says it of several."""
    note = re.sub(rf"\b{re.escape(finding.model)}(_text)?\b", "...", finding.note)
    if verbose:
        return note
    if finding.no_kernel:  # why: which packages (what to do)
        return re.sub(r": .*(?= \()", "", note)
    return re.sub(r"^[\w\[\]]+: got .*?\. ", "", note).partition(". ")[0] if finding.refused else note


def _packages(packages: Mapping[str, str]) -> str:
    """Where the functions of recurrent layers come from."""
    if set(packages.values()) == {"torch"}:
        return "torch alone"
    return ", ".join(f"{package} ({function})" for function, package in packages.items())


def _short(name: str) -> str:
    return shortened(name, 48)


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


def grouped(pairs: Iterator[tuple[K, V]]) -> list[tuple[K, list[V]]]:
    """Values by their keys, both in the order they came in, each once."""
    groups: dict[K, dict[V, None]] = {}
    for key, value in pairs:
        groups.setdefault(key, {})[value] = None
    return [(key, list(values)) for key, values in groups.items()]
