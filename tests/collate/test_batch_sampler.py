"""Batch sampler: every sample once, no batch over its budget, as many batches on each rank, and batches of a step level."""

import numpy as np
import pytest
import torch

from collate_npu import CollateError
from collate_npu.collate import BalancedBatchSampler, lengths_of, loss_weights

KINDS = {"instruction": (5.6, 0.9, 16, 4096), "rollouts": (7.6, 1.1, 64, 32768)}


@pytest.mark.parametrize(("R", "worst", "mean"), [(8, 1.05, 1.01), (64, 1.1, 1.03)])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_a_step_are_level_and_full(kind, pack, R, worst, mean):
    mu, sigma, least, most = KINDS[kind]
    lengths = np.clip(np.random.default_rng(1).lognormal(mu, sigma, 30_000), least, most).astype(int)
    _, _, costs = BalancedBatchSampler(lengths, max_tokens=2 * most, num_replicas=R, pack=pack).plan
    level = costs.reshape(-1, R).max(axis=1) / costs.reshape(-1, R).mean(axis=1)
    assert level.max() < (1.01 if pack else worst)
    assert level.mean() < mean
    assert 1 - lengths.sum() / costs.sum() < 0.01
    assert costs.mean() > 0.85 * 2 * most


@pytest.mark.parametrize(("pack", "width"), [(False, None), (True, None), (True, 100)])
def test_epochs_differ_and_repeat_with_as_many_batches(pack, width):
    for seed in range(17, 20):  # whose packs fit now and then
        lengths = np.random.default_rng(seed).integers(1, 90, 300)
        sampler = BalancedBatchSampler(lengths, max_tokens=200, num_replicas=3, rank=1, pack=pack, width=width)
        epochs = []
        for epoch in (*range(6), 0):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler))
        assert epochs[0] == epochs[-1] != epochs[1]
        assert {len(epoch) for epoch in epochs} == {len(sampler)}
    sampler.load_state_dict(state := sampler.state_dict() | {"yielded": 2})
    assert [next(iter(sampler)) for _ in range(2)] == epochs[0][2:3] * 2  # a look takes none from what goes on
    for _ in zip(range(2), running := iter(sampler)):
        sampler.set_epoch(9)
    assert (next(running), sampler.state_dict()["yielded"]) == (epochs[0][4], 0)
    with pytest.raises(CollateError, match=f"this sampler has yielded {len(sampler)}"):
        sampler.load_state_dict(state | {"yielded": len(sampler) + 1})


BAD = {
    **{f"{x}": ([3, x], f"row 1: got {x}") for x in (0, -1, 2.5, float("nan"), 2**70, None)},
    "huge": ([3, 2**62], "row 1: got 4611686018427387904\nA row holds up to 8 tokens"),
    "ragged": ([3, [1, 2]], r"row 1: got \[1, 2\]"),
    "bools": ([True, 3], "row 0: got True"),
    "floats": (np.array([3.0, 2.0]), "row 0: got 3.0"),
    "a matrix": (np.ones((2, 2), int), "got .*2, 2"),
    "a number": (5, "got an int"),
    "lengths by name": ({1: 5, 2: 3}, "got a dict"),
    "a tensor of none": (torch.tensor(5), "got int64"),
    "empty": ([], "A plan needs a sample"),
    "many": ([0] * 50, "50 in all. A length is"),
}


@pytest.mark.parametrize(("lengths", "says"), BAD.values(), ids=BAD)
def test_bad_lengths_are_refused_with_their_place(lengths, says):
    with pytest.raises(CollateError, match=says):
        BalancedBatchSampler(lengths, max_tokens=8)


def test_bad_options_are_refused():
    for options, says in (
        ({"rank": 2, "num_replicas": 2}, "numbered from 0 to 1"),
        ({"width": 9}, "A batch holds up to 8 tokens"),
        ({"max_tokens": 0}, "at least 1"),
        ({"num_replicas": 4}, "3 samples for 4 batches.*Pass fewer ranks, or more samples"),
        ({"batch_size": 2}, "BalancedBatchSampler has no such argument"),
    ):
        with pytest.raises(CollateError, match=says):
            len(BalancedBatchSampler([3, 4, 8], **{"max_tokens": 8} | options))


def test_lengths_are_counted_from_whatever_holds_samples():
    rows = [{"input_ids": [1] * n, "tokens": n} for n in (3, 1, 2)]
    assert lengths_of(rows).tolist() == [3, 1, 2]
    assert lengths_of(rows, lambda row: 2 * row["tokens"]).tolist() == [6, 2, 4]
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_list(rows)
    for dataset in (rows, held, held.data.table, held.with_format("torch")):
        assert lengths_of(dataset).tolist() == lengths_of(dataset, "tokens").tolist() == [3, 1, 2]
    assert lengths_of(held.select([2, 0])).tolist() == [2, 3]


def test_what_holds_no_lengths_is_refused():
    none = [[{"ids": [1]}], 5, iter([]), [{"input_ids": "text"}], [{"input_ids": [[1, 2], [3, 4]]}]]
    for dataset, of in (*((each, "input_ids") for each in none), ([3, 4], len)):
        with pytest.raises(CollateError, match="a column of tokens or of lengths"):
            lengths_of(dataset, of)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ([{"input_ids": [[1]]}], "Add labels"),
        ([{"labels": [[1, -100]]}], "Leave this step out"),
        ([{"labels": torch.tensor([1, 0, 1])}], "Pass per='sequence'"),
        ({"labels": [[1, 2]]}, "Pass a list of dicts"),
        ([[1]], "Pass a list of dicts"),
    ],
)
def test_a_step_that_cannot_be_weighed_is_refused_with_what_to_pass(step, says):
    with pytest.raises(CollateError, match=says):
        loss_weights(step)
