"""Ranks: what rank 0 returns; one that raises, ends or hangs ends them all in time, and says which it was."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch.distributed as dist

from collate_npu.tools.ranks import RanksError, together


def summed(start):
    import torch

    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return os.environ["RANK"], int(total), dist.get_backend()


def fails(how):
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("broken\nsecond line")
        os._exit(3)
    dist.barrier()


def test_rank_0_answers_for_all():
    assert together(summed, 2, 10, device="cpu", seconds=120) == ("0", 21, "gloo")


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "rank 1: ValueError: broken$"), ("ends", "rank 1: it ended without an answer")]
)
def test_a_lost_rank_ends_all(how, said):
    """A rank that hangs is in test_sharded."""
    began = time.monotonic()
    with pytest.raises(RanksError, match=said):
        together(fails, 2, how, device="cpu", seconds=300)
    assert time.monotonic() - began < 100  # the others wait in a barrier
    assert not multiprocessing.active_children()
