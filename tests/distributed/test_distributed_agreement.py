"""Ranks that share a row make the same calls with the same tokens, truth and layout, or every one of them raises."""

import agreement_work as work
import pytest
from gloo_pool import Pool, Threads

pytestmark = pytest.mark.xdist_group("gloo")

BY = ("adapter", "split", "gather")
ODD = {
    "layout": "layout zigzag, size",
    "width": "[2, ",
    "truth": "truth",
    "tokens": "the values of input_ids",
    "rows": "the values of input_ids",
    "labels": "the values of labels",
    "dtype": "attention_mask_2d",
    "key": "loss_mask absent on ranks [0",
    "raises": "raised CollateError",
}
HIDDEN = {("gather", odd) for odd in ("tokens", "labels", "dtype", "key", "raises")} | {("adapter", "dtype")}
"""An output holds no tokens, dtypes or keys of the batch; the adapter makes the mask anew."""


@pytest.mark.parametrize(("by", "odd"), [(by, odd) for by in BY for odd in ODD if (by, odd) not in HIDDEN])
def test_every_rank_raises_where_one_is_odd_at_the_second_step_of_a_shape(pool, by, odd):
    said = pool(work.step, odd, by, seconds=20)
    assert all(said), said
    if odd == "raises":
        assert sum("raised CollateError" in text for text in said) == pool.size - 1  # the last rank says it itself
    else:
        words = "truth" if (by, odd) == ("gather", "rows") else ODD[odd]
        assert all(words in text and f"on ranks [{pool.size - 1}]" in text for text in said), said


@pytest.mark.parametrize("by", BY)
def test_ranks_that_agree_go_on_also_after_a_refusal(pool, by):
    assert pool(work.step, "", by) == [""] * pool.size


TURNS = [
    (["split", "gather"], ["split"]),
    (["split", "gather"], ["gather"]),
    (["split", "gather"], ["gather", "split"]),
    (["split", "gather"], ["split", "split", "gather"]),
    (["adapter", "gather", "gather"], ["adapter", "gather"]),
]


@pytest.mark.parametrize(("usual", "odd"), TURNS)
def test_a_call_that_one_rank_skips_repeats_or_makes_too_early_raises_on_all(pool, usual, odd):
    said = pool(work.turns, usual, odd, seconds=20)
    assert all("call " in text and f"on ranks [{pool.size - 1}]" in text for text in said), said
    assert pool(work.turns, usual, usual, seconds=20) == [""] * pool.size


def test_truth_is_compared_whatever_holds_it(pool):
    said = pool(work.kinds_of_truth, seconds=20)
    assert all(one.pop("same numbers") == "" for one in said)
    for one in said:
        assert [name for name, text in one.items() if f"on ranks [{pool.size - 1}]" not in text] == []


@pytest.mark.parametrize(("how", "words"), [("shapes", "output float32 [1, 4] on ranks"), ("raises", "mine")])
def test_a_gather_inside_a_block_moves_nothing_before_ranks_agree(pool, how, words):
    assert all(words in text for text in pool(work.inside_a_block, how, seconds=20))
    assert pool(work.inside_a_block, "", seconds=20) == [""] * pool.size


def test_gradients_that_one_rank_asks_for_in_another_order(pool):
    assert all("the gather main" in text for text in pool(work.backwards, [1, 0], seconds=20))
    assert set(pool(work.backwards, [0, 1])) == {str([[1.0 * pool.size], [2.0 * pool.size]])}


@pytest.mark.slow
def test_a_thread_may_split_ahead_of_the_one_that_gathers(processes):
    assert processes(work.ahead, 12, seconds=40) == [[float(n) for n in range(12)]] * processes.size


@pytest.mark.slow
def test_worlds_made_again_and_processes_started_again_count_afresh_together(tmp_path):
    pool = Pool(2)
    try:
        for said in pool(work.made_again, str(tmp_path / "store"), 6):
            assert ["input_ids" in text for text in said] == [False, True, False, False, True, False, False, False, True] * 2
            assert all("input_ids" in text for text in said if text)
    finally:
        pool.close()


# --- waiting --------------------------------------------------------------------------------------------------------------


def test_a_rank_that_never_comes_is_named_after_the_timeout():
    said = Threads()(work.silent, 0.5, seconds=10)[0]
    assert f"no message from ranks {[*range(1, Threads.size)]}" in said
    assert "0:00:00.500000" in said


@pytest.mark.slow
def test_who_comes_late_to_a_first_call_that_others_gave_up_is_told():
    pool = Pool(2)
    try:
        (gone, *went_on), (told, *late) = pool(work.gives_up_first, 1, seconds=20)
    finally:
        pool.close()
    assert "no message from ranks [1]" in gone
    assert "rank 0 raised context parallel: got no message" in told
    assert went_on == late == [[1.0]]


@pytest.mark.slow
def test_two_threads_that_gather_on_one_group_mix_nothing(pair):
    for found in pair(work.two_threads, 1, 50, 1, seconds=30):
        assert all("no message from ranks" in text for text in found), found


@pytest.mark.slow
def test_two_threads_with_a_group_each_wait_for_nobody(processes):
    assert processes(work.two_threads, 5, 20, 2, seconds=30) == [[]] * processes.size


@pytest.mark.slow
def test_a_group_has_its_own_timeout_and_who_comes_late_is_told(processes):
    *waited, late = processes(work.gives_up, 0.5, 3, seconds=20)
    assert all(f"from ranks [{processes.size - 1}]" in text and "in 0:00:00.500000" in text for text in waited), waited
    assert "rank 0 raised context parallel: got no message" in late
    assert processes(work.gives_up, 10, 0.1) == [""] * processes.size


def test_a_misspelt_loss_is_told_to_those_who_wait(pool):
    *others, odd = pool(work.misspelt, seconds=20)
    assert "got 'mean'" in odd
    assert all(f"rank {pool.size - 1} raised CollateError: loss: got 'mean'" in text for text in others), others
