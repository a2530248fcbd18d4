"""Train Qwen3-Next on planned batches, two processes under DDP, and see what the plan saves.

    torchrun --nproc_per_node 2 planned_batches.py
    torchrun --nproc_per_node 8 planned_batches.py --model ./checkpoint --max-tokens 16384  # on eight cards

A plan gives each process as many batches, none over `--max-tokens`, and in each step batches of like size. The samples of a
batch are padded to one width. `loss_weights` weighs each micro-batch, so that the gradient of an optimizer step is that of
all its samples, however they stand together.

Prints the share of padding, planned and as the samples come, and how far the gradient of the first step, two micro-batches
on each process, is from that of its samples alone:

    gradient: off by ...

Exit code 1 if that is more than rounding explains.
"""

import argparse
import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from collate_npu import PaddingCollator
from collate_npu.collate import BalancedBatchSampler, lengths_of, loss_weights
from collate_npu.testing import byte_tokenizer, tiny_model

TEXTS = ["short", "a longer text, of many more tokens than the first one has", "a text between both"]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def padding(batches: list[list[int]], lengths: list[int]) -> float:
    """Return the share of all tokens that is padding."""
    sizes = [[lengths[n] for n in batch] for batch in batches]
    return 1 - sum(map(sum, sizes)) / sum(max(batch) * len(batch) for batch in sizes)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a checkpoint; by default a tiny random Qwen3-Next")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()

    on_card = torch.accelerator.is_available()
    device = torch.device(torch.accelerator.current_accelerator() if on_card else "cpu")
    if on_card:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device.type])
    rank, size = dist.get_rank(), dist.get_world_size()

    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else byte_tokenizer()
    load = AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=torch.float32) if args.model else tiny_model("qwen3_next", vocab_size=len(tokenizer))
    model = model.to(device).eval()  # no dropout: the gradient is compared
    rows = [tokenizer(TEXTS[n % 3][n // 3 % 4 :])["input_ids"] for n in range(12 * size)]
    data, lengths = [{"input_ids": ids, "labels": ids} for ids in rows], [len(ids) for ids in rows]

    sampler = BalancedBatchSampler(lengths_of(data), max_tokens=args.max_tokens, num_replicas=size, rank=rank)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PaddingCollator(tokenizer, model=model))
    every = BalancedBatchSampler(lengths, max_tokens=args.max_tokens, num_replicas=size, rank=None)
    batches, group = list(every), -(-len(rows) // len(every))
    as_they_come = [list(range(at, min(at + group, len(rows)))) for at in range(0, len(rows), group)]

    first = [n for batch in batches[: 2 * size] for n in batch]  # the samples of the first step, of all processes
    for n in first:  # the truth: each sample alone
        ids = torch.tensor([rows[n]], device=device)
        targets = sum(lengths[each] - 1 for each in first)
        (model(input_ids=ids, labels=ids).loss * (len(rows[n]) - 1) / targets).backward()
    alone = gradient(model)
    model.zero_grad()

    parallel = DistributedDataParallel(model, device_ids=[device.index] if device.index is not None else None)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    off = 0.0
    sampler.set_epoch(0)
    micro_batches = iter(loader)
    while step := list(itertools.islice(micro_batches, 2)):
        for batch, weight in zip(step, loss_weights(step, sampler=sampler)):  # ranks whose plans differ raise
            inputs = {key: value.to(device) for key, value in batch.items()}
            (parallel(**inputs).loss * weight).backward()
        off = off or float((gradient(model) - alone).norm() / alone.norm())
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"padding: {padding(as_they_come, lengths):.0%} as they come, {padding(batches, lengths):.0%} planned")
        print(f"gradient: off by {off:.1e}")
    dist.barrier()
    dist.destroy_process_group()
    # kernels on a card multiply float32 in TF32; a mean over micro-batches in place of tokens is off by more
    return int(not off < (2e-2 if on_card else 1e-4))


if __name__ == "__main__":
    sys.exit(main())
