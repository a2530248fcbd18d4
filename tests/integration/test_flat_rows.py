"""A flat row on real models: each sequence keeps its own logits, or the row is refused, by us or by transformers itself."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import PaddingCollator, UnsupportedFormError, wrap_collator
from collate_npu.consumers.models import transformers_version
from collate_npu.testing import hybrid_model_types, tiny_model

PAD = 256
IDS = [[5, 9, 2, 77, 3, 8], [7, 1, 8, 3, 200, 31, 64, 12], [40, 41, 42, 43, 44]]
SAMPLES = [{"input_ids": ids, "labels": ids} for ids in IDS]
NEEDS_A_KERNEL = "can't keep packed sequences apart|matC_old has wrong shape"
"""transformers 5.20 and later refuse a flat row without causal_conv1d."""


@torch.no_grad()
def error(model, batch):
    alone = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in IDS])
    return float((model(**batch).logits[0] - alone).abs().max().nan_to_num(nan=torch.inf))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_models_of_attention_alone_get_a_dense_mask_beside_the_offsets(name, attn):
    """They look at positions only where they make no cache, and some never: the mask does not depend on either."""
    model = tiny_model(name, vocab_size=PAD + 1, attn_implementation=attn)
    batch = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    assert batch["attention_mask"] is not None
    assert batch["cu_seq_lens_q"].tolist() == [0, 6, 14, 19]
    assert error(model, batch) < 1e-4
    assert error(model, {**batch, "attention_mask": None}) > 0.1  # the control: without it they run into each other


def test_a_flat_row_of_transformers_own_collator_is_the_same_row():
    from transformers import DataCollatorWithFlattening

    model = tiny_model("llama", vocab_size=PAD + 1)
    ours = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    theirs = wrap_collator(DataCollatorWithFlattening(), model=model)(SAMPLES)
    for key in ("input_ids", "labels", "position_ids", "attention_mask", "cu_seq_lens_q"):
        assert torch.equal(ours[key], theirs[key]), key


RUN_ON = ["falcon_mamba", "inkling_text", "jamba", "lfm3", "mamba", "mamba2", "minimax", "recurrent_gemma", "rwkv", "zaya"]
"""Families of 5.23 that read no offsets: the state runs from one sequence into the next, logits are off by 2.7 to 13."""


def recurrent_families():
    for name in hybrid_model_types():
        marks = [pytest.mark.xfail(transformers_version() >= (5, 20), strict=True, reason="not refused yet")]
        yield pytest.param(name, marks=marks if name in RUN_ON else [])


@pytest.mark.parametrize("name", recurrent_families())
def test_recurrent_families_keep_sequences_apart_or_refuse(name):
    try:
        model = tiny_model(name, vocab_size=PAD + 1)
    except (ValueError, TypeError, NotImplementedError) as reason:
        pytest.skip(str(reason)[:100])
    try:
        batch = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    except UnsupportedFormError:
        return
    try:
        assert error(model, batch) < 1e-4
    except ValueError as refused:
        if not re.search(NEEDS_A_KERNEL, str(refused)):
            raise


@pytest.mark.xfail(transformers_version() >= (5, 20), strict=True, reason="no mask for the attention layers of a hybrid yet")
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_attention_layers_of_a_hybrid_keep_sequences_apart_too(attn):
    """With kernels that keep the state apart (here: layers without any), sdpa still reads neither offsets nor, beside a
    cache, positions."""
    model = tiny_model("qwen3_next", vocab_size=PAD + 1, attn_implementation=attn)
    for name, layer in model.named_modules():
        if name.endswith("linear_attn"):
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states * 0.5
    try:
        batch = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    except UnsupportedFormError:
        return
    assert error(model, batch) < 1e-4
