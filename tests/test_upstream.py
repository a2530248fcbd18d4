"""`nox -s elsewhere`: how the guide tells what it found, and what a commit and a night run."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
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


@pytest.mark.slow
def test_a_red_test_is_red_whatever_stands_in_the_environment(tmp_path):
    for name in ("conftest", "rotation", "reported"):
        shutil.copy(ROOT / "tests" / f"{name}.py", tmp_path)
    (tmp_path / "test_red.py").write_text("def test_red():\n    assert not 1\n", encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path), *sys.path)), "COLLATE_NPU_NIGHTLY": "1"}
    env |= {"COLLATE_NPU_REPORT": str(tmp_path / "told")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(tmp_path)], env=env, cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert (tmp_path / "told").exists()


Item = type("Item", (SimpleNamespace,), {"__hash__": object.__hash__})


def items(functions, cases, **marks):
    """So many test functions with so many cases each, marked."""
    marked = {name: SimpleNamespace(args=args) for name, args in marks.items()}
    return [Item(nodeid=f"t::f{n}[{case}]", get_closest_marker=marked.get)
            for n in range(functions) for case in range(cases)]  # fmt: skip


@pytest.mark.parametrize(("night", "share", "marks", "drawn"), [
    (False, 1.0, {}, (900, 900)), (False, 1.0, {"draws": (2,)}, (200, 200)), (False, 1.0, {"models": ()}, (200, 200)),
    (False, 0.5, {}, (300, 600)), (False, 0.0, {"draws": (2,)}, (2, 2)), (True, 0.0, {"draws": (2,)}, (900, 900)),
])  # fmt: skip
def test_a_commit_runs_some_case_of_each_test_a_session_with_a_share_some_tests_and_the_night_all(
    night, share, marks, drawn, monkeypatch
):
    for name, value in {"NIGHTLY": night, "SHARE": share, "OF_MODELS": 2}.items():
        monkeypatch.setattr(rotation, name, value)
    taken = rotation.of_this_run(items(100, 9, **marks))
    assert drawn[0] <= len(taken) <= drawn[1]
    shared = rotation.of_this_run(items(100, 9, together=("one",)))
    assert len(shared) == 900  # all or none
