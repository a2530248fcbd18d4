"""Long runs, with seeds that are printed: `nox -s soak -- ranks --minutes 10`, `nox -s soak -- loaders --epochs 1000`,
`nox -s soak -- batches --count 200000`."""

import sys
import time
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

from reported import report

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]


def with_faults(what: str, amount: float, seed: int) -> bool:
    """Random calls of four ranks, or epochs of loaders with workers, with faults whose true outcome is known."""
    soak = import_module(what).Soak(seed)
    soak.run(amount)
    return told(soak.counts, soak.problems, seed)


def batches(count: int, seed: int) -> bool:
    """Random batches through the rooms of the library, and what the process holds more of after them."""
    from benchmarks.groups.long import Long

    case = Long(count, seed=seed)
    case.ready()
    over = [f"{name}: {found:.1f}, not {most}" for name, (found, most) in case.found.items() if found > most]
    over += [f"{each.name}: {each.why}" for each in case.absent]
    return told({"batches": count} | {name: round(found) for name, (found, _) in case.found.items()}, over, seed)


def told(counts: dict[str, int], problems: list[str], seed: int) -> bool:
    for name in sorted(counts):
        print(f"{counts[name]:>9,}  {name}")
    report(counts, dict.fromkeys(problems, f"not as it should be, seed {seed}"))
    print(*problems, f"{len(problems)} problems, seed {seed}", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    parser = ArgumentParser("soak")
    parser.add_argument("what", choices=("ranks", "loaders", "batches"))
    parser.add_argument("--minutes", type=float, default=10.0, help="of ranks")
    parser.add_argument("--epochs", type=int, default=1000, help="of loaders")
    parser.add_argument("--count", type=int, default=200_000, help="of batches")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    if asked.what == "batches":
        raise SystemExit(batches(asked.count, asked.seed))
    raise SystemExit(with_faults(asked.what, asked.minutes if asked.what == "ranks" else asked.epochs, asked.seed))
