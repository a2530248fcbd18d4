"""The night: each session of nox with nothing left out, and what it found, dated, in benchmarks/nightly.json.

`.ci/run nightly`; some of it: `.venv-ci/bin/python .ci/nightly.py peers_fla "soak -- ranks"`. It ends with 1 where something
was red, which a line for each says. COLLATE_NPU_SEED repeats a night.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from threading import Lock
from typing import Any

import upstream

NIGHTS = upstream.ROOT / "benchmarks" / "nightly.json"
PEERS = [name for name in upstream.SESSIONS if name.startswith("peers_")]
SESSIONS = ("tests_all(newest)", *PEERS, "tests_all(oldest)", "fuzz -- --minutes 60", "audit", "npu", "oldest_torch")
SESSIONS += ("package", "docs", "lint", "types", "mutants", "mutants -- 400", "card -- --device cpu --quick")
ALONE = ("soak -- ranks --minutes 10", "soak -- loaders --epochs 1000", "soak -- batches")
"""What has a clock of its own gets the whole machine."""
KEPT = 20
"""Nights in the file."""
_WRITES = Lock()


def main() -> int:
    asked = sys.argv[1:]
    seed = os.environ["COLLATE_NPU_SEED"]
    rest = random.Random(seed).sample(upstream.SESSIONS, 4)  # a report, of others each night: red there is red upstream
    night = {"date": now(), "commit": commit(), "seed": int(seed), "whole": not asked, "python": platform.python_version()}
    night |= {"torch": upstream.noxfile.TORCH, "cores": os.cpu_count(), "minutes": 0.0, "sessions": {}}
    start = time.monotonic()
    with ThreadPoolExecutor(2) as lanes:
        list(lanes.map(lambda each: run(each, night, start), [each for each in asked or SESSIONS if each not in ALONE]))
    for each in [each for each in asked or ALONE if each in ALONE]:
        run(each, night, start)
    if not asked:
        subprocess.run([sys.executable, ".ci/upstream.py", *rest], cwd=upstream.ROOT, check=False)
        night["upstream"] = rest
    write(night, start)
    red = {name: one["failed"] for name, one in night["sessions"].items() if one["failed"]}
    for name, failed in red.items():
        print(*(f"{name}: {test}: {said}" for test, said in failed.items()), sep="\n")
    print(f"{len(night['sessions'])} sessions in {night['minutes']} minutes, {len(red)} red, seed {seed}")
    return bool(red)


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def commit() -> str:
    told = ("git", "describe", "--always", "--dirty", "--exclude", "*")
    return subprocess.run(told, cwd=upstream.ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(session: str, night: dict[str, Any], start: float) -> None:
    """Its sums into the night, and the night so far into the file."""
    begun = time.monotonic()
    env = {"COLLATE_NPU_NIGHTLY": "1"}
    if session.startswith("card"):  # it takes the Python on the PATH
        env["PATH"] = os.pathsep.join((str(upstream.ROOT / ".nox" / "tests_all-newest" / "bin"), os.environ["PATH"]))
    found = upstream.recorded(upstream.ROOT / "build" / "nightly" / session, "-s", *session.split(), **env)
    with _WRITES:
        night["sessions"][session] = {"seconds": round(time.monotonic() - begun), **found}
        write(night, start)
    print(f"{session}: {told(night['sessions'][session])}", flush=True)


def told(one: dict[str, Any]) -> str:
    counts = [f"{value:,} {name}" for name, value in one.items() if name not in ("failed", "seconds") and value]
    return ", ".join([*counts, f"{len(one['failed'])} failed, {one['seconds']} s"])


def write(night: dict[str, Any], start: float) -> None:
    """Into what is there; a night that goes on takes its own place again."""
    night["minutes"] = round((time.monotonic() - start) / 60, 1)
    nights: Sequence[dict[str, Any]] = json.loads(NIGHTS.read_text("utf-8")) if NIGHTS.exists() else []
    others = [each for each in nights if (each["date"], each["seed"]) != (night["date"], night["seed"])]
    NIGHTS.write_text(json.dumps([night, *others][:KEPT], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
