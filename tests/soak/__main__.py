"""Long runs, with seeds that are printed: `nox -s soak -- ranks --minutes 10`, `nox -s soak -- loaders --runs 20`."""

import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from reported import report

TRANSPORT = str(Path(__file__).parents[1] / "collate" / "test_transport.py")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]


def ranks(minutes: float, seed: int) -> None:
    """Random calls of four ranks, with faults whose true outcome is known."""
    from ranks import Soak

    soak = Soak(seed)
    soak.run(minutes)
    for name in sorted(soak.counts):
        print(f"{soak.counts[name]:>9,}  {name}")
    report(soak.counts, dict.fromkeys(soak.problems, "not as it should be"))
    print(*soak.problems, f"{len(soak.problems)} problems, seed {seed}", sep="\n")
    raise SystemExit(bool(soak.problems))


def loaders(runs: int, seed: int) -> None:
    """The tests of what workers send, again and again, with other seeds; it ends with the first that fails."""
    for again in range(seed, seed + runs):
        env = {**os.environ, "COLLATE_NPU_SEED": str(again), "COLLATE_NPU_NIGHTLY": "1"}
        subprocess.run([sys.executable, "-m", "pytest", "-q", TRANSPORT], env=env, check=True)


if __name__ == "__main__":
    parser = ArgumentParser("soak")
    parser.add_argument("what", choices=("ranks", "loaders"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    ranks(asked.minutes, asked.seed) if asked.what == "ranks" else loaders(asked.runs, asked.seed)
