"""Two ranks train on shared rows of one width, run by torchrun. At the step that is named rank 1 skips a sample.

Each rank prints the step at which it raised, how often its optimiser had stepped by then, and what was said.
"""

import json
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from collate_npu import BatchAdapter, CollateError, ContextParallel, PaddingCollator, Segments, gather_sequence, last_token

WIDTH = 16


def samples() -> Iterator[dict[str, list[int]]]:
    drawn = torch.Generator().manual_seed(0)
    while True:
        yield {"input_ids": torch.randint(1, 50, (WIDTH,), generator=drawn).tolist()}


def train(odd: int) -> str:
    cp, rows, collator = ContextParallel.from_group(dist.group.WORLD), samples(), PaddingCollator(pad_token_id=0)
    adapter = BatchAdapter(needs_mask_2d=False, consumer="megatron", context_parallel=cp)
    model = torch.nn.Embedding(50, 4)
    optimiser, stepped = torch.optim.SGD(model.parameters(), 0.1), 0
    for step in range(odd + 2):
        if step == odd and cp.rank == 1:
            next(rows)
        try:
            shard, segments = adapter.with_segments(collator([next(rows), next(rows)]))
            loss_of(model(shard["input_ids"]), cp, segments).backward()
        except CollateError as error:
            return json.dumps({"rank": cp.rank, "step": step, "stepped": stepped, "said": str(error)})
        optimiser.step()
        stepped += 1
    return json.dumps({"rank": cp.rank, "step": None, "stepped": stepped, "said": "nothing"})


def loss_of(hidden: torch.Tensor, cp: ContextParallel, segments: Segments) -> torch.Tensor:
    return last_token(gather_sequence(hidden, cp, segments), segments).square().sum()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print("RANK " + train(int(sys.argv[1])), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it, with nothing left to do
