"""The command line: what it prints, what it exits with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

import collate_npu.tools.cli as cli
from collate_npu.consumers.models import transformers_version
from collate_npu.testing import byte_tokenizer, kernels, tiny_model
from collate_npu.tools.audit import candidates, handover

pytestmark = pytest.mark.models
NEWER = pytest.mark.skipif(transformers_version() < (5, 20), reason="5.20 is the first release that asks for boundaries")

QUICK = ["--batches", "1", "--batch-size", "3", "--max-length", "96", "--attn", "sdpa", "--no-gradients"]


def run(*args):
    return CliRunner().invoke(cli.app, ["audit", *args], env={"COLUMNS": "180"})


def test_the_verdict_comes_first_then_a_table():
    result = run("--model", "qwen3_next", *QUICK)
    assert result.exit_code == 0, result.output
    assert re.match(r"✔ PASS: all \d cases of ours give the numbers of each sample alone\.\n", result.stdout)
    assert "3 of 6 are wrong without an error, by up to " in result.stdout
    assert re.search(r"✔ +qwen3_next +sdpa +left, right +(\d) of \1 +\S+e-06 +3 of 6\n", result.stdout)
    assert "handed over by" not in result.stdout
    assert re.fullmatch(r"\[1/1\] qwen3_next \(sdpa\): (\d) of \1 right, worst \S+ \(.*s\)\n", result.stderr)


def test_json_is_json_alone():
    result = run("--model", "qwen3_next", "--json", "--side", "left", *QUICK)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report)[:4] == ["passed", "verdict", "exit_code", "interrupted"]
    assert (report["passed"], report["verdict"], report["exit_code"], report["interrupted"]) == (True, "PASS", 0, False)
    assert report["settings"]["torch"]
    positions = report["worst"]["elsewhere"]["by_position"]
    assert len(positions) == 3
    assert max(map(max, positions)) == report["worst"]["elsewhere"]["logits"]
    assert {finding["side"] for finding in report["findings"]} == {"left"}


def test_failure_is_exit_code_1(monkeypatch):
    monkeypatch.setitem(handover.OURS, "collator", handover.OTHERS["bare 4D"])
    result = run("--model", "qwen3_next", "--side", "left", *QUICK)
    assert result.exit_code == 1
    assert re.match(r"✘ FAIL: 1 of [34] cases of ours is wrong\.\n", result.stdout)
    assert re.search(r"ours +collator +\d\.\d\d ✘\n +collator \+ adapter +\S+e-06\n", result.stdout)


@pytest.fixture
def without_weights(tmp_path):
    """A checkpoint's folder from which a download left out the weights."""
    byte_tokenizer().save_pretrained(tmp_path)
    tiny_model("qwen3_next", vocab_size=257).config.save_pretrained(tmp_path)
    return tmp_path


def test_failure_stands_over_what_could_not_run(monkeypatch, without_weights):
    monkeypatch.setitem(handover.OURS, "collator", handover.OTHERS["bare 4D"])
    result = run("--model", "qwen3_next", "--model", str(without_weights), "--side", "left", *QUICK)
    assert result.exit_code == 1
    assert "NOT RUN" in result.output


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_exit_code_1(monkeypatch, bad):
    def spoiled(*args, **settings):
        model = tiny_model(*args, **settings)

        def spoil(module, inputs, output):
            if output.logits.shape[0] > 1:
                output.logits[-1, -1, -1] = bad

        model.register_forward_hook(spoil)
        return model

    monkeypatch.setattr(candidates, "tiny_model", spoiled)
    result = run("--model", "qwen3_next", "--json", "--tolerance", "1e30", *QUICK)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["verdict"] == "FAIL"
    assert {f["logits"] for f in report["findings"] if f["whose"] == "ours" and not f["refused"]} == {"nan"}


def unread(path):
    raise AssertionError("a model was built")


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(candidates.Candidate, "build", unread)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "qwen3_next"}', encoding="utf-8")
    (tmp_path / "broken" / "tokenizer.json").write_text("{", encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{', encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    (tmp_path / "data.parquet").write_bytes(b"PAR1\x15\x04\xf0\xffPAR1")
    return tmp_path


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "qwen3_nxt"], "Did you mean"),
        (["--model", "qwen3_next", "--model", "no_such_model"], "no_such_model"),
        (["--model", "{}/folder"], "a folder with a config.json"),
        (["--model", "{}/absent"], "a folder with a config.json"),
        (["--model", "{}/broken"], "It does not load"),
        (["--data", "{}/absent.txt"], "No such file"),
        (["--data", "{}/folder"], "Is a directory"),
        (["--data", "{}/bad.jsonl"], "line 2: got no JSON"),
        (["--data", "{}/latin.txt"], "not UTF-8"),
        (["--data", "{}/data.parquet"], "convert it to .jsonl"),
        (["--tokenizer", "{}/absent"], "It does not load"),
        (["--tokenizer", "{}/folder"], "It does not load"),
        (["--device", "nonsense"], "Name a device of this machine"),
        (["--device", "cuda:99"], "Name a device of this machine"),
        (["--tolerance", "nan"], "An error is 0 or more"),
        (["--tolerance", "-1"], "An error is 0 or more"),
        (["--dtype", "float8"], "float8"),
        (["--dtype", "int64"], "int64"),
        (["--side", "both"], "both"),
        (["--batch-size", "0"], "'--batch-size'"),
        (["--seed", "-1"], "'--seed'"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_what_cannot_run_is_exit_code_2_before_any_model_is_built(no_model, files, args, said):
    result = run("--model", "qwen3_next", *(arg.replace("{}", str(files)) for arg in args))
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.replace("│", " ").split())
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_model_that_does_not_build_beside_one_that_is_right(without_weights):
    result = run("--model", "qwen3_next", "--model", str(without_weights), *QUICK)
    assert result.exit_code == 2
    assert re.match(r"\? NOT PROVED: (\d) of \1 cases are right, but not everything named could run\.\n", result.stdout)
    assert re.search(rf"NOT RUN +/\S*\.\.\.\S*{without_weights.name[-20:]} \(sdpa\): ", result.stdout)


def test_a_family_without_one_attention_is_audited_with_the_other():
    if "inkling2_text" not in candidates.hybrid_model_types():
        pytest.skip("a family of newer transformers")
    args = [arg for arg in QUICK if arg not in ("--attn", "sdpa")]
    result = run("--model", "inkling2_text", *args)
    assert result.exit_code == 0, result.output
    assert re.search(r"left out +inkling2_text: known not to be testable", result.stdout)
    assert run("--model", "inkling2_text", *QUICK).exit_code == 2


def test_a_tolerance_that_passes_what_is_wrong_proves_nothing():
    result = run("--model", "qwen3_next", "--tolerance", "10", *QUICK)
    assert result.exit_code == 2
    assert re.search(r"CANNOT TELL +qwen3_next \(sdpa\)", result.stdout)


def test_refusals_alone_prove_nothing():
    result = run("--model", "rwkv", "--side", "left", "--attn", "eager", *QUICK[:-3], "--no-gradients")
    assert result.exit_code == 2
    assert "refused" in result.output


def test_bfloat16_passes_and_fails_without_a_tolerance(monkeypatch):
    import sys

    assert run("--model", "qwen3_next", "--dtype", "bfloat16", *QUICK).exit_code == 0
    module = sys.modules[type(tiny_model("qwen3_next", vocab_size=8)).__module__]
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda hidden_states, attention_mask: hidden_states)
    assert run("--model", "qwen3_next", "--dtype", "bfloat16", *QUICK).exit_code == 1


def test_a_local_checkpoint_with_its_tokenizer_and_own_data(tmp_path):
    tokenizer = byte_tokenizer()
    tiny_model("qwen3_next", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "ab" * n}) + "\n" for n in range(1, 9)), encoding="utf-8")
    result = run("--model", str(tmp_path / "model"), "--data", str(data), *QUICK)
    assert result.exit_code == 0, result.output
    assert re.search(r"PASS: all \d cases of ours", result.stdout)


def test_too_little_text_is_said_and_is_exit_code_2(tmp_path):
    (tmp_path / "a.txt").write_text("one line\n", encoding="utf-8")
    result = run("--model", "qwen3_next", "--data", str(tmp_path / "a.txt"), *QUICK)
    assert result.exit_code == 2
    assert "The audit draws 3 lines." in result.output


def test_help_has_examples():
    result = run("--help")
    assert result.exit_code == 0
    assert "collate-npu audit --model" in result.output


PACKED = ["--packed", "--side", "right", *QUICK[:-3], "--attn", "sdpa", "--no-gradients"]


def test_packed_adds_flat_rows_and_proves_them_for_attention_alone():
    result = run("--model", "llama", *PACKED)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("✔ PASS: all 6 cases of ours")
    assert re.search(r"llama +sdpa +right, packed +6 of 6", result.stdout)
    verbose = run("--model", "llama", "--verbose", *PACKED).stdout
    assert re.search(r"llama: flat rows.*handed over by.*no boundaries +\d", verbose, flags=re.S)


@NEWER
def test_a_recurrent_family_without_kernels_is_not_run_and_not_wrong():
    result = run("--model", "qwen3_next", "--json", *PACKED)
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert report["verdict"] == "NOT PROVED"
    lacking = {f["column"] for f in report["findings"] if f["no_kernel"] and f["whose"] == "ours"}
    assert lacking == {"collator", "adapter", "wrapped"}
    assert set(report["kernels"]["qwen3_next"].values()) == {"torch"}
    said = "NOT RUN +qwen3_next, flat rows \\(collator, collator \\+ adapter, wrapped collator\\): no kernel here"
    assert re.search(said, run("--model", "qwen3_next", *PACKED).stdout)


@NEWER
@pytest.mark.parametrize("deaf", [False, True])
def test_reference_kernels_take_the_place_of_a_cards(monkeypatch, deaf):
    if deaf:
        plain = kernels.causal_conv1d_fn
        monkeypatch.setitem(
            kernels._KERNELS,
            "causal_conv1d_fn",
            lambda x, weight, bias=None, seq_idx=None, activation=None: plain(x, weight, bias, activation=activation),
        )
    result = run("--model", "qwen3_next", "--kernels", "reference", *PACKED)
    assert result.exit_code == deaf, result.output


def test_reference_kernels_change_nothing_for_attention_alone():
    assert run("--model", "llama", "--kernels", "reference", *PACKED).exit_code == 0


@pytest.mark.parametrize(("name", "code"), [("hears", 0), ("deaf", 1)])
def test_an_attention_that_a_plugin_registers_is_audited_by_its_name(name, code, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "audit")
    args = [arg for arg in QUICK if arg not in ("--attn", "sdpa")]
    result = run("--model", "llama", "--attn", name, "--plugin", "registered_attention", "--side", "left", *args)
    assert result.exit_code == code, result.output
    assert re.search(rf"llama +{name} +left", result.output)


def test_flex_attention_is_audited_on_a_cpu(monkeypatch):
    """Not compiled here, which takes a minute: the same masks, and the same function."""
    monkeypatch.setattr("torch.compile", lambda function, **settings: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("transformers.integrations.flex_attention.WrappedFlexAttention._instance", None)
    args = [arg for arg in QUICK if arg not in ("--attn", "sdpa")]
    result = run("--model", "llama", "--attn", "flex_attention", "--side", "left", *args)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("✔ PASS: all 3 cases of ours")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--attn", "flash_attention_2"], "Flash attention kernels run on a card"),
        (["--attn", "flash_attention_3", "--attn", "sdpa"], "Flash attention kernels run on a card"),
        (["--attn", "flex_attention"], "Add --no-gradients"),
        (["--attn", "sdp"], "Did you mean sdpa?"),
        (["--plugin", "no_such_module"], "no_such_module"),
        (["--batch-size", "1", "--packed"], "neither padded nor packed"),
        (["--batch-size", "1"], "proves nothing"),
        (["--cp", "2", "--attn", "eager"], "reads sdpa alone"),
        (["--cp", "1"], "'--cp'"),
        (["--kernels", "none"], "'--kernels'"),
    ],
)
def test_cases_that_cannot_run_are_exit_code_2_before_any_model_is_built(no_model, args, said):
    result = run("--model", "qwen3_next", *args)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_one_command_line_covers_padding_flat_rows_and_ranks():
    """In a process of its own, as a user runs it: ranks are started from there."""
    pytest.importorskip("accelerate")
    args = ["--model", "llama", "--cp", "2", "--json", *PACKED]
    command = [sys.executable, "-m", "collate_npu", "audit", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    right = {(f["side"], f["column"]) for f in report["findings"] if f["right"]}
    assert {("right", "collator"), ("packed", "collator"), ("cp 2", "accelerate"), ("cp 2", "Trainer")} <= right
    assert set(report["yardsticks"]) == {"llama (sdpa)", "llama (sdpa) packed", "llama (sdpa) cp 2"}
    assert not report["cannot_tell"]


def test_a_page_is_written_beside_the_report(tmp_path):
    pytest.importorskip("matplotlib")
    result = run("--model", "qwen3_next", "--html", str(tmp_path / "report.html"), "--json", *QUICK)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "✔ PASS: all " in text
    assert "padded on the left, of qwen3_next" in text
    assert "elsewhere, the worst: " in text


def test_a_page_that_cannot_be_written_is_refused_before_any_model_is_built(no_model, tmp_path):
    pytest.importorskip("matplotlib")
    result = run("--model", "qwen3_next", "--html", str(tmp_path / "absent" / "report.html"))
    assert result.exit_code == 2
    assert "Name a file in a folder that is there" in result.output


def test_env_lists_packages():
    result = CliRunner().invoke(cli.app, ["env"])
    assert result.exit_code == 0
    assert "- torch: " in result.output
    assert "- devices: " in result.output


def test_a_command_does_not_warn_of_its_own_batches():
    command = [sys.executable, "-W", "always", "-m", "collate_npu", "show", "--lengths", "3,5", "--side", "left"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "this batch has a 4D" not in done.stderr
    assert "■" in done.stdout
