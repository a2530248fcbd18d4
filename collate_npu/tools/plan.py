"""Plan: what a `BalancedBatchSampler` makes of lengths, beside batches as they come and sorted ones.

A step lasts as long as its slowest rank, and a rank computes the tokens of its batch: rows x width if rows are padded. So
the cost of an epoch is the sum, over its steps, of the largest batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collate_npu.arrays import Array
from collate_npu.collate.batch_sampler import BalancedBatchSampler
from collate_npu.errors import CollateError, explain
from collate_npu.tools.files import encoded, load_tokenizer, read_rows
from collate_npu.tools.user_code import check_file, refused

if TYPE_CHECKING:
    from rich.table import Table

_SORTED_TOGETHER = 50
"""Batches that transformers' LengthGroupedSampler sorts together (trainer_pt_utils.py)."""
_LINES = "Write one length a line (.txt), a list (.json) or an array (.npy)."


def read_lengths(lengths: Path | None, data: Path | None, tokenizer: Path | None = None) -> Any:
    """Return the lengths that a file holds, or those of the rows of a file of samples; nothing in it is run."""
    if (lengths is None) == (data is None):
        got = "both" if data else "neither"
        raise CollateError(explain("--lengths, --data", got, "A plan is of the lengths of one file.", "Name one of them."))
    if data is not None:
        encoder = None if tokenizer is None else load_tokenizer(tokenizer)
        return [len(encoded(row, encoder, 1 << 24)["input_ids"]) for row in read_rows(data)]
    path = Path(lengths or "")
    check_file(path, [".txt", ".json", ".npy"], _LINES)
    with refused(str(path), "", "A file of lengths holds whole numbers.", _LINES):
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else [int(line) for line in text.split()]


def compare_plans(sampler: BalancedBatchSampler) -> dict[str, dict[str, float]]:
    """Return, for three ways to batch: padding, a share of all tokens; batches of a rank; level, the largest batch of a step
    beside the mean of its ranks, in the worst step; cost of an epoch, beside batches as they come."""
    R, costs = sampler.num_replicas, sampler.plan[2]
    size = max(1, round(len(sampler.lengths) / len(costs)))
    drawn = np.random.default_rng(sampler.seed).permutation(sampler.lengths)
    together = size * R * _SORTED_TOGETHER
    grouped = np.concatenate([-np.sort(-drawn[at : at + together]) for at in range(0, len(drawn), together)])
    ways = {"as they come": _padded(drawn, size, R), "sorted": _padded(grouped, size, R), "planned": costs.reshape(-1, R)}
    real, worst = int(sampler.lengths.sum()), ways["as they come"].max(axis=1).sum()
    return {
        name: {
            "padding": max(0.0, 1 - real / float(cells.sum())),
            "batches": len(cells),
            "level": float((cells.max(axis=1) / cells.mean(axis=1)).max()),
            "cost": float(cells.max(axis=1).sum() / worst),
        }
        for name, cells in ways.items()
    }


def _padded(lengths: Array, size: int, R: int) -> Array:
    """Return the tokens [steps, R] of padded batches of `size` samples; torch's DistributedSampler fills the last step."""
    missing = -len(lengths) % (size * R)
    rows = np.concatenate([lengths, np.resize(lengths, missing)]).reshape(-1, R, size)
    cells: Array = rows.max(axis=2).astype(np.int64) * size
    return cells


def plan_table(found: dict[str, dict[str, float]]) -> Table:
    """Return the table, with a bar for what an epoch costs."""
    from collate_npu.tools.terminal import ruled

    table = ruled("way", numbers=("padding", "batches", "level", "cost"))
    table.add_column("", no_wrap=True)
    for name, row in found.items():
        numbers = (f"{row['padding']:.1%}", f"{row['batches']:,}", f"{row['level']:.2f}", f"{row['cost']:.2f}")
        table.add_row(name, *numbers, "█" * max(1, round(30 * row["cost"])))
    return table
