"""TRL's SFTTrainer, really run, on tiny hybrid models: its own collator wrapped, and ours in its place."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from collate_npu import PaddingCollator, wrap_collator
from collate_npu.integrations.delivery import received_masks
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.audit.data import shipped_text

TEXT = [line for line in shipped_text() if 5 < len(line.encode()) < 80][:8]


def sft(model, tmp_path, collator, **settings):
    tokenizer = byte_tokenizer()
    args = SFTConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        max_length=80,
        gradient_checkpointing=False,
        **settings,
    )
    data = Dataset.from_dict({"text": TEXT})
    return SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer, data_collator=collator)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_sft_reaches_the_recurrent_layers(name, side, tmp_path):
    tokenizer = byte_tokenizer(padding_side=side)
    model = tiny_model(name, vocab_size=len(tokenizer))
    trainer = sft(model, tmp_path, PaddingCollator(tokenizer, consumer="transformers", model=model))
    with received_masks(model) as received:
        trainer.train()
        trainer.evaluate()
    masks = [mask for key, calls in received.items() if key.endswith("linear_attn") for mask in calls]
    assert masks
    assert all(mask is not None and mask.ndim == 2 and not mask.all() for mask in masks)
    assert all(mask[:, -1].all() for mask in masks) == (side == "left")


def test_token_accuracy_does_not_depend_on_the_side(tmp_path):
    """TRL counts tokens and accuracy from the mask it finds in the batch."""
    logged = []
    for side in ("left", "right"):
        tokenizer = byte_tokenizer(padding_side=side)
        model = tiny_model("qwen3_next", vocab_size=len(tokenizer))
        trainer = sft(model, tmp_path / side, PaddingCollator(tokenizer, consumer="transformers", model=model))
        trainer.train()
        logged.append(
            [{key: entry[key] for key in ("loss", "num_tokens") if key in entry} for entry in trainer.state.log_history]
        )
    for left, right in zip(*logged):
        assert left == pytest.approx(right, rel=1e-3)


def test_trl_own_collator_wrapped(tmp_path):
    tokenizer = byte_tokenizer()
    model = tiny_model("qwen3_next", vocab_size=len(tokenizer))
    inner = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    trainer = sft(model, tmp_path, wrap_collator(inner, consumer="transformers", model=model))
    with received_masks(model) as received:
        trainer.train()
    masks = [mask for key, calls in received.items() if key.endswith("linear_attn") for mask in calls]
    assert masks
    assert all(mask is not None for mask in masks)


def test_none_crashes_trl_and_omit_is_the_way_round(tmp_path):
    """TRL sums the mask it finds (1.16 sft_trainer.py:1650): None raises there, and no key at all does not."""
    tokenizer = byte_tokenizer()
    model = tiny_model("qwen3_next", vocab_size=len(tokenizer))
    with pytest.raises(AttributeError, match="NoneType"):
        sft(model, tmp_path, PaddingCollator(tokenizer)).train()
    collator = PaddingCollator(tokenizer, attention_mask="omit")

    def without_2d(features):
        batch = collator(features)
        del batch["attention_mask_2d"]
        return batch

    sft(model, tmp_path, without_2d).train()
