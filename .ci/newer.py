"""Which newer releases fit together: `plan` takes what an environment pins, and asks pip for the rest.

What a pinned release asks for and does not get, its next one does not get either: some stacks run here beside others that
they exclude.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

KEPT = ("torch", "triton", "pytest", "pytest-xdist", "hypothesis")
"""No newer one is taken; a release of triton belongs to one of torch."""
Release = dict[str, Any]
"""The metadata of one, as pip reports it."""


class Pin(NamedTuple):
    """The release that an environment has, and is it installed alone, without what it depends on?"""

    version: str
    alone: bool = True


@cache
def look(wanted: str, any_python: bool = False) -> Release | None:
    """The newest release that fits, where there is one."""
    flags = ["--dry-run", "--no-deps", "--ignore-installed", "--prefer-binary", "--quiet", "--report", "-"]
    flags += ["--ignore-requires-python"] * any_python
    done = subprocess.run([sys.executable, "-m", "pip", "install", *flags, wanted], capture_output=True, text=True)
    return json.loads(done.stdout)["install"][0]["metadata"] if done.returncode == 0 else None


def plan(pins: dict[str, Pin]) -> dict[str, Release]:
    """The release of each to take; one that is installed alone may ask for a later Python."""
    old = {name: pinned(name, pin) for name, pin in pins.items()}
    new = dict(old)
    for _ in range(3):  # who asks may change, and then what is asked for
        for name in (name for name in pins if name not in KEPT):
            asks = (binding(old[other], new[other], name, pins[name]) for other in pins if other != name)
            new[name] = fitting(name, pins, old[name], ",".join(filter(None, map(str, asks))))
    return new


def waiting(pins: dict[str, Pin], new: dict[str, Release]) -> list[str]:
    """Newer ones that Python or what is kept keeps away, and what two others do not agree on: "b stays: a asks for b>2"."""
    found, old = [], {name: pinned(name, pin) for name, pin in pins.items()}
    for name in (name for name in pins if name not in KEPT):
        last = look(name, True) or new[name]
        why = refuses(old[name], last, pins)
        if not (pins[name].alone or fits_python(last)):
            why.append(f"Python{last['requires_python']}")
        if why and last["version"] != new[name]["version"]:
            found.append(f"{name} {last['version']} asks for {', '.join(why)}")
        asks = {other: binding(old[other], new[other], name, pins[name]) for other in pins if other != name}
        unmet = [f"{other} asks for {name}{spec}" for other, spec in asks.items() if not has(spec, new[name]["version"])]
        found += [f"{name} stays: {', '.join(unmet)}"] * bool(unmet)
    return found


def pinned(name: str, pin: Pin) -> Release:
    return (None if name in KEPT else look(f"{name}=={pin.version}", True)) or {"version": pin.version}


def fitting(name: str, pins: dict[str, Pin], old: Release, wanted: str) -> Release:
    """The newest that the others take, and that takes what is kept; where there is none, the old one."""
    spec = SpecifierSet(wanted)
    while (found := look(f"{name}{spec}", pins[name].alone)) and refuses(old, found, pins):
        spec &= SpecifierSet(f"<{found['version']}")
    return found or old


def refuses(old: Release, new: Release, pins: dict[str, Pin]) -> list[str]:
    """What a newer release does not take of what is kept."""
    kept = {name: binding(old, new, name, pins[name]) for name in KEPT if name in pins}
    return [f"{name}{wanted}" for name, wanted in kept.items() if not has(wanted, pins[name].version)]


def binding(old: Release, new: Release, name: str, pin: Pin) -> SpecifierSet:
    """What the new release asks of another: nothing where the old one did not get it, nor by an extra that is new."""
    before, bound = asked(old, name), SpecifierSet()
    for extra, wanted in asked(new, name).items():
        if has(before[extra], pin.version) if extra in before else not extra:
            bound &= wanted
    return bound


def asked(release: Release, name: str) -> dict[str, SpecifierSet]:
    """What it asks of another, by extra."""
    found: dict[str, SpecifierSet] = {}
    for one in map(Requirement, release.get("requires_dist", ())):
        if canonicalize_name(one.name) == canonicalize_name(name):
            extras = ("", *release.get("provides_extra", ()))
            for extra in [extra for extra in extras if one.marker is None or one.marker.evaluate({"extra": extra})][:1]:
                found[extra] = found.get(extra, SpecifierSet()) & one.specifier
    return found


def has(wanted: SpecifierSet, version: str) -> bool:
    return wanted.contains(version, prereleases=True)


def fits_python(release: Release, python: str = platform.python_version()) -> bool:
    return has(SpecifierSet(release.get("requires_python") or ""), python)


def python_of(new: Iterable[Release]) -> str:
    """The first that takes all of them, this one or a later."""
    pythons = (f"3.{minor}" for minor in range(sys.version_info.minor, 20))
    return next(python for python in pythons if all(fits_python(each, f"{python}.99") for each in new))
