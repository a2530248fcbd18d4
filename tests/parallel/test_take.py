"""The copy: the same values as indexing, and one strided copy where the layout allows it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layout import places

from collate_npu.parallel.layout import token_rows, token_runs
from collate_npu.parallel.take import _as_step, take_runs

DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.uint8)


@given(
    places(), st.sampled_from(DTYPES), st.integers(0, 2), st.booleans(), st.sampled_from(["plain", "transposed", "sliced"])
)
def test_take_is_index_select(case, dtype, dim, tracked, storage):
    cp, S, offsets = case
    shape = [2, 2, 2]
    shape[dim] = S
    x = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    if storage == "transposed":
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    elif storage == "sliced":
        x = torch.stack([x, x], -1)[..., 0]
    x.requires_grad_(tracked and dtype.is_floating_point)
    taken = take_runs(x, dim, token_runs(S, cp, offsets))
    assert torch.equal(taken, x.index_select(dim, token_rows(S, cp, offsets)))
    if x.requires_grad:
        assert taken.requires_grad


@given(places(), st.integers(1, 3))
def test_expanded_tensors_are_cut_like_others(case, rows):
    cp, S, offsets = case
    x = torch.arange(S).expand(rows, S)
    taken = take_runs(x, 1, token_runs(S, cp, offsets))
    assert torch.equal(taken, x[:, token_rows(S, cp, offsets)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runs", [((2, 6),), ((0, 2), (6, 8)), ((0, 2), (4, 8)), ((0, 2), (3, 4), (6, 8))])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_flow_through_every_way_of_copying(runs, dtype, transposed):
    leaf = torch.arange(16.0).to(dtype).view(8, 2) if transposed else torch.arange(16.0).to(dtype).view(2, 8)
    leaf.requires_grad_()
    taken = take_runs(leaf.t() if transposed else leaf, 1, runs)
    taken.sum().backward()
    held = [n for start, stop in runs for n in range(start, stop)]
    ones = torch.zeros(8).index_fill(0, torch.tensor(held), 1)
    assert torch.equal((leaf.grad.t() if transposed else leaf.grad).float(), ones.expand(2, 8))


def test_many_runs_are_taken_by_one_index():
    x = torch.arange(400.0).view(2, 200).requires_grad_()
    runs = tuple((start, start + 3) for start in range(0, 200, 5))
    taken = take_runs(x, 1, runs)
    assert taken.tolist() == [[row * 200.0 + n for a, b in runs for n in range(a, b)] for row in (0, 1)]
    taken.sum().backward()
    assert x.grad[0, :5].tolist() == [1, 1, 1, 0, 0]


@given(places(layouts=("contiguous", "ulysses")))
def test_contiguous_is_a_copy_of_its_own(case):
    cp, S, _ = case
    x = torch.arange(2 * S).view(2, S)
    taken = take_runs(x, 1, token_runs(S, cp))
    assert taken.is_contiguous()
    assert cp.size == 1 or S == 0 or taken.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@given(places(layouts=("zigzag",)))
def test_zigzag_is_one_step_slice(case):
    cp, S, _ = case
    runs = token_runs(S, cp)
    if S:
        assert len(runs) == 1 or _as_step(runs, S) == (S // (2 * cp.size), cp.rank, 2 * cp.size - 1 - cp.rank)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_a_batch_without_rows_keeps_its_shape(dtype):
    assert take_runs(torch.zeros(0, 8, 3, dtype=dtype), 1, ((0, 2), (6, 8))).shape == (0, 4, 3)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_tensors_take_the_same_values(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.arange(2 * (1 << 18)).view(2, -1)
        runs = ((0, 1 << 16), (3 << 16, 4 << 16))
        assert torch.equal(take_runs(x, 1, runs), torch.cat([x[:, : 1 << 16], x[:, 3 << 16 :]], 1))
    finally:
        torch.set_num_threads(before)
