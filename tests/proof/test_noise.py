"""Noise: the yardstick passes what is right and fails a layer that ignores its mask, or says that it cannot tell."""

import contextlib
import math
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")
from text import sample_ids

from collate_npu import CollateError
from collate_npu.consumers import adapter
from collate_npu.proof.measure import MARGIN, TIMES, Errors, Yardstick, alone, measure_noise, product_error
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model
from collate_npu.tools.audit.case import Audit

pytestmark = pytest.mark.models

TOKENIZER = byte_tokenizer()
GDN = [name for name in ("qwen3_next", "qwen3_5_text") if name in hybrid_model_types()]
PRODUCTS = {
    F.linear, F.scaled_dot_product_attention, F.conv1d, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum,
    Tensor.matmul, Tensor.__matmul__, Tensor.bmm,
}  # fmt: skip


class _Round(torch.autograd.Function):
    """To ten bits, to nearest, in the forward and in the backward pass; the exponent stays."""

    @staticmethod
    def forward(ctx, x):
        bits = x.contiguous().view(torch.int32)
        return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return _Round.apply(gradient)


class RoundedProducts(TorchFunctionMode):
    """A card's matrix units, pretended: products round their float32 inputs to ten bits, as TF32 and HF32 do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            args = [_Round.apply(x) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args]
        return function(*args, **(kwargs or {}))


MACHINES = {
    "float32": (torch.float32, contextlib.nullcontext),
    "bfloat16": (torch.bfloat16, contextlib.nullcontext),
    "rounded products": (torch.float32, RoundedProducts),
}
NAN = float("nan")


def audited(model, *, seed=0, count=8, **settings):
    samples = sample_ids(TOKENIZER, count=count, max_length=96, seed=seed)
    settings = {"batch_size": 4, "gradients": True} | settings
    return Audit(model, samples, name="", pad_token_id=TOKENIZER.pad_token_id, **settings)


def deafen(monkeypatch, model):
    """Its recurrent layers take the mask and do not apply it, and nobody asks them before."""
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda hidden_states, attention_mask: hidden_states)
    monkeypatch.setattr(adapter, "rows_move_reason", lambda *asked, **_: dict.fromkeys(asked[2:], ""))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", GDN)
def test_right_passes_and_a_layer_that_ignores_its_mask_fails(name, machine, monkeypatch):
    dtype, pretend = MACHINES[machine]
    model = tiny_model(name, vocab_size=len(TOKENIZER), dtype=dtype)
    with pretend():
        right = audited(model)
        assert right.yardstick().tells()
        assert right.finding("left", "collator").right
        assert right.finding("right", "collator + adapter").right
        assert not right.finding("left", "no mask").right
        deafen(monkeypatch, model)
        deaf = audited(model)
        assert deaf.yardstick().tells()
        assert deaf.finding("left", "collator").right is False
        assert deaf.finding("right", "collator").right, "right padding hides it: recurrent layers look back alone"


@pytest.mark.slow
def test_a_deaf_layer_fails_where_logits_are_small_and_without_gradients(monkeypatch):
    """At the usual initial scale a wrong mask moves bfloat16 logits by 0.5: an absolute tolerance of 1 passes that."""
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER), dtype=torch.bfloat16, scale=1.0)
    assert audited(model, gradients=False).finding("left", "collator").right
    deafen(monkeypatch, model)
    assert audited(model, gradients=False).finding("left", "collator").right is False


def test_an_expert_chosen_otherwise_is_not_a_wrong_mask():
    """With these weights one token in bfloat16 takes another expert in the batch: its logits move by 0.5."""
    found = audited(tiny_model("qwen3_next", vocab_size=len(TOKENIZER), dtype=torch.bfloat16, seed=3), seed=3)
    assert found.finding("left", "collator").right


def test_a_model_that_is_all_noise_proves_nothing():
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER))
    generator = torch.Generator().manual_seed(0)

    def noisy(module, inputs, output):
        output.logits = output.logits + torch.randn(output.logits.shape, generator=generator)

    model.register_forward_hook(noisy)
    with pytest.raises(CollateError, match=r"more than float32 can round \(0.0005\), so nothing can be proved"):
        audited(model, gradients=False).finding("left", "collator")


def test_a_width_that_gives_no_number_passes_nothing():
    """Only the batches that measure the noise are so wide: their NaN must not leave the floor as the noise."""
    model = tiny_model(GDN[-1], vocab_size=len(TOKENIZER))

    def spoil(module, inputs, output):
        if output.logits.shape[1] > 96:
            output.logits[-1, -1, -1] = NAN

    model.register_forward_hook(spoil)
    assert not any(audited(model, gradients=each).finding("left", "collator").right for each in (True, False))


def test_right_results_differ_by_little():
    samples = sample_ids(TOKENIZER, count=2, max_length=9, seed=3)
    features = [{"input_ids": ids, "labels": ids} for ids in samples]
    model = tiny_model("llama", vocab_size=len(TOKENIZER))
    noise = measure_noise(model, [features], [alone(model, features, gradients=False)], gradients=False)
    assert 0 < noise.loss < 1e-3
    assert noise.gradient == 0


def test_the_error_of_a_product_is_that_of_the_dtype_and_of_the_machine():
    float32 = torch.zeros(1)
    assert product_error(float32) < 1e-6
    assert 1e-3 < product_error(float32.to(torch.bfloat16)) < 4e-3
    with RoundedProducts():
        assert 1e-4 < product_error(float32.to(torch.float32)) < 1e-3


def errors(logits, loss, gradient):
    return Errors(10 * logits, logits, loss, gradient)


USUAL = [1e-3, 1e-5, 1e-2]
NOISE = errors(*USUAL)


def test_each_error_can_fail_alone_and_noise_that_is_no_number_passes_nothing():
    assert Yardstick(NOISE).passes(errors(*USUAL))
    for place, name in enumerate(("logits", "loss", "gradient")):
        for bad in (1.01 * TIMES, NAN, float("inf")):
            values = [value * (bad if n == place else 1) for n, value in enumerate(USUAL)]
            assert Yardstick(NOISE).astray(errors(*values)) == (name,)
    assert not Yardstick(errors(NAN, 0.0, 0.0)).passes(errors(0.0, 0.0, 0.0))


def test_wrong_must_stand_well_above_noise_or_the_tolerance():
    """Seen: bfloat16 with a tolerance of 0.1, where a deaf layer moves the logits by 0.08."""
    near, far = 0.99 * MARGIN * TIMES, 1.01 * MARGIN * TIMES
    assert not Yardstick(NOISE, errors(1e-3 * near, 1.0, 1e-2 * near)).tells()
    assert not Yardstick(NOISE).tells(), "nothing wrong was run"
    for wrong in (errors(1e-3 * far, 0.0, 0.0), errors(0.0, 0.0, 1e-2 * far), errors(NAN, NAN, NAN)):
        assert Yardstick(NOISE, wrong).tells()
    wrong = Errors(0.08, 0.05, 0.001, 0.09)
    assert (Yardstick(NOISE, wrong).tells(0.1), Yardstick(NOISE, wrong).tells(0.085)) == (False, True)
    assert Yardstick(NOISE, Errors(math.inf, 0.0, 0.0, 0.0)).tells(0.1)
    assert not Yardstick(NOISE, Errors(0.5, 0.0, 0.0, 0.5)).tells(0.5)
