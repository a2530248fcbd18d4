"""Shared rows: what ranks that share rows send for one layer, and how long their step takes beside that of one process.

`python -m benchmarks.shared_rows [--tokens 256] [--longest 1024] [--rounds 5] [--ranks 2 4] [--write]` runs on a CPU.
Bytes: models of one layer with the sizes of a released model, in float32, and four rows of `--tokens` without padding. What
a rank sends to others in one forward and backward is counted where the library calls a collective; of all ranks the most.
Beside it stands what a gather of that layer's input for the whole rows sends, and the reduce-scatter back: each rank would
then compute the layer for the whole rows. Bytes grow with tokens, the few before each part that a convolution reads aside.
Time: a Qwen3-Next of four layers, on two processes of one thread each, and on one that has the whole rows while the other
waits; both are adapted, and take turns. The ratio by CPU time is of the rank that works longest: it leaves waiting out, and
holds on a machine that others load too. `--write` keeps both tables in planned.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported behind init_process_group (transformers does), it holds the group beyond its end
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from benchmarks.plans import keep
from collate_npu import ContextParallel, Segments, adapt, split_batch
from collate_npu.consumers.tiny_models import build
from collate_npu.outputs import shift_labels

VOCABULARY, ROWS = 512, 4
ONE = {"num_hidden_layers": 1, "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 512}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gated DeltaNet, by heads": ("qwen3_next", {**EXPERTS, "layer_types": ["linear_attention"]}),
    "attention, dealt": ("qwen3_next", {**EXPERTS, "layer_types": ["full_attention"]}),
    "convolution, dealt": ("lfm2", {"layer_types": ["conv"]}),
}
"""A layer: its family, and what of its config is not the default, which has the sizes of Qwen3-Next 80B and LFM2 1.2B."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yield the calls of collectives and the bytes that this rank sends to others, of layers and of the batch's own."""
    found: Counter[str] = Counter()

    def counting(of: str, real: Any) -> Callable[..., None]:
        def call(out: Any, x: Any, *splits: list[int], group: Any = None) -> None:
            others = dist.get_world_size(group) - 1
            rows = sum(splits[1]) - splits[1][dist.get_rank(group)] if splits else len(x) * others  # a ring passes on all
            found.update({f"{of} calls": 1, f"{of} bytes": rows * x[:1].nbytes})
            real(out, x, *splits, group=group)

        return call

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # as the library asks
    with ExitStack() as stack:
        for name, of in (("all_to_all_single", "layer"), (gather, "batch")):
            stack.enter_context(patch.object(dist, name, counting(of, getattr(dist, name))))
        yield found


def step(model: Any, batch: dict[str, Any], count: int) -> float:
    """Return the loss of one forward and backward, over the targets of all ranks."""
    given = {key: value for key, value in batch.items() if key != "shift_labels"}
    logits = model(**given, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum") / count
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def rows_of(segments: Segments) -> tuple[dict[str, Any], int]:
    """Return a batch of random tokens, and how many targets it has."""
    ids = torch.randint(0, 256, segments.shape, generator=torch.Generator().manual_seed(1))
    labels = torch.where(segments.keep, ids, -100)
    batch = {"input_ids": ids, "position_ids": segments.position_ids, "shift_labels": shift_labels(labels, segments)}
    flat = segments.shape[0] == 1
    return batch | ({} if flat else {"attention_mask": segments.keep}), int((batch["shift_labels"] != -100).sum())


def sent(layer: str, tokens: int) -> list[int]:
    """Return the most calls and bytes of a rank for this layer, those of the batch, and the bytes of a gather instead."""
    family, settings = LAYERS[layer]
    cp, config = ContextParallel.from_group(dist.group.WORLD), AutoConfig.for_model(family, **{**ONE, **settings})
    batch, count = rows_of(Segments.from_lengths([tokens] * ROWS))
    adapt(model := build(config, "sdpa").eval(), sequence_group=dist.group.WORLD, layout="head_tail")
    with counted() as found:
        step(model, split_batch(batch, cp), count)
    most = torch.tensor([found[f"{of} {what}"] for of in ("layer", "batch") for what in ("calls", "bytes")])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [*most.tolist(), 2 * (cp.size - 1) * ROWS * tokens // cp.size * config.hidden_size * 4]


def print_bytes(given: Any, rank: int, ranks: int) -> None:
    rows = []
    for name in LAYERS:
        calls, layer, _, whole, gathered = sent(name, given.tokens)
        row = {"layer": name, "ranks": ranks, "calls": calls, "bytes": layer, "gathered": gathered, "batch": whole}
        rows.append(row | {"tokens": ROWS * given.tokens})
        if rank == 0:
            sizes = f"{layer / 2**20:9.2f} MiB, gathered {gathered / 2**20:6.2f} MiB, ratio {layer / gathered:5.2f}"
            print(f"{name:25}{ranks:2} ranks{calls:3} calls{sizes}, the batch {whole / 2**10:5.1f} KiB", flush=True)
    if given.write and rank == 0:
        keep(f"shared bytes, {ranks}", rows)


def print_times(given: Any, rank: int, ranks: int) -> None:
    """Print the least time of a step of all ranks beside that of one process."""
    heads = {"head_dim": 64, "num_attention_heads": 4, "linear_num_value_heads": 8, "linear_num_key_heads": 4}
    heads |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    config = AutoConfig.for_model("qwen3_next", **{**ONE, **EXPERTS, **heads, "hidden_size": 256, "num_hidden_layers": 4})
    torch.manual_seed(0)
    alone = build(config, "sdpa").eval()
    shared, rows = deepcopy(alone), []
    adapt(alone)
    adapt(shared, sequence_group=dist.group.WORLD, layout="head_tail")
    cp, lengths = ContextParallel.from_group(dist.group.WORLD), [given.longest * part // 8 for part in (8, 6, 4, 2)]
    for form in ("padded right", "one flat row"):
        batch, count = rows_of(Segments.from_lengths(lengths if form == "padded right" else [lengths]))
        shard, took, losses = split_batch(batch, cp), torch.full((2, 2), torch.inf), torch.zeros(2)
        for _ in range(given.rounds):
            for n in (0, 1):
                dist.barrier()
                began, worked, loss = time.perf_counter(), time.process_time(), 0.0
                if n or rank == 0:
                    loss = step(shared, shard, count) if n else step(alone, batch, count)
                worked = time.process_time() - worked
                dist.barrier()
                spent = torch.tensor([time.perf_counter() - began, worked])
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                took[n] = torch.minimum(took[n], spent)
                losses[n] = loss
        dist.all_reduce(losses)
        assert abs(losses[1] / losses[0] - 1) < 1e-3, losses
        ratio, work = (took[0] / took[1]).tolist()
        if rank == 0:
            ratios = f"{ratio:5.2f} times as fast, by CPU time {work:5.2f}"
            print(f"{form:14}{sum(lengths):6} tokens, {ranks} ranks beside one: {ratios}", flush=True)
        rows.append({"form": form, "ranks": ranks, "tokens": sum(lengths), "ratio": round(ratio, 3), "work": round(work, 3)})
    if given.write and rank == 0:
        keep(f"shared steps, {ranks}", rows)


def on_rank(rank: int, ranks: int, given: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    print_bytes(given, rank, ranks)
    if ranks == 2:
        print_times(given, rank, ranks)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tokens", 256), ("longest", 1024), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    for ranks in given.ranks:
        mp.spawn(on_rank, (ranks, given), nprocs=ranks)


if __name__ == "__main__":
    main()
