"""A flat row on real models: each sequence keeps its own logits, or the row is refused, by us or by transformers itself."""

from __future__ import annotations

import importlib
import inspect
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DataCollatorWithFlattening

from collate_npu import BatchAdapter, PaddingCollator, UnsupportedFormError, wrap_collator
from collate_npu.consumers import transformers
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
    model = tiny_model("llama", vocab_size=PAD + 1)
    ours = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    theirs = wrap_collator(DataCollatorWithFlattening(), model=model)(SAMPLES)
    for key in ("input_ids", "labels", "position_ids", "attention_mask", "cu_seq_lens_q"):
        assert torch.equal(ours[key], theirs[key]), key


NEWER = pytest.mark.skipif(transformers_version() < (5, 20), reason="5.20 is the first release that asks")


@pytest.mark.parametrize("name", hybrid_model_types())
def test_recurrent_families_refuse_a_flat_row_here(name):
    """Without kernels that read offsets nothing keeps the state apart: we say so, or transformers does."""
    model = build(name)
    try:
        batch = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    except UnsupportedFormError:
        return
    with pytest.raises(ValueError, match=NEEDS_A_KERNEL):
        error(model, batch)


KERNELS = {
    "causal_conv1d_fn": ("seq_idx", 2),
    "mamba2_chunk_scan": ("seq_idx", 1),
    "torch_chunk_gated_delta_rule": ("cu_seqlens", 1),
    "chunk_kimi_delta_attention": ("cu_seqlens", 1),
}
"""Functions that give way to a kernel, by what the kernel reads and the axis of its tokens."""
APART = ["bamba", "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"]


@NEWER
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", APART)
def test_with_kernels_that_read_offsets_each_sequence_is_as_alone(monkeypatch, name, attn):
    model = with_kernels(monkeypatch, build(name, attn_implementation=attn))
    for collator in (PaddingCollator(pad_token_id=PAD, model=model, padding_free=True), positions_alone(model)):
        batch = collator(SAMPLES)
        assert error(model, batch) < 1e-4
        assert error(model, {**batch, "attention_mask": None}) > 0.1  # the control: attention runs on
        assert error(model, {**batch, "seq_idx": None}) > 1e-3  # the convolution runs on


@NEWER
@pytest.mark.parametrize("name", ["bailing_hybrid", "kimi_linear", "jamba", "minimax"])
def test_families_that_are_refused_are_wrong_with_kernels_too(monkeypatch, name):
    model = with_kernels(monkeypatch, build(name))
    collator = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)
    with pytest.raises(UnsupportedFormError, match=f"{name} do not ask where a sequence begins"):
        collator(SAMPLES)
    monkeypatch.setattr(transformers, "_STATES_READ_OFFSETS", {name})
    batch = collator(SAMPLES)
    assert error(model, batch) > 0.1


def build(name, **settings):
    try:
        return tiny_model(name, vocab_size=PAD + 1, **settings)
    except (ValueError, TypeError, NotImplementedError) as reason:
        pytest.skip(str(reason)[:100])


def positions_alone(model):
    """transformers' own collator tells positions, unless asked for more."""
    adapter, flatten = BatchAdapter(model, padding_free=True), DataCollatorWithFlattening()
    return lambda samples: adapter(flatten(samples))


def with_kernels(monkeypatch, model):
    """The model with stand-ins for the CUDA kernels: its own functions, run sequence by sequence where they are told."""
    module = importlib.import_module(type(model).__module__)
    for name, (key, axis) in KERNELS.items():
        if (function := getattr(module, name, None)) is not None:
            monkeypatch.setattr(module, name, kernel(inspect.unwrap(function), key, axis))
    return model


def kernel(plain, key, axis):
    def run(*args, **kwargs):
        if (told := kwargs.get(key)) is None:
            return plain(*args, **kwargs)
        length = args[0].shape[axis]
        cuts = told.tolist() if key == "cu_seqlens" else [0, *(1 + told[0].diff().nonzero().flatten()).tolist(), length]
        parts = [
            plain(*(cut(x, a, b) for x in args), **{k: cut(x, a, b) for k, x in kwargs.items()}) for a, b in pairwise(cuts)
        ]
        outs = [part[0] if isinstance(part, tuple) else part for part in parts]
        return (torch.cat(outs, axis), parts[-1][1]) if isinstance(parts[0], tuple) else torch.cat(outs, axis)

    def cut(x, a, b):
        tokens = isinstance(x, torch.Tensor) and x.ndim > 2 and x.shape[axis] == sum(map(len, IDS))
        return x.narrow(axis, a, b - a) if tokens else x

    return run
