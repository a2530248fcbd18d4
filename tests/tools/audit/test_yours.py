"""What the user gives, a collator or a dumped batch, is judged like ours, and is told apart from it."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")
from transformers import BatchEncoding, DataCollatorForSeq2Seq, DataCollatorWithFlattening
from typer.testing import CliRunner

from collate_npu import CollateError, PaddingCollator
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.audit import audit
from collate_npu.tools.audit.dumped import read_batch
from collate_npu.tools.cli import app

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
"""
QUICK = ["--batches", "1", "--batch-size", "3", "--attn", "sdpa", "--no-gradients", "--max-length", "48"]


def features():
    return [{"input_ids": list(ids), "labels": list(ids)} for ids in SAMPLES]


def run(*args):
    return CliRunner().invoke(app, ["audit", *args, *QUICK], env={"COLUMNS": "250"})


def told(*args):
    result = run(*args, "--json")
    report = json.loads(result.stdout)
    return result.exit_code, [f for f in report["findings"] if f["whose"] == "yours"], report


@pytest.mark.parametrize(("side", "found"), [("left", "left"), ("right", "right")])
def test_a_handover_is_a_column_of_its_own_on_the_side_it_chose(side, found):
    model = tiny_model("qwen3_next", vocab_size=257)
    mine = PaddingCollator(pad_token_id=EOS, padding_side=side, model=model)
    kept = list(audit(model, SAMPLES, pad_token_id=EOS, sides=["right"], columns=["collator"], handovers={"mine": mine}))
    assert [(f.column, f.side, f.whose, f.right) for f in kept] == [
        ("collator", "right", "ours", True),
        ("mine", found, "yours", True),
    ]


def test_a_wrong_handover_is_wrong_and_says_what_to_change():
    model = tiny_model("qwen3_next", vocab_size=257)
    flat = DataCollatorWithFlattening()
    (mine,) = audit(model, SAMPLES, pad_token_id=EOS, sides=["right"], columns=[], handovers={"mine": flat})
    assert (mine.whose, mine.side, mine.right) == ("yours", "packed", False)
    assert "read cu_seq_lens_q and seq_idx" in mine.note


def test_a_handover_that_cannot_be_compared_is_refused():
    model = tiny_model("llama", vocab_size=257)

    def cuts(features):
        return {"input_ids": torch.tensor([feature["input_ids"][:2] for feature in features])}

    with pytest.raises(CollateError, match="Switch off what changes tokens"):
        list(audit(model, SAMPLES, pad_token_id=EOS, sides=["right"], columns=[], handovers={"mine": cuts}))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_here.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "mine_here.py"


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("wrong", 1)])
def test_a_collator_by_name_fails_the_audit_where_it_is_wrong(mine, name, code):
    ended, (found,), report = told("--model", "llama", "--collator", f"{mine}:{name}", "--side", "right")
    assert ended == code
    assert found["column"] == name
    assert found["right"] is (code == 0)
    assert all(f["right"] or f["refused"] for f in report["findings"] if f["whose"] == "ours")
    assert ("make it from the lengths" in found["note"]) == (code == 1)


@pytest.mark.parametrize(("name", "said"), [("cuts", "Switch off what changes tokens"), ("raises", "KeyError: 'images'")])
def test_a_collator_that_cannot_be_compared_is_not_run_and_not_wrong(mine, name, said):
    ended, found, report = told("--model", "llama", "--collator", f"{mine}:{name}", "--side", "right")
    assert (ended, found) == (2, [])
    assert said in report["not_run"][f"{name} on llama (sdpa)"]


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


def dumped(tmp_path, batch, name="dump.pt"):
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save(batch, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(dict(batch), path)
    return path


RIGHT = dict(DataCollatorForSeq2Seq(byte_tokenizer())(features()))


@pytest.mark.parametrize("name", ["dump.pt", "dump.safetensors"])
def test_a_dumped_batch_that_is_right(tmp_path, name):
    ended, (found,), report = told("--model", "llama", "--batch", str(dumped(tmp_path, RIGHT, name)))
    assert (ended, found["side"], found["right"]) == (0, "right", True)
    assert {f["side"] for f in report["findings"]} == {"left", "right"}


def test_a_dumped_flat_row_is_compared_with_flat_rows(tmp_path):
    batch = dict(DataCollatorWithFlattening()(features()))
    ended, (found,), report = told("--model", "llama", "--batch", str(dumped(tmp_path, batch)))
    assert (ended, found["right"]) == (0, True)
    assert {f["side"] for f in report["findings"]} == {"packed"}


def test_a_dumped_batch_that_is_wrong_for_its_model(tmp_path):
    batch = dict(PaddingCollator(pad_token_id=EOS, padding_side="left")(features()))  # for an adapter, not for a model
    ended, (found,), _ = told("--model", "llama", "--batch", str(dumped(tmp_path, batch)))
    assert (ended, found["side"], found["right"]) == (1, "left", False)
    assert "True = blocked" in found["note"]


def test_labels_of_a_dump_count_as_they_are(tmp_path):
    labels = RIGHT["labels"].clone()
    labels[:, :2] = -100
    ended, (found,), _ = told("--model", "llama", "--batch", str(dumped(tmp_path, {**RIGHT, "labels": labels})))
    assert (ended, found["right"]) == (0, True)
    labels[1, -1] = 5  # at padding
    ended, (found,), _ = told("--model", "llama", "--batch", str(dumped(tmp_path, {**RIGHT, "labels": labels})))
    assert (ended, found["right"]) == (1, False)
    assert "Labels stand at padding (1)" in found["note"]


def test_what_is_no_batch_is_refused_with_the_recipe(tmp_path):
    unsafe = dumped(tmp_path, BatchEncoding(RIGHT), "unsafe.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    listed = dumped(tmp_path, [1], "list.pt")
    for path in (
        unsafe,
        listed,
        *(tmp_path / name for name in ("junk.pt", "junk.safetensors", "absent.pt", "absent.safetensors")),
    ):
        with pytest.raises(CollateError, match=r"torch\.save") as error:
            read_batch(path)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Name the model that it was made for"),
        (["--model", "llama", "--data", "a.txt"], "Leave --data out"),
        (["--model", "llama", "--cp", "2"], "Leave --cp out"),
        (["--model", "llama"], "Carry attention_mask_2d from the collator"),
    ],
)
def test_a_dump_that_says_too_little_or_comes_with_too_much(tmp_path, args, said):
    batch = {key: value for key, value in RIGHT.items() if key != "attention_mask"}
    result = run(*args, "--batch", str(dumped(tmp_path, batch)))
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_tokens_of_another_model_are_refused(tmp_path):
    (tmp_path / "model").mkdir()
    tiny_model("llama", vocab_size=257).save_pretrained(tmp_path / "model")
    batch = {**RIGHT, "input_ids": RIGHT["input_ids"] + 50_000}
    result = run("--model", str(tmp_path / "model"), "--batch", str(dumped(tmp_path, batch)))
    assert result.exit_code == 2
    assert "token id 50256" in " ".join(result.output.split())


def test_rows_of_tokens_are_used_with_their_labels(tmp_path):
    rows = [{"input_ids": list(range(1, n)), "labels": [-100] * (n - 2) + [5]} for n in range(4, 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = run("--model", "llama", "--data", str(tmp_path / "a.jsonl"))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_encoder_is_audited_on_both_sides(name):
    ended, _, report = told("--model", name)
    assert ended == 0
    wrong = {(f["side"], f["column"]) for f in report["findings"] if f["right"] is False}
    assert {("left", "None"), ("right", "None")} <= wrong


def test_an_encoder_decoder_is_refused():
    result = run("--model", "t5")
    assert result.exit_code == 2
    assert "reads two sequences" in " ".join(result.output.split())


def test_a_collator_that_ignores_a_prompt_is_compared_with_the_same_labels():
    model = tiny_model("llama", vocab_size=257)
    seq2seq = DataCollatorForSeq2Seq(byte_tokenizer())

    def ignores(features):
        batch = seq2seq(features)
        batch["labels"][:, :2] = -100
        return batch

    (mine,) = audit(model, SAMPLES, pad_token_id=EOS, sides=["right"], columns=[], handovers={"mine": ignores})
    assert mine.right
