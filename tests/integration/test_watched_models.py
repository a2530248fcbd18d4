"""Watch on models of transformers: layers that lose a fact, windows, positions, steps, and what it writes."""

import pickle

import pytest
import torch
import transformers
from torch import nn
from transformers import DataCollatorWithFlattening

from collate_npu import BatchAdapter, PaddingCollator, Segments
from collate_npu.masks import dense
from collate_npu.proof import watch
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import hybrid_model_types, tiny_model
from collate_npu.testing.kernels import reference_kernels

TOLD = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="older ones hand lfm2 the causal mask, as watch says there")

LEFT = {
    "input_ids": torch.tensor([[9, 9, 9, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]),
}


PLAIN = {
    "lfm3": "causal_conv1d_fn",
    "minimax": "MiniMaxLightningAttention",
    "zaya": "ZayaCCAProjection",
    "inkling2_text": "Inkling2DynamicShortConvolution",
}
"""Layers of plain torch; lfm3's function takes `seq_idx`, and never reads it."""


@pytest.mark.parametrize("family", sorted(PLAIN.keys() & {*hybrid_model_types()}))
def test_layers_of_plain_torch_read_padding_and_no_boundary(family):
    model = tiny_model(family, vocab_size=64, attn_implementation="eager")
    flat = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    batch = flat([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [1, 2, 3, 4, 5]}])
    batch.pop("labels")
    with watch(say=False) as seen:
        model(**LEFT)
        model(**batch)
    found = {fault.kernel.rpartition(".")[2]: fault for fault in seen.faults}
    assert "(0, 4) goes on from another sequence" in str(found[PLAIN[family]])
    assert seen.forwards[0].faults() == {}
    assert PLAIN[family] in {call.kernel.rpartition(".")[2] for call in seen.forwards[0].calls}


def replaced(model, layers, change):
    """A stack that hands other keywords to layers."""
    for name, layer in model.named_modules():
        if name.endswith(layers):
            layer.register_forward_pre_hook(lambda module, args, kwargs: (args, change(dict(kwargs))), with_kwargs=True)
    return model


def without_mask(kwargs):
    return kwargs | {"attention_mask": None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_that_a_dense_mask_loses(family, attention):
    model = tiny_model(family, vocab_size=64, attn_implementation=attention)
    ids, full = torch.arange(1, 13)[None], torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    bias = torch.where(full, 0.0, torch.finfo(torch.float32).min)
    with watch(say=False, steps=3) as seen:
        model(input_ids=ids, attention_mask=torch.ones(1, 12).long())
        assert seen.faults == []
        model(input_ids=ids, attention_mask=bias)
    windowed = 2 if family == "gemma3_text" else 3
    why = "row 0 attends more than sliding(8) attention does: query 8 attends key 0 of 12; the batch says [0, 12]"
    assert [each.why for each in seen.faults] == [why] * windowed
    with watch(say=False) as seen:  # a batch that does not tell: rows that look padded
        model(input_ids=torch.ones(1, 12).long(), attention_mask=bias)
        model(input_ids=torch.tensor([[1, 1, *range(10)]]), attention_mask=bias)
    assert "it reaches over 12 tokens, and the config says sliding(8)" in {each.why for each in seen.faults}


@pytest.mark.parametrize("attention", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])  # it compiles
@torch.no_grad()
def test_other_attention_of_transformers(attention):
    model = tiny_model("llama", vocab_size=64, attn_implementation=attention)
    with watch(say=False) as seen:
        model(**LEFT)
    assert seen.faults == []
    assert len(seen.forwards[0].calls) == 4
    with watch(say=False) as seen:
        replaced(model, "1.self_attn", without_mask)(**LEFT)
    assert {each.layer for each in seen.faults} == {"model.layers.1.self_attn"}


def test_positions_that_are_another_sequences():
    model = tiny_model("llama", vocab_size=64)
    with watch(say=False, steps=3) as seen:
        model(**LEFT, position_ids=torch.arange(7).expand(2, 7))  # rotary: what differs is right
        model(**LEFT, position_ids=torch.arange(7).flip(0).expand(2, 7))
    assert [each.kernel for each in seen.faults] == ["LlamaRotaryEmbedding"]
    gpt2 = tiny_model("gpt2", vocab_size=64)
    with watch(say=False, steps=3) as seen:
        gpt2(**LEFT)
        gpt2(**BatchAdapter(gpt2)(LEFT))
    assert [each.layer for each in seen.faults] == ["transformer.wpe"]


@pytest.mark.parametrize("mask", [None, "bias"])
def test_sequences_by_positions_or_by_a_dense_mask_reach_attention_alone(mask):
    """As in radixark/miles, pull request 2213, and in LLaMA-Factory, pull request 10436."""
    flat, model = Segments.from_lengths([[6, 5, 5]]), tiny_model("qwen3_next", vocab_size=64)
    batch = {"input_ids": torch.arange(1, 17)[None], "position_ids": flat.position_ids, "use_cache": False}
    with watch(say=False) as seen:
        model(**batch, **({"attention_mask": dense(flat, polarity=mask)} if mask else {}))
    assert {each.layer for each in seen.faults} == {"model.layers.0.linear_attn", "model.layers.2.linear_attn"}


@TOLD
def test_flat_rows_of_our_collator_and_one_of_them_lost():
    model = tiny_model("qwen3_next", vocab_size=64)
    with reference_kernels(model):
        collator = PaddingCollator(model=model, padding_free=True)
        batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        with watch(say=False, steps=3) as seen:
            model(**batch)
            assert seen.faults == []
            replaced(model, "linear_attn", lambda kwargs: kwargs | {"seq_idx": torch.zeros(1, 5).int()})(**batch)
    assert {each.kernel for each in seen.faults} == {"collate_npu.causal_conv1d_fn"}


def test_steps_end_with_the_optimizer_and_then_all_is_as_it_was():
    sdpa, call = torch.nn.functional.scaled_dot_product_attention, nn.Module._call_impl
    model = tiny_model("llama", vocab_size=64).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(say=False, steps=2) as seen:
        assert torch.nn.functional.scaled_dot_product_attention is not sdpa
        for _ in range(4):
            for _ in range(2):
                model(**LEFT, labels=LEFT["input_ids"]).loss.backward()
            optimizer.step()
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert [forward.step for forward in seen.forwards] == [0, 0, 1, 1]
    assert nn.Module._call_impl is call
    assert pickle.loads(pickle.dumps(model.config)).model_type == "llama"


def test_a_full_disk_does_not_end_the_run(capsys):
    with watch(out="/dev/full") as seen:
        tiny_model("llama", vocab_size=64)(**LEFT)
    assert seen.forwards
    assert "nothing more is written there" in capsys.readouterr().err


def test_windows_to_both_sides_of_a_batch_that_says_nothing():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    ids = {f"{name}_token_id": n for n, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    config = transformers.ModernBertConfig(vocab_size=64, local_attention=8, reference_compile=False, **sizes, **ids)
    with watch(say=False) as seen:
        transformers.ModernBertForMaskedLM(config).eval()(input_ids=torch.randint(5, 60, (2, 40)))
    assert seen.faults == []
    assert seen.kernels


class PickingAttention(nn.Module):
    """An indexer picks the keys of each query, as DeepSeek's sparse attention and Qwen4's do."""

    def __init__(self):
        super().__init__()
        self.indexer = nn.Identity()

    def forward(self, hidden, keep):
        x = hidden[:, None]
        allowed = keep[:, None, None] & torch.ones(1, 1, *keep.shape[1:] * 2, dtype=torch.bool).tril()
        allowed = allowed & ((torch.arange(keep.shape[1]) % 3 > 0) | torch.eye(keep.shape[1], dtype=torch.bool))
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed)[:, 0]


class Picking(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.embed, self.self_attn, self.keeps = nn.Embedding(64, 8), PickingAttention(), keeps

    def forward(self, input_ids, attention_mask):
        keep = attention_mask.bool() if self.keeps else torch.ones_like(attention_mask, dtype=torch.bool)
        return self.self_attn(self.embed(input_ids), keep)


@pytest.mark.parametrize("keeps", [True, False])
def test_of_keys_that_a_layer_picks_it_is_judged_whose_they_are(keeps):
    with watch(say=False) as seen:
        Picking(keeps)(**LEFT)
    assert [each.why.partition(":")[0] for each in seen.faults] == ([] if keeps else ["row 0 attends padding"])
    assert seen.forwards[0].judges(seen.forwards[0].calls[0])
