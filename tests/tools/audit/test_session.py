"""A session: a collator or a batch of yours is judged like ours and told apart from it; what a model has not is forgiven."""

import io
import json
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")
from found import finding, lacking, raised, refused
from rich.console import Console
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening
from typed import typed

from collate_npu import CollateError, PaddingCollator
from collate_npu.proof.kernel_runs import Run
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.audit import candidates, session

pytestmark = pytest.mark.models

EOS = 256
SAMPLES = [[1, 2, 3, 4, 5, EOS], [6, 7, EOS], [8, 9, 10, EOS]]
MINE = """
import torch
from transformers import DataCollatorForSeq2Seq
def right(tokenizer): return DataCollatorForSeq2Seq(tokenizer)
def wrong(features):
    width = max(len(feature["input_ids"]) for feature in features)
    ids = torch.tensor([feature["input_ids"] + [256] * (width - len(feature["input_ids"])) for feature in features])
    return {"input_ids": ids, "attention_mask": (ids != 256).long()}
def cuts(features): return {"input_ids": torch.tensor([feature["input_ids"][:2] for feature in features])}
def raises(features): raise KeyError("images")
def ends(features): raise SystemExit(0)
"""
QUICK = ["--batches", "1", "--batch-size", "3", "--no-gradients", "--max-length", "48"]


def features():
    return [{"input_ids": list(ids), "labels": list(ids)} for ids in SAMPLES]


def run(*args):
    sdpa = [] if "--attn" in args else ["--attn", "sdpa"]
    return typed("audit", *args, *sdpa, *QUICK, COLUMNS="250")


def told(*args):
    result = run(*args, "--json")
    report = json.loads(result.stdout)
    return result.exit_code, [f for f in report["findings"] if f["whose"] == "yours"], report


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_here.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "mine_here.py"


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("wrong", 1)])
def test_a_collator_by_name_fails_the_audit_where_it_is_wrong(mine, name, code):
    ended, (found,), report = told("--model", "llama", "--collator", f"{mine}:{name}", "--side", "right")
    assert (ended, found["column"], found["right"]) == (code, name, code == 0)
    assert all(f["right"] or f["refused"] for f in report["findings"] if f["whose"] == "ours")
    assert ("make it from the lengths" in found["note"]) == (code == 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuts", "Switch off what changes tokens"),
        ("raises", "mine_here.py, line 10: KeyError: 'images'"),
        ("ends", "mine_here.py, line 11: SystemExit: 0"),
    ],
)
def test_a_collator_that_cannot_be_compared_is_not_run_and_not_wrong(mine, name, said):
    ended, found, report = told("--model", "llama", "--collator", f"{mine}:{name}", "--side", "right")
    assert (ended, found) == (2, [])
    assert said in report["not_run"][f"llama (sdpa) {name}"]


def test_a_collator_made_with_a_tokenizer_is_made_for_each_side(mine):
    """Right padding alone would hide what is wrong."""
    ended, found, _ = told("--model", "llama", "--collator", f"{mine}:right")
    by_side = {each["side"]: each for each in found}
    assert by_side.keys() == {"left", "right"}
    assert by_side["right"]["right"]
    assert by_side["left"]["astray"][0] == "loss"  # its first labels are predicted from padding
    assert ended == 1
    (left,) = told("--model", "llama", "--collator", f"{mine}:right", "--side", "left")[1]
    assert left["side"] == "left"


RIGHT = dict(DataCollatorForSeq2Seq(byte_tokenizer())(features()))
FLAT = dict(DataCollatorWithFlattening()(features()))
LAYERS = SimpleNamespace(layer_types=["full_attention"])
MEGATRON = dict(PaddingCollator(pad_token_id=EOS, padding_side="left", consumer="megatron", model=LAYERS)(features()))


def dumped(tmp_path, batch):
    torch.save(batch, tmp_path / "dump.pt")
    return tmp_path / "dump.pt"


@pytest.mark.parametrize(
    ("batch", "code", "side", "beside", "note"),
    [
        (RIGHT, 0, "right", {"left", "right"}, ""),
        (FLAT, 0, "packed", {"packed"}, ""),
        (MEGATRON, 1, "left", {"left", "right"}, "True = blocked"),
    ],
)
def test_a_dumped_batch_is_compared_with_batches_laid_out_as_it_is(tmp_path, batch, code, side, beside, note):
    ended, (found,), report = told("--model", "llama", "--batch", str(dumped(tmp_path, batch)))
    assert (ended, found["side"], found["right"]) == (code, side, code == 0)
    assert {f["side"] for f in report["findings"] if f["whose"] != "yours"} == beside
    assert note in found["note"]


def test_labels_of_a_dump_count_as_they_are(tmp_path):
    labels = RIGHT["labels"].clone()
    labels[:, :2] = -100
    for place, code, note in ((-100, 0, ""), (5, 1, "Labels stand at padding (1)")):
        labels[1, -1] = place
        ended, (found,), _ = told("--model", "llama", "--batch", str(dumped(tmp_path, {**RIGHT, "labels": labels})))
        assert (ended, found["right"]) == (code, code == 0)
        assert note in found["note"]


def test_labels_that_are_not_the_samples_own_are_wrong(tmp_path, mine):
    """With any tolerance: of a dump that was moved already, and of a collator that forgets the labels of eos."""
    moved = torch.nn.functional.pad(RIGHT["labels"][:, 1:], (0, 1), value=-100)
    path = str(dumped(tmp_path, {**RIGHT, "labels": moved}))
    for more in ([], ["--tolerance", "1e9"]):
        ended, (found,), _ = told("--model", "llama", "--batch", path, *more)
        assert (ended, found["right"], "labels" in found["astray"]) == (1, False, True)
        assert "They are moved by a place" in found["note"]
    spec = "transformers:DataCollatorForLanguageModeling"
    ended, (found,), _ = told("--model", "llama", "--collator", spec, "--side", "right")
    assert ended == 1
    assert "3 are ignored, as where labels are made by labels == pad_token_id" in found["note"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Name the model that it was made for"),
        (["--model", "llama", "--data", "a.txt"], "Leave --data out"),
        (["--model", "llama"], "Pass attention_mask [B, S]"),
    ],
)
def test_a_dump_that_says_too_little_or_comes_with_too_much(tmp_path, args, said):
    batch = {key: value for key, value in RIGHT.items() if key != "attention_mask"}
    result = run(*args, "--batch", str(dumped(tmp_path, batch)))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_tokens_of_another_model_are_refused(tmp_path):
    tiny_model("llama", vocab_size=257).save_pretrained(tmp_path / "model")
    batch = {**RIGHT, "input_ids": RIGHT["input_ids"] + 50_000}
    result = run("--model", str(tmp_path / "model"), "--batch", str(dumped(tmp_path, batch)))
    assert result.exit_code == 2
    assert "token id 50256" in " ".join(result.output.split())


def test_an_encoder_is_audited_on_both_sides():
    ended, _, report = told("--model", "bert")
    assert ended == 0
    wrong = {(f["side"], f["column"]) for f in report["findings"] if f["right"] is False}
    assert {("left", "no mask"), ("right", "no mask")} <= wrong


def test_a_side_that_raises_whatever_is_handed_over_did_not_run(monkeypatch):
    """Seen: flex_attention on a CPU compiles some shapes and not others."""

    def built(*args, **settings):
        model = tiny_model(*args, **settings)
        forward = model.forward

        def no_flat_rows(input_ids, **kwargs):
            if len(input_ids) == 1 and input_ids.shape[1] > 96:  # the longest sample
                raise RuntimeError("does not compile")
            return forward(input_ids=input_ids, **kwargs)

        model.forward = no_flat_rows
        return model

    monkeypatch.setattr(candidates, "tiny_model", built)
    ended, _, report = told("--model", "llama", "--side", "right", "--packed")
    assert report["not_run"] == {"llama (sdpa) packed": "RuntimeError: does not compile"}
    assert {f["side"] for f in report["findings"]} == {"right"}
    assert ended == 2


def test_an_attention_that_a_named_model_has_not_is_not_run_and_of_the_default_ones_left_out(monkeypatch):
    flex = ["--attn", "flex_attention", "--side", "right"]
    monkeypatch.setattr(candidates, "hybrid_model_types", lambda: ["qwen3_next", "llama"])
    ended, _, report = told("--model", "qwen3_next", *flex)
    assert "does not support" in report["not_run"]["qwen3_next (flex_attention)"]
    assert ended == 2
    monkeypatch.setattr("torch.compile", lambda function, **settings: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("transformers.integrations.flex_attention.WrappedFlexAttention._instance", None)
    ended, _, report = told(*flex)
    assert (list(report["left_out"]), report["not_run"]) == (["qwen3_next (flex_attention)"], {})
    assert {f["model"] for f in report["findings"]} == {"llama"}
    assert (ended, report["passed"]) == (0, True)


def test_on_a_card_its_kernels_are_run_first_and_the_models_go_on(monkeypatch):
    asked = []

    def runs(kernels, **how):
        asked.append(how)
        return iter([Run(operator="a.kernel", truth="window", form="TND, mode 4", state="wrong", forward=0.5)])

    monkeypatch.setattr(session, "runs", runs)
    monkeypatch.setattr(session, "check_named", lambda *_, **__: None)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: model)  # the card
    result = run("--model", "qwen3_next", "--device", "npu", "--dtype", "bfloat16", "--side", "right")
    assert asked == [{"device": "npu", "dtype": torch.bfloat16, "few": True}]
    assert result.exit_code == 1, result.output
    assert "; 1 calls of kernels are wrong." in result.stdout
    assert "a.kernel" in result.stdout
    assert "cases of ours are right" in result.stdout  # they ran
    run("--model", "qwen3_next", "--side", "right")
    assert len(asked) == 1


# --- without a model


def audited(monkeypatch, *found, **settings):
    """The report of an audit that finds the same on each side, and what it printed. A batch says what was drawn for it."""

    def case(model, samples, *, sides, **_):
        answers = {"columns": lambda side: range(len(found)), "finding": lambda side, n: found[n]}
        return SimpleNamespace(sides=sides, first=lambda side: samples, yardstick=str, **answers)

    for name, instead in {
        "Audit": case,
        "build": lambda *_, **__: (None, None, 0),
        "resolved_kernels": lambda model: {"f": "torch"},
        "runs": lambda *_, **__: [Run(operator="a.kernel", state="wrong")],
        "samples_of_rows": lambda rows, tokenizer, **how: how,
    }.items():
        monkeypatch.setattr(session, name, instead)
    console = Console(file=io.StringIO(), width=200)
    how = {"data": None, "tokenizer": None, "attentions": ["sdpa"], "device": "cpu", "dtype": "float32", "seed": 7}
    how |= {"batch_size": 3, "batches": 2, "max_length": 48, "gradients": False, "tolerance": None, "sides": ["left"]}
    report = session.audit_all(**{**how, "models": ["llama"], "console": console, **settings})
    return report, console.file.getvalue()


def test_a_report_says_what_was_asked_and_a_line_how_long_each_model_took(monkeypatch):
    report, said = audited(monkeypatch, finding(), models=["llama", "bert", "llama"], tolerance=0)
    asked = {"seed": 7, "data": "shipped with the package", "kernels": "installed", "batch_size": 3, "device": "cpu"}
    assert asked.items() <= report.settings.items()
    assert re.fullmatch(r"\[1/2\] llama \(sdpa\): \d+\.\d s\n\[2/2\] bert \(sdpa\): \d+\.\d s\n", said)
    assert report.batches == {"left": {"count": 6, "max_length": 48, "seed": 7}}
    assert report.operators == []


@pytest.mark.parametrize("settings", [{"collators": ["no_such_module:collate"]}, {"tolerance": float("inf")}])
def test_what_is_named_wrongly_is_refused_before_any_model(monkeypatch, settings):
    with pytest.raises(CollateError):
        audited(monkeypatch, **settings)


ELSEWHERE = finding(False, column="no mask")


@pytest.mark.parametrize(
    ("found", "kept", "judged", "note"),
    [
        ([finding(), ELSEWHERE], 2, True, None),
        ([refused(), finding(), lacking(whose="elsewhere")], 3, True, None),
        ([refused(), lacking(), ELSEWHERE], 3, False, None),
        ([raised(note="first"), raised()], 0, False, "first"),
        ([raised(), refused()], 2, True, None),
    ],
)
def test_what_is_found_is_judged_where_something_of_ours_ran(monkeypatch, found, kept, judged, note):
    report, _ = audited(monkeypatch, *found, sides=["left", "packed"])
    places = {"llama (sdpa)": "left", "llama (sdpa) packed": "packed"}
    assert report.findings == found[:kept] * 2
    assert (report.yardsticks, report.not_run) == (places if judged else {}, dict.fromkeys(places, note) if note else {})


@pytest.mark.parametrize(
    ("sides", "kernels", "told"), [(["left"], "installed", 0), (["packed"], "installed", 1), (["packed"], "reference", 0)]
)
def test_kernels_are_told_where_flat_rows_run_on_what_is_installed(monkeypatch, sides, kernels, told):
    monkeypatch.setattr(session, "kernel_calls", lambda model: [])
    assert len(audited(monkeypatch, finding(), sides=sides, kernels=kernels)[0].kernels) == told


IDS = RIGHT["input_ids"]


@pytest.mark.parametrize(
    "ids",
    [None, IDS[0], IDS[:0], IDS.float(), IDS.to_sparse(), torch.nested.nested_tensor([*IDS], layout=torch.jagged)],
    ids=["none", "one row", "no rows", "floats", "sparse", "nested"],
)
def test_a_dump_without_rows_of_ids_is_refused(monkeypatch, ids):
    monkeypatch.setattr(session, "batch_of_file", lambda path: {"input_ids": ids, "labels": IDS})
    with pytest.raises(CollateError, match="keys input_ids, labels"):
        session._dumped("dump.pt", None, ["llama"])
