"""What was found becomes one report, whatever of it failed, with nothing in it that is nobody else's business."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from collate_npu.tools import env
from collate_npu.tools.env import Environment, masked

FOUND = Environment(
    system="Linux x86_64",
    packages={"torch": "2.13.0"},
    settings={"LD_LIBRARY_PATH": f"{Path.home()}/lib:/opt/lib"},
    cann="8.5.0 in /usr/local/Ascend",
    devices="cpu only",
    npu="torch_npu is not installed",
    runs={"transformers, attention": "sdpa"},
    hazards=("one", "two"),
)


def test_every_fact_is_a_line_of_a_list_and_json_says_the_same(monkeypatch):
    monkeypatch.setattr(env, "environment", lambda: FOUND)
    lines = env.written().splitlines()
    assert lines[:3] == ["- system: Linux x86_64", "- torch: 2.13.0", "- LD_LIBRARY_PATH=~/lib:/opt/lib"]
    assert "- runs: transformers, attention: sdpa" in lines
    assert lines[-2:] == ["- hazard: one", "- hazard: two"]
    told = Environment(**json.loads(env.written(as_json=True)))
    assert replace(told, hazards=tuple(told.hazards)) == replace(FOUND, settings={"LD_LIBRARY_PATH": "~/lib:/opt/lib"})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{Path.home()}/x", "~/x"),
        (f"a: {Path.home()}", "a: ~"),
        ("/home/somebody/venv/lib.so: gone", "~/venv/lib.so: gone"),
        ("/Users/somebody/x", "~/x"),
        ("https://user:secret@host/x", "https://***@host/x"),
        ("hf_abcdefghijklmnop", "***"),
        ("HF_TOKEN=abc, x", "HF_TOKEN=***, x"),
        ("2.13.0+cpu", "2.13.0+cpu"),
    ],
)
def test_what_is_nobodys_business_is_left_out(monkeypatch, text, left):
    assert masked({"a": [text]}) == {"a": [left]}
    for home, said in (("/", "/o/lib / x"), ("/o", "~/lib / x")):  # a home at the root masks no path
        monkeypatch.setattr(Path, "home", lambda home=home: Path(home))
        assert masked("/o/lib / x") == said


@pytest.mark.parametrize(
    ("packages", "found", "npu"),
    [
        ({}, {}, "torch_npu is not installed"),
        ({"torch_npu": "2.13.0"}, {"torch_npu": {"cann": "9.1"}}, "torch_npu loads, CANN 9.1"),
        ({"torch_npu": "2.13.0"}, {"torch_npu": {"fails": "no CANN"}}, "torch_npu does not load: no CANN"),
    ],
)
def test_stacks_that_cannot_be_asked_are_told_as_not_known(monkeypatch, packages, found, npu):
    found = {"torch": {"devices": "cpu only"}, "stacks": {"fails": "gone"}, **found}
    monkeypatch.setattr("collate_npu.tools.env.packages", lambda: {"torch": "2.13.0", **packages})
    monkeypatch.setattr(env, "ask", found.__getitem__)
    told = env.environment()
    assert (told.devices, told.runs, told.npu) == ("cpu only", {"not known": "gone"}, npu)
