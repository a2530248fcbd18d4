"""`collate-npu need`, typed: which way of training is right without us and with the line, on what is installed here."""

import json
import math
import re

import pytest
from typed import typed

pytest.importorskip("rich")
pytest.importorskip("transformers")
from collate_npu.releases import installed
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools import need

pytestmark = pytest.mark.models

RIGHT, LEFT, FLAT = (
    f"Trainer, DataCollator{name}" for name in ("ForSeq2Seq, padded right", "ForSeq2Seq, padded left", "WithFlattening")
)
WORDS = {(RIGHT, "plain"): "right", (LEFT, "plain"): "labels", (FLAT, "plain"): "wrong"}
"""Of Qwen3-Next; `ours` is right everywhere."""


def found(*line):
    done = typed("need", "--json", *line)
    report = json.loads(done.stdout)
    steps = {(row["by"], who): row[who] for row in report["rows"] for who in ("plain", "ours")}
    return done.exit_code, report, {key: step["note"] or step["word"] for key, step in steps.items()}


@pytest.mark.slow
def test_each_trainer_that_is_installed_is_right_with_its_line():
    code, report, words = found("--model", "qwen3_next")
    assert (code, report["passed"]) == (0, True)
    assert WORDS.items() <= words.items()
    assert {word for (_, who), word in words.items() if who == "ours"} == {"right"}
    assert len(report["rows"]) == sum(len(rows) for package, rows in need.stacks().items() if installed(package))
    assert all(row["ours"]["seconds"] > 0 and 0 < row["ours"]["gradient"] < 1e-5 for row in report["rows"])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(need, "_LENGTHS", (40, 9, 24, 16))


@pytest.fixture
def transformers_alone(monkeypatch):
    monkeypatch.setattr(need, "installed", lambda package: installed(package) * (package in ("torch", "transformers")))


@pytest.mark.usefixtures("transformers_alone")
def test_a_dense_checkpoint_beside_transformers_alone(tmp_path):
    tiny_model("qwen3", vocab_size=257).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    done = typed("need", "--model", tmp_path, COLUMNS="250")
    assert done.exit_code == 0
    assert re.match("✔ PASS: [12] of 3 rows are right without collate_npu, 3 with the line.\n", done.stdout)
    assert re.search(rf"✔ .* {LEFT} +wrong: 0\.\d+ labels +right +wrap_collator\(.* \d\.\d$", done.stdout, flags=re.M)
    assert "not installed  trl, ms-swift" in done.stdout


def nan(model):
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * math.nan)


PLANTED = [
    ({"adapt": lambda model: None}, 1, {FLAT: "wrong"}),
    ({"wrap_collator": lambda collator, model: collator}, 2, {LEFT: "changes them before the trainer counts them"}),
    ({"adapt": lambda model: None, "wrap_collator": lambda collator, model: collator}, 1, {LEFT: "labels", FLAT: "wrong"}),
    ({"adapt": nan}, 1, dict.fromkeys((RIGHT, LEFT, FLAT), "wrong")),
    ({"adapt": lambda model: model.no_such_method()}, 1, dict.fromkeys((RIGHT, LEFT, FLAT), "AttributeError: ")),
]


@pytest.mark.usefixtures("transformers_alone")
@pytest.mark.parametrize(("planted", "code", "lost"), PLANTED)
def test_a_line_that_does_not_help_is_no_pass(monkeypatch, planted, code, lost):
    for name, fault in planted.items():
        monkeypatch.setattr(need, name, fault)
    ended, report, words = found("--model", "qwen3_next")
    assert (ended, report["passed"]) == (code, False)
    assert {by for (by, who), word in words.items() if who == "ours" and word != "right"} == {*lost}
    assert all(word in words[by, "ours"] for by, word in lost.items())


def test_a_model_that_is_none_is_said():
    done = typed("need", "--model", "qwen3_nxt")
    assert (done.exit_code, done.stdout, "Did you mean" in done.stderr) == (2, "", True)
