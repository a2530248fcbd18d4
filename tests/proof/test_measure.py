"""Measuring: nothing that is not finite, missing or of another shape can pass for small."""

import math
from dataclasses import astuple

import pytest
import torch

from collate_npu.proof.measure import Compared, Errors, Numbers, alone, errors, measure, uncached

NAN, INF = float("nan"), float("inf")


def numbers(rows=((1.0, 2.0), (3.0, 4.0)), loss=2.0, gradient=(1.0, 1.0), finite=True):
    return Numbers([torch.tensor(row)[None] for row in rows], loss, {"w": torch.tensor(gradient)}, finite)


def test_each_error_by_hand():
    assert errors(numbers(), numbers()) == Errors(0.0, 0.0, 0.0, 0.0)
    found = errors(numbers(((1.0, 2.0), (3.0, 5.0)), loss=3.0, gradient=(1.0, 0.0)), numbers())
    assert astuple(found) == pytest.approx((1.0, 1 / math.sqrt(30), 0.5, 1 / math.sqrt(2)))
    without = Numbers(numbers().logits, 2.0, {}, True)  # a missing gradient is one of zeros
    assert errors(without, numbers()).gradient == 1.0
    assert errors(numbers(), without).gradient == INF


@pytest.mark.parametrize("rows", [((1.0, 2.0),), ((1.0,), (3.0, 4.0)), ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))])
def test_other_rows_are_no_match(rows):
    assert math.isnan(errors(numbers(rows), numbers()).logits)


@pytest.mark.parametrize("place", range(4))
def test_the_worst_keeps_what_is_not_a_number_wherever_it_stands(place):
    for bad, kept in ((NAN, NAN), (INF, INF), (-INF, 2.0)):
        values = [bad if n == place else 0.0 for n in range(4)]
        found = Compared((Errors(*[1.0] * 4), Errors(*values), Errors(*[2.0] * 4)), ()).worst
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
    assert all(map(math.isnan, astuple(errors(result, right))))
    assert all(map(math.isnan, astuple(errors(right, result))))


def test_a_model_that_makes_a_cache_is_run_without_one():
    class Caching(Model):
        def forward(self, input_ids, use_cache=True):
            return super().forward(input_ids)

    assert uncached(Caching(), {"input_ids": 1}) == {"input_ids": 1, "use_cache": False}
    assert uncached(Model(), {"input_ids": 1}) == {"input_ids": 1}


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
    again = measure(model, batch, list, gradients=True)
    assert astuple(errors(again, first)) == (0, 0, 0, 0)
    assert model.dropout.training


@pytest.mark.parametrize("pools", [False, True])
def test_without_labels_the_loss_is_half_the_squares_and_a_copy_is_looked_at(pools):
    model = Model()
    model.forward = lambda input_ids: model.table(input_ids)[:, 0] if pools else model.table(input_ids)
    found = measure(model, {"input_ids": torch.tensor([[1, 2]])}, list, gradients=False)
    shown = model.table.weight[1:2] if pools else model.table.weight[1:3]
    assert found.loss == pytest.approx(float(shown.square().sum()) / 2)
    copies = alone(model, [{"input_ids": [1, 2], "labels": [1, 2]}], gradients=False, copies=2)
    assert torch.equal(copies.logits[0], shown)
