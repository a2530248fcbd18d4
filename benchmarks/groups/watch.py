"""Watch: what a training step costs while its kernels are looked at, and once everything is taken off again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.inputs import lengths_of
from benchmarks.timing import Case, Contestant
from collate_npu import PaddingCollator
from collate_npu.proof import Watch
from collate_npu.testing import tiny_model

VOCABULARY = 257


def cases(quick: bool) -> Iterator[Case]:
    for family, width in (("qwen3_next", 256), ("llama", 512)):
        yield from of(family, *((2, 64) if quick else (4, width)))


def of(family: str, rows: int, width: int) -> Iterator[Case]:
    alone = tiny_model(family, vocab_size=VOCABULARY)
    watched, before = copy.deepcopy(alone), copy.deepcopy(alone)
    collator = PaddingCollator(pad_token_id=VOCABULARY - 1, padding_side="left", model=alone)
    batch = collator([{"input_ids": [n % 250 for n in range(length)]} for length in lengths_of(rows, width)])
    name = f"{family} {rows}x{width}"
    floor = Contestant("the step alone", step_of(alone, batch), against="floor")
    yield Case("watch", f"{name}, a step that is watched", Contestant("ours", step_of(watched, batch), begun), [floor])
    seen, again = begun(), step_of(before, batch)
    again(None)
    assert seen.kernels
    yield Case("watch", f"{name}, a step behind it", Contestant("ours", again), [floor])


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
