"""Samples of twelve lengths, and the rows of a batch as samples again."""

from typing import Any

import torch

LENGTHS = (4, 1, 7, 3, 2, 9, 5, 2, 6, 3, 8, 2)
SAMPLES: list[dict[str, Any]] = [
    {"number": n, "input_ids": [*range(10 + 20 * n, 10 + 20 * n + length)], "labels": [-100, *range(1, length)]}
    for n, length in enumerate(LENGTHS)
]
QUEUED = (0, 2, 3, 6)
"""Of three tokens and more."""


def rows_back(batch: Any) -> list[list[Any]]:
    """`[number, tokens]` of each row, by the batch's own keep mask; the numbers of a batch without any are 0, 1, ..."""
    keep = batch.get("attention_mask_2d")
    keep = torch.as_tensor(batch["attention_mask"] if keep is None else keep).bool()
    numbers = batch.get("number", range(len(keep)))
    return [[int(n), ids[real].tolist()] for n, ids, real in zip(numbers, torch.as_tensor(batch["input_ids"]), keep)]
