"""transformers' Trainer, really run: the step it takes, with text or images, and what it evaluates and predicts.

It counts the labels of a step before any forward, and may keep them from it.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

pytest.importorskip("transformers", minversion="5.2")
pytest.importorskip("accelerate")
import transformers
from differential import FAMILIES, IGNORED, PAD, Case, batch_of, samples_of, single, wrapped
from tiny_vision import PAD as PAD_OF_IMAGES, taken
from trained import gradient_of, loss_of, step_of, trainer_of

from collate_npu import PaddingCollator, adapt, wrap_collator
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.transformers import declare_columns
from collate_npu.releases import numbers

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
LENGTHS = ((5,), (9,), (3,), (12,))


def case_of(family: str) -> Case:
    if family in FAMILIES["vision"]:
        return Case(family, "ImageTextToText", LENGTHS, "left")
    return Case(family, lengths=LENGTHS, side="left")


def stranger(case, rows):
    """As DataCollatorForSeq2Seq, or a processor: the first label of each sample is there."""
    batch = batch_of(replace(case, lengths=tuple((len(row["input_ids"]),) for row in rows)), rows)
    return {key: value for key, value in batch.items() if key != "mm_token_type_ids" or "mm_token_type_ids" in rows[0]}


def data_of(case):
    """The Trainer drops keys that a forward does not name. Tokens of images are not learned."""
    found = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in samples_of(case)]
    images = lambda row: row.get("mm_token_type_ids", [0] * len(row["input_ids"]))  # noqa: E731
    return [row | {"labels": [IGNORED if kind else y for y, kind in zip(row["labels"], images(row))]} for row in found]


def summed(outputs, labels, num_items_in_batch=None):
    return sum(loss_of(one, own, 0.0) for one, own in zip(outputs.logits, labels)) / num_items_in_batch


def wanted(case, model, rows, smoothing):
    """The gradient of the mean over the labels of all samples, each by itself."""
    model.train().zero_grad(set_to_none=True)
    total = sum(label >= 0 for row in rows for label in row["labels"][1:])
    for row in rows:
        logits = model(**taken(model, stranger(single(case, row), [row]))).logits[0]
        (loss_of(logits, torch.tensor(row["labels"]), smoothing) / total).backward()
    return gradient_of(model)


CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SETTINGS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "checkpointed": CHECKPOINTED,
    "smoothed": {"label_smoothing_factor": 0.2},
    "own loss": {"compute_loss_func": summed},
    "averaged": {"average_tokens_across_devices": True, "gradient_accumulation_steps": 2},
}
KEPT = ("smoothed", "own loss")
"""Where the Trainer keeps the labels from the forward."""


def step(tmp_path, case, model, rows, setting, door):
    how = {"max_steps": 1, "save_strategy": "no", "max_grad_norm": 0.0, **SETTINGS[setting]}
    how["per_device_train_batch_size"] = 4 // how.get("gradient_accumulation_steps", 1)
    made = partial(transformers.Trainer, compute_loss_func=how.pop("compute_loss_func", None))
    shown = replace(case, side="right") if "right" in door else case
    plain = partial(stranger, shown)
    if "collator" in door:
        pad = PAD_OF_IMAGES if case.vision else PAD
        plain = PaddingCollator(pad_token_id=pad, padding_side="left", model=model)
    elif "wrapped" in door:
        plain = wrap_collator(plain, model=model)
    trainer = trainer_of(model, plain, tmp_path, rows, made=made, **how)
    trainer.model_accepts_loss_kwargs = True
    with adapt(model) if "adapt" in door else nullcontext():
        return step_of(trainer)[1]


STEPS = [*product(("llama", "qwen3_next", "qwen3_moe"), SETTINGS, ("collator", "wrapped", "adapt, padded right"))]
COUNTS = numbers(transformers.__version__) >= (5, 17)
"""Before, the losses of models with images drop the count of labels."""
STEPS += [
    (family, setting, door)
    for family, setting in product(FAMILIES["vision"], ("plain", "accumulated", "checkpointed"))
    for door in ("collator", "wrapped", "adapt, wrapped")
    if COUNTS or family == "qwen2_5_vl" or setting != "accumulated"
]


@pytest.mark.draws(5)
@pytest.mark.parametrize(("family", "setting", "door"), STEPS)
def test_a_step_of_the_trainer_is_that_of_the_samples(family, setting, door, tmp_path):
    case = case_of(family)
    model, rows = wrapped(case), data_of(case)
    reference = wanted(case, model, rows, SETTINGS[setting].get("label_smoothing_factor", 0.0))
    found = step(tmp_path, case, model, rows, setting, door)
    assert float((found - reference).norm() / reference.norm()) < 1e-3


@pytest.mark.draws(3)
@pytest.mark.parametrize("setting", ["accumulated", *KEPT])
def test_labels_that_it_counted_before_adapt_ignores_them_are_told(setting, tmp_path):
    """Without us padding predicts the first label of each row, which the Trainer counts."""
    case = case_of("llama")
    model, rows = wrapped(case), data_of(case)
    if setting in KEPT:
        with pytest.warns(UserWarning, match=r"keeps the labels from the forward.*data_collator=wrap_collator"):
            step(tmp_path, case, model, rows, setting, "adapt")
    else:
        with pytest.raises(UnsupportedFormError, match=r"data_collator=wrap_collator\(your collator, model=model\)"):
            step(tmp_path, case, model, rows, setting, "adapt")


def test_columns_that_the_collator_reads_stay_where_they_are_declared(tmp_path):
    """The Trainer drops what a forward does not name."""
    model, rows = wrapped(case_of("llama")), [{"input_ids": [3, 4, 5, 6, 7], "seq_lengths": [2, 3]}]
    trainer = trainer_of(model, PaddingCollator(pad_token_id=PAD, model=model), tmp_path, rows)
    declare_columns(trainer)
    [batch] = trainer.get_train_dataloader()
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


def test_labels_of_a_head_of_ones_own_are_its_own():
    """Classes of tokens are read in place, so the first counts."""
    case = replace(case_of("llama"), head="TokenClassification")
    model, batch = wrapped(case), batch_of(case, samples_of(case))
    plain = model(**batch).loss
    with adapt(model.base_model):
        assert torch.allclose(model(**batch).loss, plain, atol=1e-5)


@torch.no_grad()
@pytest.mark.draws(2)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_an_evaluation_and_predictions_are_those_of_the_samples_alone(side, tmp_path):
    """`eval_loss` is the mean of the batches' own, here of as many rows each."""
    case = case_of("qwen3_next")
    model, rows = wrapped(case), samples_of(case)
    collator = PaddingCollator(pad_token_id=PAD, padding_side=side, model=model)
    trainer = trainer_of(model, collator, tmp_path, rows, per_device_eval_batch_size=2)
    alone = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    losses = [loss_of(logits, torch.tensor(row["labels"]), 0.0) for logits, row in zip(alone, rows)]
    halves = [sum(losses[at : at + 2]) / sum(len(row["labels"]) - 1 for row in rows[at : at + 2]) for at in (0, 2)]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(sum(halves)) / 2, abs=1e-4)
    for found, logits in zip(trainer.predict(rows).predictions, alone):
        # the Trainer pads each batch's output on the right with -100, behind its own left or right padding
        real = torch.as_tensor(found[(found != -100).all(-1)])
        own = real[: len(logits)] if side == "right" else real[-len(logits) :]
        assert (own - logits).abs().max() < 1e-4
