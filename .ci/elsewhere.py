"""What runs on other Pythons and beside other releases: `nox -s elsewhere`, or of some rows: `nox -s elsewhere -- newest`.

Each row of the noxfile's table runs in a new environment of its own, in .nox/elsewhere. benchmarks/elsewhere.json keeps what
was found there and what the tests said, and the guide's page of installation shows it. COLLATE_NPU_SHARE=0.3 draws three
tenths of the tests, with COLLATE_NPU_SEED the same ones. Red tests are what it is there to find: they do not make it fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from random import randrange
from typing import Any

from of_nox import ROOT, run

import noxfile
from benchmarks import figures

TOLD = figures.HERE / "elsewhere.json"
ASKED = ("transformers", "numpy")


def asked(name: str) -> dict[str, str]:
    """What a row is to have: it stands in the table where nothing could be installed."""
    python, torch, beside = noxfile.ROWS[name]
    pins = [noxfile.last(one, python) for one in beside]
    return {"python": python, "torch": torch.partition("==")[2]} | {
        one: pin.replace(one, "").removeprefix("==") for one in ASKED for pin in pins if pin.startswith(one)
    }


def commit() -> str:
    """With a + where the package or its tests have changed since."""
    git = ("git", "-C", str(ROOT))
    here = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "collate_npu/*.py", "tests"]).returncode
    return here + "+" * bool(changed)


def ran(name: str) -> dict[str, Any]:
    """A row, as the file keeps it."""
    share = os.environ.get("COLLATE_NPU_SHARE", "1")
    seed = os.environ.get("COLLATE_NPU_SEED", str(randrange(10**6)))
    one = {"date": str(date.today()), "commit": commit(), "share": float(share), "seed": int(seed)}
    told = run(f"row({name})", ROOT / ".nox" / "elsewhere", COLLATE_NPU_SEED=seed)
    found = asked(name) | told.pop("found", {})
    if not told["passed"]:
        return one | found | {"reason": " ".join(told["failed"].values())}
    return one | found | told


def main() -> None:
    for name in sys.argv[1:] or noxfile.ROWS:
        one = ran(name)
        known = json.loads(TOLD.read_text("utf-8")) if TOLD.exists() else {}
        print(name, json.dumps(one, indent=1), flush=True)
        if name in known and one.get("reason", "").startswith("Python interpreter"):
            continue  # this machine lacks the Python: what ran elsewhere stays
        rows = {row: (known | {name: one})[row] for row in noxfile.ROWS if row in {*known, name}}
        TOLD.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
        for path, text in figures.between("install", elsewhere=figures.elsewhere_table()).items():
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
