"""Bytes and milliseconds a dataloader worker spends on one ms-swift batch, without and with `integrations.swift.install()`.

Needs the environment of the session `peers_swift`: python benchmarks/bench_swift_bytes.py --rows 8 --width 4096
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "peers"))

import swift_world
import torch

from collate_npu.integrations import swift


def measure(args: Any, lengths: list[int], repeats: int) -> tuple[int, float]:
    """Bytes of the tensors that cross to the trainer, and the median milliseconds of a collation."""
    made, seconds, batch = swift_world.template(cp=args.context_parallel_size), [], {}
    for _ in range(repeats):
        rows = swift_world.samples(*lengths)
        start = time.perf_counter()
        batch = made.data_collator(rows, padding_to=swift_world.get_padding_to(args))
        seconds.append(time.perf_counter() - start)
    size = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    return size, statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    logging.disable(logging.INFO)
    lengths = [given.width - b * given.width // (2 * given.rows) for b in range(given.rows)]
    args = swift_world.arguments("qwen3_next")
    without = measure(args, lengths, given.repeats)
    swift.install()
    with_it = measure(args, lengths, given.repeats)
    for name, (size, milliseconds) in {"without": without, "with": with_it}.items():
        print(f"{name:8} {size:>13,} bytes  {milliseconds:8.1f} ms  [{given.rows}, {given.width}]")


if __name__ == "__main__":
    main()
