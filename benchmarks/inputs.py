"""The same inputs for everyone: ragged rows, seeded, of own integers (no list shares its numbers with another)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

Kind = Literal["lists", "numpy", "torch"]
VOCABULARY = 150_000
IGNORED = -100


def lengths_of(rows: int, width: int) -> list[int]:
    """Between half and full width, the longest of full width."""
    drawn = np.random.default_rng(rows * width).integers(width // 2, width + 1, rows).tolist()
    drawn[rows // 2] = width
    return drawn


@lru_cache(2)
def rows_of(kind: Kind, rows: int, width: int) -> list[dict[str, Any]]:
    """`input_ids` and `labels`, a quarter of them ignored as a prompt is. Do not change them: ask for `copies`."""
    draw = np.random.default_rng(1)
    made = []
    for length in lengths_of(rows, width):
        ids = draw.integers(300, VOCABULARY, length)
        labels = np.where(np.arange(length) < length // 4, IGNORED, ids)
        made.append({"input_ids": _as(kind, ids), "labels": _as(kind, labels)})
    return made


def copies(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Dicts of their own with the same values, as a dataset hands them out; some peers write into them."""
    return [{key: row[key] for key in keys} for row in rows] if keys else [dict(row) for row in rows]


def columns_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A dict of columns, as a slice of a `datasets.Dataset` is."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def _as(kind: Kind, values: np.ndarray) -> Any:
    if kind == "lists":
        return values.tolist()
    return values if kind == "numpy" else torch.from_numpy(values)
