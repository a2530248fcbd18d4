"""The figure of README: how many times faster, peer by peer, on log axes; below, how far from the floor, and growth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

INK, FAINT, BAND = "#22272e", "#8a929c", "#f5f6f8"
PEERS = {
    "transformers": "#d9731a",
    "TRL": "#0b6fb8",
    "ms-swift": "#128a63",
    "twinkle": "#b04a9a",
    "verl": "#4cb2e0",
    "megatron-core": "#6a4bbc",
    "plain torch": "#7d858f",
}
"""Colours that differ in brightness too."""
NAMES = {
    "transformers Seq2Seq": "transformers",
    "transformers WithFlattening": "transformers",
    "transformers, sdpa": "transformers",
    "TRL": "TRL",
    "TRL, padding free": "TRL",
    "transformers Seq2Seq, of its rows": "transformers",
    "TRL, of its rows": "TRL",
    "ms-swift template": "ms-swift",
    "twinkle": "twinkle",
    "verl": "verl",
    "megatron-core": "megatron-core",
    "template arithmetic": "plain torch",
    "(~m).sum((1, 2)) > 0": "plain torch",
}
APART = (0, -0.17, 0.17, -0.02)
"""Where dots stand up and down their line, the largest first, so that equal ones are seen."""
Lines = Sequence[tuple[str, str, str]]
"""Label, group and case."""


def _lines(group: str, *cases: tuple[str, str]) -> Lines:
    return [(label, group, case) for label, case in cases]


def _wide(size: str) -> str:
    return size.replace("x", " × ")


COLLATE = _lines(
    "collate",
    *((f"{kind} {_wide(size)}", f"{kind} {size}")
      for kind in ("lists", "numpy", "torch") for size in ("4x512", "32x4096", "64x32768")),
    ("arrow 32 × 4096", "arrow 32x4096"),
    ("flat row 32 × 4096", "lists 32x4096, flat row"),
)  # fmt: skip
LOADER = _lines(
    "dataloader",
    *((f"{kind}, {workers} workers", f"{kind} 8x4096, {workers} workers, right")
      for kind in ("lists", "numpy", "torch", "arrow") for workers in (0, 2)),
)  # fmt: skip
SQUARES = ("4x512", "8x2048", "4x4096")
MASKS = (
    *_lines("dense", *((f"2D → 4D  {_wide(size)}", f"{size}, right, from lengths") for size in SQUARES)),
    *_lines("derive", *((f"4D → 2D  {_wide(size)}", f"{size}, declared, right") for size in SQUARES)),
    *_lines("parallel", ("split  8 × 131072", "zigzag [8, 131072], cp 8")),
)
FLOORS = (
    *_lines("collate", ("lists 32 × 4096\nstruct.pack_into", "lists 32x4096")),
    *_lines("collate", ("numpy 64 × 32768\nnp.copyto", "numpy 64x32768")),
    *_lines("dense", ("4D mask 4 × 4096\nnp.full", "4x4096, right, from lengths")),
    *_lines("derive", ("4D → 2D 4 × 4096\none read", "4x4096, declared, right")),
    *_lines("parallel", ("split 8 × 131072\na copy", "zigzag [8, 131072], cp 8")),
    *_lines("neutral", ("left, 134 MB of mask\nnp.full", "8x4096, left, 4D")),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """PNG, 1600 pixels wide. Cases that were not run leave their line out."""
    plt.rcParams.update({"font.size": 7.5, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK})
    figure = plt.figure(figsize=(8, 7.6), dpi=200, facecolor="white")
    rows = result["rows"]
    left, right, width = 0.148, 0.655, 0.325
    _panel(figure.add_axes((left, 0.395, width, 0.475)), "Collators", COLLATE, rows, "peer")
    _panel(figure.add_axes((right, 0.665, width, 0.205)), "DataLoader, 8 × 4096 a batch", LOADER, rows, "peer")
    _panel(figure.add_axes((right, 0.395, width, 0.205)), "Masks, context parallelism", MASKS, rows, "peer")
    _panel(figure.add_axes((left, 0.05, width, 0.27)), "Our time over the floor's", FLOORS, rows, "floor")
    _growth(figure.add_axes((right, 0.05, width, 0.27)), rows)
    _head(figure, result)
    figure.savefig(path)
    plt.close(figure)


def _growth(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Nanoseconds of a token, by the tokens of a batch."""
    of_growth = [row for row in rows if row["group"] == "growth"]
    for kind, color in zip(dict.fromkeys(row["case"] for row in of_growth), (PEERS["TRL"], PEERS["ms-swift"])):
        lines = [row for row in of_growth if row["case"] == kind]
        tokens = [int(row["name"].partition(" ")[0].replace(",", "")) for row in lines]
        times = [1e9 * row["theirs"] for row in lines]
        label = kind.partition(":")[0]
        axes.plot(tokens, times, "o-", color=color, lw=1.4, ms=4.6, mec="white", mew=0.7, label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    if of_growth:
        axes.legend(frameon=False, fontsize=7.2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} ns")
    axes.grid(color="#e3e6ea", lw=0.6)
    _plain(axes, "Time of a token, by tokens of a batch")


def _panel(axes: Axes, title: str, lines: Lines, rows: Sequence[dict[str, Any]], against: str) -> None:
    shown = [(label, found) for label, group, case in lines if (found := _found(rows, group, case, against))]
    if not shown:
        axes.set_axis_off()
        return
    for y, (_, found) in enumerate(shown):
        if y % 2 == 0:
            axes.axhspan(y - 0.5, y + 0.5, color=BAND, zorder=0)
        ratios = [row["ratio"] for row in found]
        axes.plot([min(1, *ratios), max(1, *ratios)], [y, y], color="#cdd2d8", lw=1.2, zorder=1, solid_capstyle="round")
        for place, row in enumerate(sorted(found, key=lambda row: -row["ratio"])):
            _dot(axes, y + (APART[place % 4] if len(found) > 1 else 0), y, row)
        end = max(1, *(max(row["quartiles"][1], row["target"] or 0) for row in found))
        best = max(ratios)
        axes.annotate(_times(best), (end, y), (6, 0), textcoords="offset points", va="center", fontsize=6.8)
    axes.axvline(1, color=INK, lw=0.9, zorder=2)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.7), high * 2.2)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks(range(len(shown)), [label for label, _ in shown])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.grid(axis="x", color="#e3e6ea", lw=0.6, zorder=0)
    _plain(axes, title)


def _plain(axes: Axes, title: str) -> None:
    axes.tick_params(length=0, labelsize=7.2, colors=INK)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=8.6, fontweight="bold", pad=6)
    axes.minorticks_off()
    for side in axes.spines.values():
        side.set_visible(False)


def _dot(axes: Axes, at: float, y: float, row: dict[str, Any]) -> None:
    """The ratio, its quartiles, and the target as an upright stroke."""
    color = PEERS[NAMES[row["name"]]] if row["against"] == "peer" else INK
    axes.plot(row["quartiles"], [at, at], color=color, lw=2.2, alpha=0.45, zorder=3, solid_capstyle="butt")
    axes.plot(row["ratio"], at, "o", ms=5.4, color=color, mec="white", mew=0.7, zorder=4)
    if row["target"] is not None:
        axes.plot([row["target"]] * 2, [y - 0.36, y + 0.36], color=color, lw=1.3, zorder=3)


def _found(rows: Sequence[dict[str, Any]], group: str, case: str, against: str) -> list[dict[str, Any]]:
    of_case = [row for row in rows if (row["group"], row["case"], row["against"]) == (group, case, against)]
    if against == "peer":
        return [row for row in of_case if row["name"] in NAMES]
    return of_case[:1]


def _head(figure: Any, result: dict[str, Any]) -> None:
    found = result["versions"]
    names = ("transformers", "trl", "ms-swift", "twinkle-kit", "verl", "megatron-core", "torch")
    peers = "  ".join(f"{name} {found[name].partition('+')[0]}" for name in names if found[name] != "absent")
    figure.text(0.02, 0.965, "collate_npu: times faster than each peer, in one run", fontsize=11.5, fontweight="bold")
    threads = "one thread" if result["torch threads"] == 1 else f"{result['torch threads']} threads"
    figure.text(0.02, 0.944, f"{peers}  ·  {result['machine']['cpu']}, {threads}", fontsize=6.6, color=FAINT)
    handles = [Line2D([], [], marker="o", ls="", color=color, ms=5.4, label=name) for name, color in PEERS.items()]
    handles.append(Line2D([], [], marker="|", ls="", color=INK, ms=8, mew=1.3, label="target"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.012, 0.938), ncols=8, frameon=False, fontsize=7.2,
        handletextpad=0.2, columnspacing=1.3,
    )  # fmt: skip


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"
