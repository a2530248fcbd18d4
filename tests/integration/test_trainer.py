"""transformers' Trainer, really run: tiny hybrid models, real text, and what it logs, evaluates and predicts."""

import pytest
import torch
from rotation import rotating

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from text import sample_ids  # noqa: E402
from trained import trainer_of  # noqa: E402

from collate_npu import PaddingCollator  # noqa: E402
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model  # noqa: E402

TOKENIZER = byte_tokenizer()  # pad is eos, and every sample ends with a real eos
IDS = sample_ids(TOKENIZER, count=8, max_length=90, seed=3)
SAMPLES = [{"input_ids": ids, "labels": ids} for ids in IDS]
BATCHES = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
MODERN = not transformers.__version__.startswith("4.")


@torch.no_grad()
def loss_alone(model, ids=IDS):
    """Mean loss over all predicted tokens, each sample without padding and without a mask."""
    total = 0.0
    for tokens in map(torch.tensor, ids):
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
    return total / sum(len(row) - 1 for row in ids)


@pytest.fixture(params=rotating(["qwen3_next", "qwen3_5_text"]))
def name(request):
    if request.param not in hybrid_model_types():
        pytest.skip(f"{request.param} is not in transformers {transformers.__version__}")
    return request.param


@pytest.mark.parametrize("side", ["left", "right"])
def test_losses_and_predictions_are_those_of_the_samples_alone(name, side, tmp_path):
    model = tiny_model(name, vocab_size=len(TOKENIZER))
    collator = PaddingCollator(TOKENIZER, padding_side=side, model=model)
    seen = {"include_num_input_tokens_seen": "non_padding" if MODERN else True}
    how = {"max_steps": 1, "gradient_accumulation_steps": 2, "save_strategy": "no", **BATCHES, **seen}
    trainer = trainer_of(model, collator, tmp_path, SAMPLES, **how)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx([loss_alone(model)], abs=2e-4)  # the Trainer rounds what it logs
    assert not MODERN or trainer.state.num_input_tokens_seen == sum(map(len, IDS))
    batch_losses = [loss_alone(model, IDS[:4]), loss_alone(model, IDS[4:])]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(batch_losses) / 2, abs=1e-4)
    for row, ids in zip(trainer.predict(SAMPLES).predictions, IDS):
        # the Trainer pads each batch's output on the right with -100, behind its own left or right padding
        real = torch.as_tensor(row[(row != -100).all(-1)])
        logits = real[: len(ids)] if side == "right" else real[-len(ids) :]
        with torch.no_grad():
            assert (logits - model(input_ids=torch.tensor([ids])).logits[0]).abs().max() < 1e-4
