"""Fuzz the targets: `python -m fuzz --minutes 20 [--target adapt] [--seed 7]`, from the folder of the tests.

Bytes are steered by coverage where `atheris` is installed; else they are random. What fails is printed with its traceback
and put into `found.txt`, which `test_fuzz.py` replays.
"""

import argparse
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from reported import report

try:
    import atheris
except ImportError:
    atheris = None

FOUND = Path(__file__).with_name("found.txt")
LONGEST = 160
KEPT = "collate_npu.kernels.fusion_attention"
"""Not steered by: atheris 3.0.0 never frees the result of a comparison, and here it is 4 MiB, the compressed triangle."""


class Hunt:
    """One target after another: the first byte of each input names it. Two failures at one line are one fault."""

    def __init__(self, names: list[str], minutes: float) -> None:
        from fuzz.targets import TARGETS

        self.targets = {name: TARGETS[name] for name in names or TARGETS}
        self.names = [name for name in self.targets for _ in range(3 if name == "probe" else 20)]  # which takes long
        if "probe" in self.targets:  # what it imports is steered by, too
            import fuzz.probing  # noqa: F401
        self.end, self.counts, self.seen = time.monotonic() + 60 * minutes, Counter[str](), set()
        self.failed: dict[str, str] = {}

    def once(self, data: bytes) -> None:
        from fuzz.drawn import Drawn

        name = self.names[data[0] % len(self.names) if data else 0]
        self.counts[name] += 1
        try:
            self.targets[name](Drawn(data[1:]))
        except Exception as error:
            self.told(name, data[1:], error)
        if time.monotonic() > self.end:
            print(f"{sum(self.counts.values())} executions: {dict(self.counts)}, {len(self.seen)} failed", flush=True)
            report({f"executions of {each}": n for each, n in self.counts.items()}, self.failed)
            os._exit(bool(self.seen))  # libFuzzer does not come back

    def told(self, name: str, data: bytes, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if (place := (name, type(error), last.filename, last.lineno)) in self.seen:
            return
        self.seen.add(place)
        self.failed[f"{name} {data.hex()}"] = f"{type(error).__name__}: {error}"
        print(f"{name} {data.hex()}", *traceback.format_exception(error), sep="\n", flush=True)
        with FOUND.open("a") as file:
            file.write(f"{name} {data.hex()}  # {type(error).__name__}: {' '.join(str(error).split())[:90]}\n")


def main() -> None:
    reads = argparse.ArgumentParser(description=__doc__)
    reads.add_argument("--minutes", type=float, default=2)
    reads.add_argument("--target", action="append")
    reads.add_argument("--seed", type=int, default=time.time_ns() // 1000 % 2**31)
    asked = reads.parse_args()
    print(f"--seed {asked.seed}, {'steered by coverage' if atheris else 'random: atheris is not installed'}", flush=True)
    warnings.filterwarnings("ignore")
    with atheris.instrument_imports(include=["collate_npu"], exclude=[KEPT]) if atheris else nullcontext():
        hunt = Hunt(asked.target, asked.minutes)
    if atheris:
        flags = [f"-seed={asked.seed}", f"-max_len={LONGEST}", "-len_control=0", "-rss_limit_mb=0", "-verbosity=0"]
        flags += ["-timeout=86400", "-report_slow_units=86400"]  # a machine that sleeps is no slow input
        atheris.Setup([sys.argv[0], *flags], hunt.once)
        atheris.Fuzz()
    chosen = random.Random(asked.seed)
    while True:
        hunt.once(chosen.randbytes(1 + chosen.randrange(LONGEST)))


if __name__ == "__main__":
    main()
