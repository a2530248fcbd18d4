"""Faults planted in transformers' models: the fifth stack of tests/proof/test_planted_faults.py, whose letters these are."""

import inspect

import pytest
import torch

pytest.importorskip("transformers")

from rotation import some

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, check_delivery, guard_first_batch
from collate_npu.masks import dense
from collate_npu.proof import watch
from collate_npu.proof.delivery import check_alone
from collate_npu.proof.forward import case_of
from collate_npu.proof.invariance import assert_padding_invariant
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import hybrid_model_types, tiny_model

pytestmark = pytest.mark.models

PAD = 256
ROWS = [[(5 + 7 * n + 3 * t) % 250 for t in range(S)] for n, S in enumerate((9, 5, 12))]
DENSE = "qwen3_5_text" if "qwen3_5_text" in hybrid_model_types() else "qwen3_next"


def handed(at, **changes):
    """A layer is called with another argument."""

    def plant(model):
        def look(module, args, kwargs):
            named = {**dict(zip(inspect.signature(module.forward).parameters, args)), **kwargs}
            told = {
                key: change(named[key]) for key, change in changes.items() if key != "train" and named.get(key) is not None
            }
            return ((), {**named, **told}) if "train" not in changes or module.training else None

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
    "no mask in training": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: None, train=0), "CWai", ATTENTION),
    "a 2D mask rolled": ("qwen3_next", handed(RULE, attention_mask=lambda x: x.roll(1, 1)), "CWai", RULE),
    "a 2D mask turned round": ("qwen3_next", handed(RULE, attention_mask=lambda x: x == 0), "CW", RULE),
    "a mask turned round": ("llama", handed(ATTENTION, attention_mask=lambda x: x == 0), "CW", ATTENTION),
    "no mask in a scan": ("bamba", handed("model.layers.0.mamba", attention_mask=lambda x: None), "CWai", "layers.0.mamba"),
    "no mask in a convolution": ("lfm2", handed("model.layers.0.conv", attention_mask=lambda x: None), "CWai", "0.conv"),
    "a 2D mask of ones": ("qwen3_next", handed(RULE, attention_mask=torch.ones_like), "CWai", RULE),
    "no 2D mask in training": ("qwen3_next", handed(RULE, attention_mask=lambda x: None, train=0), "CWai", RULE),
    "a mask that one head has not": ("qwen3_next", handed(ATTENTION, attention_mask=by_head), "CWai", ATTENTION),
    "numbers for True and False": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: x.float()), "CWai", ATTENTION),
    "a mask that is too weak": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: -5.0 * ~x), "CWai", ATTENTION),
    "another row's mask": ("qwen3_next", handed(ATTENTION, attention_mask=lambda x: x.roll(1, 0)), "CWai", ATTENTION),
    "a mask cut by one": (
        "qwen3_next", handed(ATTENTION, attention_mask=lambda x: torch.cat([x[..., 1:], x[..., :1]], -1)), "CWai", ATTENTION
    ),
    "states rolled behind a layer": ("qwen3", gives("model.layers.1.mlp", lambda x: x.roll(1, 1)), "Cai", "layers.1.mlp"),
    "rows swapped behind a layer": ("qwen3", gives("model.layers.1.mlp", lambda x: x.flip(0)), "Cai", "layers.1.mlp"),
    "states less their mean": ("qwen3", gives("model.norm", lambda x: x - x.mean((0, 1))), "Cai", "model.norm"),
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


TOLD = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="older ones hand lfm2 the causal mask, as watch says there")
HERE = [name for name in FAULTS if DENSE != "qwen3_next" or "axis" not in name]
HERE = [name for name in HERE if KERNELS_TOLD.holds() or FAULTS[name][0] not in ("bamba", "lfm2")]
"""Before 5.19 these get other masks from transformers itself."""


@pytest.mark.parametrize("name", some(HERE, 6))
def test_who_claims_to_see_a_fault_in_a_model_sees_it(name):
    family, plant, claims, layer = FAULTS[name]
    for entrance in claims:
        model = tiny_model(family, vocab_size=PAD + 1)
        model.train("train" in name)
        plant(model)
        said = said_by(entrance.lower(), model)
        assert said, entrance
        assert not entrance.isupper() or layer in said, entrance


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "family",
    ["qwen3_next", "qwen3", "llama", "mistral", DENSE, *(pytest.param(name, marks=TOLD) for name in ("bamba", "lfm2"))],
)
def test_nobody_says_anything_of_a_right_model(family, training):
    model = tiny_model(family, vocab_size=PAD + 1).train(training)
    assert [said_by(each, model) for each in "cwai"] == [""] * 4


@pytest.mark.parametrize("family", ["llama4_text", "mistral"])
def test_packed_chunks_and_windows_are_a_right_run_to_every_entrance(family):
    """A sequence longer than Llama 4's chunk, and than a window."""
    model, seen = tiny_model(family, vocab_size=PAD + 1), []
    if family == "llama4_text":
        model.config.attention_chunk_size = 4
    batch = PaddingCollator(pad_token_id=PAD, padding_free=True, model=model)([{"input_ids": ids} for ids in ROWS])
    check_delivery(model, batch, alone=True)
    guard_first_batch(model, report=seen.append)
    with watch(say=False) as heard:
        model(**batch)
    assert (len(seen), list(heard.faults)) == (1, [])
