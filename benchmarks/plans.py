"""Plans: what planning takes and gives for 10^4 to 10^7 lengths and 1 to 256 ranks, beside TRL's best fit and
transformers' length-grouped batches.

`python -m benchmarks.plans [--most 7] [--write]` prints seconds, memory, padding, and how level the steps are: the largest
batch of a step beside the mean of its ranks, on average and in the worst step. `--write` keeps them in planned.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collate_npu.arrays import Array
from collate_npu.collate import BalancedBatchSampler

KINDS = {"instruction": (5.6, 0.9, 16, 4096), "rollouts": (7.6, 1.1, 64, 32768)}
"""Mean and deviation of the logarithm of the length, the least and the most."""


FOUND = Path(__file__).with_name("planned.json")


def keep(name: str, rows: list[dict[str, Any]]) -> None:
    """Put what was found into planned.json, a row a line."""
    held = json.loads(FOUND.read_text("utf-8")) if FOUND.exists() else {}
    held[name] = rows
    lists = (f'"{each}": [\n' + ",\n".join(map(json.dumps, found)) + "\n]" for each, found in sorted(held.items()))
    FOUND.write_text("{\n" + ",\n".join(lists) + "\n}\n", "utf-8")


def drawn(kind: str, count: int) -> Array:
    """Return log-normal lengths."""
    mu, sigma, least, most = KINDS[kind]
    found: Array = np.clip(np.random.default_rng(0).lognormal(mu, sigma, count), least, most).astype(np.int64)
    return found


def timed(plan: Callable[[], Array]) -> tuple[Array, float, int]:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    costs = plan()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return costs, time.perf_counter() - began, grown // 1024


def level_of(costs: Array, ranks: int) -> tuple[float, float]:
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    level = steps.max(axis=1) / steps.mean(axis=1)
    return float(level.mean()), float(level.max())


def planned(lengths: Array, most: int, ranks: int, pack: bool) -> Array:
    return BalancedBatchSampler(lengths, max_tokens=most, num_replicas=ranks, pack=pack).plan[2]


def grouped(lengths: Array, most: int, ranks: int) -> Array:
    """Return the costs of batches as LengthGroupedSampler sorts them, of as many samples as `most` tokens hold."""
    size = max(1, int(most / lengths.mean()))
    order = np.random.default_rng(0).permutation(lengths)
    together = size * ranks * 50
    order = np.concatenate([-np.sort(-order[at : at + together]) for at in range(0, len(order), together)])
    rows = np.concatenate([order, order[: -len(order) % size]]).reshape(-1, size)  # as DistributedSampler fills up
    costs: Array = rows.max(axis=1) * size
    return costs


def best_fit(lengths: Array, most: int) -> Array:
    """Return the costs of TRL's packs (trl/data_utils.py, packing_strategy="bfd")."""
    from datasets import Dataset
    from trl import pack_dataset

    rows = Dataset.from_dict({"input_ids": [[0] * int(length) for length in lengths]})
    packed = pack_dataset(rows, most, "bfd")
    return np.array([sum(each) for each in packed["seq_lengths"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=7, help="the largest power of ten")
    parser.add_argument("--write", action="store_true")
    given, rows = parser.parse_args(), []
    print(f"{'lengths':12}{'samples':>10}{'ranks':>6}  {'way':16}{'s':>8}{'MB':>6}{'padding':>9}{'level':>7}{'worst':>7}")
    for kind, power, ranks in [(k, p, r) for k in KINDS for p in range(4, given.most + 1) for r in (1, 8, 64, 256)]:
        lengths, most = drawn(kind, 10**power), 4 * KINDS[kind][3]
        ways = {name: partial(planned, lengths, most, ranks, pack) for name, pack in (("planned", False), ("packed", True))}
        if len(grouped(lengths, most, ranks)) >= ranks:
            ways["length-grouped"] = partial(grouped, lengths, most, ranks)
        if power == 4 and ranks == 8:
            ways["TRL's bfd"] = partial(best_fit, lengths, most)
        for name, plan in ways.items():
            costs, seconds, grown = timed(plan)
            padding = max(0.0, 1 - lengths.sum() / costs.sum())
            level, worst = level_of(costs, ranks)
            begin = f"{kind:12}{len(lengths):10}{ranks:6}  {name:16}{seconds:8.2f}{grown:6}{padding:9.2%}"
            print(f"{begin}{level:7.3f}{worst:7.3f}", flush=True)
            found = {"padding": padding, "level": level, "worst": worst}
            numbers = {key: round(x, 4) for key, x in found.items()} | {"seconds": round(seconds, 3), "MB": grown}
            rows.append({"lengths": kind, "samples": len(lengths), "ranks": ranks, "way": name, **numbers})
    if given.write:
        keep("plans", rows)


if __name__ == "__main__":
    main()
