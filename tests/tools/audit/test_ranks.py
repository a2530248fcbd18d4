"""Ranks: one that raises or ends ends them all, and is named. What they return, and one that hangs: test_sharded."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch.distributed as dist

from collate_npu.tools.audit.ranks import RanksError, together


def fails(how):
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("broken\nsecond line")
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "rank 1: ValueError: broken$"), ("ends", "rank 1: it ended without an answer")]
)
def test_a_lost_rank_ends_all(how, said):
    began, others = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(RanksError, match=said):
        together(fails, 2, how, device="cpu", seconds=300)
    assert time.monotonic() - began < 100  # the others wait in a barrier
    assert set(multiprocessing.active_children()) <= others
