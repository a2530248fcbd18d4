"""torch's DataLoader over a list of samples, one epoch a call: what a trainer waits for. Batches of 8 rows to 4096."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

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
    for kind, side in (("lists", "right"), ("lists", "left"), ("numpy", "right"), ("torch", "right")):
        for workers in (0, 2):
            yield case(kind, rows, width, side, workers)


def case(kind: Kind, rows: int, width: int, side: str, workers: int) -> Case:
    dataset = rows_of(kind, rows, width)  # a list of dicts is a dataset
    target = TARGETS[workers] if kind == "lists" and width == 4096 else None
    loader = partial(epochs, dataset, workers, batch_size=BATCH)
    name = f"{kind} {BATCH}x{width}, {workers} workers, {side}"
    return Case("dataloader", name, ours(loader, side), [*rivals(dataset, side, workers, target), floor(loader)])


def ours(loader: Callable[[Work], Work], side: str) -> Contestant:
    return Contestant("ours", loader(PaddingCollator(peers.tokenizer(side), consumer="transformers")))


def floor(loader: Callable[[Work], Work]) -> Contestant:
    """What torch's loader and the dataset cost by themselves."""
    return Contestant("the loader, nothing collated", loader(_nothing), against="floor")


def rivals(dataset: Any, side: str, workers: int, target: float | None) -> list[Contestant | Absent]:
    builders = {"transformers Seq2Seq": lambda: peers.seq2seq(side), "ms-swift template": lambda: peers.swift(side)}
    if side == "right":
        builders["TRL"] = peers.trl
    loader = partial(epochs, dataset, workers, batch_size=BATCH)
    return [
        rival(
            name,
            lambda build=build: loader(build()),
            agrees=agreement.same_batch,
            target=target if name == "transformers Seq2Seq" else None,
        )
        for name, build in builders.items()
    ]


def epochs(dataset: Any, workers: int, collate: Work, **settings: Any) -> Work:
    """Workers are forked and stay from one epoch to the next."""
    kept = {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    loader: DataLoader[Any] = DataLoader(dataset, collate_fn=collate, **kept, **settings)
    return lambda _: _last(loader)


def _nothing(samples: Any) -> None: ...


def _last(loader: DataLoader[Any]) -> dict[str, torch.Tensor]:
    """An epoch; the last batch is compared."""
    return deque(loader, maxlen=1)[0]
