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
    """Small loaders over each way to start workers: killed, resumed, with little shared memory."""
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
    adding = parser.add_subparsers(required=True)
    for run, name, kind, default in ((ranks, "minutes", float, 10.0), (loaders, "epochs", int, 1000)):
        one = adding.add_parser(run.__name__, help=run.__doc__)
        one.add_argument(f"--{name}", type=kind, default=default)
        one.add_argument("--seed", type=int, default=int(time.time()))
        one.set_defaults(run=run)
    asked = vars(parser.parse_args())
    asked.pop("run")(**asked)
