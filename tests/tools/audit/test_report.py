"""The report: its verdict and exit code say what was measured, in words, and drop no number."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from rich.console import Console

from collate_npu.testing.measure import Errors
from collate_npu.testing.yardstick import Yardstick
from collate_npu.tools.audit.case import Finding
from collate_npu.tools.audit.report import WORDS, Report, print_report

NAN = float("nan")
SETTINGS = {"device": "cpu", "dtype": "float32", "torch": "2", "transformers": "5"}
NOISE = Errors(1e-6, 1e-6, 1e-6, 1e-6)
SEEN = {"m (sdpa)": Yardstick(NOISE, Errors(4.0, 0.5, 0.1, 0.9))}
UNSEEN = {"m (sdpa)": Yardstick(NOISE, NOISE)}


def finding(right=True, *, logits=1e-6, column="collator", **more):
    whose = "ours" if column == "collator" else "elsewhere"
    where = {"model": "m", "attn_implementation": "sdpa", "side": "left", "column": column, "whose": whose}
    return Finding(**where, logits=logits, relative=logits, loss=0.0, gradient=0.0, right=right, **more)


def refused():
    where = {"model": "m", "attn_implementation": "sdpa", "side": "left", "column": "mapping", "whose": "ours"}
    return Finding(**where, refused=True, note="no mapping")


def raised():
    where = {"model": "m", "attn_implementation": "sdpa", "side": "left", "column": "adapter", "whose": "ours"}
    return Finding(**where, note="RuntimeError: no")


def lacking(column="collator", *, whose="ours"):
    where = {"model": "m", "attn_implementation": "sdpa", "side": "packed", "column": column, "whose": whose}
    return Finding(**where, no_kernel=True, note="no kernel here")


def report(*findings, yardsticks=SEEN, **more):
    return Report(settings=SETTINGS, findings=list(findings), yardsticks=dict(yardsticks), **more)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (report(finding()), 0),
        (report(finding(), refused()), 0),
        (report(finding(), finding(False, column="None")), 0),
        (report(finding(), left_out={"rwkv (sdpa)": "never reads it"}), 0),
        (report(finding(), finding(False)), 1),
        (report(finding(), raised()), 1),
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
    ],
)
def test_exit_codes_and_words(made, code):
    assert made.exit_code == code
    assert made.verdict().startswith(f"{WORDS[code]}  ours: ")


def printed(made, **settings):
    console = Console(width=200, **settings)
    with console.capture() as capture:
        print_report(console, made)
    return capture.get()


@pytest.mark.parametrize("colour", [{"no_color": True}, {"force_terminal": True}])
def test_the_verdict_stands_first_and_needs_no_colour(colour):
    text = printed(report(finding(False, logits=4.0), finding(column="None")), **colour)
    assert text.splitlines()[0].endswith("[cpu, float32, torch 2, transformers 5]") or "FAIL  ours: 0 of 1" in text
    assert "FAIL  ours: 0 of 1 cases" in text.splitlines()[0]
    assert "4.00 !" in text
    assert "1.0e-06 !" not in text


def test_the_worst_number_is_not_dropped_when_it_is_none():
    for findings in ([finding(False, logits=NAN), finding()], [finding(), finding(False, logits=NAN), finding()]):
        assert "(worst nan)" in report(*findings).verdict()


def test_everything_that_did_not_run_is_said():
    made = report(refused(), raised(), not_run={"n (sdpa)": "OSError: gone"}, yardsticks=UNSEEN, left_out={"r": "deaf"})
    text = printed(made)
    for said in (
        "refused: mapping on m: no mapping",
        "raises: adapter on m",
        "NOT RUN: n (sdpa): OSError",
        "left out: r: deaf",
    ):
        assert said in text
    assert "CANNOT TELL: m (sdpa): what is wrong moves the logits by 1.0e-06" in text


def test_json_is_strict():
    made = report(finding(False, logits=NAN), tolerance=0.1).as_json()
    again = json.loads(json.dumps(made, allow_nan=False))
    assert again["findings"][0]["logits"] == "nan"
    assert (again["verdict"], again["exit_code"]) == ("FAIL", 1)
    assert again["yardsticks"]["m (sdpa)"]["noise"]["gradient"] == 1e-6


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_and_no_name_is_cut_at_any_width(width):
    """Seen at 80 columns: headers cut to `positio…`, and "no kernel" in two lines."""
    flat = {"model": "m", "attn_implementation": "flash_attention_2", "side": "packed", "logits": 1e-6, "right": True}
    columns = ["collator", "adapter", "wrapped", "positions", "cu_seq_lens_q", "seq_idx", "nothing"]
    found = [Finding(**flat, column=column, whose="ours" if n < 3 else "elsewhere") for n, column in enumerate(columns)]
    made = report(finding(), *found, lacking(), Finding(**{**flat, "side": "cp 2"}, column="accelerate", whose="ours"))
    console = Console(width=width)
    with console.capture() as capture:
        print_report(console, made)
    lines = capture.get().splitlines()
    assert any(all(column in line for column in columns) for line in lines)
    assert any("no kernel" in line for line in lines)
    assert "…" not in capture.get()
    assert [line.partition(":")[0] for line in lines if "against each sample alone: largest" in line] == [
        "Padded batch against each sample alone",
        "Flat row against each sample alone",
        "Batch shared out between ranks against each sample alone",
    ]


def test_where_kernels_come_from_is_said():
    made = report(
        finding(), kernels={"a": {"f": "torch", "g": "torch"}, "b": {"f": "fla"}, "c": {"f": "torch", "g": "torch"}}
    )
    assert "recurrent kernels of a, c: none, torch alone" in printed(made)
    assert "recurrent kernels of b: f: fla" in printed(made)
