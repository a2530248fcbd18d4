"""The command line of the audit: what it prints, what it exits with. Of what it measures: tests/tools/audit."""

import json
import re
import sys
from contextlib import nullcontext
from functools import partial

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from transformers.utils import logging
from typed import typed

from collate_npu.errors import CollateError
from collate_npu.releases import MISSING_KERNEL_RAISES
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools import cli
from collate_npu.tools.audit import session
from collate_npu.tools.audit.report import Report

pytestmark = pytest.mark.models
NEWER = pytest.mark.skipif(not MISSING_KERNEL_RAISES.holds(), reason="5.20 is the first release that asks for boundaries")

QUICK = ["--batches", "1", "--batch-size", "3", "--max-length", "96", "--attn", "sdpa", "--no-gradients"]


def run(*args):
    return typed("audit", *args, COLUMNS="180", TRANSFORMERS_VERBOSITY=None)


def test_the_verdict_comes_first_then_a_table_and_a_page_is_written_beside_it(tmp_path):
    result = run("--model", "qwen3_next", "--html", str(tmp_path / "report.html"), *QUICK)
    assert result.exit_code == 0, result.output
    assert re.match(
        r"✔ PASS: (\d) of \1 cases of ours are right: they give the numbers of each sample alone\.\n", result.stdout
    )
    assert "1 of 2 are wrong without an error, by up to " in result.stdout
    assert re.search(r"✔ +qwen3_next +sdpa +left, right +(\d) of \1 +\S+e-06 +1 of 2\n", result.stdout)
    assert "handed over by" not in result.stdout
    wrote = f"collate-npu: wrote {tmp_path / 'report.html'}"
    assert re.fullmatch(rf"\[1/1\] qwen3_next \(sdpa\): .* s\n{re.escape(wrote)}\n", result.stderr)
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (False, logging.ERROR)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [
        words for words in ("</bdi> PASS: ", "The error at each token", "elsewhere, the worst: ") if words not in text
    ] == []


@pytest.mark.parametrize(
    ("args", "verbosity", "sides", "quiet"),
    [
        ([], None, ["left", "right"], ["set_verbosity_error", "disable_progress_bar"]),
        (["--packed", "--side", "right"], "info", ["right", "packed"], []),
    ],
)
def test_transformers_is_quiet_unless_its_variable_is_set(monkeypatch, args, verbosity, sides, quiet):
    given, called = [], []
    monkeypatch.setattr(session, "audit_all", lambda **how: given.append(how["sides"]) or Report(settings={}))
    for name in ("set_verbosity_error", "disable_progress_bar"):
        monkeypatch.setattr(logging, name, partial(called.append, name))
    typed("audit", "--json", *args, TRANSFORMERS_VERBOSITY=verbosity)
    assert (given, called) == ([sides], quiet)


@pytest.mark.parametrize(
    ("package", "remedy"), [("json", ""), ("no_such_package", "pip install no_such_package"), ("breaks", "collate-npu env")]
)
def test_what_a_command_needs_loads_or_is_named(tmp_path, monkeypatch, package, remedy):
    (tmp_path / "breaks.py").write_text("raise RuntimeError('gone')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CollateError, match=remedy) if remedy else nullcontext():
        cli.load(package)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "qwen3_nxt", "--model", "no_such_model"], "got qwen3_nxt, no_such_model"),
        (["--device", "cuda:99"], "Name a device of this machine"),
        (["--html", "absent/report.html"], "Name a file in a folder that exists"),
        (["--tolerance", "nan"], "An error is 0 or more"),
        (["--batch-size", "1"], "--batch-size: 1 is not in the range 2..inf."),
        (["--dtype", "int64"], "int64"),
        (["--side", "both"], "both"),
        (["--seed", "-1"], "--seed: -1"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_what_cannot_run_is_exit_code_2_before_any_model_is_built(monkeypatch, args, said):
    monkeypatch.setattr(session, "load_model", lambda *a, **k: pytest.fail("a model was built"))
    result = run("--model", "qwen3_next", *args)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_model_that_does_not_build_beside_one_that_is_right(tmp_path):
    """A checkpoint's folder from which a download left out the weights."""
    byte_tokenizer().save_pretrained(tmp_path)
    tiny_model("llama", vocab_size=257).config.save_pretrained(tmp_path)
    result = run("--model", "llama", "--model", str(tmp_path), *QUICK)
    assert result.exit_code == 2
    assert re.match(
        r"\? NOT PROVED: (\d) of \1 cases of ours are right, but not everything named could run\.\n", result.stdout
    )
    assert re.search(rf"NOT RUN +/\S*\.\.\.\S*{tmp_path.name[-20:]} \(sdpa\): ", result.stdout)


def test_bfloat16_passes_and_fails_without_a_tolerance(monkeypatch):
    left = ("--model", "qwen3_next", "--dtype", "bfloat16", "--side", "left", *QUICK)
    assert run(*left).exit_code == 0
    module = sys.modules[type(tiny_model("qwen3_next", vocab_size=8)).__module__]
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda hidden_states, attention_mask: hidden_states)
    assert run(*left).exit_code == 1


PACKED = ["--packed", "--side", "right", *QUICK]


def test_packed_adds_flat_rows_and_proves_them_for_attention_alone():
    result = run("--model", "llama", "--verbose", *PACKED)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("✔ PASS: 6 of 6 cases of ours")
    assert re.search(r"llama +sdpa +right, packed +6 of 6", result.stdout)
    verbose = run("--model", "llama", "--verbose", *PACKED).stdout
    assert re.search(r"llama: sdpa.*handed over by.*no boundaries +packed +\d", verbose, flags=re.S)


@NEWER
def test_a_recurrent_family_without_kernels_is_right_in_flat_rows():
    result = run("--model", "qwen3_next", "--json", *PACKED)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert list(report)[:4] == ["passed", "verdict", "exit_code", "interrupted"]
    cost = {f["column"]: f["logits"] for f in report["findings"] if f["side"] == "packed"}
    assert cost["no boundaries"] > 1 > 1e-4 > cost["collator"]
    assert set(report["kernels"]["qwen3_next"].values()) == {"torch"}
