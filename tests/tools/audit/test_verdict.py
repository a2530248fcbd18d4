"""The verdict: one sentence that says what is right, whose it is, and what to do next."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from found import NAN, UNSEEN, finding, lacking, raised, report

from collate_npu.tools.audit.verdict import facts, headline, told

MINE = {"column": "mine", "whose": "yours"}


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (report(finding()), "PASS: all 1 cases of ours give the numbers of each sample alone."),
        (report(finding(), finding(**MINE)), "PASS: all 1 cases of ours and all 1 of YOUR collator give"),
        (report(finding(), finding(False)), "FAIL: 1 of 2 cases of ours is wrong."),
        (
            report(finding(), finding(False, **MINE)),
            "FAIL: 1 of 1 cases of YOUR collator is wrong. All 1 of ours are right.",
        ),
        (report(finding(False), finding(False, **MINE)), "FAIL: 1 of 1 cases of ours and 1 of 1 cases of YOUR collator are"),
        (report(finding(), lacking()), "NOT PROVED: 1 of 1 cases are right, but not everything named could run."),
        (
            report(finding(), yardsticks=UNSEEN),
            "NOT PROVED: 1 of 1 cases are right, but a wrong mask would not have been seen",
        ),
        (report(), "NOT PROVED: nothing of ours could be measured."),
        (report(finding(), finding(False), interrupted=True), "INTERRUPTED: 1 of 2 cases measured until then are right."),
        (report(interrupted=True), "INTERRUPTED: nothing was measured."),
    ],
)
def test_the_first_line(made, sentence):
    assert headline(made).startswith(sentence)


def test_what_to_do_depends_on_whose_it_is():
    said = dict(facts(report(finding(), finding(False, **MINE))))
    assert "each line YOURS says what to change" in said["next"]
    assert "report it" not in said["next"]
    assert said["wrong"].startswith("YOUR collator (mine) on m: ")
    said = dict(facts(report(finding(False), finding(**MINE))))
    assert "report it to collate_npu" in said["next"]
    assert "YOURS" not in said["next"]
    said = dict(facts(report(finding(), finding(False, column="your batch", whose="yours"))))
    assert said["wrong"].startswith("YOUR batch (your batch) on m: ")


def test_the_worst_number_is_not_dropped_when_it_is_none():
    for found in ([finding(False, logits=NAN), finding(False)], [finding(False), finding(False, logits=NAN)]):
        assert "off by up to nan, the loss by " in dict(facts(report(*found)))["wrong"]
    assert dict(facts(report(raised())))["wrong"].endswith("it raises")


def test_what_is_wrong_beside_right_logits_is_said():
    wrong = finding(False, loss=0.03, gradient=0.06, astray=("loss", "gradient"))
    assert dict(facts(report(wrong)))["wrong"].endswith(
        "a logit is off by up to 1.0e-06, the loss by 0.03, the gradient by 0.06"
    )


def test_a_model_that_is_done_in_half_a_line():
    made = report(finding(), finding(False, logits=4.0), finding(column="None"), not_run={"n (sdpa)": "OSError: gone"})
    assert told(made, "m (sdpa)", 0) == "1 of 2 WRONG, worst 4.00"
    assert told(made, "m (sdpa)", 2) == "nothing to measure"
    assert told(made, "n (sdpa)", 3) == "NOT RUN, OSError: gone"
