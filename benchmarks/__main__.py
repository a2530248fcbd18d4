"""`python -m benchmarks`: prepare each case, compare its outputs, time it, print the table, write JSON and the plot."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import editions, report
from benchmarks.measure import GROUPS, apart
from benchmarks.timing import Absent, Pace, Row

QUICK = Pace(rounds=5, least=3, budget=0.4, turn=0.003)


def main(given: list[str] | None = None) -> None:
    options = parse(given)
    if options.against:
        editions.show(editions.compare(options.against, options.only or GROUPS, options.rounds))
        return
    os.environ["COLLATE_NPU_BENCH_DEVICE"] = options.device  # read by the processes of groups
    pace = QUICK if options.quick else Pace(options.rounds, min(options.rounds, 5))
    start = perf_counter()
    rows: list[Row] = []
    absent: list[Absent] = []
    groups = options.only or GROUPS
    for together in [groups] if options.quick else [[group] for group in groups]:
        found = apart(together, pace, quick=options.quick, threads=options.threads)
        rows, absent = rows + found[0], absent + found[1]
    result = report.result(rows, absent, threads=options.threads, seconds=perf_counter() - start, quick=options.quick)
    report.show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(result, options.plot)


def plot(result: dict[str, Any], path: Path) -> None:
    try:
        if any(row["group"] == "growth" for row in result["rows"]):
            from benchmarks.plot_growth import draw
        else:
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
    parser.add_argument("--device", default="cpu", help="where steps run: cpu, cuda, npu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure, and where it was measured")
    parser.add_argument("--against", type=Path, metavar="DIR", help="our own times beside those of another checkout")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
