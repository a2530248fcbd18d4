"""The report: its exit code says what was measured, and its JSON is strict."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
from found import NAN, NOISE, UNSEEN, finding, lacking, raised, refused, report

from collate_npu.testing.yardstick import Yardstick
from collate_npu.tools.audit.report import WORDS


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (report(finding()), 0),
        (report(finding(), refused()), 0),
        (report(finding(), finding(False, column="None")), 0),
        (report(finding(), left_out={"rwkv (sdpa)": "never reads it"}), 0),
        (report(finding(), finding(column="mine", whose="yours")), 0),
        (report(finding(column="mine", whose="yours")), 0),
        (report(finding(), finding(False)), 1),
        (report(finding(), raised()), 1),
        (report(finding(), finding(False, column="mine", whose="yours")), 1),
        (report(finding(), raised(whose="yours")), 1),
        (report(finding(False), not_run={"n (sdpa)": "OSError"}, yardsticks=UNSEEN), 1),
        (report(finding(), not_run={"n (sdpa)": "OSError"}), 2),
        (report(finding(), yardsticks=UNSEEN), 2),
        (report(finding(), yardsticks={"m (sdpa)": Yardstick(NOISE)}), 2),
        (report(refused()), 2),
        (report(finding(column="None")), 2),
        (report(), 2),
        (report(finding(), lacking()), 2),
        (report(finding(False), lacking()), 1),
        (report(lacking()), 2),
        (report(finding(), lacking("seq_idx", whose="elsewhere")), 0),
        (report(finding(False), tolerance=1e-4), 0),
        (report(finding(logits=1e-3), tolerance=1e-4), 1),
        (report(finding(logits=NAN), tolerance=1e30), 1),
        (report(finding(), tolerance=5.0), 2),
        (report(finding(), interrupted=True), 130),
        (report(finding(False), interrupted=True), 130),
    ],
)
def test_exit_codes_and_what_machines_read(made, code):
    assert made.exit_code == code
    found = made.as_json()
    assert list(found)[:4] == ["passed", "verdict", "exit_code", "interrupted"]
    assert (found["passed"], found["verdict"], found["exit_code"]) == (code == 0, WORDS[code], code)


def test_json_is_strict():
    made = report(finding(False, logits=NAN, by_position=((0.0, NAN),)), tolerance=0.1).as_json()
    again = json.loads(json.dumps(made, allow_nan=False))
    assert again["findings"][0]["logits"] == "nan"
    assert again["yardsticks"]["m (sdpa)"]["noise"]["gradient"] == 1e-6
    assert again["worst"]["ours"]["by_position"] == [[0.0, "nan"]]
    assert again["worst"]["elsewhere"] is None
    assert "by_position" not in again["findings"][0]


def test_the_worst_is_one_that_is_not_finite():
    for found in ([finding(logits=NAN), finding(logits=3.0)], [finding(logits=3.0), finding(logits=NAN), finding()]):
        worst = report(*found).worst("ours")
        assert worst is not None
        assert str(worst.logits) == "nan"


def test_each_model_has_a_row_and_its_state():
    made = report(
        finding(), finding(False, model="bad"), lacking(model="kernel"), finding(model="kernel"),
        not_run={"gone (sdpa)": "OSError", "a (b)/c (eager)": "OSError", "my:collate on m (sdpa)": "KeyError"},
    )  # fmt: skip
    states = {row.model: row.state for row in made.rows()}
    assert states == {"m": "unproved", "bad": "wrong", "kernel": "unproved", "gone": "unproved", "a (b)/c": "unproved"}
