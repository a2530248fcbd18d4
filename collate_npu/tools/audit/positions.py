"""Positions: the error at each token of each sample, drawn by matplotlib as one SVG that stands in a page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from collate_npu.tools.audit.case import Finding
from collate_npu.tools.audit.report import Report
from collate_npu.tools.audit.tables import WHOSE
from collate_npu.tools.audit.verdict import number
from collate_npu.tools.audit.ways import kind_of, shortened, way_of

_COLOURS = {"ours": "#1f6f50", "yours": "#2b5fa8", "elsewhere": "#b4451f"}
_LEAST = 1e-8
"""Where an error of zero is drawn on an axis of powers of ten."""


def positions_svg(report: Report) -> str:
    """A panel for the worst case of ours, yours and elsewhere: a line a sample, bold the one with the largest error.

    Nothing where no case ran. Loads matplotlib; text stays text, so the page's own font is used.
    """
    worst = [found for whose in WHOSE if (found := report.worst(whose)) and found.by_position]
    if not worst:
        return ""
    matplotlib: Any = import_module("matplotlib")
    high = 2.2 * len(worst) + 0.2
    figure = import_module("matplotlib.figure").Figure(figsize=(8.6, high))
    panels = figure.subplots(len(worst), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.09, right=0.99, top=1 - 0.3 / high, bottom=0.5 / high, hspace=0.32)
    for panel, finding in zip(panels, worst):
        _draw(panel, finding, _noise(report, finding))
    panels[-1].set_xlabel("token of the sample, from its first real one", fontsize=9)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "collate_npu", "font.family": "sans-serif"}):
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(drawn.getvalue())


def title_of(finding: Finding) -> str:
    """Which case a panel shows."""
    where = f"{shortened(finding.model, 40)}, {finding.attn_implementation}, {finding.side}"
    return f"{WHOSE[finding.whose][0]}, the worst: {way_of(finding).title} on {where}"


def _draw(panel: Any, finding: Finding, noise: float | None) -> None:
    colour = _COLOURS[finding.whose]
    sizes = [max(row, key=_size, default=0.0) for row in finding.by_position]
    bold = max(range(len(sizes)), key=lambda n: _size(sizes[n]))
    for n, row in enumerate(finding.by_position):
        heavy = {"linewidth": 1.6, "zorder": 3} if n == bold else {"linewidth": 0.7, "alpha": 0.45}
        panel.plot(range(len(row)), [max(x, _LEAST) for x in row], color=colour, **heavy)
        lost = [at for at, x in enumerate(row) if not math.isfinite(x)]
        panel.plot(lost, [1.0] * len(lost), "x", color=colour, clip_on=False, zorder=4)
    if noise is not None and noise > 0:
        panel.axhline(noise, color="#667085", linewidth=0.8, linestyle=(0, (4, 3)))
        panel.annotate(
            f"rounding alone: up to {number(noise)}", (1, noise), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", fontsize=7.5, color="#475467", zorder=5,
        )  # fmt: skip
    panel.set_yscale("log")
    panel.set_title(f"{title_of(finding)} (bold: sample {bold + 1}, {number(sizes[bold])})", fontsize=9, loc="left")
    panel.set_ylabel("difference of a logit", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(axis="y", linewidth=0.4, color="#d0d5dd")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _size(x: float) -> float:
    return x if math.isfinite(x) else math.inf


def _noise(report: Report, finding: Finding) -> float | None:
    """The largest difference of a logit between two right results of that model."""
    padded = kind_of(finding) == "padded"
    place = f"{finding.model} ({finding.attn_implementation})" + ("" if padded else f" {finding.side}")
    return report.yardsticks[place].noise.largest if place in report.yardsticks else None


def _inline(svg: str) -> str:
    """Without what an element of a page does not need: its prologue, names of name spaces, metadata and size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(xmlns(:\w+)?|version|width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="error at each token">{rest}'


def missing() -> Sequence[str]:
    """Packages that this needs and that are not here."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        return [error.name or "matplotlib"]
    return []
