"""cosmos-rl 0.4.7: `HFModel`, the policy around a transformers model. What it imports beside torch is a stand-in."""

import sys
from unittest.mock import MagicMock

import pytest
import torch
import transformers.modeling_flash_attention_utils  # noqa: F401  it looks for kernels before others stand there
from cells import PAD, VOCAB, samples
from stand_ins import put_module

from collate_npu import CollateError, adapt
from collate_npu.testing import tiny_model

NEEDS = ("cosmos_rl",)


@pytest.fixture(scope="module")
def policy():
    while True:
        try:
            from cosmos_rl.policy.model.hf_models import HFModel
        except ModuleNotFoundError as error:
            put_module(error.name, MagicMock)
            for name in [name for name in sys.modules if name.startswith("cosmos_rl")]:
                del sys.modules[name]
        else:
            return HFModel


def made(policy, family):
    model = tiny_model(family, vocab_size=VOCAB)
    return policy(model.config, model, type(model))


def padded(rows):
    """Rows padded right, positions and no mask: what `HFModel.forward` hands on (hf_models/__init__.py:165-190)."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "position_ids": torch.arange(width).expand(len(rows), -1)}


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3"])
def test_padded_rows_are_right_without_ours_which_would_refuse_them(policy, family):
    rows, whole, alone = samples(), made(policy, family), tiny_model(family, vocab_size=VOCAB)
    logits = whole(**padded(rows)).logits
    gaps = [logits[n, : len(row)] - alone(input_ids=torch.tensor([row])).logits[0] for n, row in enumerate(rows)]
    assert max(float(gap.abs().max()) for gap in gaps) < 1e-5
    adapt(whole.model)
    with pytest.raises(CollateError, match="No key says which tokens are padding"):
        whole(**padded(rows))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_its_trainer_does_not_pack_a_text_hybrid(policy, family, monkeypatch):
    """The patch of its layers fails (hf_models/patch.py:488-530), and the trainer then pads (grpo_trainer.py:1426-1440)."""
    whole = made(policy, family)
    monkeypatch.setattr(type(whole.model), "set_attn_implementation", lambda *args: None)  # flash attention is not there
    assert whole.check_sequence_packing_compatible() is False
