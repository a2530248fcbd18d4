"""By sequence: a plan lays every token in a row of its own sequence, and back; a checkpoint function carries it."""

import threading

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu.consumers import by_sequence
from collate_npu.consumers.by_sequence import begin, carry, plan_of, running
from collate_npu.proof.boundaries import plan_reason
from collate_npu.segments import of_lengths

LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=12)


@given(LENGTHS, st.sampled_from(["few", "even", "one"]), st.sampled_from([0, 256]))
def test_rows_hold_one_sequence_each_and_come_back_with_their_gradient(lengths, buckets, cost):
    plan = plan_of(lengths, "cpu", buckets, cost)
    assert plan_reason(plan, of_lengths([lengths], sum(lengths))) == ""
    x = torch.randn(1, sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    rows = plan.lay(x)
    held = {n: row for bucket, each in zip(plan.buckets, rows) for n, row in zip(bucket, each)}
    for n, tokens in enumerate(x[0].split(lengths)):
        assert torch.equal(held[n][: lengths[n]], tokens)
        assert not held[n][lengths[n] :].any()
    assert torch.equal(plan.back(rows), x)
    for n, bucket in enumerate(plan.buckets):
        assert plan.rows_of(n).lengths == tuple((lengths[each],) for each in bucket)
    weights = torch.randn_like(x)
    (sum((row * row).sum() for row in rows) + (plan.back(rows) * weights).sum()).backward()
    assert torch.allclose(x.grad, 2 * x + weights)
    if buckets == "one":
        assert len(rows) == 1
    if buckets == "even":
        assert all(row.shape[1] == lengths[n] for bucket, row in zip(plan.buckets, rows) for n in bucket)


@given(LENGTHS)
def test_buckets_cost_at_most_what_one_bucket_costs(lengths):
    cost = lambda plan: sum(L * (n + 1) + by_sequence.CALL_COST for n, L in plan.shapes)  # noqa: E731
    assert cost(plan_of(lengths)) <= cost(plan_of(lengths, "cpu", "one"))


def test_many_lengths_make_few_buckets():
    drawn = torch.randint(8, 65, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = plan_of(drawn)
    assert len(plan.buckets) < 16
    assert sum(n * L for n, L in plan.shapes) < 1.2 * sum(drawn)


@pytest.mark.parametrize("name", ["_gradient_checkpointing_func", "checkpoint_fn"])
def test_a_checkpointed_layer_is_computed_again_by_its_plan_in_any_thread(name):
    kept, layer, seen = [], torch.nn.Linear(1, 1), []
    setattr(layer, name, lambda function, *args: kept.append((function, args)))
    carry(layer)
    carry(layer)
    plan = plan_of([2, 1])
    before = begin(plan)
    getattr(layer, name)(lambda: seen.append(running()[0]))
    begin(before)
    thread = threading.Thread(target=lambda: [function(*args) for function, args in kept])
    thread.start()
    thread.join()
    assert seen == [plan]
    assert running() == (None, None)
