"""Ranks that share a row agree on layout, shape, dtype, truth and tokens, or every one of them raises."""

from __future__ import annotations

import agreement_work as work
import pytest
from gloo_pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]

BY = ("adapter", "split", "gather")
ODD = {
    "layout": "layout zigzag, size",
    "width": "[2, ",
    "truth": "truth",
    "tokens": "the values of input_ids",
    "dtype": "attention_mask_2d",
    "key": "loss_mask absent on ranks [0",
    "raises": "raised CollateError",
}
HIDDEN = {("gather", odd) for odd in ("tokens", "dtype", "key", "raises")} | {("adapter", "dtype")}
"""An output holds no tokens, dtypes or keys of the batch; the adapter makes the mask anew."""


@pytest.mark.parametrize(("by", "odd"), [(by, odd) for by in BY for odd in ODD if (by, odd) not in HIDDEN])
def test_every_rank_raises_where_one_is_odd(pool, by, odd):
    said = pool(work.step, odd, by, seconds=20)
    assert all(said), said
    if odd == "raises":
        assert sum("raised CollateError" in text for text in said) == pool.size - 1  # the last rank says it itself
    else:
        assert all(ODD[odd] in text and f"on ranks [{pool.size - 1}]" in text for text in said), said


@pytest.mark.parametrize("by", BY)
def test_ranks_that_agree_go_on_also_after_a_refusal(pool, by):
    assert pool(work.step, "", by) == [""] * pool.size


def test_a_rank_that_never_comes_is_named_after_the_timeout():
    pool = Pool(2)
    try:
        said = pool(work.silent, 0.5, seconds=10)[0]
        assert "no word of ranks [1]" in said
        assert "0:00:00.500000" in said
    finally:
        pool.close()


def test_a_shape_that_was_seen_is_not_waited_for(pair):
    assert pair(work.waits, 3) == [0, 0]


def test_a_shape_that_is_new_to_one_rank_alone_is_told_at_once(pool):
    """The others hold a shape they have seen, and wait for nobody; the odd rank raises before any data moves."""
    *others, odd = pool(work.new_to_one, seconds=20)
    assert others == [""] * (pool.size - 1)
    assert f"on ranks [{pool.size - 1}]" in odd
    assert "input_ids int64 [2, " in odd


def test_the_store_does_not_fill_up(pair):
    assert pair(work.kept, 6, 2) == [2, 2]
