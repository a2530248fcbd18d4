"""The environments that nox has built, locked: `nox -s lock` writes .ci/locks/NAME.txt, a line for each package with the
hash of the one file that this machine took of it (Python 3.11, Linux, x86-64). Build them with COLLATE_NPU_UNLOCKED=1 first.

torch stays out, for which build of it there is depends on the index, and so does what asks for a later Python: the noxfile
pins both.

`nox -s lock -- --elsewhere` resolves `tests` for other Pythons, and builds nothing: .ci/locks/tests-3.12.txt has the hashes
of all wheels that fit this Python on Linux, x86-64 or aarch64.
"""

import json
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import tomllib
from of_nox import ROOT, installs
from packaging.specifiers import SpecifierSet

PYTHON = platform.python_version()
PYTHONS = ("3.10", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
OF_CUDA = ("torch", "triton", "nvidia-", "cuda-")
"""torch, and what its build for CUDA brings."""


def pip(*args: str) -> str:
    return subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True, check=True).stdout


def held(environment: Path) -> list[str]:
    """`name==version` of each package in it."""
    frozen = pip("--python", str(environment), "freeze", "--all").splitlines()
    return [line for line in frozen if "==" in line and not line.startswith("#")]  # an editable one is a comment too


def files_of(pins: list[str]) -> list[str]:
    """The same, with the hash of the file."""
    look = ("--dry-run", "--no-deps", "--ignore-installed", "--ignore-requires-python", "--quiet", "--report", "-")
    report = json.loads(pip("install", *look, *pins))["install"]
    fits = [each for each in report if PYTHON in SpecifierSet(each["metadata"].get("requires_python", ""))]
    found = [(each["metadata"], each["download_info"]["archive_info"]["hashes"]["sha256"]) for each in fits]
    return sorted(f"{data['name'].lower()}=={data['version']} --hash=sha256:{digest}" for data, digest in found)


def of_python(session: str, python: str) -> list[str]:
    """The lock of a session on another Python: one release of each package for all machines."""
    wanted = {one for call in installs(session, python) for one in call if one[:1] not in "-."}
    hashes: dict[str, set[str]] = defaultdict(set)
    for machine in MACHINES:
        for each in resolved([*wanted, *hashes], python, machine):
            if not each["name"].startswith(OF_CUDA):
                found = {wheel["hashes"]["sha256"] for wheel in each["wheels"]}
                hashes[f"{each['name']}=={each['version']}"] |= found
    lines = [" ".join([pin, *(f"--hash=sha256:{one}" for one in sorted(found))]) for pin, found in sorted(hashes.items())]
    return [f"# beside torch: {' '.join(MACHINES)}", *lines]


def resolved(wanted: list[str], python: str, machine: str) -> list[dict]:
    """The packages, each with the wheels that fit."""
    on = ("--python-version", python, "--python-platform", f"{machine}-manylinux_2_28", "--only-binary", ":all:")
    command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", *on, "-"]
    done = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"Python {python} on {machine}: {done.stderr}")
    return tomllib.loads(done.stdout)["packages"]


def elsewhere(locks: Path) -> None:
    for python in PYTHONS:
        lines = of_python("tests", python)
        (locks / f"tests-{python}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"tests, Python {python}: {len(lines)} lines")


def main() -> None:
    locks = ROOT / ".ci" / "locks"
    locks.mkdir(exist_ok=True)
    if sys.argv[1:] == ["--elsewhere"]:
        elsewhere(locks)
        return
    for name in sys.argv[1:] or sorted(path.parent.name for path in (ROOT / ".nox").glob("*/pyvenv.cfg")):
        pins = held(ROOT / ".nox" / name)
        beside = [pin for pin in pins if pin.startswith("torch==")]
        lines = ["# beside torch"] * bool(beside) + files_of([pin for pin in pins if pin not in beside])
        (locks / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{name}: {len(lines)} lines")


if __name__ == "__main__":
    main()
