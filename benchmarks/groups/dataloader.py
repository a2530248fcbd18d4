"""torch's DataLoader over a list of samples, one epoch a call: what a trainer waits for. Batches of 8 rows to 4096."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from benchmarks import agreement, peers
from benchmarks.inputs import Kind, rows_of
from benchmarks.peers import rival
from benchmarks.timing import Absent, Case, Contestant, Work
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
    for workers in (0, 2):
        yield arrow(rows, width, workers)


def case(kind: Kind, rows: int, width: int, side: str, workers: int) -> Case:
    dataset = rows_of(kind, rows, width)  # a list of dicts is a dataset
    target = TARGETS[workers] if kind == "lists" and width == 4096 else None
    ours = rival("ours", lambda: epochs(dataset, ours_for(side), workers, batch_size=BATCH))
    name = f"{kind} {BATCH}x{width}, {workers} workers, {side}"
    return Case("dataloader", name, ours, rivals(dataset, side, workers, target))


def arrow(rows: int, width: int, workers: int) -> Case:
    """A `datasets.Dataset` and what it hands out: a table a batch to ours, rows of lists to the peers."""
    name = f"arrow {BATCH}x{width}, {workers} workers, right"
    try:
        from datasets import Dataset
    except ImportError as error:
        return Case("dataloader", name, Absent("ours", str(error)), [])
    dataset = Dataset.from_list(rows_of("lists", rows, width))
    batches = BatchSampler(SequentialSampler(dataset), BATCH, drop_last=False)
    tables = dataset.with_format("arrow")
    ours = rival("ours", lambda: epochs(tables, ours_for("right"), workers, batch_size=None, sampler=batches))
    return Case("dataloader", name, ours, rivals(dataset, "right", workers, None))


def ours_for(side: str) -> Work:
    return PaddingCollator(peers.tokenizer(side), consumer="transformers")


def rivals(dataset: Any, side: str, workers: int, target: float | None) -> list[Contestant | Absent]:
    builders = {"transformers Seq2Seq": lambda: peers.seq2seq(side), "ms-swift template": lambda: peers.swift(side)}
    if side == "right":
        builders["TRL"] = peers.trl
    found = [
        rival(
            name,
            lambda build=build: epochs(dataset, build(), workers, batch_size=BATCH),
            agrees=agreement.same_batch,
            target=target if name == "transformers Seq2Seq" else None,
        )
        for name, build in builders.items()
    ]
    alone = epochs(dataset, _nothing, workers, batch_size=BATCH)
    return [*found, Contestant("the loader, nothing collated", alone, against="floor")]


def _nothing(samples: Any) -> None:
    """For what torch's loader itself costs."""


def epochs(dataset: Any, collate: Work, workers: int, **settings: Any) -> Work:
    """Workers stay from one epoch to the next."""
    loader: DataLoader[Any] = DataLoader(
        dataset, collate_fn=collate, num_workers=workers, persistent_workers=workers > 0, **settings
    )  # fmt: skip
    return lambda _: _last(loader)


def _last(loader: DataLoader[Any]) -> dict[str, torch.Tensor]:
    """An epoch; the last batch is compared."""
    return deque(loader, maxlen=1)[0]
