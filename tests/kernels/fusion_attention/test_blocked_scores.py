"""Blocks of query rows, put together, are the whole; what each mode blocks is tested with the reference."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collate_npu.kernels.fusion_attention import blocked_scores as module
from collate_npu.kernels.fusion_attention import prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.blocked_scores import blocked_scores, dense_blocks, query_blocks
from collate_npu.kernels.fusion_attention.operator_call import Call, Sizes

Q, K, B = 5, 7, 2
GENERATOR = torch.Generator().manual_seed(0)
DENSE = torch.rand(B, 3, Q, K, generator=GENERATOR) < 0.5
LISTS = {"input_layout": "TND", "actual_seq_qlen": [2, 2, 7], "actual_seq_kvlen": [3, 3, 10]}
CALLS: dict[str, dict[str, Any]] = {
    "None": {},
    "dense": {"atten_mask": DENSE, "sparse_mode": 1},
    "shared": {"atten_mask": DENSE[0, 0], "sparse_mode": 1},
    "dense, tokens": {"atten_mask": DENSE[:, :1], "pre_tockens": 2, "next_tockens": 1},
    "prefix": {"atten_mask": DENSE[:, :1].to(torch.uint8), "sparse_mode": 5, "prefix": [2, 7]},
    "compressed prefix": {"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": [2, 7]},
    **{f"mode {n}": {"atten_mask": triangle(), "sparse_mode": n, "pre_tockens": 3, "next_tockens": 1} for n in (2, 3, 4)},
    "TND, shared": LISTS | {"atten_mask": DENSE[0, 0], "sparse_mode": 1},
    "TND, all tokens": LISTS | {"atten_mask": torch.rand(7, 10, generator=GENERATOR) < 0.5, "sparse_mode": 1},
    "TND, mode 7": LISTS | {"atten_mask": triangle(), "sparse_mode": 7, "pre_tockens": 9, "next_tockens": -1},
    "TND, mode 8": LISTS | {"atten_mask": triangle(), "sparse_mode": 8, "pre_tockens": 9, "next_tockens": 1},
}


def call_of(name: str) -> Call:
    return Call.read({"input_layout": "BSND"} | CALLS[name], Sizes(N=3, Nkv=3, D=8, B=B, Sq=Q, Skv=K))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [1, 20, 2**18])
def test_blocks_are_the_whole_in_pieces(name: str, size: int) -> None:
    call = call_of(name)
    with mock.patch.object(module, "BLOCK_SCORES", size):
        for n, (q, k) in enumerate(call.lengths):
            whole = blocked_scores(call, n)
            assert whole.shape[-2:] == (q, k)
            parts = [blocked_scores(call, n, queries) for queries in query_blocks(q, k)]
            assert q == 0 or torch.equal(torch.cat(parts, -2), whole)
            assert size > 1 or len(parts) == q


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 99))
def test_blocks_cover_every_row_once_and_keep_their_size(rows: int, scores: int, size: int) -> None:
    with mock.patch.object(module, "BLOCK_SCORES", size):
        blocks = list(query_blocks(rows, scores))
    assert [q for block in blocks for q in range(rows)[block]] == list(range(rows))
    assert all(len(range(rows)[block]) * scores <= max(size, scores) for block in blocks)


@pytest.mark.parametrize(("name", "rows"), [("dense", [0, 1]), ("shared", [0]), ("prefix", [0, 1]), ("TND, shared", [0, 2])])
def test_dense_blocks_visit_each_distinct_part(name: str, rows: list[int]) -> None:
    call = call_of(name)
    seen = {n: masked for n, _, masked in dense_blocks(call)}
    assert list(seen) == rows
    assert torch.equal(seen[0], DENSE[0] if name == "dense" else seen[0])
    assert all(masked.shape[-2:] == call.lengths[n] and masked.dtype == torch.bool for n, masked in seen.items())


def test_each_rows_own_mask_is_read() -> None:
    call = call_of("dense")
    assert all(torch.equal(blocked_scores(call, b), DENSE[b]) for b in range(B))
    packed = call_of("TND, all tokens")
    assert torch.equal(blocked_scores(packed, 2), CALLS["TND, all tokens"]["atten_mask"][2:, 3:])
