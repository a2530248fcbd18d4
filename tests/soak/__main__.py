"""Long runs, with seeds that are printed: `nox -s soak -- ranks --minutes 10`, `nox -s soak -- loaders --epochs 1000`."""

import sys
import time
from pathlib import Path

import typer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

app = typer.Typer(add_completion=False)


@app.command()
def ranks(minutes: float = 10.0, seed: int = int(time.time())) -> None:
    """Random calls of four ranks, with faults whose true outcome is known."""
    from ranks import Soak

    soak = Soak(seed)
    soak.run(minutes)
    told(seed, soak.counts, soak.problems)


@app.command()
def loaders(epochs: int = 1000, seed: int = int(time.time())) -> None:
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
    app()
