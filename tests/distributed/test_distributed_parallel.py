"""Sequence parallelism between real processes on Gloo; hypothesis draws the cases, every call has a deadline."""

from __future__ import annotations

import gloo_work as work
import pytest
from gloo_pool import Pool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LAYOUTS = [
    "zigzag",
    "contiguous",
    "document_zigzag",
    "document_contiguous",
    "ulysses",
    "ulysses_ring",
    "document_ulysses_ring",
]
few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def layouts(draw):
    layout = draw(st.sampled_from(LAYOUTS))
    return {"layout": layout, "ulysses": 2 if layout.endswith("ulysses_ring") else 1}


sides = st.sampled_from(["left", "right"])


@st.composite
def rows(draw):
    """Lengths of the sequences of each row, and a width that holds them."""
    lengths = draw(st.lists(st.lists(st.integers(1, 9), max_size=2), min_size=1, max_size=3))
    return lengths, max(1, max(map(sum, lengths)) + draw(st.integers(0, 5)))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(batch=rows(), side=sides, tp=st.sampled_from([1, 2]), scope=st.just("local"))
@few
def test_split_then_gather_is_the_identity_for_every_key(pool, layout, batch, side, tp, scope):
    place = {
        "layout": layout,
        "ulysses": 2 if layout.endswith("ulysses_ring") else 1,
        "tensor_parallel": tp,
        "mask_2d": scope,
    }
    pool(work.split_and_gather, place, *batch, side)


@given(place=layouts(), batch=rows(), side=sides, loss=st.sampled_from(["local", "same"]))
@few
def test_loss_and_gradients_are_those_of_the_unsplit_model(pool, place, batch, side, loss):
    pool(work.attention, place, *batch, side, loss)


@given(place=layouts(), batch=rows(), side=sides)
@few
def test_pooling_after_the_gather(pool, place, batch, side):
    pool(work.outputs, place, *batch, side)


@given(
    layout=st.sampled_from(["document_zigzag", "document_contiguous"]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
@few
def test_jagged_outputs(pool, layout, lengths):
    pool(work.jagged, {"layout": layout}, lengths)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "ulysses"])
def test_mrope_positions(pool, layout):
    pool(work.mrope, {"layout": layout})


def test_same_is_one_gradient_and_local_is_the_sum_over_ranks(pool):
    answers = pool(work.meaning_of_loss)
    assert [same for same, _ in answers] == [rank + 1 for rank in range(pool.size)]
    assert {local for _, local in answers} == {sum(range(1, pool.size + 1))}


def test_wrong_groups_are_errors_on_every_rank_and_nobody_hangs(pool):
    words = ["its rank", "its rank", "count from 0", "Gathering needs", "shards has", "multiple of"]
    for said in pool(work.wrong_groups, seconds=10):
        assert all(word in text for word, text in zip(words, said, strict=True)), said


def test_device_meshes(pool):
    pool(work.meshes)


def test_objects_travel_by_gloo(pool):
    assert pool(work.objects) == [[{"rank": rank} for rank in range(pool.size)]] * pool.size


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_no_object_meets_hccl_and_all_that_share_out_the_data_meet(pool, tensor_parallel):
    """Tensor-parallel ranks hold the same tokens: only one of them counts."""
    for seen in pool(work.objects_beside_hccl, tensor_parallel):
        everyone = list(range(pool.size))
        assert seen["gathered"] == (seen["own"], everyone, seen["own"])
        assert (seen["groups"], seen["hccl"]) == (1 if tensor_parallel == 1 else 2, 0)


def test_the_pool_itself_ends_ranks_that_wait_for_a_failed_one():
    pool = Pool(2)
    try:
        with pytest.raises(AssertionError, match="on purpose"):
            pool(work.fail_on, 0)
        assert pool(work.objects)[0] == [{"rank": 0}, {"rank": 1}]  # and starts afresh
    finally:
        pool.close()
