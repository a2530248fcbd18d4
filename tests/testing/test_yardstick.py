"""The yardstick passes what is right and fails a layer that ignores its mask, in any dtype, or says that it cannot tell."""

from __future__ import annotations

import contextlib
import math
import sys

import pytest
import torch

pytest.importorskip("transformers")
from rounding import RoundedProducts

from collate_npu.integrations.delivery.alone import TIMES, product_error
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model
from collate_npu.testing.measure import Errors
from collate_npu.testing.yardstick import MARGIN, Yardstick
from collate_npu.tools.audit.case import Audit
from collate_npu.tools.audit.data import shipped_text
from collate_npu.tools.audit.samples import sample_ids

pytestmark = pytest.mark.models

TOKENIZER = byte_tokenizer()
GDN = [name for name in ("qwen3_next", "qwen3_5_text") if name in hybrid_model_types()]
MACHINES = {
    "float32": (torch.float32, contextlib.nullcontext),
    "bfloat16": (torch.bfloat16, contextlib.nullcontext),
    "rounded products": (torch.float32, RoundedProducts),
}
NAN = float("nan")


def audited(model, *, seed=0, count=8, **settings):
    samples = sample_ids(shipped_text(), TOKENIZER, count=count, max_length=96, seed=seed)
    settings = {"batch_size": 4, "gradients": True} | settings
    return Audit(model, samples, name="", pad_token_id=TOKENIZER.pad_token_id, **settings)


def deafen(monkeypatch, model):
    """Its recurrent layers take the mask and do not apply it."""
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda hidden_states, attention_mask: hidden_states)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", GDN)
def test_right_passes_and_a_layer_that_ignores_its_mask_fails(name, machine, monkeypatch):
    dtype, pretend = MACHINES[machine]
    model = tiny_model(name, vocab_size=len(TOKENIZER), dtype=dtype)
    with pretend():
        right = audited(model)
        assert right.yardstick().tells()
        assert right.finding("left", "collator").right
        assert right.finding("right", "adapter").right
        assert not right.finding("left", "None").right
        deafen(monkeypatch, model)
        deaf = audited(model)
        assert deaf.yardstick().tells()
        assert deaf.finding("left", "collator").right is False
        assert deaf.finding("right", "collator").right, "right padding hides it: recurrent layers look back alone"


@pytest.mark.parametrize("measured", [True, False], ids=["gradients", "logits alone"])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_a_deaf_layer_fails_where_logits_are_small_and_without_gradients(scale, measured, monkeypatch):
    """At the usual initial scale a wrong mask moves bfloat16 logits by 0.5: an absolute tolerance of 1 passes that."""
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER), dtype=torch.bfloat16, scale=scale)
    assert audited(model, gradients=measured).finding("left", "collator").right
    deafen(monkeypatch, model)
    assert audited(model, gradients=measured).finding("left", "collator").right is False


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
    found = audited(model, gradients=False)
    assert found.finding("left", "collator").right
    assert not found.yardstick().tells()


@pytest.mark.parametrize("gradients", [True, False])
def test_a_width_that_gives_no_number_passes_nothing(gradients):
    """Only the batches that measure the noise are so wide: their NaN must not leave the floor as the noise."""
    model = tiny_model("qwen3_5_text" if "qwen3_5_text" in GDN else "qwen3_next", vocab_size=len(TOKENIZER))

    def spoil(module, inputs, output):
        if output.logits.shape[1] > 96:
            output.logits[-1, -1, -1] = NAN

    model.register_forward_hook(spoil)
    assert audited(model, gradients=gradients).finding("left", "collator").right is False


def test_the_error_of_a_product_is_that_of_the_dtype_and_of_the_machine():
    float32 = tiny_model("qwen3_next", vocab_size=8)
    assert product_error(float32) < 1e-6
    assert 1e-3 < product_error(float32.to(torch.bfloat16)) < 4e-3
    with RoundedProducts():
        assert 1e-4 < product_error(float32.to(torch.float32)) < 1e-3


def errors(logits, loss, gradient):
    return Errors(10 * logits, logits, loss, gradient)


NOISE = errors(1e-3, 1e-5, 1e-2)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bad", [1.01 * TIMES, NAN, float("inf")])
def test_each_error_can_fail_alone(place, bad):
    values = [1e-3, 1e-5, 1e-2]
    assert Yardstick(NOISE).passes(errors(*values))
    values[place] = bad * values[place]
    assert not Yardstick(NOISE).passes(errors(*values))


def test_noise_that_is_no_number_passes_nothing():
    assert not Yardstick(errors(NAN, 0.0, 0.0)).passes(errors(0.0, 0.0, 0.0))


def test_wrong_must_stand_well_above_noise():
    near, far = 0.99 * MARGIN * TIMES, 1.01 * MARGIN * TIMES
    assert not Yardstick(NOISE, errors(1e-3 * near, 1.0, 1e-2 * near)).tells()
    assert Yardstick(NOISE, errors(1e-3 * far, 0.0, 0.0)).tells()
    assert Yardstick(NOISE, errors(0.0, 0.0, 1e-2 * far)).tells()
    assert Yardstick(NOISE, errors(NAN, NAN, NAN)).tells(), "what is not finite is seen"
    assert not Yardstick(NOISE).tells(), "nothing wrong was run"


def test_a_tolerance_must_stand_below_what_is_wrong():
    """Seen: bfloat16 with a tolerance of 0.1, where a deaf layer moves the logits by 0.08."""
    wrong = Errors(0.08, 0.05, 0.001, 0.09)
    assert not Yardstick(NOISE, wrong).tells(0.1)
    assert Yardstick(NOISE, wrong).tells(0.085)
    assert Yardstick(NOISE, Errors(math.inf, 0.0, 0.0, 0.0)).tells(0.1)
