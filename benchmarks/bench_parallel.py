"""Split and join against a plain copy of the same bytes, and against Megatron's split: ratios of one run.

python benchmarks/bench_parallel.py [--rounds 15] [--threads 1]

Every round times all contestants of a row one after the other, forwards and backwards in turn; a ratio is the median of
the rounds' ratios, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from collate_npu import Segments, dense
from collate_npu.parallel import ContextParallel, join_shards, query_rows, split_batch, split_tensor


def seconds(work: Callable[[], object], least: float = 0.02) -> float:
    """Seconds of one call, over as many as take `least` seconds."""
    calls = 1
    while True:
        start = perf_counter()
        for _ in range(calls):
            work()
        took = perf_counter() - start
        if took >= least:
            return took / calls
        calls = max(calls * 2, int(calls * least / max(took, 1e-9)))


def compare(name: str, ours: Callable[[], object], floor: Callable[[], object], against: str, rounds: int) -> None:
    """One row: microseconds of both, and ours divided by the other."""
    pairs = []
    for n in range(rounds + 1):
        order = (ours, floor) if n % 2 else (floor, ours)
        took = {work: seconds(work) for work in order}
        pairs.append((took[ours], took[floor]))
    pairs = pairs[1:]
    micro = [1e6 * median(column) for column in zip(*pairs)]
    ratio = median(a / b for a, b in pairs)
    print(f"{name:<52} {micro[0]:>9.1f} us  {against:<34} {micro[1]:>11.1f} us  {ratio:>7.3f}x")


def megatron(x: Tensor, cp: ContextParallel) -> Tensor:
    """What megatron-core's get_batch_on_this_cp_rank computes for one key: a view, an index tensor, a selection."""
    cut = x.view(x.shape[0], 2 * cp.size, x.shape[1] // (2 * cp.size))
    index = torch.tensor([cp.rank, 2 * cp.size - cp.rank - 1])
    return cut.index_select(1, index).view(x.shape[0], -1)


def splits(B: int, S: int, size: int, rounds: int) -> None:
    x = torch.randint(0, 1000, (B, S))
    positions = torch.arange(S).expand(B, S)
    cp, flat = ContextParallel(size, 1), ContextParallel(size, 1, layout="contiguous")
    shards = [split_tensor(x, cp.with_rank(rank)) for rank in range(size)]
    shard = shards[1]
    assert torch.equal(shard, megatron(x, cp))
    name, copy = f"[{B}, {S}] int64, cp {size}", "plain copy of the shard"
    compare(f"zigzag {name}", lambda: split_tensor(x, cp), shard.clone, copy, rounds)
    compare(f"zigzag {name}", lambda: split_tensor(x, cp), lambda: megatron(x, cp), "megatron's split", rounds)
    compare(f"zigzag {name}, expanded", lambda: split_tensor(positions, cp), shard.clone, copy, rounds)
    compare(f"contiguous {name}", lambda: split_tensor(x, flat), shard.clone, copy, rounds)
    compare(f"join {name}", lambda: join_shards(shards, cp), x.clone, "plain copy of the row", rounds)


def documents(rounds: int) -> None:
    cp = ContextParallel(8, 1, layout="document_zigzag")
    offsets = list(range(0, 131073, 1024))
    x = torch.randint(0, 1000, (1, 131072))
    shard = split_tensor(x, cp, cu_seqlens=offsets)
    work = lambda: split_tensor(x, cp, cu_seqlens=offsets)  # noqa: E731
    compare("by document [1, 131072], 128 documents, cp 8", work, shard.clone, "plain copy of the shard", rounds)


def batches(rounds: int) -> None:
    segments = Segments.from_lengths([131072 - 100 * n for n in range(8)])
    ids = torch.randint(0, 1000, segments.shape)
    cp = ContextParallel(8, 1)
    batch = {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": segments.position_ids,
        "attention_mask": None,
        "attention_mask_2d": segments.keep,
    }
    shard = split_batch(batch, cp, segments=segments)
    copies = [x for x in shard.values() if x is not None]
    work = lambda: split_batch(batch, cp, segments=segments)  # noqa: E731
    compare("batch of 4 keys [8, 131072], cp 8", work, lambda: [x.clone() for x in copies], "plain copies", rounds)


def dense_rows(rounds: int) -> None:
    segments = Segments.from_lengths([4000, 8192])
    cp = ContextParallel(8, 1)
    rows = query_rows(8192, cp)
    ours = lambda: dense(segments, polarity="masked", rows=rows)  # noqa: E731
    theirs = lambda: split_batch(  # noqa: E731
        {"attention_mask": dense(segments, polarity="masked")}, cp, segments=segments
    )
    assert torch.equal(ours(), theirs()["attention_mask"])
    compare("4D mask [2, 1, 8192, 8192], cp 8: own rows", ours, theirs, "whole mask, then split", max(rounds // 3, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s)")
    for B, S, size in ((8, 131072, 8), (8, 8192, 8), (1, 8192, 2)):
        splits(B, S, size, arguments.rounds)
    for part in (documents, batches, dense_rows):
        part(arguments.rounds)


if __name__ == "__main__":
    main()
