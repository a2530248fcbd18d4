"""What proof costs: a training step that is watched or guarded, and one behind it; ranks that agree on each batch."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.inputs import lengths_of, rows_of
from benchmarks.timing import Case, Contestant
from collate_npu import BatchAdapter, ContextParallel, PaddingCollator, guard_first_batch
from collate_npu.proof import Watch
from collate_npu.testing import tiny_model

VOCABULARY = 257


def cases(quick: bool) -> Iterator[Case]:
    for family, width in (("qwen3_next", 256), ("llama", 512)):
        yield from of(family, *((2, 64) if quick else (4, width)))
    yield from agreed(*((4, 512) if quick else (8, 4096)))


def of(family: str, rows: int, width: int) -> Iterator[Case]:
    alone = tiny_model(family, vocab_size=VOCABULARY)
    watched, before = copy.deepcopy(alone), copy.deepcopy(alone)
    collator = PaddingCollator(pad_token_id=VOCABULARY - 1, padding_side="left", model=alone)
    batch = collator([{"input_ids": [n % 250 for n in range(length)]} for length in lengths_of(rows, width)])
    name = f"{family} {rows}x{width}"
    floor = Contestant("the step alone", step_of(alone, batch), against="floor")
    yield Case("proof", f"{name}, a step that is watched", Contestant("ours", step_of(watched, batch), begun), [floor])
    seen, again = begun(), step_of(before, batch)
    again(None)
    assert seen.kernels
    yield Case("proof", f"{name}, a step behind it", Contestant("ours", again), [floor])
    guarded = copy.deepcopy(alone)
    step = step_of(guarded, batch)

    def quiet(made: Any) -> Any:
        with redirect_stdout(None):
            return step(made)

    guard = Contestant("ours", quiet, lambda: guard_first_batch(guarded))
    yield Case("proof", f"{name}, a step that is guarded", guard, [floor])


def agreed(rows: int, width: int) -> Iterator[Case]:
    """This process is rank 0 of two; the other one splits the same batch as often."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = get_context("spawn").Process(target=_rank, args=(port, 1, rows, width), daemon=True)
    other.start()
    adapter, batch = _joined(port, 0, rows, width)
    alone = BatchAdapter(needs_mask_2d=False, consumer="megatron", context_parallel=ContextParallel(2, 0))
    floor = Contestant("the same split, without agreement", alone, lambda: dict(batch), against="floor")
    ours = Contestant("ours", adapter, lambda: dict(batch))
    yield Case("proof", f"a split of {rows}x{width}, 2 ranks that agree", ours, [floor])
    other.kill()
    dist.destroy_process_group()


def _joined(port: int, rank: int, rows: int, width: int) -> tuple[BatchAdapter, dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    cp = ContextParallel.from_group(dist.group.WORLD)
    batch = PaddingCollator(pad_token_id=0, pad_to_multiple_of=8)(rows_of("numpy", rows, width))
    return BatchAdapter(needs_mask_2d=False, consumer="megatron", context_parallel=cp), batch


def _rank(port: int, rank: int, rows: int, width: int) -> None:
    adapter, batch = _joined(port, rank, rows, width)
    while True:
        adapter(dict(batch))


def begun() -> Watch:
    """It ends with the optimizer's step."""
    seen = Watch(steps=1)
    seen.start()
    return seen


def step_of(model: Any, batch: dict[str, Any]) -> Callable[[Any], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(_: Any) -> None:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        logits.float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
