"""Measuring: nothing that is not finite, missing or of another shape can pass for small."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch

from collate_npu.testing.measure import Errors, Numbers, alone, errors, run, worst

NAN, INF = float("nan"), float("inf")


def numbers(rows=((1.0, 2.0), (3.0, 4.0)), loss=2.0, gradient=(1.0, 1.0), finite=True):
    return Numbers([torch.tensor(row)[None] for row in rows], loss, {"w": torch.tensor(gradient)}, finite)


def test_equal_results_are_not_apart():
    assert errors(numbers(), numbers()) == Errors(0.0, 0.0, 0.0, 0.0)


def test_each_error_by_hand():
    found = errors(numbers(((1.0, 2.0), (3.0, 5.0)), loss=3.0, gradient=(1.0, 0.0)), numbers())
    assert found.largest == 1.0
    assert found.logits == pytest.approx(1 / math.sqrt(30))
    assert found.loss == 0.5
    assert found.gradient == pytest.approx(1 / math.sqrt(2))


def test_a_missing_gradient_is_one_of_zeros_and_none_against_some_is_infinite():
    without = Numbers(numbers().logits, 2.0, {}, True)
    assert errors(without, numbers()).gradient == 1.0
    assert errors(numbers(), without).gradient == INF


@pytest.mark.parametrize("rows", [((1.0, 2.0),), ((1.0,), (3.0, 4.0)), ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))])
def test_other_rows_are_no_match(rows):
    assert math.isnan(errors(numbers(rows), numbers()).logits)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", range(4))
def test_the_worst_keeps_what_is_not_a_number_wherever_it_stands(bad, place):
    values = [0.0] * 4
    values[place] = bad
    found = worst([Errors(1.0, 1.0, 1.0, 1.0), Errors(*values), Errors(2.0, 2.0, 2.0, 2.0)])
    kept = astuple(found)[place]
    assert math.isnan(kept) if math.isnan(bad) else kept == max(bad, 2.0)


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
    result = run(Model(spoil, bad), batch, lambda logits: [logits[0], logits[1, 1:]], gradients=True)
    assert not result.finite
    right = run(Model(), batch, lambda logits: [logits[0], logits[1, 1:]], gradients=True)
    assert right.finite
    assert all(map(math.isnan, astuple(errors(result, right))))
    assert all(map(math.isnan, astuple(errors(right, result))))


def test_samples_alone_add_up_and_leave_no_gradient():
    model, features = Model(), [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3], [4, 5])]
    both = alone(model, features, gradients=True)
    first, second = (alone(model, [feature], gradients=True) for feature in features)
    assert both.loss == pytest.approx(first.loss + second.loss)
    name = "table.weight"
    assert torch.allclose(both.gradients[name], first.gradients[name] + second.gradients[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_bad_sample_spoils_the_samples_alone():
    assert not alone(Model((0, 2, 0)), [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], gradients=False).finite
