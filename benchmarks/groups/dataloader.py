"""torch's DataLoader over a list of samples, one epoch a call: what a trainer waits for. Batches of 8 rows to 4096."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks import agreement, peers
from benchmarks.inputs import Kind, rows_of
from benchmarks.peers import rival
from benchmarks.timing import Case, Contestant
from collate_npu import PaddingCollator

BATCH = 8
TARGETS = {0: 28.0, 2: 8.0}
"""Times faster than Seq2Seq on lists, by the number of workers, on both sides."""


def cases(quick: bool) -> Iterator[Case]:
    rows, width = (4 * BATCH, 1024) if quick else (24 * BATCH, 4096)
    for kind in ("lists", "numpy", "torch"):
        for side in ("right", "left"):
            for workers in (0, 2):
                yield case(kind, rows, width, side, workers)


def case(kind: Kind, rows: int, width: int, side: str, workers: int) -> Case:
    def epoch_of(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        loader = DataLoader(
            dataset, batch_size=BATCH, collate_fn=collate, num_workers=workers, persistent_workers=workers > 0
        )  # fmt: skip
        return lambda _: _last(loader)

    dataset: Any = rows_of(kind, rows, width)  # a list of dicts is a dataset
    ours = Contestant("ours", epoch_of(PaddingCollator(peers.tokenizer(side), consumer="transformers")))
    target = TARGETS[workers] if kind == "lists" and width == 4096 else None
    rivals = [
        rival("transformers Seq2Seq", lambda: epoch_of(peers.seq2seq(side)), agrees=agreement.same_batch, target=target)
    ]
    if side == "right":
        rivals.append(rival("TRL", lambda: epoch_of(peers.trl()), agrees=agreement.same_batch))
    rivals.append(rival("ms-swift template", lambda: epoch_of(peers.swift(side)), agrees=agreement.same_batch))
    return Case("dataloader", f"{kind} {BATCH}x{width}, {workers} workers, {side}", ours, rivals)


def _last(loader: DataLoader[Any]) -> dict[str, torch.Tensor]:
    """An epoch; the last batch is compared."""
    batch: dict[str, torch.Tensor] = {}
    for batch in loader:
        pass
    return batch
