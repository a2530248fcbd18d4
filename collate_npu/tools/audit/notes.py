"""Notes: what an audit refused, what raised, what did not run and what proves nothing, with the reason of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from collate_npu.testing.yardstick import Yardstick
from collate_npu.tools.audit.case import Finding
from collate_npu.tools.audit.report import Report
from collate_npu.tools.audit.verdict import Told
from collate_npu.tools.audit.ways import KINDS, kind_of, listed, shortened, way_of

K = TypeVar("K")
V = TypeVar("V")

_MOST = 4
"""Names in a brief line."""


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
        models = listed(_short(name.rpartition(" (")[0]) for name in report.left_out)
        yield "left out", f"{models}: known not to be testable (--verbose says why)"


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
    if finding.whose == "yours" and finding.logits is not None:
        return "yours is wrong"
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
