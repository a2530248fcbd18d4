"""Gather without processes: joining undoes splitting, values and gradients, in order. With processes: tests/distributed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layout import places

from collate_npu import CollateError, Segments, UnsupportedFormError, dense
from collate_npu.parallel import ContextParallel, gather, gather_sequence, join_shards, query_rows, split_tensor, token_rows


@given(places(), st.integers(0, 2), st.booleans())
def test_join_is_the_inverse_of_split_along_any_dimension(case, dim, many):
    cp, S, offsets = case
    shape = [2, 3, 2]
    shape[dim] = S
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = [split_tensor(x, cp.with_rank(rank), dim=dim, cu_seqlens=offsets) for rank in range(cp.size)]
    assert torch.equal(join_shards(shards, cp, dim=dim, cu_seqlens=offsets), x)
    assert torch.equal(join_shards(shards, cp, dim=dim - 3, cu_seqlens=offsets), x)


@given(places())
def test_many_pieces_take_another_way_to_the_same_row(case):
    cp, S, offsets = case
    x = torch.arange(S)[None]
    shards = [split_tensor(x, cp.with_rank(rank), cu_seqlens=offsets) for rank in range(cp.size)]
    pieces = gather._pieces(S, cp, offsets)
    few, gather._FEW_PIECES = gather._FEW_PIECES, 0
    try:
        assert torch.equal(gather._in_order(shards, pieces, 1), x)
    finally:
        gather._FEW_PIECES = few


@given(places())
def test_the_gradient_reaches_the_right_rank(case):
    cp, S, offsets = case
    shards = [torch.zeros(1, S // cp.size, requires_grad=True) for _ in range(cp.size)]
    weights = torch.arange(1.0, S + 1)[None]
    (join_shards(shards, cp, cu_seqlens=offsets) * weights).sum().backward()
    for rank, shard in enumerate(shards):
        if S:
            assert torch.equal(shard.grad, weights[:, token_rows(S, cp.with_rank(rank), offsets)])


@given(places(), st.data())
def test_attention_with_rows_of_each_rank_is_the_attention(case, data):
    """Shards of queries against whole keys, masked by `dense(rows=query_rows)`, are rows of the unsplit attention."""
    cp, S, offsets = case
    if S == 0 or cp.ulysses_size > 1:
        return
    segments = Segments.from_lengths(
        [data.draw(st.integers(1, S))], width=S, side=data.draw(st.sampled_from(["left", "right"]))
    )
    q, k, v = (torch.randn(1, 1, S, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    whole = attend(q, k, v, attn_mask=dense(segments))
    rows = [query_rows(S, cp.with_rank(rank), offsets) for rank in range(cp.size)]
    parts = [attend(q[:, :, r], k, v, attn_mask=dense(segments, rows=r)) for r in rows]
    together = join_shards(parts, cp, dim=2, cu_seqlens=offsets)
    assert torch.allclose(together[0, 0][segments.keep[0]], whole[0, 0][segments.keep[0]], atol=1e-6)


@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.sampled_from(["document_zigzag", "document_contiguous"]),
)
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


def test_shards_that_cannot_be_joined():
    cp = ContextParallel(2, 0)
    with pytest.raises(CollateError, match="2 ranks hold one shard each"):
        join_shards([torch.zeros(1, 4)], cp)
    with pytest.raises(CollateError, match="all alike"):
        join_shards([torch.zeros(1, 4), torch.zeros(1, 2)], cp)


def test_what_is_wrong_is_said_before_anyone_waits():
    cp = ContextParallel(2, 0)
    with pytest.raises(CollateError, match="Gathering needs the process group"):
        gather_sequence(torch.zeros(2, 4), cp)
    with pytest.raises(CollateError, match="one of 2 shards has 4 tokens"):
        gather_sequence(torch.zeros(2, 8), cp, Segments.from_lengths([8, 8]))
    with pytest.raises(CollateError, match="one of 2 shards has 4 tokens"):
        gather_sequence(torch.zeros(3, 4), cp, Segments.from_lengths([8, 8]))
    with pytest.raises(CollateError, match="'same'"):
        gather_sequence(torch.zeros(2, 4), cp, loss="mean")
    with pytest.raises(CollateError, match="multiple of 4"):
        gather_sequence(torch.zeros(2, 3), cp)
