"""A trainer with a worker for every size of batch, that is killed while they wait: prints their process ids and stays."""

from __future__ import annotations

import sys
import time

from torch.utils.data import DataLoader

from collate_npu import PaddingCollator

ROWS = {"small": (2, 8), "300 KiB": (8, 9600), "2 MiB": (8, 65536)}
"""Rows and tokens of a batch; ids of two bytes and labels make the size of its message."""


def loader(size, start_method):
    rows, tokens = ROWS[size]
    data = [{"input_ids": list(range(1, 1 + min(tokens, 30_000))) * max(1, tokens // 30_000)}] * (rows * 64)
    collator = PaddingCollator(pad_token_id=0)
    return DataLoader(data, rows, num_workers=1, collate_fn=collator, multiprocessing_context=start_method)


if __name__ == "__main__":
    running = [iter(loader(size, sys.argv[1])) for size in ROWS]
    for batches in running:
        next(batches)
    print(*(worker.pid for batches in running for worker in batches._workers), flush=True)
    time.sleep(120)
