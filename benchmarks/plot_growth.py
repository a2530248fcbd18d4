"""The figure of the limits: time and peak memory of every public function, over four decades of rows, width and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.plot import FAINT, INK, plt

SHOWN = {
    "PaddingCollator": "#d9731a",
    "BatchAdapter": "#0b6fb8",
    "Segments": "#128a63",
    "dense": "#b04a9a",
    "derive_segments": "#6a4bbc",
}
"""Functions with a colour; the others are grey."""
AXES = ("rows", "width", "tokens")
SIZES = {"time": (1, "milliseconds", 1e3), "memory": (2, "MiB at the peak", 1 / 2**20)}


def draw(result: dict[str, Any], path: Path) -> None:
    """Two rows of panels, PNG: a line a function; dotted is linear, and by width also quadratic."""
    plt.rcParams.update({"font.size": 7.5, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK})
    figure, panels = plt.subplots(2, 3, figsize=(8, 5.2), dpi=110, layout="constrained")
    for line, (title, (at, unit, scale)) in zip(panels, SIZES.items()):
        for axes, axis in zip(line, AXES):
            for name, points in _points(result["rows"], axis).items():
                _line(axes, name, [(each[0], each[at] * scale) for each in points])
            _finish(axes, axis, f"{title}, {unit}" if axis == "rows" else "")
    handles, labels = panels[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(SHOWN), frameon=False, fontsize=6.8)
    figure.savefig(path)
    plt.close(figure)


def _points(rows: list[dict[str, Any]], axis: str) -> dict[str, list[list[float]]]:
    """Of each function: size, seconds and bytes."""
    found = [row for row in rows if row["group"] == "growth" and row["case"].endswith(f": {axis}")]
    return {row["case"].partition(":")[0]: row["facts"][0]["points"] for row in found}


def _line(axes: Axes, name: str, points: list[tuple[float, float]]) -> None:
    color, label = SHOWN.get(name, "#cdd2d8"), name if name in SHOWN else None
    axes.plot(*zip(*points), color=color, label=label, lw=1.4 if label else 0.7, zorder=3 if label else 2)


def _finish(axes: Axes, axis: str, unit: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=unit)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for power in (1, 2) if axis == "width" else (1,):
        top = high / 2
        axes.plot([left, right], [top * (left / right) ** power, top], color=FAINT, lw=0.8, ls=":", zorder=1)
    axes.set(xlim=(left, right), ylim=(low, high))
    axes.tick_params(length=0, colors=INK, which="both")
    axes.grid(color="#eceef1", lw=0.5, zorder=0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
