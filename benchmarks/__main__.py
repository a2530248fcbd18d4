"""`python -m benchmarks`: prepare each case, compare its outputs, time it, print the table, write JSON and the plot."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import warnings
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

for noisy in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
    os.environ.setdefault(noisy, "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore")

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.timing import Pace, Row, race  # noqa: E402

GROUPS = ("collate", "dataloader", "dense", "derive", "parallel", "adapter", "neutral", "growth")
QUICK = Pace(rounds=5, least=3, budget=0.4, turn=0.003)


def main(given: list[str] | None = None) -> None:
    options = parse(given)
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    pace = QUICK if options.quick else Pace(options.rounds, min(options.rounds, 5))
    start, rows, absent = perf_counter(), [], []
    for group in options.only or GROUPS:
        for case in import_module(f"benchmarks.groups.{group}").cases(options.quick):
            rows += run(case, pace)
            absent += case.absent
    result = report.result(rows, absent, threads=options.threads, seconds=perf_counter() - start, quick=options.quick)
    report.show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(result, options.plot)


def run(case: Any, pace: Pace) -> list[Row]:
    report.progress(f"{case.group}: {case.name}")
    gc.collect()  # the last case's loaders end their workers here, before others are forked
    contestants = case.ready()
    return case.rows(race(contestants, pace)) if contestants else []


def plot(result: dict[str, Any], path: Path) -> None:
    try:
        from benchmarks.plot import draw
    except ImportError as error:
        print(f"no plot: {error}")
    else:
        draw(result, path)


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: under a minute")
    parser.add_argument("--only", action="append", choices=GROUPS, metavar="GROUP", help="one of " + ", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=15, help="at most; slow cases get fewer, never under 5")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure, and where it was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
