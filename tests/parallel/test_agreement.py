"""Agreement without a group: nothing is asked. Between ranks: tests/distributed/test_distributed_agreement.py."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from collate_npu import ContextParallel, Segments
from collate_npu.parallel import agreement, gather_sequence, ranks_agree, split_batch
from collate_npu.parallel.agreement import RanksApartError, batch_facts


@pytest.mark.parametrize("cp", [None, ContextParallel(2, 0), ContextParallel(1, 0)])
def test_without_a_group_nobody_is_asked(cp):
    with ranks_agree(cp) as facts:
        facts["width"] = "8"


def _in_a_worker(rows):
    cp = ContextParallel(2, 0)
    object.__setattr__(cp, "group", "a group that this process is not a rank of")
    with ranks_agree(cp):
        return rows


def test_a_dataloader_worker_is_no_rank():
    assert list(DataLoader([1, 2], batch_size=2, num_workers=1, collate_fn=_in_a_worker)) == [[1, 2]]


def test_a_fake_group_has_nobody_to_ask():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        cp = ContextParallel.from_group(dist.group.WORLD)
        assert split_batch({"input_ids": torch.arange(8)[None]}, cp)["input_ids"].tolist() == [[0, 1, 6, 7]]
        assert gather_sequence(torch.zeros(1, 4), cp, Segments.from_lengths([8])).shape == (1, 8)
    finally:
        dist.destroy_process_group()


DRAWN = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))
FLOATS = {
    "vectors, two rows swapped": ("inputs_embeds", DRAWN, lambda x: x[[1, 0, 2, 3]]),
    "vectors, two tokens swapped": ("inputs_embeds", DRAWN, lambda x: x[:, [1, 0, *range(2, 8)]]),
    "vectors, turned inside": ("inputs_embeds", DRAWN.bfloat16(), lambda x: x.flip(-1)),
    "vectors without a mean": ("inputs_embeds", DRAWN - DRAWN.mean(-1, keepdim=True), lambda x: x[[1, 0, 2, 3]]),
    "float labels": ("labels", DRAWN[:, 0, 0], lambda x: x.flip(0)),
    "weights": ("loss_scale", DRAWN[..., 0].abs(), lambda x: x[[0, 1, 3, 2]]),
    "advantages": ("advantages", DRAWN[:, 0, 0], lambda x: x[[0, 2, 1, 3]]),
    "NaN on one rank": ("advantages", DRAWN[:, 0, 0], lambda x: x * torch.nan),
    "mine": ("a key of my own", DRAWN[..., 0].double(), lambda x: x * 1.01),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_tokens_are_compared_but_for_rounding(name):
    key, value, other = FLOATS[name]
    noise = torch.finfo(value.dtype).eps * value.abs() * torch.randn(value.shape).to(value)
    facts = (batch_facts({key: each}, None) for each in (value, value + noise, other(value)))
    told_by = [{name: x if isinstance(x, str) else x() for name, x in each.items()} for each in facts]
    agreement._check(dict(enumerate(told_by[:2])))
    with pytest.raises(RanksApartError, match=f"a sum of {key}"):
        agreement._check({0: told_by[0], 1: told_by[1], 2: told_by[2]})
