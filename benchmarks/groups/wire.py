"""From two workers to the trainer, one epoch a call: our message or storage a batch against torch's storage a tensor.

The trainer reads a byte of every page, as a copy to a device would. Beside it the same epoch without workers, and by two
threads of the trainer's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks import agreement
from benchmarks.inputs import Kind, rows_of
from benchmarks.timing import Case, Contestant, Work
from collate_npu import PaddingCollator

SMALL, LARGE = 1.8, 1.3
"""Times faster than torch's way, up to 8 x 4096 and beyond."""
NEUTRAL = PaddingCollator(pad_token_id=0, attention_mask="2d")


def cases(quick: bool) -> Iterator[Case]:
    for rows, width in ((8, 512), (8, 4096), (32, 4096), (32, 32768))[: 1 if quick else None]:
        for kind in ("numpy", "lists"):
            yield case(kind, rows, width, NEUTRAL, LARGE if rows * width > 8 * 4096 else SMALL)
    if not quick:
        yield case("numpy", 8, 4096, PaddingCollator(pad_token_id=0, consumer="transformers"), SMALL, " for transformers")
        yield case("numpy", 8, 4096, PaddingCollator(pad_token_id=0, attention_mask="4d"), None, " with its 4D mask")


def case(kind: Kind, rows: int, width: int, collate: Work, target: float | None, name: str = "") -> Case:
    batches = max(6, min(48, 3_000_000 // (rows * width)))
    held = rows_of(kind, rows, width)
    dataset = [held[n % rows] for n in range(batches * rows)]
    loader = partial(loaded, dataset, rows)
    by_torch = loader(partial(_plain, collate), 2)
    rivals = [
        Contestant("torch's storage a tensor", by_torch, agrees=agreement.same_batch, target=target),
        Contestant("no workers", loader(collate, 0), agrees=agreement.same_batch),
        Contestant("2 threads", lambda _: _last(by_threads(dataset, rows, collate)), agrees=agreement.same_batch),
    ]
    return Case("wire", f"{kind} {rows}x{width}{name}, {batches} batches", Contestant("ours", loader(collate, 2)), rivals)


def loaded(dataset: list[Any], size: int, collate: Work, workers: int) -> Work:
    """An epoch; workers are forked and stay from one to the next."""
    kept = {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=size, collate_fn=collate, **kept)  # type: ignore[arg-type]
    return lambda _: _last(loader)


def by_threads(dataset: list[Any], size: int, collate: Work, threads: int = 2) -> Iterator[dict[str, Any]]:
    """Two batches ahead of the trainer for each thread."""
    ahead: deque[Any] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(dataset), size):
            ahead.append(pool.submit(collate, dataset[start : start + size]))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        yield from (future.result() for future in ahead)


def _plain(collate: Work, features: list[Any]) -> dict[str, Any]:
    """The same batch as the plain dict that torch carries a storage a tensor."""
    return dict(collate(features))


def _last(batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for batch in batches:
        _read(batch)
    return batch


def _read(batch: Mapping[str, Any]) -> None:
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.reshape(-1).view(torch.uint8).numpy()[::4096].sum()
