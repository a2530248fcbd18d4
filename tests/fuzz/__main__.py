"""Fuzz the targets: `python -m fuzz --minutes 20 [--target adapt] [--seed 7] [--processes 2]`, from the folder of the tests.

Bytes are steered by coverage where `atheris` is installed; else, or `--unsteered`, random or changed from earlier ones. What
fails is made small, printed with its traceback, and put into `found.txt`, which `test_fuzz.py` replays.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

FOUND = Path(__file__).with_name("found.txt")
LONGEST = 160
KEPT = "collate_npu.kernels.fusion_attention.operator_call"
"""Not steered by: atheris 3.0.0 never frees the result of a comparison, and here it is 4 MiB, the compressed triangle."""
NAMES = ["collate", "derive", "adapt", "split", "gather", "outputs", "kernels", "bad_input"]


def failing(target: Callable, data: bytes) -> Exception | None:
    from fuzz.drawn import Drawn

    try:
        target(Drawn(data))
    except Exception as error:
        return error
    return None


def place_of(error: Exception) -> tuple:
    """Two failures at one place are taken for one fault."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    cause = place_of(error.__cause__) if isinstance(error.__cause__, Exception) else ()
    return type(error).__name__, last.filename, last.lineno, *cause


def shrunk(target: Callable, data: bytes, place: tuple) -> bytes:
    """Chunks taken out, or made zero, as long as it fails at the same place."""
    size = len(data)
    while size:
        for at in range(0, len(data), size):
            for less in (data[:at] + data[at + size :], data[:at] + bytes(len(data[at : at + size])) + data[at + size :]):
                error = failing(target, less) if less != data else None
                if error is not None and place_of(error) == place:
                    data = less
                    break
        size //= 2
    return data


def told(name: str, target: Callable, data: bytes, error: Exception) -> None:
    data = shrunk(target, data, place_of(error))
    error = failing(target, data) or error
    print(f"{name} {data.hex()}", *traceback.format_exception(error), sep="\n", flush=True)
    with FOUND.open("a") as file:
        file.write(f"{name} {data.hex()}  # {type(error).__name__}: {' '.join(str(error).split())[:90]}\n")


def mutated(seed: int) -> Iterator[bytes]:
    """Without coverage: half of the inputs are new, half are changed in a few bytes."""
    chosen, before = random.Random(seed), b""
    while True:
        data = bytearray(before)
        for _ in range(1 + chosen.randrange(4) if before else 0):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        before = bytes(data) if before and chosen.random() < 0.5 else chosen.randbytes(1 + chosen.randrange(LONGEST))
        yield before


def work(names: list[str], seed: int, minutes: float, steered: bool) -> None:
    """One process: the first byte of each input names its target."""
    with atheris.instrument_imports(include=["collate_npu"], exclude=[KEPT]) if steered else nullcontext():
        from fuzz.targets import TARGETS
    warnings.filterwarnings("ignore")
    counts, seen, end = Counter(), set(), time.monotonic() + 60 * minutes

    def once(data: bytes) -> None:
        name = names[data[0] % len(names) if data else 0]
        counts[name] += 1
        error = failing(TARGETS[name], data[1:])
        if error is not None and (name, place := place_of(error)) not in seen:
            seen.add((name, place))
            told(name, TARGETS[name], data[1:], error)
        if time.monotonic() > end:
            print(json.dumps({"ran": counts, "failed": len(seen)}), flush=True)
            os._exit(bool(seen))  # libFuzzer does not come back

    if steered:
        flags = [f"-seed={seed}", f"-max_len={LONGEST}", "-len_control=0", "-rss_limit_mb=0", "-verbosity=0"]
        flags += ["-timeout=86400", "-report_slow_units=86400"]  # a machine that sleeps is no slow input
        atheris.Setup([sys.argv[0], *flags], once)
        atheris.Fuzz()
    for data in mutated(seed):
        once(data)


def main() -> None:
    reads = argparse.ArgumentParser(description=__doc__)
    reads.add_argument("--minutes", type=float, default=2)
    reads.add_argument("--target", choices=NAMES, action="append")
    reads.add_argument("--seed", type=int, default=time.time_ns() // 1000 % 2**31)
    reads.add_argument("--processes", type=int, default=2)
    reads.add_argument("--unsteered", action="store_true", help="three times as many inputs, none chosen by coverage")
    reads.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = reads.parse_args()
    steered = atheris is not None and not asked.unsteered
    if asked.alone:
        work(asked.target or NAMES, asked.seed, asked.minutes, steered)
    why = "" if asked.unsteered else ": atheris is not installed"
    print(f"--seed {asked.seed}, {'steered by coverage' if steered else f'not steered by coverage{why}'}")
    same = [sys.executable, "-m", "fuzz", "--alone", "--minutes", str(asked.minutes), *["--unsteered"] * (not steered)]
    same += [each for name in asked.target or () for each in ("--target", name)]
    runs = [
        subprocess.Popen([*same, "--seed", str(asked.seed + n)], stdout=subprocess.PIPE, text=True)
        for n in range(asked.processes)
    ]
    counts, failed = Counter(), 0
    for run in runs:
        for line in run.stdout:
            if line.startswith('{"ran"'):
                counts.update(json.loads(line)["ran"])
            else:
                print(line, end="", flush=True)
        failed += run.wait() != 0
    print(f"{sum(counts.values())} executions: {', '.join(f'{name} {n}' for name, n in sorted(counts.items()))}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
