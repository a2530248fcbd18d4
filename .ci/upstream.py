"""What newer releases of other stacks change: `nox -s upstream`, or of some: `nox -s upstream -- peers_fla npu`.

A session that pins packages of other stacks runs again, in .nox/upstream, where one of these has a newer release that fits
the others and torch. benchmarks/upstream.json keeps what its tests said, and the guide's page of stacks shows it. `--all`
runs the others too, `--look` none. Red tests are what it is there to find: they do not make it fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

import newer  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

import noxfile  # noqa: E402
from benchmarks import page_of_stacks  # noqa: E402

FOLDER = ROOT / ".nox" / "upstream"
SESSIONS = ("tests_all(newest)", "npu", *(name for name in dir(noxfile) if name.startswith("peers_")))
ARGUMENTS = {"tests_all(newest)": noxfile.TORCH_ALONE}
STAY = {"peers_veomni": ("transformers",)}
"""What a stack asks for elsewhere than in the metadata of its wheel."""
PATHS = re.compile(r"/\S*/site-packages/|(?<![\w./])/(?:[\w.+-]+/)+")
"""Where this machine keeps files is nobody's matter."""


class Recorder:
    """A session of nox that notes what it would install."""

    python, posargs, venv_backend = None, (), "uv"

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, []

    def install(self, *packages: str) -> None:
        self.calls.append(packages)

    def run(self, *_: Any, **__: Any) -> None: ...

    def create_tmp(self) -> str:
        return mkdtemp()


def named(session: str) -> dict[str, tuple[str, bool]]:
    """What it says of each package, by name, and does it install that alone? What gets a folder of its own is left out."""
    name, _, rest = session.rstrip(")").partition("(")
    recorder = Recorder(session)
    getattr(noxfile, name).func(recorder, *filter(None, [rest]))
    calls = [call for call in recorder.calls if "--target" not in call]
    return {
        re.split("[=<>]", one)[0]: (one, "--no-deps" in call) for call in calls for one in call if re.match("[A-Za-z]", one)
    }


def held(text: str, lock: Path) -> str:
    """Its release: of the lock, else of the pin, else the newest."""
    name, _, release = text.partition("==")
    for line in lock.read_text("utf-8").splitlines() if lock.exists() else ():
        if canonicalize_name(line.partition("==")[0]) == canonicalize_name(re.split("[<>]", name)[0]):
            return line.split()[0].partition("==")[2]
    return release or newer.look(text)["version"]


def pins_of(sessions: Iterable[str]) -> dict[str, dict[str, newer.Pin]]:
    """What each has of the packages that any session pins."""
    said = {session: named(session) for session in SESSIONS}
    peers = {name for packages in said.values() for name, (text, _) in packages.items() if "==" in text}
    return {
        session: {
            name: newer.Pin(held(text, noxfile.lock_of(session)), alone)
            for name, (text, alone) in said[session].items()
            if name in peers and name not in STAY.get(session, ())
        }
        for session in sessions
    }


def run(session: str, pins: dict[str, newer.Pin], new: dict[str, newer.Release]) -> dict[str, Any]:
    """Its tests beside the new releases: how many passed, and what the red ones said."""
    flags = ("--envdir", str(FOLDER), "--reuse-venv", "never", "-s", session, "--", *ARGUMENTS.get(session, ()))
    return recorded(FOLDER / session, *flags, **settings(pins, new))


def recorded(place: Path, *flags: str, **env: str) -> dict[str, Any]:
    """What the runs of pytest in a call of nox found, and what else reports (`COLLATE_NPU_REPORT`); its log is beside it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    log, told = Path(f"{place}.log"), Path(f"{place}.jsonl")
    told.write_text("")
    with log.open("w", encoding="utf-8") as out:
        env = {**os.environ, **env, "COLLATE_NPU_REPORT": str(told)}
        code = subprocess.run([sys.executable, "-m", "nox", *flags], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
    runs = [json.loads(line) for line in told.read_text("utf-8").splitlines()]
    if code.returncode:  # before pytest, or beside it
        lines = [line for line in log.read_text("utf-8").splitlines() if line and not line.startswith("nox >")]
        last = [*lines, *(line for line in lines if "rror" in line)][-1:]
        runs.append({"failed": {" ".join(("nox", *flags[flags.index("-s") :])): " ".join(last)}})
    return summed(runs)


def settings(pins: dict[str, newer.Pin], new: dict[str, newer.Release]) -> dict[str, str]:
    taken = {name: f"{name}=={each['version']}" for name, each in new.items() if name not in newer.KEPT}
    later = [pin for name, pin in taken.items() if pins[name].alone and not newer.fits_python(new[name])]
    one_dies = {"PYTEST_ADDOPTS": "-n 1"}  # then the tests after it still run
    found = {"NEWEST": " ".join(taken.values()), "LATER_PYTHON": " ".join(later), "NIGHTLY": "1"}
    return one_dies | {f"COLLATE_NPU_{name}": value for name, value in found.items()}


def summed(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One session runs pytest several times, and what counts other things than tests."""
    whole: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": {}}
    for each in runs:
        counts = {name: value for name, value in each.items() if name != "failed"}
        whole |= {name: whole.get(name, 0) + value for name, value in counts.items()}
        for test, said in each.get("failed", {}).items():
            whole["failed"][test] = PATHS.sub("", said)[:300]
    return whole


def main() -> None:
    os.environ["COLLATE_NPU_UNLOCKED"] = "1"  # what the noxfile says, not what its locks hold
    flags = {word for word in sys.argv[1:] if word.startswith("--")}
    for session, pins in pins_of([word for word in sys.argv[1:] if word not in flags] or SESSIONS).items():
        new = newer.plan(pins)
        pairs = {name: [pin.version, new[name]["version"]] for name, pin in sorted(pins.items())}
        ahead = {name: pair for name, pair in pairs.items() if len(set(pair)) > 1}
        one = {"date": str(date.today()), "newer": ahead, "waiting": newer.waiting(pins, new)}
        if "--look" not in flags:
            write(session, one | (run(session, pins, new) if ahead or "--all" in flags else {}))
        else:
            print(session, json.dumps(one, indent=1), flush=True)


def write(session: str, one: dict[str, Any]) -> None:
    """Into what is there now: another may run other sessions."""
    told = page_of_stacks.NEWER
    found = json.loads(told.read_text("utf-8")) | {session: one}
    told.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    page_of_stacks.write()
    print(f"{session}: {page_of_stacks.newer(one)}", flush=True)


if __name__ == "__main__":
    main()
