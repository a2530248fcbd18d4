"""Gather without processes: joining undoes splitting, values and gradients, in order. With processes: tests/distributed."""

from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from test_layout import LAYOUTS, places

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.parallel import ContextParallel, gather, gather_sequence, join_shards, split_tensor, token_rows


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


def test_one_rank_needs_no_group():
    x = torch.rand(2, 8)
    assert gather_sequence(x, ContextParallel(1, 0)) is x


def test_a_jagged_output_comes_back_jagged_without_padding():
    cp, values = ContextParallel(1, 0, layout="document_zigzag"), torch.arange(12.0).view(6, 2)
    output = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6]))
    assert torch.equal(gather_sequence(output, cp).values(), values)
    real = gather_sequence(output, cp, Segments.from_ids([[1, 1, 1, 0, 2, 0]]))
    assert torch.equal(real.values(), values[[0, 1, 2, 4]])
    assert real.offsets().tolist() == [0, 3, 4]
    with pytest.raises(CollateError, match="one flat row of 6"):
        gather_sequence(output, cp, Segments.from_lengths([3, 3]))


@pytest.mark.parametrize("widths", [[4], [4, 2]])
def test_shards_that_cannot_be_joined(widths):
    with pytest.raises(CollateError, match="2 ranks hold one shard each, all alike"):
        join_shards([torch.zeros(1, width) for width in widths], ContextParallel(2, 0))


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
