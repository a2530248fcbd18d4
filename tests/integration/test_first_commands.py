"""The first commands of a transformers user, with left padding: the model says who reads; samples keep their logits."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments  # noqa: E402

from collate_npu import BatchAdapter, PaddingCollator, Segments, per_sequence, wrap_collator  # noqa: E402
from collate_npu.testing import byte_tokenizer, tiny_model  # noqa: E402

TOKENIZER = byte_tokenizer(padding_side="left", pad_is_eos=False)
IDS = [[5, 9, 2], [7, 1, 8, 3, 200, 31, 64, 12], [40, 41, 42, 43, 44]]
SAMPLES = [{"input_ids": ids, "labels": ids} for ids in IDS]
TRUTH = Segments.from_lengths([len(ids) for ids in IDS], side="left")
FAMILIES = ["qwen3_next", "llama"]


def neutral():
    return PaddingCollator(TOKENIZER)(SAMPLES)


def wrapped(inner, model):
    features = SAMPLES if isinstance(inner, transformers.DataCollatorForSeq2Seq) else [{"input_ids": ids} for ids in IDS]
    return wrap_collator(inner, model=model)(features)


COMMANDS = {
    "PaddingCollator": lambda model: PaddingCollator(TOKENIZER, model=model)(SAMPLES),
    "BatchAdapter": lambda model: BatchAdapter(model)(neutral()),
    "DataCollatorWithPadding": lambda model: wrapped(transformers.DataCollatorWithPadding(TOKENIZER), model),
    "DataCollatorForSeq2Seq": lambda model: wrapped(transformers.DataCollatorForSeq2Seq(TOKENIZER), model),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param, vocab_size=len(TOKENIZER))


@torch.no_grad()
def error(model, batch):
    """The largest difference of a logit to the sample alone."""
    batched = per_sequence(model(**batch).logits, TRUTH)
    alone = [model(input_ids=torch.tensor([ids])).logits[0] for ids in IDS]
    return max(float((a - b).abs().max()) for a, b in zip(batched, alone))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_sample_keeps_its_own_logits(command, model):
    batch = COMMANDS[command](model)
    assert batch["attention_mask"].tolist() == TRUTH.keep.long().tolist()
    assert error(model, batch) < 1e-4


@pytest.mark.filterwarnings("ignore:collate_npu")
def test_the_neutral_batch_is_not_for_the_model_itself(model):
    """The control: a batch made for nobody moves the logits, so the test above has power."""
    batch = neutral()
    assert batch["attention_mask"].ndim == 4
    kwargs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    assert error(model, kwargs) > 0.1


@pytest.mark.parametrize("how", ["collator", "wrapped"])
def test_trainer_predicts_what_each_sample_gives_alone(how, model, tmp_path):
    collator = PaddingCollator(TOKENIZER, model=model)
    if how == "wrapped":
        collator = wrap_collator(transformers.DataCollatorForSeq2Seq(TOKENIZER), model=model)
    args = TrainingArguments(tmp_path, use_cpu=True, report_to=[], max_steps=1, learning_rate=0.0, disable_tqdm=True)
    trainer = Trainer(model, args, data_collator=collator, train_dataset=SAMPLES, eval_dataset=SAMPLES)
    trainer.train()
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([ids])).logits[0] for ids in IDS]
    told = torch.as_tensor(trainer.predict(SAMPLES).predictions)
    assert max(float((a - b).abs().max()) for a, b in zip(per_sequence(told, TRUTH), alone)) < 1e-4


# --- nothing aliases ------------------------------------------------------------------------------------------------------

EDITS = {
    "masked_fill_": lambda positions: positions.masked_fill_(~TRUTH.keep, 1),
    "+=": lambda positions: positions.add_(2),
    "view": lambda positions: positions.view(-1).zero_(),
}


@pytest.mark.parametrize("command", [*COMMANDS, "neutral"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.filterwarnings("ignore:collate_npu")
def test_positions_can_be_edited_in_place_and_nothing_else_moves(command, edit, model):
    make = COMMANDS.get(command, lambda model: neutral())
    batch, again = make(model), make(model)
    wanted = batch["position_ids"].clone()
    for positions in (wanted, batch["position_ids"]):
        EDITS[edit](positions)
    assert torch.equal(batch["position_ids"], wanted)
    assert not torch.equal(wanted, again["position_ids"])
    for key, value in again.items():
        assert key == "position_ids" or torch.equal(batch[key], value), key
    assert torch.equal(make(model)["position_ids"], again["position_ids"])


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_does_not_reach_the_truth(edit, model):
    keep = TRUTH.keep.long()
    batch, segments = BatchAdapter(model).with_segments({"input_ids": keep.clone(), "attention_mask": keep})
    EDITS[edit](batch["position_ids"])
    batch["attention_mask"].zero_()
    assert segments == TRUTH
    assert torch.equal(segments.position_ids, TRUTH.position_ids)
    assert torch.equal(keep, TRUTH.keep.long())


@pytest.mark.parametrize("settings", [{}, {"consumer": "megatron", "model_type": "qwen3_next"}, {"padding_free": True}])
@pytest.mark.parametrize("edit", ["+=", "view"])
def test_positions_of_right_padding_and_flat_rows_can_be_edited_too(edit, settings):
    """Right padding counts alike in every row: positions that are one row, expanded, cannot be written to."""
    collator = PaddingCollator(TOKENIZER, padding_side="right", **settings)
    batch, again = collator(SAMPLES), collator(SAMPLES)
    EDITS[edit](batch["position_ids"])
    assert not torch.equal(batch["position_ids"], again["position_ids"])
    for key, value in again.items():
        assert key == "position_ids" or not isinstance(value, torch.Tensor) or torch.equal(batch[key], value), key
