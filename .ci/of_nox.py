"""What sessions of nox install, and what their tests found: lock.py, upstream.py and elsewhere.py ask here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

import noxfile  # noqa: E402

noxfile.fits = lambda lock: False  # `installs` tells what the noxfile says, not what its locks hold
PATHS = re.compile(r"/\S*/site-packages/|(?<![\w./])/(?:[\w.+-]+/)+")
"""Where this machine keeps files is nobody's matter."""
AROUND = re.compile(r"^nox > Session \S+ failed: |^ *cause: | [(]took [^)]*[)][.]?$")
"""What nox and uv say around a reason."""


class Recorder:
    """A session of nox that notes what it would install."""

    posargs, venv_backend = (), "uv"

    def __init__(self, name: str, python: str | None = None) -> None:
        self.name, self.python, self.calls = name, python, []

    def install(self, *packages: str) -> None:
        self.calls.append(packages)

    def run(self, *_: Any, **__: Any) -> None: ...

    def create_tmp(self) -> str:
        return mkdtemp()


def installs(session: str, python: str | None = None) -> list[tuple[str, ...]]:
    """Its calls of `install`, but for what gets a folder of its own."""
    name, _, rest = session.rstrip(")").partition("(")
    recorder = Recorder(session, python)
    getattr(noxfile, name).func(recorder, *filter(None, [rest]))
    return [call for call in recorder.calls if "--target" not in call]


def run(session: str, folder: Path, args: Iterable[str] = (), python: str = "", **env: str) -> dict[str, Any]:
    """What its tests found, in new environments below the folder."""
    new = ("--envdir", str(folder), "--reuse-venv", "never", "--error-on-missing-interpreters")
    new += ("--force-python", python) if python else ()  # of its own a row has one
    return recorded(folder / session, *new, "-s", session, "--", *args, **env)


def recorded(place: Path, *flags: str, **env: str) -> dict[str, Any]:
    """What the tests of a call of nox found, and what else reports: how many passed, and what the red ones said. Its log
    is beside it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    log, told = Path(f"{place}.log"), Path(f"{place}.jsonl")
    told.write_text("")
    with log.open("w", encoding="utf-8") as out:
        env = {**os.environ, **env, "COLLATE_NPU_REPORT": str(told)}
        nox = [sys.executable, "-m", "nox", *flags]
        code = subprocess.run(nox, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT).returncode
    runs = [json.loads(line) for line in told.read_text("utf-8").splitlines()]
    if code:  # before pytest, or beside it
        lines = [line for line in log.read_text("utf-8").splitlines() if line and not line.startswith("nox > Command")]
        last = [*lines, *(line for line in lines if re.search("rror|not found|cause: ", line))][-1:]
        runs.append({"failed": {" ".join(("nox", *flags[flags.index("-s") :])): AROUND.sub("", " ".join(last))}})
    return summed(runs)


def summed(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One session runs pytest several times, and what counts other things than tests; what else its lines say is kept."""
    whole: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": {}}
    for each in runs:
        counts = {name: whole.get(name, 0) + value for name, value in each.items() if isinstance(value, int)}
        red = {test: PATHS.sub("", said)[:300] for test, said in each.get("failed", {}).items()}
        whole |= each | counts | {"failed": whole["failed"] | red}
    return whole
