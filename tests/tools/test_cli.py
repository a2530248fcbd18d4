"""The command line: what it prints, what it exits with."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

import collate_npu.tools.cli as cli
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools import audit as audit_module

pytestmark = pytest.mark.models

QUICK = ["--batches", "1", "--batch-size", "3", "--max-length", "96", "--attn", "sdpa", "--no-gradients"]


def run(*args):
    return CliRunner().invoke(cli.app, ["audit", *args], env={"COLUMNS": "180"})


def test_a_table_and_a_verdict():
    result = run("--model", "qwen3_next", *QUICK)
    assert result.exit_code == 0, result.output
    assert "qwen3_next" in result.output
    assert re.search(r"ours: (\d) of \1 cases within 0.0001", result.output)
    assert "3 of 6 wrong without an error" in result.output


def test_json_is_json_alone():
    result = run("--model", "qwen3_next", "--json", "--side", "left", *QUICK)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["settings"]["torch"]
    assert {finding["side"] for finding in report["findings"]} == {"left"}


def test_failure_is_exit_code_1(monkeypatch):
    monkeypatch.setitem(audit_module.OURS, "collator", audit_module.OTHERS["bare 4D"])
    result = run("--model", "qwen3_next", "--side", "left", *QUICK)
    assert result.exit_code == 1
    assert "FAILED" in result.output


def test_nothing_measured_is_not_a_pass():
    result = run("--model", "no_such_model", *QUICK)
    assert result.exit_code == 1
    assert "left out: no_such_model (sdpa)" in result.output


def test_a_local_checkpoint_with_its_tokenizer_and_own_data(tmp_path):
    tokenizer = byte_tokenizer()
    tiny_model("qwen3_next", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "ab" * n}) + "\n" for n in range(1, 9)), encoding="utf-8")
    result = run("--model", str(tmp_path / "model"), "--data", str(data), *QUICK)
    assert result.exit_code == 0, result.output
    assert re.search(r"ours: (\d) of \1", result.output)


def test_too_little_text_is_said_and_is_exit_code_2(tmp_path):
    (tmp_path / "a.txt").write_text("one line\n", encoding="utf-8")
    result = run("--model", "qwen3_next", "--data", str(tmp_path / "a.txt"), *QUICK)
    assert result.exit_code == 2
    assert "The audit draws 3 lines." in result.output


def test_help_has_examples():
    result = run("--help")
    assert result.exit_code == 0
    assert "collate-npu audit --model" in result.output


def test_show_draws_a_batch_and_explains():
    result = CliRunner().invoke(cli.app, ["show", "--lengths", "3,5", "--left", "--consumer", "megatron"])
    assert result.exit_code == 0, result.output
    assert "⬚ ⬚ ■ ■ ■\n■ ■ ■ ■ ■" in result.output
    assert "attention_mask: bool [2, 1, 5, 5]" in result.output


@pytest.mark.parametrize("args", [["--lengths", "3,x"], ["--lengths", "3,5", "--left", "--consumer", "mindspeed"]])
def test_show_refuses_in_words(args):
    result = CliRunner().invoke(cli.app, ["show", *args])
    assert result.exit_code == 2
    assert result.output.strip()


def test_env_lists_packages():
    result = CliRunner().invoke(cli.app, ["env"])
    assert result.exit_code == 0
    assert "- torch: " in result.output
    assert "- devices: " in result.output
