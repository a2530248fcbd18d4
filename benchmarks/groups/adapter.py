"""The adapter at the trainer: what a step pays before the model, for a batch whose 2D mask stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from benchmarks import peers
from benchmarks.inputs import rows_of
from benchmarks.timing import Case, Contestant
from collate_npu import BatchAdapter, PaddingCollator

LIMIT = 40
"""Microseconds."""


def cases(quick: bool) -> Iterator[Case]:
    batch = PaddingCollator(peers.tokenizer("right"))(rows_of("numpy", 8, 4096))
    yield case("8x4096, right, as our collator sends it", batch)
    bare = {key: batch[key] for key in ("input_ids", "labels", "attention_mask", "attention_mask_2d")}
    yield case("8x4096, right, without positions", bare)


def case(name: str, batch: dict[str, Any]) -> Case:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    copy = Contestant("copy of the batch", lambda _: [x.clone() for x in tensors], against="floor")
    adapter = BatchAdapter(model_type="qwen3_next", padding_free=False)
    return Case("adapter", name, Contestant("ours", adapter, lambda: dict(batch)), [copy], limit=LIMIT)
