"""`collate-npu kernels`: what it prints, what it exits with; with a card that is not there, and on this CPU."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("rich")
from typed import typed

from collate_npu import CollateError
from collate_npu.proof import kernel_runs
from collate_npu.proof.kernel_runs import TRUTHS, Run
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
    assert find_spec("torch_npu") or "Install it: collate-npu guide install." in " ".join(result.stdout.split())
    assert "calls would run there" in result.stdout
    assert "TND, mode 4" in result.stdout
    assert "passes" not in result.stdout.partition("\ntruth: ")[0]
    assert re.search(r"torch_npu.npu_fusion_attention (\(not installed\)|2\.)", result.stdout)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        *((["--device", device], "Name a device of this machine: cpu") for device in ("nonsense", "cpu:x", "meta", "")),
        (["--operator", "npu_fusion_atention"], "Did you mean npu_fusion_attention"),
        (["--dtype", "int8"], "--dtype: invalid choice"),
    ],
)
def test_what_is_named_wrongly_is_refused_in_one_line(args, said):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
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


# --- runs of another machine


@pytest.fixture
def ran(monkeypatch):
    """What each call of the runner was asked, where it gives these states; a device that computes or not."""

    def ran(*args, states=("right",), card=""):
        def check(device, dtype):
            if card:
                raise CollateError(card)

        def give(rows, **how):
            asked.append((how["device"], str(how["dtype"])[6:], [row.name for row in rows]))
            return [Run(operator="a.b", state=state, note=f"its {state}") for state in states]

        asked = []
        monkeypatch.setattr(kernels, "check_device", check)
        monkeypatch.setattr(kernels, "runs", give)
        return run(*args), asked

    return ran


@pytest.mark.parametrize(
    ("args", "dtype"),
    [
        ("cpu", "float32"),
        ("cpu:0", "float32"),
        ("npu:1", "bfloat16"),
        ("cuda", "bfloat16"),
        ("npu --dtype float16", "float16"),
    ],
)
def test_training_on_a_card_is_in_bfloat16(ran, args, dtype):
    _, ((device, found, _),) = ran("--device", *args.split())
    assert (device, found) == (args.split()[0], dtype)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ("right", 0), ("wrong", 1), ("refused", 2), ("raised", 2), ("cannot tell", 2), ("not installed", 2),
        ("right, not installed", 0), ("right, refused", 0), ("right, raised", 2), ("right, cannot tell", 2),
        ("right, wrong", 1),
    ],
)  # fmt: skip
def test_nothing_measured_is_no_pass_and_wrong_outweighs_what_did_not_run(ran, states, code):
    for card, ended in ("", code), ("no card", 1 if code == 1 else 2):
        assert ran("--device", "npu", states=states.split(", "), card=card)[0].exit_code == ended


def test_what_was_refused_is_noted_where_all_is_wanted(ran):
    for more, noted in ((), {"RAISED", "right"}), (("--verbose",), {"RAISED", "refused", "right"}):
        text = ran(*more, states=("refused", "raised", "right"))[0].stdout
        assert {*re.findall(r"(\w+) +a\.b: its", text)} == noted


def test_a_device_that_is_advised_is_here():
    advised = re.search(r"Name a device of this machine: ([\w, ]+)\.", run("--device", "nonsense").output)[1].split(", ")
    for device in advised:
        kernels.check_device(device, torch.float32)
