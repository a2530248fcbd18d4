"""`nox -s upstream`: which newer releases are taken, and how the page of stacks tells what they change."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import rotation
from house import ROOT

pytest.importorskip("packaging")
sys.path += [str(ROOT), str(ROOT / ".ci")]

import newer

from benchmarks import page_of_stacks

INDEX = {
    "torch": {"2.13": []},
    "base": {"1.0": [], "1.5": [], "2.0": [], "3.0": ["torch>=2.14"]},
    "stack": {"1.0": ["base<2", "old<1"], "1.1": ["base<3", "old<1"], "2.0": ["base==2.0", "torch==2.14"]},
    "other": {"4.0": ["base>=1", "torch==9; extra == 'card'"], "4.1": ["base!=2.0", "torch==8; extra == 'card'"]},
    "third": {"1": [], "2": ["base>2"]},
    "old": {"7": [], "8": []},
}
"""What each release asks for."""
LATER = {"requires_python": ">=99"}


@pytest.fixture(autouse=True)
def index(monkeypatch):
    def look(wanted, any_python=False):
        one = newer.Requirement(wanted)
        fit = [
            each for each in INDEX[one.name] if each in one.specifier and (any_python or (one.name, each) != ("old", "8"))
        ]
        told = {"version": fit[-1], "requires_dist": INDEX[one.name][fit[-1]], "provides_extra": ["card"]} if fit else None
        return told | LATER if told and (one.name, fit[-1]) == ("old", "8") else told

    monkeypatch.setattr(newer, "look", look)


def taken(alone=True, **pins):
    found = {name: newer.Pin(version, alone) for name, version in {"torch": "2.13", **pins}.items()}
    new = newer.plan(found)
    return {name: new[name]["version"] for name in pins}, newer.waiting(found, new)


def test_the_newest_is_taken_that_fits_torch_and_what_the_others_ask():
    assert taken(base="1.0") == ({"base": "2.0"}, ["base 3.0 asks for torch>=2.14"])
    both, kept_away = taken(stack="1.0", base="1.0")
    assert both == {"stack": "1.1", "base": "2.0"}
    assert "stack 2.0 asks for torch==2.14" in kept_away
    assert taken(stack="1.0", base="1.0", other="4.0")[0] == {"stack": "1.1", "base": "1.5", "other": "4.1"}


def test_where_nothing_fits_all_the_pinned_one_stays():
    pins, kept_away = taken(base="1.0", stack="1.0", third="1")
    assert pins == {"base": "1.0", "stack": "1.1", "third": "2"}
    assert "base stays: third asks for base>2" in kept_away


def test_what_is_passed_over_today_stays_so():
    """stack asks for an old one below 1 and runs beside 7; a card's extra asks for another torch."""
    assert taken(stack="1.0", base="1.0", old="7")[0]["old"] == "8"
    assert taken(other="4.0") == ({"other": "4.1"}, [])


def test_a_later_python_is_passed_over_where_nothing_is_installed_along():
    assert taken(old="7") == ({"old": "8"}, [])
    assert taken(old="7", alone=False) == ({"old": "7"}, ["old 8 asks for Python>=99"])


def test_a_stack_has_a_line_about_newer_releases():
    one = {"date": "2026-11-22", "newer": {}, "waiting": []}
    red = {"tests/peers/test_a.py::test_b": "Error: a|b", "tests/peers/test_a.py::test_c": "Error: a|b"}
    ran = {**one, "newer": {"a": ["1", "2"]}, "passed": 5, "skipped": 1, "failed": red}
    first, second, third = map(page_of_stacks.newer, (ran, {**one, "waiting": ["c 9 asks for torch==3"]}, one))
    said = "With them 5 of 7 tests pass, 1 skipped. What fails: 2 × Error: a|b (test_a.py::test_b)."
    assert first == f"Newer releases on 2026-11-22: a 1 → 2. {said}"
    assert second == "Newer releases on 2026-11-22: not taken: c 9 asks for torch==3. They were not run."
    assert third == "Newer releases on 2026-11-22: none."


def test_a_red_test_is_red_whatever_stands_in_the_environment(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "tests" / "rotation.py", tmp_path)
    (tmp_path / "test_red.py").write_text("def test_red():\n    assert not 1\n", encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))), "COLLATE_NPU_NIGHTLY": "1"}
    env |= {"COLLATE_NPU_REPORT": str(tmp_path / "told")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(tmp_path)], env=env, cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert (tmp_path / "told").exists()


def test_a_commit_draws_some_of_the_night_and_the_night_all(monkeypatch):
    for night, drawn in ((False, (1, 60)), (True, (336, 336))):
        monkeypatch.setattr(rotation, "NIGHTLY", night)
        marked = (SimpleNamespace(nodeid=str(n), get_closest_marker=lambda name: name == "nightly") for n in range(336))
        assert drawn[0] <= sum(not rotation.of_the_night(item) for item in marked) <= drawn[1]
