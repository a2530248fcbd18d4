"""Planned steps: real tokens a second of an epoch whose batches are padded as they come, sorted, planned, or planned packs.

`python -m benchmarks.planned_steps [--samples 256] [--rows 8] [--longest 1024] [--device cpu] [--write]` trains tiny models
on one process, then, on a CPU, on two ranks that average their gradients after each step, so that the slower one is waited
for. All ways train on the same samples, of lengths as instruction data has them, and may hold as many tokens in a batch.
Ratios are to the first way; `--write` keeps them in planned.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported behind init_process_group (transformers does), it holds the group beyond its end
import torch.multiprocessing as mp
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import DataCollatorForSeq2Seq
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.plans import keep
from collate_npu import PaddingCollator, adapt
from collate_npu.collate import BalancedBatchSampler, loss_weights
from collate_npu.testing import byte_tokenizer, tiny_model

FAMILIES = ("qwen3_next", "llama")
WAYS = ("padded as they come", "sorted", "planned", "planned, one flat row", "planned, packed rows")
VOCABULARY = 512


def lengths_drawn(samples: int, longest: int) -> list[int]:
    """Return lengths as of instruction data: log-normal, a sixth of the longest in the middle."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 6), 0.9, samples)
    found: list[int] = np.clip(drawn, 8, longest).astype(int).tolist()
    return found


def loader_of(way: str, model: Any, data: list[dict[str, Any]], given: Any, rank: int, ranks: int) -> DataLoader[Any]:
    """Return the loader of one rank."""
    lengths, most = [len(row["input_ids"]) for row in data], given.rows * given.longest
    if way in WAYS[:2]:
        generator = torch.Generator().manual_seed(0)
        size = given.rows * ranks
        sampler = (
            RandomSampler(data, generator=generator)  # type: ignore[arg-type]
            if way == WAYS[0]
            else LengthGroupedSampler(size, lengths=lengths, generator=generator)
        )
        batches = [batch[rank::ranks] for batch in BatchSampler(sampler, size, drop_last=False)]
        collator: Any = DataCollatorForSeq2Seq(byte_tokenizer(padding_side="right"))
    else:
        flat, packed = way == WAYS[3], way == WAYS[4]
        adapt(model)
        width = {"packing": True, "max_length": given.longest} if packed else {}
        collator = PaddingCollator(pad_token_id=VOCABULARY - 1, model=model, padding_free=flat, **width)  # type: ignore[arg-type]
        how = {"pack": flat or packed, "width": given.longest if packed else None}
        batches = list(BalancedBatchSampler(lengths, max_tokens=most, num_replicas=ranks, rank=rank, **how))  # type: ignore[arg-type]
    return DataLoader(data, batch_sampler=batches, collate_fn=collator)  # type: ignore[arg-type]


def epochs(family: str, given: Any, rank: int = 0, ranks: int = 1) -> Iterator[tuple[str, float, float]]:
    """Yield, for each way, the seconds of an epoch, the least of three, and its loss over all labels."""
    draw = torch.Generator().manual_seed(1)
    data = [
        {"input_ids": ids, "labels": ids}
        for length in lengths_drawn(given.samples, given.longest)
        for ids in [torch.randint(0, 256, (length,), generator=draw).tolist()]
    ]
    for way in WAYS:
        model = tiny_model(family, vocab_size=VOCABULARY).to(given.device).train()
        loader, took, loss = loader_of(way, model, data, given, rank, ranks), [], 0.0
        for _ in range(3):
            began, loss = time.perf_counter(), 0.0
            for batch in loader:
                count = int((batch["labels"][:, 1:] != -100).sum())
                moved = {key: value.to(given.device) if torch.is_tensor(value) else value for key, value in batch.items()}
                found = model(**moved).loss
                (found * loss_weights([batch])[0]).backward()
                for parameter in model.parameters() if ranks > 1 else ():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                model.zero_grad()
                loss += float(found) * count
            took.append(time.perf_counter() - began)
        yield way, min(took), loss


def print_table(given: Any, rank: int = 0, ranks: int = 1) -> None:
    rows = []
    for family in FAMILIES:
        found = list(epochs(family, given, rank, ranks))
        losses = torch.tensor([loss for *_, loss in found])
        if ranks > 1:
            dist.all_reduce(losses)
        assert (losses / losses[0] - 1).abs().max() < 1e-3, losses
        for way, seconds, _ in found if rank == 0 else ():
            tokens = sum(lengths_drawn(given.samples, given.longest)) / seconds
            ratio = found[0][1] / seconds
            print(f"{family:12}{ranks:3} ranks  {way:24}{tokens:10.0f} tokens/s{ratio:7.2f}", flush=True)
            rows.append({"family": family, "ranks": ranks, "way": way, "ratio": round(ratio, 3)})
    if given.write and rank == 0:
        keep(f"steps, {ranks}", rows)


def on_rank(rank: int, ranks: int, given: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    print_table(given, rank, ranks)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("samples", 256), ("rows", 8), ("longest", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_table(given)
    if given.device == "cpu":
        mp.spawn(on_rank, (2, given), nprocs=2)


if __name__ == "__main__":
    main()
