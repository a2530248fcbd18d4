"""Sequence parallelism between ranks; hypothesis draws the cases, every call has a deadline."""

import gloo_work as work
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

pytestmark = pytest.mark.xdist_group("gloo")

LAYOUTS = ("zigzag", "contiguous", "document_zigzag")
few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sides = st.sampled_from(["left", "right"])


@st.composite
def rows(draw):
    """Lengths of the sequences of each row, and a width that holds them."""
    lengths = draw(st.lists(st.lists(st.integers(1, 9), max_size=2), min_size=1, max_size=3))
    return lengths, max(1, max(map(sum, lengths)) + draw(st.integers(0, 5)))


@given(layout=st.sampled_from(LAYOUTS), batch=rows(), side=sides, tp=st.sampled_from([1, 2]))
@settings(few, max_examples=100)
def test_split_then_gather_is_the_identity_for_every_key(pool, layout, batch, side, tp):
    pool(work.split_and_gather, {"layout": layout, "tensor_parallel": tp}, *batch, side)


@pytest.mark.slow
@given(layout=st.sampled_from(LAYOUTS), batch=rows(), side=sides, loss=st.sampled_from(["local", "same"]))
@few
def test_loss_and_gradients_are_those_of_the_unsplit_model(processes, layout, batch, side, loss):
    processes(work.attention, {"layout": layout}, *batch, side, loss)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@few
def test_jagged_outputs(pool, lengths):
    pool(work.jagged, lengths)


def test_same_is_one_gradient_and_local_is_the_sum_over_ranks(pool):
    answers = pool(work.meaning_of_loss)
    assert [same for same, _ in answers] == [rank + 1 for rank in range(pool.size)]
    assert {local for _, local in answers} == {sum(range(1, pool.size + 1))}


def test_a_rank_whose_step_cannot_be_weighed_leaves_none_waiting(pair):
    assert pair(work.weights, ["token", "token"], -1) == ["[0.6666666666666666]", "[1.3333333333333333]"]
    for told, says in zip(pair(work.weights, ["token", "token"], 0), ("Pass per='sequence'", "1 other ranks raised")):
        assert says in told
    assert all("ranks by per= [1, 0, 1]" in each for each in pair(work.weights, ["token", "sequence"], -1))
    for odd in ("seed", "epoch", "order", "options"):
        assert all("ranks whose plans differ" in each for each in pair(work.weights, ["token", "token"], -1, odd))


@pytest.mark.slow
def test_device_meshes(processes):
    processes(work.meshes)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_no_object_meets_hccl_and_all_that_share_out_the_data_meet(processes, tensor_parallel):
    """Tensor-parallel ranks hold the same tokens: only one of them counts."""
    for seen in processes(work.objects_beside_hccl, tensor_parallel):
        everyone = list(range(processes.size))
        assert seen["gathered"] == (seen["own"], everyone, seen["own"])
        assert (seen["groups"], seen["hccl"]) == (1 if tensor_parallel == 1 else 2, 0)
