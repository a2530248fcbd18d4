"""`collate-npu kernels`: what it prints, what it exits with; with a card that is not there, and on this CPU."""

import json
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich")
from typed import typed

from collate_npu import CollateError
from collate_npu.proof import kernel_runs
from collate_npu.proof.kernel_runs import TRUTHS
from collate_npu.tools import kernels

SDPA = ("--operator", "scaled_dot_product_attention")


def run(*args):
    return typed("kernels", *args, COLUMNS="120")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(kernel_runs, "TRUTHS", [truth for truth in TRUTHS if truth.few or truth.name == "one token"])


def test_a_cpu_measures_what_runs_there():
    result = run(*SDPA)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("✔ PASS: 12 of 12 calls of 1 operators are right.\n")
    assert "torch.scaled_dot_product_attention 2." in result.stdout
    assert re.search("truth +form +forward +backward +passes", result.stdout)
    lines = [line for line in result.stdout.splitlines() if line.strip().startswith("window")]
    assert [line.split()[1:3] for line in lines] == [["dense,", "keep"], ["dense,", "bias"]]
    assert all(line.endswith("right ✔") for line in lines)


def test_without_a_card_what_would_run_is_listed():
    result = run("--device", "npu", "--operator", "npu_fusion_attention", "--operator", "chunk_gated_delta_rule")
    assert result.exit_code == 2
    assert result.stdout.startswith("? NOT PROVED: nothing was measured on the card; ")
    assert "calls would run there" in result.stdout
    assert "TND, mode 4" in result.stdout
    assert "passes" not in result.stdout.partition("\ntruth: ")[0]
    assert (
        "torch_npu.npu_fusion_attention (not installed)" in result.stdout
        or "torch_npu.npu_fusion_attention 2." in result.stdout
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--device", "nonsense"], "Name a device of this machine"),
        (["--operator", "npu_fusion_atention"], "Did you mean npu_fusion_attention"),
        (["--dtype", "int8"], "--dtype: invalid choice"),
    ],
)
def test_what_is_named_wrongly_is_refused_in_one_line(args, said):
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_an_operator_that_was_named_and_does_not_run_here_is_no_pass():
    result = run(*SDPA, "--operator", "varlen_attn")
    assert result.exit_code == 2
    assert "NOT PROVED: 12 of 12 calls of 1 operators are right, but not everything named could run." in result.stdout
    assert "not here  torch.varlen_attn: it runs on cuda" in result.stdout


def test_a_wrong_call_fails_and_json_says_the_same(monkeypatch):
    right = kernel_runs._judged

    def spoilt(run, truth, *rest):
        found = right(run, truth, *rest)
        return replace(found, state="wrong", forward=float("nan"), note="out") if truth.name == "window" else found

    monkeypatch.setattr(kernel_runs, "_judged", spoilt)
    result = run(*SDPA)
    assert result.exit_code == 1
    assert result.stdout.startswith("✘ FAIL: 10 of 12 calls of 1 operators are right.\n")
    assert "WRONG  torch.scaled_dot_product_attention, window (dense, keep), torch.scaled_dot" in result.stdout
    found = json.loads(run(*SDPA, "--json").stdout)
    assert (found["passed"], found["verdict"], found["exit_code"]) == (False, "FAIL", 1)
    assert [each["form"] for each in found["runs"] if each["state"] == "wrong"] == ["dense, keep", "dense, bias"]
    assert {each["forward"] for each in found["runs"] if each["state"] == "wrong"} == {"nan"}


def test_what_is_interpreted_is_measured_on_a_cpu_alone(monkeypatch):
    also = []
    monkeypatch.setattr(kernels, "interpreted", lambda: ("fla.chunk_gated_delta_rule",))
    monkeypatch.setattr(kernels, "runs", lambda *_, also, **__: [also])
    for device in ("cpu", "cpu:0", "cuda", "cuda:0"):
        also += kernels.measured([], device, torch.float32, "")
    assert also == [("fla.chunk_gated_delta_rule",)] * 2 + [()] * 2
    monkeypatch.setattr(kernels, "runs", lambda held, **how: [(how["device"], [kernel.name for kernel in held])])
    rows = kernels.kernels_named(["chunk_gated_delta_rule", *SDPA[1:]])
    (npu, listed), (cpu, run) = kernels.measured(rows, "npu", torch.float32, "no card")
    assert (npu, listed, cpu, run) == ("npu", [row.name for row in rows], "cpu", ["fla.chunk_gated_delta_rule"])


def test_training_on_a_card_is_in_bfloat16_and_no_card_is_told_apart_from_no_device():
    dtypes = [(None, "cpu"), (None, "cpu:0"), (None, "npu:1"), ("float16", "npu")]
    assert [str(kernels.dtype_of(*each))[6:] for each in dtypes] == ["float32", "float32", "bfloat16", "float16"]
    assert [bool(kernels.why_no_card(device, torch.float32)) for device in ("cpu", "cuda:99")] == [False, True]
    with pytest.raises(CollateError):
        kernels.why_no_card("nonsense", torch.float32)


def test_what_was_refused_is_dim_and_noted_where_all_is_asked_for():
    found = [kernel_runs.Run(operator=state, state=state, note=note) for state, note in (("refused", "a"), ("raised", "b"))]
    found.append(kernel_runs.Run(operator="right", state="right"))
    for verbose, noted in ((False, ["RAISED"]), (True, ["refused", "RAISED"])):
        assert [label for label, _ in kernels.notes(found, "", verbose=verbose)] == noted
    assert [str(kernels._marked(run.state).style) for run in found] == ["dim", "yellow", "green"]


def test_nothing_measured_is_no_pass_and_wrong_outweighs_what_did_not_run():
    def a(state):
        return kernel_runs.Run(operator="a.b", state=state)

    assert [kernels.exit_code([a(state)]) for state in ("right", "wrong", "refused", "raised", "cannot tell")] == [
        0,
        1,
        2,
        2,
        2,
    ]
    assert kernels.exit_code([a("right"), a("not installed")]) == 0
    assert [kernels.exit_code([a("right"), a(state)]) for state in ("refused", "raised", "cannot tell")] == [0, 2, 2]
    assert kernels.exit_code([a("right"), a("not installed")], named=["b"]) == 2
    assert kernels.exit_code([a("right")], "no card") == 2
    assert kernels.exit_code([a("wrong")], "no card") == 1


@pytest.mark.parametrize("device", ["cuda:x", "nonsense", "cuda:99", "npu", "meta", ""])
def test_a_device_that_does_not_compute_is_refused(device):
    with pytest.raises(CollateError, match=r"Name a device of this machine|Run on a real device"):
        kernels.check_device(device, torch.float32)
