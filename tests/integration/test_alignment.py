"""Aligned rows and rows of one shape on real models: every token as alone, in logits and in every gradient.

Recurrent layers run the references of `kernels.gated_delta` in place of the kernels; attention by offsets runs sequence by
sequence. `faulty` is a rule as some kernels are: wrong where a sequence ends in a short chunk (flash-linear-attention-npu
issues 367, 544, 733).
"""

from __future__ import annotations

import copy
import importlib
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AttentionInterface

from collate_npu import BatchAdapter, ContextParallel, PaddingCollator, Segments, UnsupportedFormError, unpad, wrap_collator
from collate_npu.consumers.models import transformers_version
from collate_npu.kernels.gated_delta import (
    flat_offsets,
    gated_delta_kwargs,
    reference_causal_conv1d,
    reference_gated_delta_rule,
)
from collate_npu.masks.find import segments_from_batch
from collate_npu.parallel import pad_documents
from collate_npu.testing import tiny_model

PAD, C = 256, 4
IDS = [[5, 9, 2, 77, 3, 8], [7], [40, 41, 42, 43, 44], [7, 1, 8, 3, 200, 31, 64, 12]]
SAMPLES = [{"input_ids": ids, "labels": ids} for ids in IDS]
SHAPES = {
    "aligned": {"sequence_multiple": C},
    "aligned, a tail": {"sequence_multiple": C, "padding": (48,)},
    "one shape": {"sequence_multiple": C, "padding": (32, 48), "max_sequences": 6},
    "one shape, not aligned": {"padding": (32, 48), "max_sequences": 6},
    "one shape, none left": {"sequence_multiple": C, "padding": (32, 48), "max_sequences": 4},
}
NEWER = pytest.mark.skipif(transformers_version() < (5, 20), reason="5.20 is the first release that asks for offsets")


def by_offsets(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
    """Causal attention of `[1, H, T, D]`, sequence by sequence as flash kernels take them; empty ones are passed over."""
    assert attention_mask is None
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    ends = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scaling
        )
        for a, b in pairwise(ends)
        if b > a
    ]
    unwritten = query.new_full((*query.shape[:2], query.shape[2] - ends[-1], value.shape[-1]), torch.nan)
    return torch.cat([*parts, unwritten], 2).transpose(1, 2), None


AttentionInterface.register("by_offsets", by_offsets)


def conv(x, weight, bias=None, activation=None, seq_idx=None, **_):
    return reference_causal_conv1d(x.transpose(1, 2), weight, bias, activation, seq_idx).transpose(1, 2)


def rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None, output_final_state=False, **_):
    keys = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "output_final_state": output_final_state}
    return reference_gated_delta_rule(query, key, value, g, beta, cu_seqlens=cu_seqlens, **keys)


def faulty(query, key, value, g, beta, cu_seqlens=None, **settings):
    out, state = rule(query, key, value, g, beta, cu_seqlens=cu_seqlens, **settings)
    ends = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    short = torch.zeros(1, query.shape[1], 1, 1)
    for a, b in pairwise(ends):
        short[:, b - (b - a) % C : b] = 1
    return out * (1 + short), state


def described(model):
    """What a collator is told of it: its config, with the name of a kernel that reads offsets."""
    config = copy.deepcopy(model.config)
    if model.config._attn_implementation == "by_offsets":
        config._attn_implementation = "flash_attention_2"
    return {"model": config, "consumer": "transformers"}


@pytest.fixture
def hybrid(monkeypatch):
    def build(kernel=rule, attn="by_offsets", name="qwen3_next"):
        model = tiny_model(name, vocab_size=PAD + 1, attn_implementation=attn)
        module = importlib.import_module(type(model).__module__)
        monkeypatch.setattr(module, "causal_conv1d_fn", conv)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", kernel)
        return model

    return build


def run(model, hidden_of, real):
    """Logits at real tokens, and the gradient of a fixed sum of them for every parameter."""
    logits = real(hidden_of(model))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (logits * weights).sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def apart(model, batch, segments, alone=None):
    """The largest difference from the samples alone, over the size of what differs: `(logits, gradients)`."""
    alone = alone or model
    packed = run(model, lambda m: m(**batch, use_cache=False).logits, lambda x: unpad(x, segments))
    each = [torch.tensor([ids]) for ids in IDS]
    single = run(alone, lambda m: torch.cat([m(input_ids=x, use_cache=False).logits[0] for x in each]), lambda x: x)
    errors = [float(((x - y).abs().max() / y.abs().max()).nan_to_num(nan=torch.inf)) for x, y in zip(packed, single)]
    return errors[0], max(errors[1:])


def collated(model, **settings):
    """The batch the model takes, without labels, and the truth by its offsets and the samples."""
    batch = PaddingCollator(pad_token_id=PAD, padding_free=True, **described(model), **settings)(SAMPLES)
    return {key: value for key, value in batch.items() if key != "labels"}, truth_of(batch)


def truth_of(batch):
    found = torch.zeros_like(batch["input_ids"], dtype=torch.int32)
    for n, (start, ids) in enumerate(zip(batch["cu_seq_lens_q"].tolist(), IDS), start=1):
        assert batch["input_ids"][0, start : start + len(ids)].tolist() == ids
        found[0, start : start + len(ids)] = n
    return Segments(found)


@pytest.mark.parametrize("attn", ["by_offsets", "sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_as_alone(shape, attn):
    model = tiny_model("llama", vocab_size=PAD + 1, attn_implementation=attn)
    batch, truth = collated(model, **SHAPES[shape])
    assert (batch["attention_mask"] is None) == (attn == "by_offsets")
    assert max(apart(model, batch, truth)) < 1e-4
    if attn == "by_offsets":
        unparted = {**batch, "cu_seq_lens_q": batch["cu_seq_lens_q"][[0, -1]]}
        assert apart(model, unparted, truth)[0] > 0.1  # the control
        neutral = PaddingCollator(pad_token_id=PAD, padding_free=True, **SHAPES[shape])(SAMPLES)
        adapted, known = BatchAdapter(**described(model), padding_free=True).with_segments(neutral)
        adapted.pop("labels")
        assert max(apart(model, adapted, known)) < 1e-4


@NEWER
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_models_are_as_alone(hybrid, shape, name):
    model = hybrid(name=name)
    batch, truth = collated(model, **SHAPES[shape])
    assert (batch["cu_seq_lens_q"].diff() > 0).all()
    assert max(apart(model, batch, truth)) < 1e-4
    assert apart(model, {**batch, "seq_idx": None}, truth)[0] > 1e-3  # the control: the convolution runs on
    with pytest.raises(TypeError, match="cu_seqlens"):  # why the other offsets are left out
        model(**batch, cu_seqlens=batch["cu_seq_lens_q"])


@NEWER
@torch.no_grad()
def test_alignment_is_a_way_around_kernels_that_are_wrong_in_short_chunks(hybrid, monkeypatch):
    model = hybrid()
    alone = torch.cat([model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in IDS])
    monkeypatch.setattr(importlib.import_module(type(model).__module__), "torch_chunk_gated_delta_rule", faulty)
    for settings in ({}, *SHAPES.values()):
        batch, truth = collated(model, **settings)
        error = (unpad(model(**batch, use_cache=False).logits, truth) - alone).abs().max() / alone.abs().max()
        assert (error < 1e-4) if "sequence_multiple" in settings else (error > 1e-2), settings


@NEWER
@pytest.mark.parametrize("size", [1, 2, 3])
def test_documents_aligned_for_ranks_and_chunks_are_as_alone(hybrid, size):
    """The whole row of every rank, as a layer sees it that gathers the sequence first."""
    model = hybrid()
    cp = ContextParallel(size, 0).for_documents()
    flat = PaddingCollator(pad_token_id=PAD, padding_free=True)(SAMPLES)
    batch, truth = pad_documents(flat, cp, multiple=C, pad_token_id=PAD)
    batch = BatchAdapter(**described(model), padding_free=True)(batch)
    batch.pop("labels")
    assert max(apart(model, batch, truth)) < 1e-4


def layer():
    draw = torch.Generator().manual_seed(0)
    shapes = {"project": (12, 14), "gates": (12, 4), "taps": (14, 4)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=draw) / 2) for name, shape in shapes.items()}


def through(weights, hidden, rule_kwargs, conv_kwargs):
    """A layer of the two references: convolution, then rule, 1 head of 4, 2 value heads of 3."""
    mixed = reference_causal_conv1d(hidden @ weights["project"], weights["taps"], activation="silu", **conv_kwargs)
    T = hidden.shape[1]
    query, key, value = (x.view(1, T, n, -1) for x, n in zip(mixed.split([4, 4, 6], -1), (1, 1, 2)))
    g, beta = (hidden @ weights["gates"]).split(2, -1)
    gates = -torch.nn.functional.softplus(g), beta.sigmoid()
    return reference_gated_delta_rule(query, key, value, *gates, use_qk_l2norm_in_kernel=True, **rule_kwargs)[0]


@pytest.mark.parametrize("told", ["own", "behind", "the batch's"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_references_on_kernel_arguments_are_as_alone(shape, told):
    batch = PaddingCollator(pad_token_id=PAD, padding_free=True, **SHAPES[shape])(SAMPLES)
    truth, weights = segments_from_batch(batch), layer()
    padding = batch["cu_seqlens_padded"] if told == "the batch's" else told
    offsets = gated_delta_kwargs(truth, kernel="fla", padding=padding)["cu_seqlens"]
    numbers = gated_delta_kwargs(truth, kernel="causal_conv1d", padding=padding)["seq_idx"]
    if told == "the batch's":
        assert offsets.tolist() == padding.tolist()
    assert told == "own" or shape == "one shape, not aligned" or (offsets % C == 0).all()
    hidden = torch.randn(*truth.shape, 12, generator=torch.Generator().manual_seed(2)).requires_grad_()
    packed = unpad(through(weights, hidden, {"cu_seqlens": offsets}, {"seq_idx": numbers}), truth)
    alone = torch.cat(
        [through(weights, part[None], {}, {})[0] for part in unpad(hidden, truth).split(list(truth.sequence_lengths))]
    )
    seed = torch.randn(alone.shape, generator=torch.Generator().manual_seed(3))
    wanted = [hidden, *weights.values()]
    grads = [torch.autograd.grad((out * seed).sum(), wanted) for out in (packed, alone)]
    assert (packed - alone).abs().max() < 1e-5
    assert all((a - b).abs().max() / b.abs().max() < 1e-5 for a, b in zip(*grads))
    assert grads[0][0][~truth.keep].abs().max() == 0  # padding has no say in what is learned


@NEWER
def test_a_model_is_given_one_set_of_offsets_whatever_arrives(hybrid):
    model = hybrid()
    neutral = PaddingCollator(pad_token_id=PAD, padding_free=True, **SHAPES["one shape"])(SAMPLES)
    truth = segments_from_batch(neutral)
    for names in (("cu_seqlens", "cu_seqlens_padded"), ("cu_seqlens", "cu_seqlens_padded", "seq_idx"), neutral):
        batch = BatchAdapter(**described(model), padding_free=True)(
            {key: value for key, value in neutral.items() if key == "input_ids" or (key in names and key != "labels")}
        )
        assert not {"cu_seqlens", "cu_seqlens_padded", "seq_lens"} & set(batch)
        assert max(apart(model, batch, truth)) < 1e-4


def test_a_wrapped_collator_and_shards_keep_the_places():
    inner = PaddingCollator(pad_token_id=PAD, padding_free=True, sequence_multiple=C, padding=(48,), max_sequences=6)
    batch = wrap_collator(inner)(SAMPLES)
    cp = ContextParallel(2, 0).for_documents()
    shard = BatchAdapter(needs_mask_2d=True, consumer="megatron", padding_free=True, context_parallel=cp)(batch)
    assert shard["input_ids"].shape == (1, 24)
    assert shard["cu_seqlens_padded"].tolist() == batch["cu_seqlens_padded"].tolist()


def test_attention_that_looks_ahead_takes_no_alignment():
    with pytest.raises(UnsupportedFormError, match="looks ahead"):
        PaddingCollator(pad_token_id=PAD, padding_free=True, sequence_multiple=C, pattern="bidirectional")
    assert flat_offsets(segments_from_batch(PaddingCollator(padding_free=True)(SAMPLES))) == (0, 6, 7, 12, 20)
