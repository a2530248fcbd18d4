"""From a worker to the trainer: one message or storage a batch against torch's one a tensor, no workers, and threads.

python benchmarks/bench_wire.py [--rounds 5] [--quick]

Milliseconds of a batch through a DataLoader with two workers, the trainer reading a byte of every page. Each round times
all contestants, forwards and backwards in turn; ratios are medians of rounds, above 1 where ours is faster. "waiting" is
what one `next()` costs a trainer whose batches are ready: it sleeps between them.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from collate_npu import PaddingCollator

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
OURS = PaddingCollator(pad_token_id=0, attention_mask="2d")
TRANSFORMERS = PaddingCollator(pad_token_id=0, consumer="transformers")
DENSE = PaddingCollator(pad_token_id=0, attention_mask="4d", consumer=None)


class Rows:
    """Rows of 3/4 to all of `width` tokens, 64 different ones, over and over."""

    def __init__(self, count: int, width: int, kind: str) -> None:
        random = np.random.default_rng(0)
        rows = [random.integers(0, 150_000, length) for length in random.integers(width * 3 // 4, width + 1, min(count, 64))]
        held = [row.tolist() for row in rows] if kind == "lists" else rows
        self.rows, self.count = [{"input_ids": row, "labels": row[:]} for row in held], count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> dict[str, Any]:
        if n >= self.count:
            raise IndexError
        return self.rows[n % len(self.rows)]


class AsTorch:
    """The same batch as the plain dict that torch's own way carries: a storage of each tensor."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(self.collate(features))


def threaded(data: Rows, collate: Collate, size: int, threads: int = 2) -> Iterator[dict[str, Any]]:
    """Batches by threads of this process, two ahead of the trainer for each, as a loader of threads gives them."""
    ahead: deque[Any] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(data), size):
            ahead.append(pool.submit(collated, data, collate, range(start, start + size)))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()


def collated(data: Rows, collate: Collate, places: Iterable[int]) -> dict[str, Any]:
    return collate([data[n] for n in places])


def read(value: Any) -> None:
    """A byte of every page, as a copy to a device would touch them."""
    if isinstance(value, Mapping):
        for each in value.values():
            read(each)
    elif isinstance(value, torch.Tensor) and value.numel():
        value.reshape(-1).view(torch.uint8).numpy()[::4096].sum()


def milliseconds(batches: Iterable[dict[str, Any]], sleep: float = 0.0) -> float:
    """Of one batch: the whole loop's, or with a pause between batches what waiting for one takes. Four warm up."""
    stream, waits = iter(batches), []
    for _ in range(4):
        read(next(stream))
    begun = time.perf_counter()
    while True:
        time.sleep(sleep)
        start = time.perf_counter()
        batch = next(stream, None)
        if batch is None:
            break
        read(batch)
        waits.append(time.perf_counter() - start)
    return 1e3 * (median(waits) if sleep else (time.perf_counter() - begun) / len(waits))


def compare(
    title: str, contestants: Mapping[str, Callable[[], Iterable[dict[str, Any]]]], rounds: int, sleep: float
) -> None:
    """One row: milliseconds of each, and how many times ours (the first) each other takes."""
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for n in range(rounds):
        for name in list(contestants)[:: 1 if n % 2 == 0 else -1]:
            took[name].append(milliseconds(contestants[name](), sleep))
    first, *others = took.values()
    ratios = [median(b / a for a, b in zip(first, other)) for other in others]
    cells = [f"{name} {median(values):8.2f} ms" for name, values in took.items()]
    print(
        f"{title:<44}", cells[0], *(f"{cell} {ratio:5.2f}x" for cell, ratio in zip(cells[1:], ratios)), sep="  ", flush=True
    )


def loader(data: Rows, collate: Collate, size: int, workers: int) -> Iterable[dict[str, Any]]:
    return DataLoader(data, batch_size=size, collate_fn=collate, num_workers=workers)  # type: ignore[arg-type]


def wire(size: int, width: int, kind: str, collate: Collate, name: str, rounds: int, *, pause: float = 0.0) -> None:
    """Two workers our way and torch's; without a pause also no workers and two threads."""
    tokens = 300_000 if collate is DENSE else 6_000_000
    data = Rows(size * (30 if pause else max(10, min(200, tokens // (size * width)))), width, kind)
    contestants = {
        "ours": lambda: loader(data, collate, size, 2),
        "torch's": lambda: loader(data, AsTorch(collate), size, 2),
    }
    if not pause:
        contestants["no workers"] = lambda: loader(data, collate, size, 0)
        contestants["2 threads"] = lambda: threaded(data, collate, size)
        contestants["1 thread"] = lambda: threaded(data, collate, size, 1)
    compare(f"{name} {size}x{width} {kind}{', waiting' if pause else ''}", contestants, rounds, pause)


def check() -> None:
    """Both ways bring the same batches."""
    data = Rows(16, 600, "lists")
    for collate in (OURS, TRANSFORMERS, DENSE):
        for one, other in zip(loader(data, collate, 4, 2), loader(data, AsTorch(collate), 4, 2)):
            assert list(one) == list(other)
            assert all(value is other[key] or torch.equal(value, other[key]) for key, value in one.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check()
    sizes = [(8, 512), (8, 4096), (32, 4096), (32, 32768)]
    for size, width in sizes[:2] if options.quick else sizes:
        for kind in ("numpy", "lists"):
            wire(size, width, kind, OURS, "neutral", options.rounds)
        wire(size, width, "numpy", TRANSFORMERS, "transformers", options.rounds)
        wire(size, width, "numpy", OURS, "neutral", options.rounds, pause=0.004 + size * width * 3e-8)
    if not options.quick:
        wire(8, 4096, "numpy", DENSE, "dense 4D", options.rounds)


if __name__ == "__main__":
    main()
