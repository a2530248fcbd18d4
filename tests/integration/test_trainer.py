"""transformers' Trainer, really run: tiny hybrid models, real text, and what it evaluates and predicts."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from text import sample_ids  # noqa: E402
from trained import trainer_of  # noqa: E402

from collate_npu import PaddingCollator  # noqa: E402
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model  # noqa: E402

TOKENIZER = byte_tokenizer()  # pad is eos, and every sample ends with a real eos
IDS = sample_ids(TOKENIZER, count=8, max_length=90, seed=3)
SAMPLES = [{"input_ids": ids, "labels": ids} for ids in IDS]


@torch.no_grad()
def loss_alone(model, ids):
    """Mean loss over all predicted tokens, each sample without padding and without a mask."""
    total = 0.0
    for tokens in map(torch.tensor, ids):
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
    return total / sum(len(row) - 1 for row in ids)


@pytest.fixture(params=["qwen3_next", "qwen3_5_text"])
def name(request):
    if request.param not in hybrid_model_types():
        pytest.skip(f"{request.param} is not in transformers {transformers.__version__}")
    return request.param


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_an_evaluation_and_predictions_are_those_of_the_samples_alone(name, side, tmp_path):
    """`eval_loss` is the mean of the batches' own, here of as many rows each. What it trains: test_no_harm."""
    model = tiny_model(name, vocab_size=len(TOKENIZER))
    collator = PaddingCollator(TOKENIZER, padding_side=side, model=model)
    trainer = trainer_of(model, collator, tmp_path, SAMPLES, per_device_eval_batch_size=4)
    batch_losses = [loss_alone(model, IDS[:4]), loss_alone(model, IDS[4:])]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(batch_losses) / 2, abs=1e-4)
    for row, ids in zip(trainer.predict(SAMPLES).predictions, IDS):
        # the Trainer pads each batch's output on the right with -100, behind its own left or right padding
        real = torch.as_tensor(row[(row != -100).all(-1)])
        logits = real[: len(ids)] if side == "right" else real[-len(ids) :]
        with torch.no_grad():
            assert (logits - model(input_ids=torch.tensor([ids])).logits[0]).abs().max() < 1e-4
