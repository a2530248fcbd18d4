"""The report: its exit code says what was measured, its JSON is strict, its words say whose it is and what to do next."""

import json

import pytest

pytest.importorskip("transformers")
from found import CHECKPOINT, MINE, NAN, NOISE, UNSEEN, finding, lacking, raised, refused, report

from collate_npu.proof.kernel_runs import Run
from collate_npu.proof.noise import Yardstick
from collate_npu.tools.audit.report import WORDS, facts, headline, listed, notes, number, shortened


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (report(finding()), 0),
        (report(finding(), refused()), 0),
        (report(finding(), finding(False, column="no mask")), 0),
        (report(finding(), left_out={"rwkv (sdpa)": "never reads it"}), 0),
        (report(finding(**MINE)), 0),
        (report(finding(), finding(False)), 1),
        (report(finding(), raised()), 1),
        (report(finding(), finding(False, **MINE)), 1),
        (report(finding(), raised(whose="yours")), 1),
        (report(finding(False), not_run={"n (sdpa)": "OSError"}, yardsticks=UNSEEN), 1),
        (report(finding(), not_run={"n (sdpa)": "OSError"}), 2),
        (report(finding(), yardsticks=UNSEEN), 2),
        (report(finding(), yardsticks={"m (sdpa)": Yardstick(NOISE)}), 2),
        (report(refused()), 2),
        (report(finding(column="no mask")), 2),
        (report(), 2),
        (report(finding(), lacking()), 2),
        (report(finding(False), lacking()), 1),
        (report(finding(), lacking("seq_idx", whose="elsewhere")), 0),
        (report(finding(False), tolerance=1e-4), 0),
        (report(finding(logits=1e-3), tolerance=1e-4), 1),
        (report(finding(logits=NAN), tolerance=1e30), 1),
        (report(finding(), tolerance=5.0), 2),
        (report(finding(False), interrupted=True), 130),
    ],
)
def test_exit_codes_and_what_machines_read(made, code):
    assert made.exit_code == code
    found = made.as_json()
    assert list(found)[:4] == ["passed", "verdict", "exit_code", "interrupted"]
    assert (found["passed"], found["verdict"], found["exit_code"]) == (code == 0, WORDS[code], code)


def test_a_wrong_kernel_fails_the_audit_whatever_its_models_say():
    wrong = Run(
        operator="a.kernel", truth="window", form="TND, mode 4", state="wrong", forward=NAN, note="out of real tokens"
    )
    right = Run(operator="a.kernel", truth="padded left", form="TND, mode 3", state="right", forward=1e-3)
    made = report(finding(), operators=[right, wrong])
    assert (made.exit_code, headline(made)) == (1, "FAIL: 1 of 1 cases of ours are right; 1 calls of kernels are wrong.")
    said = dict(facts(made))
    assert said["operators"].startswith(
        "1 of 2 calls of 1 operators are right; a.kernel, window (TND, mode 4) wrong: out of"
    )
    assert "collate-npu kernels" in said["next"]
    assert json.loads(json.dumps(made.as_json(), allow_nan=False))["operators"][1]["forward"] == "nan"
    assert dict(facts(report(finding(), operators=[right, right, wrong])))["operators"].startswith("2 of 3 calls")
    assert report(finding(), operators=[right]).exit_code == 0
    missing = report(finding(), operators=[Run(operator="a.kernel", state="not installed")])
    assert (missing.exit_code, dict(facts(missing))["operators"][:11]) == (0, "no operator")


def test_json_is_strict():
    made = report(finding(False, logits=NAN, by_position=((0.0, NAN),)), tolerance=0.1).as_json()
    again = json.loads(json.dumps(made, allow_nan=False))
    assert again["findings"][0]["logits"] == "nan"
    assert again["yardsticks"]["m (sdpa)"]["noise"]["gradient"] == 1e-6
    assert again["worst"]["ours"]["by_position"] == [[0.0, "nan"]]
    assert again["worst"]["elsewhere"] is None
    assert "by_position" not in again["findings"][0]


def test_the_worst_is_one_that_is_not_finite():
    for first, *others in ([NAN, 3.0], [3.0, NAN, 1e-6]):
        assert str(report(finding(logits=first), *(finding(logits=x) for x in others)).worst("ours").logits) == "nan"


def test_each_model_has_its_state():
    not_run = dict.fromkeys(("gone (sdpa)", "a (b)/c (eager)", "m (sdpa) my:collate", "n (sdpa) packed"), "OSError")
    models = [finding(), finding(False, model="bad"), lacking(model="kernel"), finding(model="kernel"), finding(model="n")]
    states = report(*models, finding(model="fine"), not_run=not_run).states()
    unproved = dict.fromkeys(("m", "kernel", "gone", "a (b)/c", "n"), "unproved")
    assert states == {**unproved, "bad": "wrong", "fine": "right"}


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (report(finding()), "1 of 1 cases of ours are right: they give the numbers of each sample alone."),
        (report(finding(), finding(**MINE)), "1 of 1 cases of ours and 1 of 1 cases of YOUR collator are right: they "),
        (report(finding(), finding(False, **MINE)), "1 of 1 cases of ours and 0 of 1 cases of YOUR collator are right."),
        (report(finding(), lacking()), "1 of 1 cases of ours are right, but not everything named could run."),
        (report(finding(), yardsticks=UNSEEN), "1 of 1 cases of ours are right, but a wrong mask would not have been seen"),
        (report(), "nothing of ours was measured."),
        (report(finding(), finding(False), interrupted=True), "1 of 2 cases of ours are right, as far as it came."),
    ],
)
def test_the_first_line(made, sentence):
    assert headline(made).startswith(f"{WORDS[made.exit_code]}: {sentence}")


def test_what_to_do_depends_on_whose_it_is():
    said = dict(facts(report(finding(), finding(False, **MINE))))
    assert "each line YOURS says what to change" in said["next"]
    assert "report it" not in said["next"]
    assert said["wrong"].startswith(f"YOUR collator ({MINE['column']}) on m: ")
    said = dict(facts(report(finding(False), finding(**MINE))))
    assert "report it to collate_npu" in said["next"]
    assert "YOURS" not in said["next"]
    said = dict(facts(report(finding(), finding(False, column="your batch", whose="yours"))))
    assert said["wrong"].startswith("YOUR batch (your batch) on m: ")


def test_by_how_much_it_is_wrong_is_said():
    def off(*found):
        return dict(facts(report(*found)))["wrong"].partition(": ")[2]

    assert off(raised()) == "it raises"
    assert off(finding(False), finding(False, logits=NAN)).startswith("a logit is off by up to nan, the loss by ")
    assert off(finding(False, loss=0.03, gradient=NAN)).endswith("the loss by 0.03, the gradient by nan")
    assert off(finding(False, loss=0.03, gradient=0.0)).endswith("the loss by 0.03")
    wrong = finding(False, loss=0.03, gradient=0.06)
    assert off(wrong) == "a logit is off by up to 1.0e-06, the loss by 0.03, the gradient by 0.06"


def said(made, verbose=False):
    return [f"{label}: {text}" for label, text in notes(made, verbose=verbose)]


def test_everything_that_did_not_run_is_said():
    yours, lost = finding(False, note="No mask: wrap it.", **MINE), finding(False, logits=NAN, note="a number is not finite")
    told = {"not_run": {"n (sdpa)": "OSError: gone"}, "left_out": {"r (sdpa)": "deaf"}, "kernels": {"a": {"f": "fla"}}}
    made = report(refused(), raised(), yours, lost, yardsticks=UNSEEN, **told)
    *lines, blind, left_out, kernels = said(made, verbose=True)
    assert lines == [
        "refused: m, padded batches (mask per layer kind): no mapping",
        "raises: m, padded batches (collator + adapter): RuntimeError: no",
        f"YOURS is wrong: m, padded batches ({MINE['column']}): No mask: wrap it.",
        "not finite: m, padded batches (collator): a number is not finite",
        "NOT RUN: n (sdpa): OSError: gone",
    ]
    assert blind.startswith("CANNOT TELL: m (sdpa): what is wrong moves the logits by 1.0e-06")
    assert (left_out, kernels) == ("left out: r (sdpa): deaf", "kernels: a: f of fla")
    (line,) = said(report(finding(), yardsticks={"m (sdpa)": Yardstick(NOISE)}))
    assert line.startswith("CANNOT TELL: m (sdpa): nothing wrong could be run beside it")


def test_a_reason_is_said_once_and_briefly():
    rule = "A mapping is known for attention. Keep the 2D."
    found = [refused(f"layer_types: got kind_{n}. {rule}", model=f"m{n}") for n in range(7)]
    assert said(report(*found)) == [
        "refused: m0, m1, m2, m3 and 3 more, padded batches (mask per layer kind): A mapping is known for attention"
    ]
    assert len(said(report(*found), verbose=True)) == 7
    assert "got kind_6" in said(report(*found), verbose=True)[6]


def test_what_lacks_a_kernel_names_every_model_and_the_remedy():
    found = report(*(lacking(c, model=f"m{n}") for n in range(7) for c in ("collator", "collator + adapter")))
    models = "m0, m1, m2, m3, m4, m5, m6, flat rows (collator, collator + adapter)"
    assert said(found) == [f"NOT RUN: {models}: no kernel here (try --kernels reference)"]
    assert said(found, verbose=True)[0].endswith("f is plain torch")


def test_a_long_path_keeps_its_ends_and_a_list_says_how_many_more():
    assert shortened(CHECKPOINT, 30) == f"{CHECKPOINT[:9]}...{CHECKPOINT[-18:]}"
    assert shortened("qwen3_next", 30) == "qwen3_next"
    assert listed("abcabc") == "a, b, c"
    assert listed("abcd", 3) == "a, b, c, d"
    assert listed("abcde", 3) == "a, b, c and 2 more"


@pytest.mark.parametrize(
    ("error", "said"),
    [(0.00999, "1.0e-02"), (0.01, "0.01"), (4.04, "4.04"), (999.9, "999.90"), (1000, "1.0e+03"), (NAN, "nan")],
)
def test_small_and_large_errors_are_said_by_their_power(error, said):
    assert number(error) == said


def test_what_is_handed_over_is_said_of_every_way_but_yours():
    assert finding().meaning != finding(**MINE).meaning == "as you gave it to the audit"
    assert finding(logits=0.5, relative=0.5, loss=0.5, gradient=0.5).within(0.5)
