"""None in the place of a mask that the causal kernel does not need: on every causal family that builds tiny, a batch padded
right gives each sample's own logits, loss and gradient by `adapt(model)`, whether it left the mask out or not."""

import pytest
import torch
from rotation import rotating

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from collate_npu import CollateError, adapt
from collate_npu.consumers.models import is_encoder
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import hybrid_model_types, left_out, tiny_config, tiny_model

pytestmark = pytest.mark.models
VOCAB, PAD = 257, 256
TOLERANCE = 1e-4
ROUNDING = 2e-3
"""As in test_padding_invariance."""
LARGE = 20e6
"""Parameters; what has more is not tiny."""
LENGTHS = (9, 14, 3)
FAMILIES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - left_out().keys())
OFTEN = [name for name in ("mistral", "gemma3_text", "llama4_text", "qwen3_next") if name in FAMILIES]
"""A window, two kinds of it, chunks, a recurrent layer."""


def numbers(model, batch):
    model.zero_grad(set_to_none=True)
    out = model(**batch, use_cache=False)
    out.loss.backward()
    gradient = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])
    return out.logits.detach(), out.loss.detach(), gradient


def built(name):
    """A tiny model that trains; transformers raises many things for sizes that do not fit a family, or without sdpa."""
    if not KERNELS_TOLD.holds() and name in hybrid_model_types():
        pytest.skip("4.57 has no gradient of its layers on a CPU")
    if not KERNELS_TOLD.holds() and name == "moshi":
        pytest.skip("4.57 moves its labels twice (modeling_moshi.py:1549, loss_utils.py:59), over the ends of rows")
    try:
        config = tiny_config(name, vocab_size=VOCAB)
        assert not is_encoder(config), "an encoder"
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        assert size < LARGE, "it is not tiny"
        model, ids = tiny_model(name, vocab_size=VOCAB), torch.ones(1, 4).long()
        numbers(model, {"input_ids": ids, "labels": ids})
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}"[:80])
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(model.config, name, None):
            setattr(model.config, name, 6)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OFTEN, *rotating([name for name in FAMILIES if name not in OFTEN], 0, slow=8)])
def test_each_sample_has_its_own_numbers(name):
    model = built(name)
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, VOCAB - 1, (n,), generator=draw) for n in LENGTHS]
    ids = torch.full((len(rows), max(LENGTHS)), PAD)
    keep = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        ids[b, : len(row)], keep[b, : len(row)] = row, 1
    labels = ids.where(keep > 0, -100)
    alone = [numbers(model, {"input_ids": row[None], "labels": row[None]}) for row in rows]
    weights = [n - 1 for n in LENGTHS]
    with adapt(model):
        try:
            logits, loss, gradient = numbers(model, {"input_ids": ids, "attention_mask": keep, "labels": labels})
        except CollateError:
            return
    for b, (own, *_) in enumerate(alone):
        assert (logits[b, : LENGTHS[b]] - own[0]).abs().max() <= TOLERANCE * max(1.0, float(own.abs().max()))
    for mine, at, within in ((loss, 1, TOLERANCE), (gradient, 2, ROUNDING)):
        wanted = sum(each[at] * n for each, n in zip(alone, weights)) / sum(weights)
        assert float((mine - wanted).norm() / wanted.norm()) <= within
