"""Watch on models of transformers: layers that lose a fact, windows, positions, steps, and what it writes. Then faults
planted in these models, the fifth stack of tests/proof/test_planted_faults.py, whose letters these are.
"""

import inspect
import pickle
from itertools import product

import pytest
import torch
import transformers
from torch import nn
from transformers import DataCollatorWithFlattening

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, check_delivery, guard_first_batch
from collate_npu.masks import dense
from collate_npu.proof import watch
from collate_npu.proof.invariance import assert_padding_invariant
from collate_npu.proof.kernel_calls import case_of
from collate_npu.proof.leaks import check_alone
from collate_npu.releases import KERNELS_TOLD, numbers
from collate_npu.testing import hybrid_model_types, tiny_model

pytestmark = pytest.mark.models

LEFT = {
    "input_ids": torch.tensor([[9, 9, 9, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]),
}


@pytest.mark.skipif("lfm3" not in hybrid_model_types() or numbers(transformers.__version__) >= (5, 24), reason="it raises")
def test_a_function_of_transformers_that_takes_boundaries_and_never_reads_them():
    model = tiny_model("lfm3", vocab_size=64, attn_implementation="eager")
    flat = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    batch = flat([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [1, 2, 3, 4, 5]}])
    batch.pop("labels")
    with watch(say=False) as seen:
        model(**LEFT)
        model(**batch)
    found = {fault.kernel.rpartition(".")[2]: fault for fault in seen.faults}
    assert "(0, 4) goes on from another sequence" in str(found["causal_conv1d_fn"])
    assert seen.forwards[0].faults() == {}


def test_copies_that_are_probed_are_no_forwards_of_the_run():
    with watch(say=False) as seen:
        model = tiny_model("qwen3_next", vocab_size=64)
        model.config.rms_norm_eps = 1.25e-6  # no other test has probed it
        model(**BatchAdapter(model)(LEFT))
    assert len(seen.forwards) == 1


def replaced(model, layers, change):
    """A stack that hands other keywords to layers."""
    for name, layer in model.named_modules():
        if name.endswith(layers):
            layer.register_forward_pre_hook(lambda module, args, kwargs: (args, change(dict(kwargs))), with_kwargs=True)
    return model


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
    assert "it attends 12 tokens back, and the config says sliding(8)" in {each.why for each in seen.faults}


@pytest.mark.parametrize("attention", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])  # it compiles
@torch.no_grad()
def test_other_attention_of_transformers(attention):
    model = tiny_model("llama", vocab_size=64, attn_implementation=attention)
    with watch(say=False) as seen:
        model(**LEFT)
    assert seen.faults == []
    assert len(seen.forwards[0].calls) == 4
    with watch(say=False) as seen:
        replaced(model, "1.self_attn", lambda kwargs: kwargs | {"attention_mask": None})(**LEFT)
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


PAD = 256
ROWS = [[(5 + 7 * n + 3 * t) % 250 for t in range(S)] for n, S in enumerate((9, 5, 12))]
DENSE = "qwen3_5_text" if "qwen3_5_text" in hybrid_model_types() else "qwen3_next"


def handed(at, in_training=False, **changes):
    """A layer is called with another argument."""

    def plant(model):
        def look(module, args, kwargs):
            named = {**dict(zip(inspect.signature(module.forward).parameters, args)), **kwargs}
            told = {key: change(named[key]) for key, change in changes.items() if named.get(key) is not None}
            return ((), {**named, **told}) if not in_training or module.training else None

        model.get_submodule(at).register_forward_pre_hook(look, with_kwargs=True)

    return plant


def gives(at, change):
    def plant(model):
        model.get_submodule(at).register_forward_hook(lambda module, args, given: change(given))

    return plant


def own_loss(loss):
    def plant(model):
        model.loss_function = lambda logits, labels, **_: loss(logits[:, :-1], labels[:, 1:])

    return plant


def summed(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def by_head(mask):
    heads = mask.repeat(1, 4, 1, 1)
    heads[:, 1] = torch.eye(mask.shape[-1]).bool() & mask[:, 0]
    return heads


def in_4d(polarity):
    return lambda keep: dense(Segments.from_keep(keep), polarity=polarity)


def one_axis(positions):
    positions = (positions[None] if positions.ndim == 2 else positions).repeat(3 if positions.ndim == 2 else 1, 1, 1)
    return torch.cat([positions[:-1], positions[-1:].flip(-1)])


ATTENTION, RULE = "model.layers.1.self_attn", "model.layers.0.linear_attn"
FAULTS = {
    "no mask in one layer": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: None), "CWai", ATTENTION),
    "no mask in training": ("qwen3_next", handed(ATTENTION, True, attention_mask=lambda x: None), "CWai", ATTENTION),
    "a 2D mask rolled": ("qwen3_next", handed(RULE, attention_mask=lambda x: x.roll(1, 1)), "CWai", RULE),
    "a 2D mask turned round": ("qwen3_next", handed(RULE, attention_mask=lambda x: x == 0), "CW", RULE),
    "a mask turned round": ("llama", handed(ATTENTION, attention_mask=lambda x: x == 0), "CW", ATTENTION),
    "no mask in a scan": ("bamba", handed("model.layers.0.mamba", attention_mask=lambda x: None), "CWai", "layers.0.mamba"),
    "no mask in a convolution": ("lfm2", handed("model.layers.0.conv", attention_mask=lambda x: None), "CWai", "0.conv"),
    "a 2D mask of ones": ("qwen3_next", handed(RULE, attention_mask=torch.ones_like), "CWai", RULE),
    "no 2D mask in training": ("qwen3_next", handed(RULE, True, attention_mask=lambda x: None), "CWai", RULE),
    "a mask that one head has not": ("qwen3_next", handed(ATTENTION, attention_mask=by_head), "CWai", ATTENTION),
    "numbers for True and False": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: x.float()), "CWai", ATTENTION),
    "a mask that is too weak": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: -5.0 * ~x), "CWai", ATTENTION),
    "another row's mask": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: x.roll(1, 0)), "CWai", ATTENTION),
    "a mask cut by one": (
        "qwen3_next", handed(ATTENTION, attention_mask=lambda x: torch.cat([x[..., 1:], x[..., :1]], -1)), "CWai", ATTENTION
    ),
    "states rolled behind a layer": ("qwen3", gives("model.layers.1.mlp", lambda x: x.roll(1, 1)), "cai", ""),
    "rows swapped behind a layer": ("qwen3", gives("model.layers.1.mlp", lambda x: x.flip(0)), "cai", ""),
    "states less their mean": ("qwen3", gives("model.norm", lambda x: x - x.mean((0, 1))), "cai", ""),
    "states times the width": ("qwen3", gives("model.norm", lambda x: x * x.shape[1] / 8), "ai", ""),
    "no mask at all": ("qwen3_next", handed("model", attention_mask=lambda x: None), "CW", RULE),
    "a bare 4D mask": ("qwen3_next", handed("model", attention_mask=in_4d("keep")), "CW", RULE),
    "a bare additive 4D mask": ("qwen3_next", handed("model", attention_mask=in_4d("bias")), "CW", RULE),
    "a bare 4D mask of Megatron's": ("qwen3_next", handed("model", attention_mask=in_4d("masked")), "CW", RULE),
    "one axis of positions turned": (DENSE, handed("model", position_ids=one_axis), "CWa", "rotary_emb"),
    "a loss by padded tokens": ("qwen3", own_loss(lambda x, y: summed(x, y) / y.numel()), "i", ""),
    "a loss of padding": ("qwen3", own_loss(lambda x, y: summed(x, y.clamp(min=0)) / y.numel()), "i", ""),
    "a loss by rows": ("qwen3", own_loss(lambda x, y: summed(x, y) / len(y) ** 2 / 9), "i", ""),
}  # fmt: skip


def said_by(entrance, model):
    collate = PaddingCollator(pad_token_id=PAD, padding_side="left", model=model)
    batch = BatchAdapter(model)(collate([{"input_ids": ids} for ids in ROWS]))
    batch = {key: value for key, value in batch.items() if key != "labels"}
    try:
        if entrance == "c":
            check_delivery(model, batch)
        elif entrance == "w":
            with watch(say=False) as seen:
                model(**batch)
            return "; ".join(map(str, seen.faults))
        elif entrance == "a":
            with torch.no_grad():
                check_alone(model, batch, case_of(model, batch), model(**batch), None)
        else:
            assert_padding_invariant(model, collate, ROWS, gradients=False)
    except (CollateError, AssertionError) as error:
        return str(error)
    return ""


HERE = [name for name in FAULTS if DENSE != "qwen3_next" or "axis" not in name]
HERE = [name for name in HERE if KERNELS_TOLD.holds() or FAULTS[name][0] not in ("bamba", "lfm2")]
"""Before 5.19 these get other masks from transformers itself."""


@pytest.mark.draws(4)
@pytest.mark.parametrize("name", HERE)
def test_who_claims_to_see_a_fault_in_a_model_sees_it(name):
    family, plant, claims, layer = FAULTS[name]
    for entrance in claims:
        model = tiny_model(family, vocab_size=PAD + 1)
        model.train("train" in name)
        plant(model)
        said = said_by(entrance.lower(), model)
        assert said, entrance
        assert not entrance.isupper() or layer in said, entrance


RIGHT = ["qwen3_next", "qwen3", "llama", "mistral", DENSE, *(["bamba", "lfm2"] if KERNELS_TOLD.holds() else [])]


@pytest.mark.draws(4)
@pytest.mark.parametrize(("family", "training"), [*product(RIGHT, [False, True])])
def test_nobody_says_anything_of_a_right_model(family, training):
    model = tiny_model(family, vocab_size=PAD + 1).train(training)
    assert [said_by(each, model) for each in "cwai"] == [""] * 4


@pytest.mark.parametrize("family", ["llama4_text", "mistral"])
def test_packed_chunks_and_windows_are_a_right_run_to_every_entrance(family, capsys):
    """A sequence longer than Llama 4's chunk, and than a window."""
    model = tiny_model(family, vocab_size=PAD + 1)
    if family == "llama4_text":
        model.config.attention_chunk_size = 4
    batch = PaddingCollator(pad_token_id=PAD, padding_free=True, model=model)([{"input_ids": ids} for ids in ROWS])
    check_delivery(model, batch, alone=True)
    guard_first_batch(model)
    with watch(say=False) as heard:
        model(**batch)
    assert (capsys.readouterr().out.count("got what the batch says"), heard.faults) == (1, [])
