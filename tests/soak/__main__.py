"""Long runs, with seeds that are printed: `nox -s soak -- ranks --minutes 10`, `nox -s soak -- loaders --epochs 1000`."""

import sys
import time
from argparse import ArgumentParser
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]


def ranks(minutes: float, seed: int) -> None:
    """Random calls of four ranks, with faults whose true outcome is known."""
    from ranks import Soak

    soak = Soak(seed)
    soak.run(minutes)
    told(seed, soak.counts, soak.problems)


def loaders(epochs: int, seed: int) -> None:
    """Small loaders over each way to start workers: killed or resumed."""
    from loaders import Soak

    soak = Soak(seed)
    soak.run(epochs)
    told(seed, soak.counts, soak.problems)


def told(seed: int, counts: dict[str, int], problems: list[str]) -> None:
    for name in sorted(counts):
        print(f"{counts[name]:>9,}  {name}")
    print(*problems, f"{len(problems)} problems, seed {seed}", sep="\n")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    parser = ArgumentParser("soak")
    parser.add_argument("what", choices=("ranks", "loaders"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    ranks(asked.minutes, asked.seed) if asked.what == "ranks" else loaders(asked.epochs, asked.seed)
