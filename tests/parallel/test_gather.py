"""Gather without processes: joining undoes splitting, values and gradients, in order. With processes: tests/distributed."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from test_layout import places

from collate_npu import CollateError, Segments
from collate_npu.parallel import ContextParallel, gather, gather_sequence, join_shards, split_tensor


@given(places(), st.integers(0, 2), st.booleans())
def test_join_is_the_inverse_of_split_along_any_dimension(case, dim, many):
    cp, S, offsets = case
    shape = [2, 3, 2]
    shape[dim] = S
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = [split_tensor(x, cp.with_rank(rank), dim=dim, cu_seqlens=offsets) for rank in range(cp.size)]
    assert torch.equal(join_shards(shards, cp, dim=dim, cu_seqlens=offsets), x)
    assert torch.equal(join_shards(shards, cp, dim=dim - 3, cu_seqlens=offsets), x)


def test_a_jagged_output_comes_back_jagged_without_padding():
    cp, values = ContextParallel(1, 0, layout="document_zigzag"), torch.arange(12.0).view(6, 2)
    output = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6]))
    assert torch.equal(gather_sequence(output, cp).values(), values)
    real = gather_sequence(output, cp, Segments.from_ids([[1, 1, 1, 0, 2, 0]]))
    assert torch.equal(real.values(), values[[0, 1, 2, 4]])
    assert real.offsets().tolist() == [0, 3, 4]
    with pytest.raises(CollateError, match="one flat row of 6"):
        gather_sequence(output, cp, Segments.from_lengths([3, 3]))


# --- what is exchanged, the other rank played


NAMES = (("all_gather_single", "reduce_scatter_single"), ("all_gather_into_tensor", "reduce_scatter_tensor"))


@pytest.fixture(params=NAMES, ids=["torch 2.13", "before"])
def other_rank(request, monkeypatch):
    """This is rank 1 of two: rank 0 holds 100 less, its gradients are 10 times as large. Yields what is said to it."""

    def gathered(out, own, group):
        out.copy_(torch.cat([own - 100 if own.dtype != torch.uint8 else 1 - own, own]))

    def reduced(out, grads, group):
        out.copy_(11 * grads.view(2, -1)[1])

    facts = {"number": "main 3"}
    for names in NAMES:
        for name, stand_in in zip(names, (gathered, reduced), strict=True):
            if names == request.param:
                monkeypatch.setattr(dist, name, stand_in, raising=False)
            elif request.param == NAMES[1]:
                monkeypatch.delattr(dist, name, raising=False)
    monkeypatch.setattr(gather, "check_group", lambda *_: None)
    monkeypatch.setattr(gather, "ranks_agree", lambda cp, call: nullcontext(facts))
    return facts


@pytest.mark.parametrize(("loss", "times"), [("same", 1), ("local", 11)])
def test_shards_are_put_in_order_and_gradients_go_back(other_rank, loss, times):
    shard = torch.tensor([[103.0], [104.0], [105.0], [106.0]], requires_grad=True)
    whole = gather_sequence(shard, ContextParallel(2, 1), dim=0, loss=loss)
    assert whole.flatten().tolist() == [3, 4, 103, 104, 105, 106, 5, 6]
    (whole * torch.arange(8.0)[:, None]).sum().backward()
    assert shard.grad.flatten().tolist() == [times * n for n in (2, 3, 4, 5)]
    assert other_rank.get("the gather") == ("main 3" if loss == "local" else None)
    assert other_rank["gradient"] == ("float32 [2, 4, 1]" if loss == "local" else "False")


@pytest.mark.parametrize(
    ("shape", "segments", "loss", "words"),
    [
        ((2, 4), None, "same", "Gathering needs the process group"),
        ((2, 8), Segments.from_lengths([8, 8]), "same", "one of 2 shards has 4 tokens"),
        ((3, 4), Segments.from_lengths([8, 8]), "same", "one of 2 shards has 4 tokens"),
        ((2, 4), None, "mean", "'same'"),
        ((2, 3), None, "same", "multiple of 4"),
    ],
)
def test_what_is_wrong_is_said_before_anyone_waits(shape, segments, loss, words):
    with pytest.raises(CollateError, match=words):
        gather_sequence(torch.zeros(shape), ContextParallel(2, 0), segments, loss=loss)
