"""Loaders with our collator against the same loader with its own collation: an epoch a call, rows of one length, because
most of them cannot pad. Ours makes masks and positions beside that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from benchmarks.peers import rival
from benchmarks.timing import Case, Work
from collate_npu import PaddingCollator

BATCH = 8
OURS = PaddingCollator(pad_token_id=0, consumer="transformers")
Size = tuple[int, int]
Loader = Callable[[Size, Work | None], Callable[[], Iterable[Any]]]
"""Rows and width, and a collator, None for its own, to what starts an epoch."""


def cases(quick: bool) -> Iterator[Case]:
    size = (4 * BATCH, 512) if quick else (12 * BATCH, 4096)
    for name, loader in (LOADERS if quick else LOADERS | CLUSTERS).items():
        yield case(name, loader, size)


def case(name: str, loader: Loader, size: Size) -> Case:
    ours = rival("ours", lambda: epochs(loader(size, OURS)))
    theirs = rival("its own collation", lambda: epochs(loader(size, None)), agrees=_same)
    return Case("loaders", f"{name}, {size[0] // BATCH} x {BATCH}x{size[1]}", ours, [theirs])


@cache
def rows_of_one_length(rows: int, width: int) -> list[dict[str, torch.Tensor]]:
    ids = np.random.default_rng(1).integers(300, 150_000, (rows, width))
    return [{"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row.copy())} for row in ids]


def epochs(start: Callable[[], Iterable[Any]]) -> Work:
    """The last batch is compared; the first epoch, and the processes it starts, are outside the clock."""
    deque(start(), maxlen=1)
    return lambda _: deque(start(), maxlen=1)[0]


def stateful(size: Size, collate: Work | None) -> Callable[[], Iterable[Any]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    made = StatefulDataLoader(rows_of_one_length(*size), batch_size=BATCH, collate_fn=collate)
    return lambda: made


def streaming(size: Size, collate: Work | None) -> Callable[[], Iterable[Any]]:
    theirs = peers.streaming()
    dataset = theirs.StreamingDataset(local=_mds(*size), batch_size=BATCH, shuffle=False)
    made = theirs.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=collate)
    return lambda: made


def webdataset(size: Size, collate: Work | None) -> Callable[[], Iterable[Any]]:
    """Its own collation takes tuples."""
    from webdataset import WebDataset

    samples = WebDataset(_tar(*size), shardshuffle=False).decode()
    if collate is not None:
        return lambda: samples.map(_named).batched(BATCH, collation_fn=collate)
    return lambda: samples.to_tuple("input_ids.npy", "labels.npy").batched(BATCH)


def energon(size: Size, collate: Work | None) -> Callable[[], Iterable[Any]]:
    made = peers.energon(Path(_tar(*size)).parent, BATCH, _named, collate)
    return lambda: made


def ray_data(size: Size, collate: Work | None) -> Callable[[], Iterable[Any]]:
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    rows = rows_of_one_length(*size)
    held = ray.data.from_items([{key: value.numpy() for key, value in row.items()} for row in rows]).materialize()
    return partial(held.iter_torch_batches, batch_size=BATCH, collate_fn=collate)


def nested(size: Size, collate: Work | None) -> Callable[[], Iterable[Any]]:
    """What a TransferQueue's `kv_batch_get` returns, and torch's own padding of it."""
    from tensordict import TensorDict

    rows = rows_of_one_length(*size)
    parts = [rows[n : n + BATCH] for n in range(0, len(rows), BATCH)]
    keys = ("input_ids", "labels")
    columns = [{key: torch.nested.as_nested_tensor([row[key] for row in part], layout=torch.jagged) for key in keys}
               for part in parts]  # fmt: skip
    batches = [TensorDict(held, [BATCH]) for held in columns]
    own = collate or (lambda batch: {key: value.to_padded_tensor(0) for key, value in batch.items()})
    return lambda: map(own, batches)


LOADERS: dict[str, Loader] = {
    "torchdata StatefulDataLoader": stateful,
    "mosaicml-streaming": streaming,
    "webdataset": webdataset,
    "megatron-energon": energon,
    "TensorDict of nested tensors": nested,
}
CLUSTERS: dict[str, Loader] = {"Ray Data": ray_data}


def _named(sample: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.as_tensor(sample[f"{key}.npy"]) for key in ("input_ids", "labels")}


@cache
def _mds(rows: int, width: int) -> str:
    folder = mkdtemp()
    columns = dict.fromkeys(("input_ids", "labels"), "ndarray:int64")
    with peers.streaming().MDSWriter(out=f"{folder}/rows", columns=columns) as writer:
        for row in rows_of_one_length(rows, width):
            writer.write({key: value.numpy() for key, value in row.items()})
    return f"{folder}/rows"


@cache
def _tar(rows: int, width: int) -> str:
    folder = mkdtemp()
    from webdataset import TarWriter

    with TarWriter(f"{folder}/rows.tar") as writer:
        for n, row in enumerate(rows_of_one_length(rows, width)):
            writer.write({"__key__": f"{n:06d}", **{f"{key}.npy": value.numpy() for key, value in row.items()}})
    return f"{folder}/rows.tar"


def _same(ours: Any, theirs: Any) -> None:
    """Tuples are the keys in their order."""
    found = theirs if hasattr(theirs, "keys") else dict(zip(("input_ids", "labels"), theirs))
    for key in ("input_ids", "labels"):
        assert torch.equal(ours[key], torch.as_tensor(found[key])), f"{key} differs"
