"""The figure of README: how many times faster, peer by peer, on a log axis; the training step first."""

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
    "a dense 4D mask, by arithmetic": "plain torch",
}
APART = (0, -0.17, 0.17, -0.02)
"""Where dots stand up and down their line, the largest first, so that equal ones are seen."""
Lines = Sequence[tuple[str, str, str]]
"""Label, group and case."""


def _lines(group: str, *cases: tuple[str, str]) -> Lines:
    return [(label, group, case) for label, case in cases]


def _wide(size: str) -> str:
    return size.replace("x", " × ")


STEP = _lines(
    "step",
    *((f"{name} {_wide(size)}", f"{family} {size}, cpu")
      for family, name in (("qwen3_next", "Qwen3-Next"), ("llama", "Llama"), ("mistral", "Mistral"))
      for size in ("8x1024", "4x4096")),
)  # fmt: skip
COLLATE = _lines(
    "collate",
    *((f"{kind} {_wide(size)}", f"{kind} {size}") for kind in ("lists", "numpy", "torch") for size in ("4x512", "32x4096")),
)
LOADER = _lines(
    "dataloader", *((f"lists, {workers} workers", f"lists 8x4096, {workers} workers, right") for workers in (0, 2))
)
MASKS = (
    *_lines("dense", ("2D to 4D  4 × 4096", "4x4096, right, from lengths")),
    *_lines("derive", ("4D to 2D  4 × 4096", "4x4096, declared, right")),
    *_lines("parallel", ("split  8 × 131072", "zigzag [8, 131072], cp 8")),
)
GROUPS = {
    "A training step, loader to gradient: tiny models on a CPU, adapt(model)": STEP,
    "Collators": COLLATE,
    "DataLoader, 8 × 4096 a batch": LOADER,
    "Masks, context parallelism": MASKS,
}


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel, PNG, 1600 pixels wide. Cases that were not run leave their line out."""
    plt.rcParams.update({"font.size": 7.5, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK})
    groups = {title: [(label, _found(result["rows"], group, case)) for label, group, case in lines]
              for title, lines in GROUPS.items()}  # fmt: skip
    shown = {title: [each for each in lines if each[1]] for title, lines in groups.items()}
    places = sum(len(lines) + 1 for lines in shown.values() if lines)
    high = 0.2 * places + 0.9
    figure = plt.figure(figsize=(8, high), dpi=200, facecolor="white")
    axes = figure.add_axes((0.17, 0.3 / high, 0.79, 1 - 1.0 / high))
    at = 0
    for title, lines in shown.items():
        at = _group(axes, title, lines, at) if lines else at
    _finish(axes, [label for lines in shown.values() if lines for label in ("", *(label for label, _ in lines))])
    _head(figure, result, high)
    figure.savefig(path)
    plt.close(figure)


def _group(axes: Axes, title: str, lines: Sequence[tuple[str, list[dict[str, Any]]]], at: int) -> int:
    """A title and its lines, from this place downwards; the next place."""
    axes.text(
        0.005,
        at,
        title,
        transform=axes.get_yaxis_transform(),
        fontweight="bold",
        fontsize=8,
        va="center",
        zorder=5,
        bbox={"color": "white", "pad": 1},
    )
    for y, (_, found) in enumerate(lines, at + 1):
        if (y - at) % 2:
            axes.axhspan(y - 0.5, y + 0.5, color=BAND, zorder=0)
        ratios = [row["ratio"] for row in found]
        axes.plot([min(1, *ratios), max(1, *ratios)], [y, y], color="#cdd2d8", lw=1.2, zorder=1, solid_capstyle="round")
        for place, row in enumerate(sorted(found, key=lambda row: -row["ratio"])):
            _dot(axes, y + (APART[place % 4] if len(found) > 1 else 0), y, row)
        end = max(1, *(max(row["quartiles"][1], row["target"] or 0) for row in found))
        axes.annotate(_times(max(ratios)), (end, y), (6, 0), textcoords="offset points", va="center", fontsize=6.8)
    return at + len(lines) + 1


def _finish(axes: Axes, labels: Sequence[str]) -> None:
    axes.axvline(1, color=INK, lw=0.9, zorder=2)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.7), high * 1.6)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.grid(axis="x", color="#e3e6ea", lw=0.6, zorder=0)
    axes.tick_params(length=0, labelsize=7.2, colors=INK)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    for side in axes.spines.values():
        side.set_visible(False)


def _dot(axes: Axes, at: float, y: float, row: dict[str, Any]) -> None:
    """The ratio, its quartiles, and the target as an upright stroke."""
    color = PEERS[NAMES[row["name"]]]
    axes.plot(row["quartiles"], [at, at], color=color, lw=2.2, alpha=0.45, zorder=3, solid_capstyle="butt")
    axes.plot(row["ratio"], at, "o", ms=5.4, color=color, mec="white", mew=0.7, zorder=4)
    if row["target"] is not None:
        axes.plot([row["target"]] * 2, [y - 0.36, y + 0.36], color=color, lw=1.3, zorder=3)


def _found(rows: Sequence[dict[str, Any]], group: str, case: str) -> list[dict[str, Any]]:
    of_case = [row for row in rows if (row["group"], row["case"], row["against"]) == (group, case, "peer")]
    return [row for row in of_case if row["name"] in NAMES]


def _head(figure: Any, result: dict[str, Any], high: float) -> None:
    found = result["versions"]
    names = ("transformers", "trl", "ms-swift", "twinkle-kit", "verl", "megatron-core", "torch")
    peers = "  ".join(f"{name} {found[name].partition('+')[0]}" for name in names if found[name] != "absent")
    figure.text(
        0.02, 1 - 0.22 / high, "collate_npu: times faster than each peer, on one machine", fontsize=11.5, fontweight="bold"
    )
    threads = "one thread" if result["torch threads"] == 1 else f"{result['torch threads']} threads"
    figure.text(0.02, 1 - 0.38 / high, f"{peers}  ·  {result['machine']['cpu']}, {threads}", fontsize=6.6, color=FAINT)
    handles = [Line2D([], [], marker="o", ls="", color=color, ms=5.4, label=name) for name, color in PEERS.items()]
    handles.append(Line2D([], [], marker="|", ls="", color=INK, ms=8, mew=1.3, label="target"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.012, 1 - 0.43 / high), ncols=8, frameon=False, fontsize=7.2,
        handletextpad=0.2, columnspacing=1.3,
    )  # fmt: skip


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"
