"""`nox -s elsewhere`: how the guide tells what it found, and what a commit and a night run."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import rotation
from house import ROOT

sys.path.append(str(ROOT))
from benchmarks import figures


def test_a_row_says_what_ran_elsewhere_or_why_nothing_did():
    one = {"date": "2026-11-26", "commit": "abc1234", "share": 0.3, "python": "3.14.1", "torch": "2.13.0+cpu"}
    ran = {**one, "platform": "Linux x86_64, glibc 2.36", "passed": 1200, "skipped": 5, "failed": {"test_a.py::test_b": "c"}}
    *_, first, second = figures.elsewhere_table({"a": ran, "b": {**one, "reason": "no Python|3.14"}}).splitlines()
    had = "| 3.14.1 | 2.13.0 | none | none |"
    assert first == f"{had} 1,200 pass, **1 fail**, 5 skipped, of a random 30% | 2026-11-26, Linux x86_64, commit abc1234 |"
    assert second == f"{had} not run: no Python\\|3.14 | 2026-11-26, commit abc1234 |"
    rows = json.loads((ROOT / "benchmarks" / "elsewhere.json").read_text("utf-8")).values()
    assert all({*one} <= {*row} and ("reason" in row) != ({*ran} <= {*row}) for row in rows)


def test_a_red_test_is_red_whatever_stands_in_the_environment(tmp_path):
    for name in ("conftest", "rotation", "reported"):
        shutil.copy(ROOT / "tests" / f"{name}.py", tmp_path)
    (tmp_path / "test_red.py").write_text("def test_red():\n    assert not 1\n", encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path), *sys.path)), "COLLATE_NPU_NIGHTLY": "1"}
    env |= {"COLLATE_NPU_REPORT": str(tmp_path / "told")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(tmp_path)], env=env, cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert (tmp_path / "told").exists()


def test_a_commit_draws_some_of_the_night_and_the_night_all(monkeypatch):
    for night, drawn in ((False, (1, 600)), (True, (9999, 9999))):
        monkeypatch.setattr(rotation, "NIGHTLY", night)
        marked = (SimpleNamespace(nodeid=str(n), get_closest_marker=lambda name: name == "nightly") for n in range(9999))
        assert drawn[0] <= sum(not rotation.of_the_night(item) for item in marked) <= drawn[1]
