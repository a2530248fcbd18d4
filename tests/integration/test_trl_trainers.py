"""TRL's trainers, from their constructors, on a CPU: what each layer received, and each sequence against itself alone.

TRL's own collators pad right with a 2D mask, which is right on every model here; a collator of the user's (`Left`) is not.
"""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.utils import DPODataCollatorWithPadding
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer
from watching import Watch

from collate_npu import CollateError, PaddingCollator, adapt, wrap_collator
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.transformers import DeliveryCallback
from collate_npu.testing import byte_tokenizer, tiny_model

pytestmark = pytest.mark.slow

TOKENIZER = byte_tokenizer()
PAD = TOKENIZER.pad_token_id
TEXTS = ["one, a short text", "two is a longer text than the one before it", "three", "four has some words"]
PAIRS = {"prompt": ["the sky is", "2 and 2"], "chosen": [" blue and very wide", " are 4"]}
PAIRS["rejected"] = [" a cat", " is 5, they say"]
WHOLE = {key: [p + c for p, c in zip(PAIRS["prompt"], PAIRS[key])] for key in ("chosen", "rejected")}
UNPAIRED = {"prompt": PAIRS["prompt"] * 2, "completion": PAIRS["chosen"] + PAIRS["rejected"], "label": [1, 1, 0, 0]}
RIGHT, WRONG = 1e-5, 0.05
MODELS = ["qwen3_next", "qwen3"]


def joined(data, prompt, *keys):
    """The sequences of each row, once."""
    return {(*(row[prompt] if prompt else ()), *row[key]) for row in data for key in keys}


KINDS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS, ("prompt_ids", "chosen_ids", "rejected_ids")),
    "kto": (trl.KTOTrainer, trl.KTOConfig, UNPAIRED, ("prompt_ids", "completion_ids", "KL_completion_ids")),
    "reward": (trl.RewardTrainer, trl.RewardConfig, WHOLE, ("", "chosen_ids", "rejected_ids")),
    "sft": (trl.SFTTrainer, trl.SFTConfig, {"text": TEXTS}, ("", "input_ids")),
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS, ("", "chosen_input_ids", "rejected_input_ids")),
}
COLLATORS = {
    "dpo": dpo_trainer.DataCollatorForPreference,
    "kto": kto_trainer.DataCollatorForUnpairedPreference,
    "reward": reward_trainer.DataCollatorForPreference,
}


def settings(tmp_path, **more):
    common = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 1, "learning_rate": 0.0, "logging_steps": 1}
    quiet = {"save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False}
    return {"output_dir": str(tmp_path), **common, **quiet, "per_device_train_batch_size": 4, **more}


def build(name):
    model = tiny_model(name, vocab_size=len(TOKENIZER))
    model.name = name
    model.config.router_aux_loss_coef = 0.0  # the router's loss and a dense mask do not go together, and say so
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # else a batch differs from itself
            module.p = 0.0
    return model


def trainer_of(kind, model, tmp_path, collator=None, **more):
    """The trainer, and the sequences of its data."""
    made, config, data, keys = KINDS[kind]
    if kind == "reward":
        model.config.num_labels, inner = 1, model
        model = AutoModelForSequenceClassification.from_config(model.config)
        model.base_model.load_state_dict(inner.base_model.state_dict())
    own = {"sft": {}, "orpo": {"max_length": 80, "remove_unused_columns": False}}.get(kind, {"max_length": 80})
    given = {"train_dataset": Dataset.from_dict(data), "processing_class": TOKENIZER, "data_collator": collator}
    reference = [build(model.name)] if kind in ("dpo", "kto") else []
    trainer = made(model, *reference, config(**settings(tmp_path, **own | more)), **given)
    return trainer, lambda: joined(trainer.train_dataset, *keys)


def grpo(model, tmp_path):
    """It takes no collator. The rows that it scores come as it goes."""
    args = trl.GRPOConfig(**settings(tmp_path, num_generations=2, max_completion_length=6, beta=0.0))
    data = Dataset.from_dict({"prompt": ["the", "a much longer prompt than that"] * 2})
    given = {"args": args, "train_dataset": data, "processing_class": TOKENIZER}
    trainer = trl.GRPOTrainer(model, lambda completions, **_: [float(len(text)) for text in completions], **given)
    scored, score = [], trainer._get_per_token_logps_and_entropies

    def note(model, ids, mask, *args, **kwargs):
        scored.extend(row[keep.bool()].tolist() for row, keep in zip(ids, mask))
        return score(model, ids, mask, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = note
    return trainer, lambda: scored


class Left:
    """A user's own collator: TRL's batch moved to the right end, and a correct 4D mask, which recurrent layers skip."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, samples):
        batch = dict(self.inner(samples))
        keep = batch["attention_mask"].bool()
        for key in ("input_ids", "attention_mask", "completion_mask"):
            if key in batch:
                batch[key] = torch.stack([row.roll(int((~k).sum())) for row, k in zip(batch[key], keep)])
        causal = torch.ones(keep.shape[1], keep.shape[1], dtype=torch.bool).tril()
        return batch | {"attention_mask": batch["attention_mask"].bool()[:, None, None] & causal}


def error_of(trainer, sequences, adapted=False):
    """Of a step, by the hidden states of each sequence; and what its layers got for a mask."""
    if adapted:
        adapt(trainer.model)
    with Watch(trainer.model) as seen:
        trainer.train()
    error, compared = seen.error(sequences())
    assert compared >= len(sequences()) > 1
    return error, seen.masks


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", COLLATORS)
def test_preference_trainers(kind, name, tmp_path):
    """TRL's own collator is right; a left-padding one with a 4D mask is wrong on a hybrid model, and right when wrapped."""
    errors, own = {}, COLLATORS[kind](pad_token_id=PAD)
    for case in ("own", "left", "left wrapped", "left adapted"):
        model, collator = build(name), own if case == "own" else Left(own)
        chosen = wrap_collator(collator, model=model) if case == "left wrapped" else collator
        trainer, sequences = trainer_of(kind, model, tmp_path, chosen)
        if (kind, case) == ("kto", "left wrapped"):  # its second rows would get the positions of the first
            with pytest.raises(UnsupportedFormError, match=r"KL_input_ids.* or do not wrap this collator"):
                trainer.train()
            continue
        errors[case], masks = error_of(trainer, sequences, adapted=case == "left adapted")
        if case == "left wrapped" and name == "qwen3_next":
            assert {form.split()[0] for form in masks["linear_attn"]} == {"int64"}
    assert (errors.pop("left") > WRONG) == (name == "qwen3_next")
    assert max(errors.values()) < RIGHT


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo"])
def test_a_routers_loss_that_the_call_asks_for_counts_no_padding(kind, tmp_path):
    """TRL asks for it in each call, and its batches are right for this model without us: GRPO's too, padded left."""
    told = []
    for line in (lambda model: nullcontext(), adapt):
        torch.manual_seed(0)
        model = build("mixtral")
        trainer, _ = grpo(model, tmp_path) if kind == "grpo" else trainer_of(kind, model, tmp_path)
        trainer.router_aux_loss_coef, trainer.aux_loss_enabled = 1.0, True
        with line(trainer.model):
            trainer.train()
        told.append([row[key] for row in trainer.state.log_history for key in ("loss", "aux_loss") if key in row])
    assert len(told[0]) == 2
    assert told[0] == pytest.approx(told[1], rel=1e-5)


def test_none_crashes_trl_and_omit_is_the_way_round(tmp_path):
    """TRL sums the mask it finds (1.16 sft_trainer.py:1650): None raises there, and no key at all does not."""
    model, collator = build("qwen3_next"), PaddingCollator(TOKENIZER, attention_mask="omit")
    with pytest.raises(AttributeError, match="NoneType"):
        trainer_of("sft", model, tmp_path, PaddingCollator(TOKENIZER))[0].train()
    bare = lambda rows: {key: value for key, value in collator(rows).items() if key != "attention_mask_2d"}  # noqa: E731
    trainer_of("sft", model, tmp_path, bare)[0].train()


FLAT = {"packing": {"packing": True, "max_length": 64}, "padding_free": {"padding_free": True, "max_length": None}}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize(("name", "coefficient"), [("qwen3_next", 0.0), ("qwen3", 0.0), ("qwen3_next", 0.01)])
def test_flat_rows_of_sft(kind, name, coefficient, tmp_path):
    """TRL refuses a collator there; the forward is adapted, and TRL still counts tokens, not entries of a mask."""
    model = build(name)
    with pytest.raises(ValueError, match="custom data collator is not supported"):
        trainer_of("sft", model, tmp_path, PaddingCollator(TOKENIZER), **FLAT[kind])
    trainer, _ = trainer_of("sft", model, tmp_path, **FLAT[kind], router_aux_loss_coef=coefficient)
    rows = [TOKENIZER(text)["input_ids"] for text in TEXTS]
    assert error_of(trainer, lambda: rows, adapted=True)[0] < RIGHT
    assert trainer.state.log_history[0]["num_tokens"] == sum(len(ids) + 1 for ids in rows)  # TRL adds an eos


@pytest.mark.parametrize(
    ("name", "own", "ours"), [("qwen3_next", True, True), ("gpt2", False, True), ("recurrent_gemma", False, None)]
)
def test_grpo_pads_prompts_left(name, own, ours, tmp_path):
    """A 2D mask alone is wrong where positions are absolute and where a layer reads no mask."""
    for adapted, right in ((False, own), (True, ours)):
        trainer, scored = grpo(build(name), tmp_path)
        if right is None:
            with adapt(trainer.model), pytest.raises(UnsupportedFormError, match="padding moves a sequence"):
                trainer.train()
            continue
        error, _ = error_of(trainer, scored, adapted)
        assert error < RIGHT if right else error > WRONG
        if not right:  # the callback judges what is trained, not the generation before it, which is right
            trainer.add_callback(DeliveryCallback())
            with pytest.raises(CollateError, match=r"positions|padding"):
                trainer.train()


def test_orpo_joins_rows_behind_its_collator(tmp_path):
    model = build("qwen3_next")
    wrapped = wrap_collator(DPODataCollatorWithPadding(pad_token_id=PAD), model=model)
    with pytest.raises(CollateError, match=r"builds the rows of this batch after the collator.*adapt\(model\)"):
        trainer_of("orpo", model, tmp_path, wrapped)[0].train()
    assert error_of(*trainer_of("orpo", model, tmp_path), adapted=True)[0] < RIGHT
