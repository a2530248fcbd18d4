"""What newer releases of other stacks change: `nox -s upstream`, or of some: `nox -s upstream -- peers_fla npu`.

A session that pins packages of other stacks runs again, in .nox/upstream, where one of these has a newer release that fits
the others and torch, on the first Python that takes all of them. benchmarks/upstream.json keeps what its tests said, and the
guide's page of stacks shows it. `--all` runs the others too, `--look` none. Red tests are what it is there to find: they do
not make it fail.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import newer
from of_nox import ROOT, installs, run as run_session
from packaging.utils import canonicalize_name

import noxfile
from benchmarks import page_of_stacks

FOLDER = ROOT / ".nox" / "upstream"
SESSIONS = ("tests_all(newest)", "npu", *(name for name in dir(noxfile) if name.startswith("peers_")))
ARGUMENTS = {"tests_all(newest)": noxfile.TORCH_ALONE}
STAY = {"peers_veomni": ("transformers",)}
"""What a stack asks for elsewhere than in the metadata of its wheel."""


def named(session: str) -> dict[str, tuple[str, bool]]:
    """What it says of each package, by name, and does it install that alone? What gets a folder of its own is left out."""
    calls = installs(session)
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


def run(session: str, new: dict[str, newer.Release]) -> dict[str, Any]:
    """Its tests beside the new releases: how many passed, and what the red ones said."""
    taken = [f"{name}=={each['version']}" for name, each in new.items() if name not in newer.KEPT]
    one_dies = {"PYTEST_ADDOPTS": "-n 1"}  # then the tests after it still run
    found = {"COLLATE_NPU_NEWEST": " ".join(taken), "COLLATE_NPU_NIGHTLY": "1"}
    return run_session(session, FOLDER, ARGUMENTS.get(session, ()), newer.python_of(new.values()), **one_dies, **found)


def main() -> None:
    flags = {word for word in sys.argv[1:] if word.startswith("--")}
    for session, pins in pins_of([word for word in sys.argv[1:] if word not in flags] or SESSIONS).items():
        new = newer.plan(pins)
        pairs = {name: [pin.version, new[name]["version"]] for name, pin in sorted(pins.items())}
        ahead = {name: pair for name, pair in pairs.items() if len(set(pair)) > 1}
        one = {"date": str(date.today()), "newer": ahead, "waiting": newer.waiting(pins, new)}
        if "--look" not in flags:
            write(session, one | (run(session, new) if ahead or "--all" in flags else {}))
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
