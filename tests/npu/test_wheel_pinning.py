"""Loaders whose batches the real wheel pins, in memory of a pretended card: a thread of torch copies what workers send."""

import os
import random

import pytest
import torch
from torch.utils.data import DataLoader

from collate_npu import BatchAdapter, PaddingCollator

pytestmark = pytest.mark.usefixtures("torch_npu")
EPOCHS = 10 if "COLLATE_NPU_NIGHTLY" in os.environ else 1


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed):
        draw = random.Random(seed)
        self.lengths = [draw.choice((1, 7, 300, 40_000 if n % 5 == 0 else 20)) for n in range(12)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, n):
        return {"input_ids": torch.arange(self.lengths[n]) + n + 1}


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_pinned_batches_are_those_that_were_collated(start):
    """Workers of another start: a forked one would inherit the card."""
    collate = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
    adapter = BatchAdapter(needs_mask_2d=True, consumer="verl", device="npu")
    for seed in range(EPOCHS):
        rows = Rows(seed)
        loader = DataLoader(rows, 4, num_workers=2, collate_fn=collate, pin_memory=True, multiprocessing_context=start)
        wanted = [collate([rows[n] for n in range(at, at + 4)]) for at in range(0, 12, 4)]
        for batch, own in zip(loader, wanted, strict=True):
            assert batch.keys() == own.keys()
            assert all(page.is_pinned() and torch.equal(page, own[key]) for key, page in batch.items())
            moved = adapter(batch)["input_ids"]
            assert moved.device.type == "npu"
            assert torch.equal(moved.cpu(), own["input_ids"])
