"""The CPU reference of the operator: against torch's attention over a mask spelt out here, and against the vendor's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_oracle import reference_fusion_attention
from npu_batches import HEAD_DIM, HEADS, PADDED, from_layout, in_layout, qkv, torch_attention
from torch import Tensor
from vendor_oracle import missing, oracle

from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels import prefix_triangle, triangle

SCALE = HEAD_DIM**-0.5
SIZES = [(1, 1), (6, 6), (5, 9), (9, 5), (7, 8)]


def attends(mode: int, Q: int, K: int, pre: int = 0, after: int = 0, prefix: int = 0) -> Tensor:
    """What the documents say each sparse mode attends, spelt out (op-plugin torch_npu-npu_fusion_attention.md)."""
    last = K - Q
    by_mode: dict[int, Callable[[int, int], bool]] = {
        0: lambda q, k: q - pre <= k <= q + after,
        2: lambda q, k: k <= q,
        3: lambda q, k: k <= q + last,
        4: lambda q, k: q + last - pre <= k <= q + last + after,
        6: lambda q, k: k <= q + last or k < prefix,
    }
    return torch.tensor([[by_mode[mode](q, k) for k in range(K)] for q in range(Q)])


def run(tensors: list[Tensor], layout: str, **kwargs: Any) -> Tensor:
    """`[B, Sq, heads, D]`: the reference, called in a layout."""
    out = reference_fusion_attention(*(in_layout(x, layout) for x in tensors), HEADS, layout, scale=SCALE, **kwargs)[0]
    assert out.shape == in_layout(tensors[0], layout).shape
    return from_layout(out, layout)


def agree(tensors: list[Tensor], layout: str, keep: Tensor, **kwargs: Any) -> None:
    """Outputs and gradients are torch's own, at query rows with a key."""
    tensors = [x.requires_grad_() for x in tensors]
    got, wanted = run(tensors, layout, **kwargs), torch_attention(*tensors, keep)
    rows = keep.any(-1).reshape(-1, tensors[0].shape[1]).expand(tensors[0].shape[:2])
    torch.testing.assert_close(got[rows], wanted[rows], atol=1e-9, rtol=0)
    grads = [torch.autograd.grad(out[rows].square().sum(), tensors) for out in (got, wanted)]
    torch.testing.assert_close(grads[0], grads[1], atol=1e-9, rtol=0)


# --- every mode, in every layout, with fewer key heads


def calls(Q: int, K: int) -> list[tuple[dict[str, Any], Tensor]]:
    """A call of each mode for two rows, and what it attends."""
    some = torch.rand(2, 1, Q, K, generator=torch.Generator().manual_seed(1)) < 0.3
    some[..., 0] = False
    after, prefix = max(1, Q - K), [max(0, K - Q), K]
    per_row = torch.stack([attends(6, Q, K, prefix=n) for n in prefix])[:, None]
    band = {"pre_tockens": 2, "next_tockens": after}
    return [
        ({}, torch.ones(Q, K, dtype=torch.bool)),
        ({"atten_mask": some}, ~some),
        *(({"atten_mask": shared, "sparse_mode": 1}, ~some[0, 0]) for shared in (some[0, 0], some[:1])),
        ({"atten_mask": some.repeat(1, HEADS, 1, 1), "sparse_mode": 1}, ~some),
        ({"atten_mask": some, "pre_tockens": Q, "next_tockens": 1}, ~some & attends(0, Q, K, Q, 1)),
        *(({"atten_mask": triangle(), "sparse_mode": mode}, attends(mode, Q, K)) for mode in (2, 3)),
        ({"atten_mask": triangle(), "sparse_mode": 4, **band}, attends(4, Q, K, 2, after)),
        ({"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": prefix}, per_row),
        ({"atten_mask": ~per_row, "sparse_mode": 5, "prefix": prefix}, per_row),
        ({"atten_mask": some, "sparse_mode": 5, "prefix": [K + 1, 0]}, ~some),  # an illegal one switches sparsity off
    ]


@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize(("Q", "K"), SIZES)
def test_each_mode_is_torchs_attention_over_its_mask(layout: str, Q: int, K: int) -> None:
    for kwargs, keep in calls(Q, K):
        agree(qkv(2, Q, K), layout, keep, **kwargs)


@pytest.mark.parametrize("mode", range(7))
def test_no_mask_is_full_attention_in_every_mode(mode: int) -> None:
    full = torch.ones(5, 9, dtype=torch.bool)
    agree(qkv(2, 5, 9), "BSND", full, sparse_mode=mode, pre_tockens=0, next_tockens=0, prefix=[9, 9])


# --- rows without keys


def test_a_row_without_keys_is_a_mean_of_v_or_0() -> None:
    tensors = qkv(1, 4, 4)
    blocked = torch.ones(4, 4, dtype=torch.bool).triu(1)
    blocked[1] = True
    mean = tensors[2].mean(1).repeat_interleave(2, dim=1)
    for layout in PADDED:
        torch.testing.assert_close(run(tensors, layout, atten_mask=blocked)[:, 1], mean)
        for prefix in (0, 1):
            out = run(tensors, layout, atten_mask=blocked[None, None], sparse_mode=5, prefix=[prefix])
            torch.testing.assert_close(out[:, 1], mean)
        assert not run(tensors, layout, atten_mask=blocked, inner_precise=2)[:, 1].any()
        agree(tensors, layout, ~blocked, atten_mask=blocked, inner_precise=2)
        narrow = qkv(1, 2, 1, key_heads=HEADS)  # one key, which nobody attends
        torch.testing.assert_close(run(narrow, layout, atten_mask=~blocked[:2, :1]), narrow[2].expand(-1, 2, -1, -1))


BAND = {"pre_tockens": 2, "next_tockens": -1}


@pytest.mark.parametrize(
    ("Q", "K", "empty", "kwargs"),
    [
        (8, 5, 3, {"atten_mask": triangle(), "sparse_mode": 3}),
        (8, 5, 3, {"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": [0]}),
        (8, 5, 3, {"atten_mask": ~attends(3, 8, 5)[None, None], "sparse_mode": 5, "prefix": [0]}),
        (8, 5, 3, {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 99, "next_tockens": 0}),
        (5, 5, 1, {"atten_mask": triangle(), "sparse_mode": 4, **BAND}),
        (5, 5, 1, {"atten_mask": torch.zeros(5, 5, dtype=torch.bool), **BAND}),
    ],
)
def test_rows_that_the_operator_notices_itself_are_0(Q: int, K: int, empty: int, kwargs: Any) -> None:
    out = run(qkv(1, Q, K), "BSND", **kwargs)
    assert not out[:, :empty].any()
    assert out[:, empty:].any(dim=(2, 3)).all()


# --- packed sequences


PAIRS = [(3, 3), (0, 0), (2, 6), (1, 1), (5, 5)]
ALONE = [qkv(1, *pair, seed=n) for n, pair in enumerate(PAIRS)]
TRIANGLE, DENSE = triangle(), torch.ones(5, 6, dtype=torch.bool)
PACKED: list[tuple[dict[str, Any], Callable[[int, int, int], Tensor]]] = [
    ({"atten_mask": TRIANGLE, "sparse_mode": 2}, lambda n, q, k: attends(2, q, k)),
    ({"atten_mask": TRIANGLE, "sparse_mode": 3}, lambda n, q, k: attends(3, q, k)),
    ({"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0},
     lambda n, q, k: attends(4, q, k, 2, 0)),
    ({"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": [1, 0, 5, 1, 4]},
     lambda n, q, k: attends(6, q, k, prefix=[1, 0, 5, 1, 4][n])),
    ({"atten_mask": DENSE.triu(2), "sparse_mode": 1}, lambda n, q, k: attends(0, q, k, 9, 1)),
    ({"atten_mask": ~DENSE, "pre_tockens": 9, "next_tockens": 1}, lambda n, q, k: attends(0, q, k, 9, 1)),
    ({"sparse_mode": 3}, lambda n, q, k: torch.ones(q, k, dtype=torch.bool)),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "keep"), PACKED)
def test_packed_sequences_do_not_see_each_other(kwargs: Any, keep: Any) -> None:
    q, k, v = (torch.cat([parts[i][0] for parts in ALONE]) for i in range(3))
    q_ends, k_ends = torch.tensor(PAIRS).cumsum(0).T.tolist()
    lists = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends}
    out = reference_fusion_attention(q, k, v, HEADS, "TND", scale=SCALE, **lists, **kwargs)[0]
    wanted = [torch_attention(*parts, keep(n, *pair))[0] for n, (parts, pair) in enumerate(zip(ALONE, PAIRS)) if pair[0]]
    torch.testing.assert_close(out, torch.cat(wanted), atol=1e-9, rtol=0)


def test_tokens_behind_the_last_end_are_0_and_lists_may_be_tensors() -> None:
    tensors = [x[0] for x in qkv(1, 7, 7)]
    for ends in ([3, 5], torch.tensor([3, 5])):
        out = reference_fusion_attention(*tensors, HEADS, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)[0]
        assert out.shape[0] == 7
        assert out[:5].any(dim=(1, 2)).all()
        assert not out[5:].any()


# --- the operator's manners


def test_a_head_smaller_than_one_element_is_refused_not_divided_by() -> None:
    with pytest.raises(UnsupportedFormError, match="of 0 elements"):
        reference_fusion_attention(torch.zeros(1, 3, 2), *[torch.zeros(1, 3, 2)] * 2, 4, "BSH")


FOUR = torch.zeros(1, 1, 4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("layout", "kwargs", "words"),
    [
        ("BSND", {"atten_mask": torch.zeros(2, 4, dtype=torch.bool)}, "refuses it: atten_mask"),
        ("BSND", {"atten_mask": ~triangle(), "sparse_mode": 2}, "contents"),
        ("BSND", {"pse": torch.zeros(1)}, "pse"),
        ("BSND", {"keep_prob": 0.5}, "keep_prob"),
        ("BSH", {}, "other dimensions"),
        ("TND", {"atten_mask": FOUR, "actual_seq_qlen": [4], "actual_seq_kvlen": [4]}, "4-D"),
        ("TND", {}, "refuses it: actual_seq_qlen"),
        ("TND", {"actual_seq_qlen": (3,)}, "refuses it: actual_seq_qlen"),
        ("TND", {"actual_seq_kvlen": (3,)}, "refuses it: actual_seq_qlen"),
    ],
)
def test_what_the_operator_refuses_and_what_is_not_covered_raises(layout: str, kwargs: Any, words: str) -> None:
    tensors = [x[0] if layout == "TND" else x for x in qkv(2, 4, 4)]
    with pytest.raises(UnsupportedFormError, match=words):
        reference_fusion_attention(*tensors, HEADS, layout, **kwargs)


# --- the vendor's own benchmark


def sound(kwargs: dict[str, Any], square: bool) -> bool:
    """Where the benchmark is sound: not with tokens outside mode 4, nor mode 6 or an illegal prefix, and mode 4 only with
    Sq = Skv (it counts that band from the top-left). Rows without keys it leaves unmasked."""
    mode = kwargs.get("sparse_mode", 0)
    return square if mode == 4 else mode != 6 and "pre_tockens" not in kwargs and kwargs.get("prefix", [0, 0])[1] != 0


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize(("Q", "K"), [(12, 12), (8, 13), (13, 8)])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_vendors_benchmark_agrees_where_it_is_sound(layout: str, Q: int, K: int, key_heads: int) -> None:
    for kwargs, keep in calls(Q, K):
        if not sound(kwargs, Q == K):
            continue
        tensors = [in_layout(x, layout).requires_grad_() for x in qkv(2, Q, K, key_heads=key_heads)]
        plain = [x.detach() for x in tensors]
        ours = reference_fusion_attention(*tensors, HEADS, layout, scale=SCALE, **kwargs)
        theirs = oracle().npu_fusion_attention(*plain, HEADS, layout, scale=SCALE, **kwargs)
        rows = keep.any(-1).reshape(-1, Q).expand(2, Q)
        assert (from_layout(ours[0], layout) - from_layout(theirs[0], layout))[rows].abs().max() < 1e-9, kwargs
        assert (ours[1][:, :, rows[0]] - theirs[1][:, :, rows[0]]).abs().max() < 1e-5
        if rows.all():
            dy = torch.randn_like(ours[0])
            wanted = oracle().npu_fusion_attention_grad(*plain, dy, HEADS, layout, scale_value=SCALE, **kwargs)
            got = torch.autograd.grad(ours[0], tensors, dy)
            assert max(float((a - b).abs().max()) for a, b in zip(got, wanted)) < 1e-9
