"""Measuring: nothing that is not finite, missing or of another shape can pass for small. Rounding passes, and a layer that
ignores its mask does not; or it is said that nothing can be proved."""

import contextlib
import math
import sys
from dataclasses import astuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

from collate_npu import CollateError
from collate_npu.consumers import probe
from collate_npu.proof import measure as measuring
from collate_npu.proof.invariance import Reference
from collate_npu.proof.measure import MARGIN, TIMES, Errors, Numbers, Yardstick, alone, errors_between, measure
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model
from collate_npu.tools.audit import Subject
from collate_npu.tools.files import samples_of_rows, shipped_text

NAN, INF = float("nan"), float("inf")


def numbers(rows=((1.0, 2.0), (3.0, 4.0)), loss=2.0, gradient=(1.0, 1.0), finite=True):
    return Numbers([torch.tensor(row)[None] for row in rows], loss, {"w": torch.tensor(gradient)}, finite)


def test_each_error_by_hand():
    assert errors_between(numbers(), numbers()) == Errors(0.0, 0.0, 0.0, 0.0)
    found = errors_between(numbers(((1.0, 2.0), (3.0, 5.0)), loss=3.0, gradient=(1.0, 0.0)), numbers())
    assert astuple(found) == pytest.approx((1.0, 1 / math.sqrt(30), 0.5, 1 / math.sqrt(2)))
    without = Numbers(numbers().logits, 2.0, {}, True)  # a missing gradient is one of zeros
    assert errors_between(without, numbers()).gradient == 1.0
    assert errors_between(numbers(), without).gradient == INF
    for rows in (((1.0, 2.0),), ((1.0,), (3.0, 4.0)), ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))):
        assert math.isnan(errors_between(numbers(rows), numbers()).logits), "other rows are no match"


@pytest.mark.parametrize("place", range(4))
def test_the_worst_keeps_what_is_not_a_number_wherever_it_stands(place):
    for bad, kept in ((NAN, NAN), (INF, INF), (-INF, 2.0)):
        values = [bad if n == place else 0.0 for n in range(4)]
        found = measuring.worst((Errors(*[1.0] * 4), Errors(*values), Errors(*[2.0] * 4)))
        assert astuple(found)[place] == pytest.approx(kept, nan_ok=True)


class Model(torch.nn.Module):
    """Two rows of two tokens; `spoil` puts a number into one place of what it gives."""

    device = torch.device("cpu")

    def __init__(self, spoil=None, bad=NAN):
        super().__init__()
        self.table = torch.nn.Embedding(8, 8)
        self.idle = torch.nn.Parameter(torch.ones(2))
        self.spoil, self.bad = spoil, bad
        if spoil == "gradient":
            self.idle.register_hook(lambda gradient: gradient + torch.tensor([0.0, bad]))

    def forward(self, input_ids):
        logits = self.table(input_ids) + 0 * self.idle.sum()
        if isinstance(self.spoil, tuple):
            logits = logits.index_put(tuple(map(torch.tensor, self.spoil)), torch.tensor(self.bad))
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("spoil", [(1, 1, 3), (1, 0, 7), (0, 0, 0), "gradient"])
def test_every_place_of_a_result_is_looked_at(spoil, bad):
    """The second row's first token is padding here: what stands there counts too."""
    batch = {"input_ids": torch.tensor([[1, 2], [0, 3]]), "labels": torch.tensor([[1, 2], [-100, 3]])}
    models = (Model(spoil, bad), Model())
    result, right = (measure(each, batch, lambda x: [x[0], x[1, 1:]], gradients=True) for each in models)
    assert (result.finite, right.finite) == (False, True)
    assert all(map(math.isnan, astuple(errors_between(result, right))))
    assert all(map(math.isnan, astuple(errors_between(right, result))))


def test_samples_alone_add_up_and_leave_no_gradient():
    model, features = Model(), [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3], [4, 5])]
    both = alone(model, features, gradients=True)
    first, second = (alone(model, [feature], gradients=True) for feature in features)
    assert both.loss == pytest.approx(first.loss + second.loss)
    name = "table.weight"
    assert torch.allclose(both.gradients[name], first.gradients[name] + second.gradients[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not alone(Model((0, 2, 0)), features[:1], gradients=False).finite, "one bad sample spoils them all"


def test_what_was_learned_before_does_not_count_and_dropout_is_left_out():
    model = Model()
    model.dropout = torch.nn.Dropout(0.5)
    model.table.register_forward_hook(lambda module, args, out: model.dropout(out))
    batch = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]])}
    first = measure(model, batch, list, gradients=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert astuple(errors_between(measure(model, batch, list, gradients=True), first)) == (0, 0, 0, 0)
    assert model.dropout.training


@pytest.mark.parametrize("pools", [False, True])
def test_without_labels_the_loss_is_half_the_squares_and_a_copy_is_looked_at(pools):
    model = Model()
    model.forward = lambda input_ids: model.table(input_ids)[:, 0] if pools else model.table(input_ids)
    found = measure(model, {"input_ids": torch.tensor([[1, 2]])}, list, gradients=False)
    shown = model.table.weight.detach()[1:2] if pools else model.table.weight.detach()[1:3]
    assert found.loss == pytest.approx(float(shown.square().sum()) / 2)
    copies = alone(model, [{"input_ids": [1, 2], "labels": [1, 2]}], gradients=False, copies=2)
    assert torch.equal(copies.logits[0], shown)


# --- what passes, by errors

USUAL = [1e-3, 1e-5, 1e-2]


def errors(logits, loss, gradient):
    return Errors(10 * logits, logits, loss, gradient)


NOISE = errors(*USUAL)


def test_each_error_can_fail_alone_and_noise_that_is_no_number_passes_nothing():
    assert not Yardstick(NOISE).astray(errors(*USUAL))
    for place, name in enumerate(("logits", "loss", "gradient")):
        for bad in (1.01 * TIMES, NAN, INF):
            values = [value * (bad if n == place else 1) for n, value in enumerate(USUAL)]
            assert Yardstick(NOISE).astray(errors(*values)) == (name,)
    assert Yardstick(errors(NAN, 0.0, 0.0)).astray(errors(0.0, 0.0, 0.0)) == ("logits",)


NEAR, FAR = 0.99 * MARGIN * TIMES, 1.01 * MARGIN * TIMES
SEEN = Errors(0.08, 0.05, 0.001, 0.09)
"""In bfloat16 with a tolerance of 0.1, where a layer that ignores its mask moves the logits by 0.08."""


@pytest.mark.parametrize(
    ("wrong", "tolerance", "tells"),
    [
        (None, None, False),  # nothing wrong was run
        (errors(1e-3 * NEAR, 1.0, 1e-2 * NEAR), None, False),
        (errors(1e-3 * FAR, 0.0, 0.0), None, True),
        (errors(0.0, 0.0, 1e-2 * FAR), None, True),
        (errors(NAN, NAN, NAN), None, True),
        (SEEN, 0.1, False),
        (SEEN, 0.085, True),
        (Errors(INF, 0.0, 0.0, 0.0), 0.1, True),
        (Errors(0.5, 0.0, 0.0, 0.5), 0.5, False),
    ],
)
def test_wrong_must_stand_well_above_noise_or_the_tolerance(wrong, tolerance, tells):
    assert Yardstick(NOISE, wrong).tells(tolerance) == tells


# --- and on models

TOKENIZER = byte_tokenizer()
GDN = [name for name in ("qwen3_next", "qwen3_5_text") if name in hybrid_model_types()]
PRODUCTS = {
    F.linear, F.scaled_dot_product_attention, F.conv1d, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum,
    Tensor.matmul, Tensor.__matmul__, Tensor.bmm,
}  # fmt: skip


class RoundedProducts(TorchFunctionMode):
    """A card's matrix units, pretended: products round their float32 inputs to ten bits, as TF32 and HF32 do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            args = [x.half().float() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args]
        return function(*args, **(kwargs or {}))


MACHINES = {
    "float32": (torch.float32, contextlib.nullcontext),
    "bfloat16": (torch.bfloat16, contextlib.nullcontext),
    "rounded products": (torch.float32, RoundedProducts),
}


def audited(model, *, seed=0, count=8, gradients=True):
    rows = samples_of_rows(shipped_text(), TOKENIZER, count=count, max_length=96, seed=seed)
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows]
    reference = Reference(model, [samples[:4], samples[4:]], gradients=gradients)
    about = {"model": "", "attention": "sdpa"}
    return Subject(reference=reference, model=model, pad_token_id=TOKENIZER.pad_token_id, about=about)


def deafen(monkeypatch, model):
    """Its recurrent layers take the mask and do not apply it, and nobody asks them before."""
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda hidden_states, attention_mask: hidden_states)
    monkeypatch.setattr(probe, "leak_reasons", lambda *asked, **_: dict.fromkeys(asked[2:], ""))


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", GDN)
def test_right_passes_and_a_layer_that_ignores_its_mask_fails(name, machine, monkeypatch):
    dtype, pretend = MACHINES[machine]
    model = tiny_model(name, vocab_size=len(TOKENIZER), dtype=dtype)
    with pretend():
        right = audited(model, seed=1)  # on 4.57, rounding chooses one token of seed 0 another expert
        assert right.tells()
        assert right.ours("left").right
        assert right.ours("right").right
        deafen(monkeypatch, model)
        deaf = audited(model, seed=1)
        assert deaf.tells()
        assert deaf.ours("left").right is False
        assert deaf.ours("right").right, "right padding hides it: recurrent layers look back alone"


@pytest.mark.models
@pytest.mark.slow
def test_a_deaf_layer_fails_where_logits_are_small_and_without_gradients(monkeypatch):
    """At the usual initial scale a wrong mask moves bfloat16 logits by 0.5: an absolute tolerance of 1 passes that."""
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER), dtype=torch.bfloat16, scale=1.0)
    assert audited(model, gradients=False).ours("left").right
    deafen(monkeypatch, model)
    assert audited(model, gradients=False).ours("left").right is False


@pytest.mark.models
def test_an_expert_chosen_otherwise_is_not_a_wrong_mask():
    """With these weights one token in bfloat16 takes another expert in the batch: its logits move by 0.5."""
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER), dtype=torch.bfloat16, seed=3)
    assert audited(model, seed=3, gradients=False).ours("left").right


@pytest.mark.models
def test_a_model_that_is_all_noise_proves_nothing():
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER))
    generator = torch.Generator().manual_seed(0)

    def noisy(module, inputs, output):
        output.logits = output.logits + torch.randn(output.logits.shape, generator=generator)

    model.register_forward_hook(noisy)
    with pytest.raises(CollateError, match=r"more than float32 can round \(0.0005\), so nothing can be proved"):
        audited(model, gradients=False).ours("left")


@pytest.mark.models
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_width_that_gives_no_number_passes_nothing(gradients):
    """Only the batches that measure the noise are so wide: their NaN must not leave the floor as the noise."""
    model = tiny_model(GDN[-1], vocab_size=len(TOKENIZER))

    def spoil(module, inputs, output):
        if output.logits.shape[1] > 96:
            output.logits[-1, -1, -1] = NAN

    model.register_forward_hook(spoil)
    assert not audited(model, gradients=gradients).ours("left").right


def test_the_error_of_a_product_is_that_of_the_dtype_and_of_the_machine():
    float32 = torch.zeros(1)
    assert measuring.product_error(float32) < 1e-6
    assert 1e-3 < measuring.product_error(float32.to(torch.bfloat16)) < 4e-3
    with RoundedProducts():
        assert 1e-4 < measuring.product_error(float32.to(torch.float32)) < 1e-3
