"""Gather without processes: joining undoes splitting, values and gradients, in order. With processes: tests/distributed."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from test_layout import LAYOUTS, places

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.parallel import ContextParallel, gather, gather_sequence, join_shards, split_tensor, token_rows
from collate_npu.parallel.agreement import digest_offsets


@given(places(), st.integers(0, 2), st.booleans())
def test_join_is_the_inverse_of_split_along_any_dimension(case, dim, many):
    cp, S, offsets = case
    shape = [2, 3, 2]
    shape[dim] = S
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = [split_tensor(x, cp.with_rank(rank), dim=dim, cu_seqlens=offsets) for rank in range(cp.size)]
    assert torch.equal(join_shards(shards, cp, dim=dim, cu_seqlens=offsets), x)
    assert torch.equal(join_shards(shards, cp, dim=dim - 3, cu_seqlens=offsets), x)


@pytest.mark.parametrize("few", [0, 64])
@given(case=places())
def test_the_gradient_reaches_the_right_rank_by_pieces_and_by_one_index(few, case):
    cp, S, offsets = case
    shards = [torch.zeros(1, S // cp.size, requires_grad=True) for _ in range(cp.size)]
    weights = torch.arange(1.0, S + 1)[None]
    with mock.patch.object(gather, "_FEW_PIECES", few):
        (join_shards(shards, cp, cu_seqlens=offsets) * weights).sum().backward()
    for rank, shard in enumerate(shards):
        if S:
            assert torch.equal(shard.grad, weights[:, token_rows(S, cp.with_rank(rank), offsets)])


@given(st.sampled_from([1, 2, 4]), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from(LAYOUTS[2:4]))
def test_jagged_tensors_split_by_document(size, counts, layout):
    cps = [ContextParallel(size, rank, layout=layout) for rank in range(size)]
    sizes = [n * cps[0].document_multiple for n in counts]
    values = torch.arange(sum(sizes) * 2).view(-1, 2)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    x = torch.nested.nested_tensor_from_jagged(values, offsets)
    shards = [split_tensor(x, cp) for cp in cps]
    assert all(shard.offsets().tolist() == (offsets // size).tolist() for shard in shards)
    whole = join_shards([shard.values() for shard in shards], cps[0], dim=0, cu_seqlens=offsets)
    assert torch.equal(whole, values)


def test_jagged_tensors_want_a_layout_by_document():
    x = torch.nested.nested_tensor_from_jagged(torch.zeros(8), torch.tensor([0, 4, 8]))
    with pytest.raises(UnsupportedFormError, match="document by document"):
        split_tensor(x, ContextParallel(2, 0))


def test_a_jagged_output_comes_back_jagged_without_padding():
    cp, values = ContextParallel(1, 0, layout="document_zigzag"), torch.arange(12.0).view(6, 2)
    output = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6]))
    assert torch.equal(gather_sequence(output, cp).values(), values)
    real = gather_sequence(output, cp, Segments.from_ids([[1, 1, 1, 0, 2, 0]]))
    assert torch.equal(real.values(), values[[0, 1, 2, 4]])
    assert real.offsets().tolist() == [0, 3, 4]
    with pytest.raises(CollateError, match="one flat row of 6"):
        gather_sequence(output, cp, Segments.from_lengths([3, 3]))


ONE = torch.zeros(1, 4)
JAGGED = torch.nested.nested_tensor_from_jagged(torch.arange(4), torch.tensor([0, 2, 4]))


@pytest.mark.parametrize(
    "shards", [[ONE], [ONE, ONE[:, :2]], [ONE.to_sparse()] * 2, [JAGGED] * 2, ["a", "b"], {0: ONE, 1: ONE}]
)
def test_shards_that_cannot_be_joined(shards):
    with pytest.raises(CollateError, match="2 ranks hold one shard each, all alike"):
        join_shards(shards, ContextParallel(2, 0))


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


def test_bools_and_jagged_documents_come_back_as_they_were(other_rank):
    cp = ContextParallel(2, 1, layout="document_contiguous")
    whole = gather_sequence(torch.tensor([[True, False]]), ContextParallel(2, 1, layout="contiguous"))
    assert whole.tolist() == [[False, True, True, False]]
    documents = gather_sequence(JAGGED, cp)
    assert documents.values().tolist() == [-100, -99, 0, 1, -98, -97, 2, 3]
    assert documents.offsets().tolist() == [0, 4, 8]
    assert other_rank["documents"]() == digest_offsets([0, 4, 8])


@pytest.mark.parametrize(
    ("loss", "leaf", "on"), [("local", True, True), ("same", True, True), ("local", False, True), ("local", True, False)]
)
def test_ranks_say_what_they_gather_and_whether_gradients_follow(other_rank, loss, leaf, on):
    with torch.set_grad_enabled(on):
        gather_sequence(torch.zeros(1, 4, requires_grad=leaf), ContextParallel(2, 1), Segments.from_lengths([8]), loss=loss)
    said = {"output": "float32 [1, 4]", "dim": "1", "loss": loss, "segments": "[1, 8]"}
    assert said.items() <= other_rank.items()
    assert other_rank["gradient"] == str(loss == "local" and leaf and on)


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
