"""Report: the audit's findings as tables people can read, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collate_npu.tools.audit import OTHERS, OURS, Finding

K = TypeVar("K")

WIDTH = 110
"""Columns the tables need: a narrower terminal wraps lines, which reads better than numbers cut short."""


def passes(ours: Sequence[Finding], tolerance: float) -> bool:
    """Was anything measured, and is all of it inside the tolerance?"""
    return any(f.logits is not None for f in ours) and all(f.within(tolerance) for f in ours)


def print_findings(
    console: Console, findings: Sequence[Finding], left_out: Mapping[str, str], settings: Mapping[str, Any], tolerance: float
) -> None:
    """A table of logits and one of gradients, what was refused, raised or left out and why, and the verdict."""
    console.width = max(console.width, WIDTH)
    for title, measure in (("largest difference of a logit", "logits"), ("relative error of the gradient", "gradient")):
        if any(getattr(finding, measure) is not None for finding in findings):
            console.print(_table(findings, measure, title, tolerance))
    for (column, note), names in _grouped(((f.column, f.note), f.model) for f in findings if f.note).items():
        what = "refused" if any(f.refused for f in findings if f.note == note) else "raises"
        console.print(Text(f"{what}: {column} on {', '.join(names)}: {note}", style="dim"))
    for why, names in _grouped((why, name) for name, why in left_out.items()).items():
        console.print(Text(f"left out: {', '.join(names)}: {why}", style="dim"))
    console.print(_verdict(findings, tolerance, settings))


def _grouped(pairs: Iterable[tuple[K, str]]) -> dict[K, list[str]]:
    groups: dict[K, dict[str, None]] = {}
    for key, name in pairs:
        groups.setdefault(key, {})[name] = None
    return {key: list(names) for key, names in groups.items()}


def _table(findings: Sequence[Finding], measure: str, title: str, tolerance: float) -> Table:
    title = f"Padded batch against each sample alone: {title}"
    table = Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    for name in ("model", "attn", "side"):
        table.add_column(name, no_wrap=True)
    for column in (*OURS, *OTHERS):
        table.add_column(column, justify="right", min_width=8, header_style="green" if column in OURS else "yellow")
    last = ""
    for (name, attn, side), row in _rows(findings):
        if last and name != last:
            table.add_section()
        cells = [_cell(row.get(column), measure, tolerance) for column in (*OURS, *OTHERS)]
        table.add_row(name if name != last else "", attn, side, *cells)
        last = name
    return table


def _rows(findings: Sequence[Finding]) -> Iterator[tuple[tuple[str, str, str], dict[str, Finding]]]:
    rows: dict[tuple[str, str, str], dict[str, Finding]] = {}
    for f in findings:
        rows.setdefault((f.model, f.attn_implementation, f.side), {})[f.column] = f
    yield from rows.items()


def _cell(finding: Finding | None, measure: str, tolerance: float) -> Text:
    if finding is None:
        return Text("")
    error = getattr(finding, measure)
    if error is None:
        return Text("refused" if finding.refused else "raises" if finding.note else "-", style="dim")
    wrong = not error <= tolerance
    return Text(f"{error:.1e}" if error < 0.01 else f"{error:.2f}", style="bold red" if wrong else "green")


def _verdict(findings: Sequence[Finding], tolerance: float, settings: Mapping[str, Any]) -> Text:
    ours = [f for f in findings if f.ours and not f.refused]
    wrong = [f for f in ours if not f.within(tolerance)]
    others = [f for f in findings if not f.ours and f.logits is not None]
    astray = [f for f in others if not f.within(tolerance)]
    head = f"ours: {len(ours) - len(wrong)} of {len(ours)} cases within {tolerance:g}"
    worst = max((f.logits or 0.0 for f in ours), default=0.0)
    tail = f"elsewhere: {len(astray)} of {len(others)} wrong without an error, by up to "
    tail += f"{max((f.logits or 0.0 for f in astray), default=0.0):.2f}"
    where = f"{settings['device']}, {settings['dtype']}, torch {settings['torch']}, transformers {settings['transformers']}"
    text = Text(f"{head} (worst {worst:.1e}); {tail}.  [{where}]", style="bold")
    return text if passes(ours, tolerance) else Text("FAILED  ", style="bold red").append_text(text)
