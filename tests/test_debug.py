"""COLLATE_NPU_DEBUG=1, as a user meets it: a process with the variable set, and one without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collate_npu import BatchAdapter, PaddingCollator, debug, wrap_collator

SIDES = {"left": "padding on the left", "right": "padding on the right"}


def run(code, on=True, **settings):
    env = {name: value for name, value in os.environ.items() if name != "COLLATE_NPU_DEBUG"}
    env |= {"COLLATE_NPU_DEBUG": "1"} if on else {}
    done = subprocess.run([sys.executable, "-c", code], env=env | settings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr.split("collate_npu [")[1:]


COLLATE = """
from collate_npu import BatchAdapter, PaddingCollator, wrap_collator
rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9]}]
"""


@pytest.mark.parametrize("side", SIDES)
def test_a_route_is_said_once_with_its_reasons(side):
    code = f"""{COLLATE}
collate = PaddingCollator(pad_token_id=0, padding_side={side!r}, attention_mask="2d")
adapter = BatchAdapter(needs_mask_2d=True, consumer="megatron")
for _ in range(3):
    adapter(collate(rows))
"""
    neutral, route = run(code)
    assert "no consumer named: the neutral form, for a BatchAdapter" in neutral
    assert "MainProcess" in route
    assert "consumer megatron, model not named\n" in route
    assert "attention_mask_2d: stays (recurrent layers read it)" in route
    assert f"2 rows of 4, one sequence each; {SIDES[side]}, 3 of 8 places (38%)" in route
    exact = "attention_mask: None (causal attention, padding on the right only"
    assert (exact if side == "right" else "attention_mask: 4D, True = blocked (padding stands on the left") in route
    assert "context parallelism: none" in route


def test_without_the_variable_nothing_is_said():
    code = f"{COLLATE}\nBatchAdapter(needs_mask_2d=True, consumer='verl')(PaddingCollator(pad_token_id=0)(rows))"
    assert run(code, on=False) == []
    assert run(code, on=False, COLLATE_NPU_DEBUG="0") == []
    assert len(run(code)) == 2


def test_another_route_is_said_too_and_the_ranks_with_it():
    code = f"""{COLLATE}
from collate_npu import ContextParallel
cp = ContextParallel(size=2, rank=1, layout="contiguous")
for consumer in ("megatron", "verl"):
    adapter = BatchAdapter(needs_mask_2d=False, consumer=consumer, context_parallel=cp)
    for batch in (rows, [rows[0], rows[0]]):
        adapter(PaddingCollator(pad_token_id=0, attention_mask="omit")(batch))
"""
    said = [text for text in run(code) if "no consumer named" not in text]
    assert len(said) == 4
    assert all("size=2, rank=1, layout='contiguous'" in text for text in said)
    assert sum("no padding" in text for text in said) == 2


HAZARD = """
import torch
from collate_npu import BatchAdapter, Segments, dense, describe
segments = Segments.from_lengths([2, 3], side="left")
ids = torch.tensor([[7, 5, 7], [5, 6, 4]])
batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": dense(segments).to(torch.int8)}
print(describe(batch))
for _ in range(2):
    BatchAdapter(needs_mask_2d=True, consumer="megatron")(batch)
"""


def test_every_hazard_that_describe_names_is_said_where_the_batch_arrives():
    env = {**os.environ, "COLLATE_NPU_DEBUG": "1"}
    done = subprocess.run([sys.executable, "-c", HAZARD], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    named = [line.partition("hazard: ")[2] for line in done.stdout.splitlines() if line.startswith("hazard: ")]
    assert len(named) == 4
    for text in named:
        assert done.stderr.count(f"hazard in a batch as it arrives: {text}") == 1


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader
from collate_npu import PaddingCollator
if __name__ == "__main__":
    rows = [{"input_ids": list(range(1, n))} for n in (4, 7, 3, 5, 6, 2, 8, 3)]
    collate = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
    collate(rows[:2])
    for _ in DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=2, multiprocessing_context=sys.argv[1]):
        pass
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_each_worker_says_a_route_once(tmp_path, start):
    file = tmp_path / "load.py"
    file.write_text(WORKERS, encoding="utf-8")
    env = {**os.environ, "COLLATE_NPU_DEBUG": "1", "PYTHONPATH": str(Path(debug.__file__).parents[1])}
    done = subprocess.run([sys.executable, str(file), start], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    who = [text.partition("]")[0] for text in done.stderr.split("collate_npu [")[1:] if "neutral form" in text]
    assert len(who) == 3
    assert len(set(who)) == 3  # the process that started them, and two workers


def test_an_applications_own_handler_is_the_only_one():
    code = f"""import logging, sys
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("collate_npu [mine] %(message)s"))
logging.getLogger("collate_npu").addHandler(handler)
{COLLATE}
PaddingCollator(pad_token_id=0)(rows)
"""
    assert [text.partition("]")[0] for text in run(code)] == ["mine"]


def test_logging_that_an_application_configured_does_not_say_it_twice():
    code = f"import logging\nlogging.basicConfig(level=logging.DEBUG)\n{COLLATE}\nPaddingCollator(pad_token_id=0)(rows)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "COLLATE_NPU_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stderr.count("the neutral form") == 1


def test_collators_still_pickle(monkeypatch):
    import pickle

    monkeypatch.setattr(debug, "ON", True)
    monkeypatch.setattr(debug, "say", lambda what, text: None)
    for collate in (PaddingCollator(pad_token_id=0), wrap_collator(PaddingCollator(pad_token_id=0, attention_mask="2d"))):
        assert pickle.loads(pickle.dumps(collate))([{"input_ids": [1, 2]}])["attention_mask_2d"].all()


def test_what_is_off_is_never_called(monkeypatch):
    monkeypatch.setattr(debug, "ON", False)
    monkeypatch.setattr(debug, "say", None)
    batch = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")([{"input_ids": [1]}])
    BatchAdapter(needs_mask_2d=True, consumer="megatron")(batch)


TRAINER = """
import sys, torch
from collate_npu import PaddingCollator, wrap_collator
from collate_npu.testing import byte_tokenizer, tiny_model
tokenizer = byte_tokenizer(padding_side="left")
model = tiny_model("qwen3_next", vocab_size=len(tokenizer))
texts = ["a short one", "and one that is a little longer", "x", "another"]
settings = dict(output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True)
settings |= dict(save_strategy="no", disable_tqdm=True)
"""
PLAIN = """
from transformers import Trainer, TrainingArguments
rows = [tokenizer(text) for text in texts]
data = [dict(row, labels=row["input_ids"]) for row in rows]
collate = PaddingCollator(tokenizer, model=model)
Trainer(model, TrainingArguments(**settings), data_collator=collate, train_dataset=data).train()
"""
SFT = """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
collate = PaddingCollator(tokenizer, model=model)
arguments = SFTConfig(**settings, bf16=False)
data = Dataset.from_dict({"text": texts})
trainer = SFTTrainer(model, args=arguments, data_collator=collate, train_dataset=data, processing_class=tokenizer)
trainer.train()
"""


@pytest.mark.models
@pytest.mark.parametrize(("needs", "code"), [("accelerate", PLAIN), ("trl", SFT)], ids=["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("on", [True, False])
def test_a_trainer_with_left_padding_says_what_its_model_gets(tmp_path, needs, code, on):
    pytest.importorskip("transformers")
    pytest.importorskip(needs)
    file = tmp_path / "train.py"
    file.write_text(TRAINER + code, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "COLLATE_NPU_DEBUG"}
    env |= {"PYTHONPATH": str(Path(debug.__file__).parents[1]), **({"COLLATE_NPU_DEBUG": "1"} if on else {})}
    done = subprocess.run([sys.executable, str(file), str(tmp_path)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [text for text in done.stderr.split("collate_npu [")[1:] if "] consumer " in text]
    if not on:
        assert "collate_npu [" not in done.stderr
        return
    (route,) = said
    assert "consumer transformers, model qwen3_next on sdpa" in route
    assert "attention_mask: the 2D mask, True or 1 = real (every layer of a transformers model reads the 2D mask)" in route
    assert "attention_mask_2d: taken out (this consumer never reads it)" in route
    assert "padding on the left" in route
