"""The night: each session of nox with nothing left out, and what it found, dated, in benchmarks/nightly.json.

`.ci/run nightly`; some of it: `.ci/run nightly peers_fla "soak -- ranks"`. It ends with 1 where something was red, which a
line for each says. COLLATE_NPU_SEED repeats a night; one that was cut off goes on where it was, if only results changed.
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
from of_nox import ROOT, recorded

from benchmarks import figures

NIGHTS = ROOT / "benchmarks" / "nightly.json"
PEERS = [name for name in upstream.SESSIONS if name.startswith("peers_")]
MODELS = "tests/integration"
EACH = f"{MODELS}/test_differential.py"
PARTS = (EACH, f"{MODELS} --ignore={EACH}", f"tests --ignore={MODELS}")
SESSIONS = ("fuzz", *(f"tests_all(newest) -- {part}" for part in PARTS), *PEERS, "tests_all(oldest)")
SESSIONS += ("audit", "npu", "oldest_torch", "package", "docs", "lint", "types", "faults", "mutants")
SESSIONS += ("card -- --device cpu --quick",)
"""The longest first: the other lane does the rest."""
ALONE = ("soak -- ranks --minutes 10", "soak -- loaders --epochs 1000", "soak -- batches")
"""What has a clock of its own gets the whole machine."""
REPORTS = {"upstream": upstream.SESSIONS, "elsewhere": tuple(upstream.noxfile.ROWS)}
KEPT = 20
"""Nights in the file."""
_WRITES = Lock()


def main() -> int:
    night = begun(int(os.environ["COLLATE_NPU_SEED"]), sys.argv[1:])
    rest = [each for each in sys.argv[1:] or (*SESSIONS, *ALONE) if each not in night["sessions"]]
    rooms: dict[str, list[str]] = {}  # one after the other in one environment
    for each in rest:
        rooms.setdefault("alone" if each in ALONE else each.partition(" -- ")[0], []).append(each)
    last = rooms.pop("alone", [])
    with ThreadPoolExecutor(2) as lanes:
        list(lanes.map(lambda some: [run(each, night) for each in some], rooms.values()))
    for each in last:
        run(each, night)
    for name, every in {} if sys.argv[1:] else REPORTS.items():  # of others each night, into files of their own
        for each in random.Random(night["seed"]).sample(every, 2):
            subprocess.run([sys.executable, f".ci/{name}.py", each], cwd=ROOT, check=False)
            found = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text("utf-8")).get(each, {})
            ran = found.get("date", "") >= night["began"][:10] and "reason" not in found
            failed = found.get("failed", {}) if ran else {each: found.get("reason", "It did not run on this machine.")}
            night["sessions"][f"{name} {each}"] = {"failed": failed}
    night["ended"] = now()
    write(night)
    red = {name: one["failed"] for name, one in night["sessions"].items() if one["failed"]}
    for name, failed in red.items():
        print(*(f"{name}: {test}: {said}" for test, said in failed.items()), sep="\n")
    print(f"{len(night['sessions'])} sessions, {len(red)} red, seed {night['seed']}")
    return bool(red)


def begun(seed: int, some: Sequence[str]) -> dict[str, Any]:
    """A new night, or the one of this seed and these sources that was cut off, which goes on."""
    own = {"source": os.environ["COLLATE_NPU_SOURCE"] + changed(), "seed": seed, "some": list(some)}
    ours = next((each for each in nights() if own.items() <= each.items() and not each["ended"]), None)
    machine = {"python": platform.python_version(), "torch": upstream.noxfile.TORCH, "cores": os.cpu_count()}
    new = {"began": now(), "ended": "", "commit": git("rev-parse", "--short=7", "HEAD"), **own, **machine}
    return ours or {**new, "sessions": {}}


def nights() -> list[dict[str, Any]]:
    return list(json.loads(NIGHTS.read_text("utf-8"))) if NIGHTS.exists() else []


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def changed() -> str:
    return " and changes" * bool(git("status", "--porcelain", "--", ":!benchmarks/*.json", ":!*/guide/*.md"))


def git(*asked: str) -> str:
    return subprocess.run(("git", *asked), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(session: str, night: dict[str, Any]) -> None:
    """Its sums into the night, and the night so far into the file."""
    start, env = time.monotonic(), {"COLLATE_NPU_NIGHTLY": "1"}
    if session.startswith("card"):  # it takes the Python on the PATH
        env["PATH"] = os.pathsep.join((str(ROOT / ".nox" / "tests_all-newest" / "bin"), os.environ["PATH"]))
    found = recorded(ROOT / "build" / "nightly" / session.replace("/", "_"), "-s", *session.split(), **env)
    with _WRITES:
        night["sessions"][session] = {"seconds": round(time.monotonic() - start), **found}
        write(night)
    counts = [f"{value} {name}" for name, value in found.items() if name != "failed" and value]  # a share is a text
    print(f"{session}:", *counts, f"{len(found['failed'])} failed, {time.monotonic() - start:.0f} s", flush=True)


def write(night: dict[str, Any]) -> None:
    others = [each for each in nights() if (each["began"], each["seed"]) != (night["began"], night["seed"])]
    NIGHTS.write_text(json.dumps([night, *others][:KEPT], indent=1) + "\n", "utf-8")
    for path, text in figures.between("promises", nights=figures.nights()).items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
