"""The environments that nox has built, locked: `nox -s lock` writes .ci/locks/NAME.txt, a line for each package with the
hash of the one file that this machine took of it (Python 3.11, Linux, x86-64). Build them with COLLATE_NPU_UNLOCKED=1 first.

torch stays out, for which build of it there is depends on the index, and so does what asks for a later Python: the noxfile
pins both.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYTHON = platform.python_version()


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


def main() -> None:
    locks = ROOT / ".ci" / "locks"
    locks.mkdir(exist_ok=True)
    for name in sys.argv[1:] or sorted(path.parent.name for path in (ROOT / ".nox").glob("*/pyvenv.cfg")):
        pins = held(ROOT / ".nox" / name)
        beside = [pin for pin in pins if pin.startswith("torch==")]
        lines = ["# beside torch"] * bool(beside) + files_of([pin for pin in pins if pin not in beside])
        (locks / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{name}: {len(lines)} lines")


if __name__ == "__main__":
    main()
