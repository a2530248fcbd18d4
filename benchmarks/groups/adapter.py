"""The adapter at the trainer: what a step pays before the model, for a batch whose 2D mask stays."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from benchmarks import peers
from benchmarks.inputs import rows_of
from benchmarks.timing import Case, Contestant
from collate_npu import BatchAdapter, PaddingCollator

LIMIT = 50
"""Microseconds."""


def cases(quick: bool) -> Iterator[Case]:
    for rows, width in ((8, 4096),):
        batch = PaddingCollator(peers.tokenizer("right"))(rows_of("numpy", rows, width))
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        adapter = BatchAdapter(model_type="qwen3_next", padding_free=False)
        ours = Contestant("ours", adapter, lambda batch=batch: dict(batch))
        copy = Contestant("copy of the batch", lambda _, held=tensors: [x.clone() for x in held], against="floor")
        yield Case("adapter", f"{rows}x{width}, right, 2D kept", ours, [copy], limit=LIMIT)
