"""The CPU reference of the operator: against torch's attention over a mask spelt out here, and against the vendor's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_batches import HEAD_DIM, HEADS, PADDED, from_layout, in_layout, qkv, torch_attention
from torch import Tensor
from vendor_oracle import missing, oracle

from collate_npu import UnsupportedFormError
from collate_npu.kernels.fusion_attention import prefix_triangle, reference_fusion_attention, triangle
from collate_npu.kernels.fusion_attention.operator_call import DEFAULTS

SCALE = HEAD_DIM**-0.5
SIZES = [(1, 1), (6, 6), (5, 9), (9, 5), (7, 8)]


def matrix(Q: int, K: int, attends: Callable[[int, int], bool]) -> Tensor:
    """bool `[Q, K]`, True = attends, element by element."""
    return torch.tensor([[attends(q, k) for k in range(K)] for q in range(Q)])


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
    return matrix(Q, K, by_mode[mode])


def run(tensors: list[Tensor], layout: str, **kwargs: Any) -> Tensor:
    """`[B, Sq, heads, D]`: the reference, called in a layout."""
    out = reference_fusion_attention(*(in_layout(x, layout) for x in tensors), HEADS, layout, scale=SCALE, **kwargs)[0]
    assert out.shape == in_layout(tensors[0], layout).shape
    return from_layout(out, layout)


def agree(tensors: list[Tensor], layout: str, keep: Tensor, rows: Tensor | None = None, **kwargs: Any) -> None:
    """Outputs and gradients are torch's own, at query rows with a key (all of them, unless `rows` says which)."""
    rows = keep.any(-1) if rows is None else rows
    tensors = [x.requires_grad_() for x in tensors]
    got, wanted = run(tensors, layout, **kwargs), torch_attention(*tensors, keep)
    rows = rows.reshape(-1, tensors[0].shape[1]).expand(tensors[0].shape[:2])
    torch.testing.assert_close(got[rows], wanted[rows], atol=1e-9, rtol=0)
    grads = [torch.autograd.grad(out[rows].square().sum(), tensors) for out in (got, wanted)]
    torch.testing.assert_close(grads[0], grads[1], atol=1e-9, rtol=0)


# --- every mode, in every layout, with fewer key heads


@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize(("Q", "K"), SIZES)
def test_each_mode_is_torchs_attention_over_its_mask(layout: str, Q: int, K: int) -> None:
    tensors = qkv(2, Q, K)
    for mode in (2, 3):
        agree(tensors, layout, attends(mode, Q, K), atten_mask=triangle(), sparse_mode=mode)
    band = {"pre_tockens": 2, "next_tockens": max(1, Q - K)}
    agree(tensors, layout, attends(4, Q, K, 2, max(1, Q - K)), atten_mask=triangle(), sparse_mode=4, **band)
    some = torch.rand(Q, K, generator=torch.Generator().manual_seed(1)) < 0.3
    some[:, 0] = False
    agree(tensors, layout, ~some, atten_mask=some, sparse_mode=1)
    agree(tensors, layout, ~some, atten_mask=some.expand(2, HEADS, Q, K), sparse_mode=1)
    wide = {"pre_tockens": Q, "next_tockens": 1}
    agree(tensors, layout, ~some & attends(0, Q, K, Q, 1), atten_mask=some, **wide)
    prefix = [max(0, K - Q), K]
    per_row = torch.stack([attends(6, Q, K, prefix=n) for n in prefix])[:, None]
    agree(tensors, layout, per_row, atten_mask=prefix_triangle(), sparse_mode=6, prefix=prefix)
    agree(tensors, layout, per_row, atten_mask=~per_row, sparse_mode=5, prefix=prefix)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9), st.sampled_from(PADDED))
def test_a_band_counts_from_the_corner_of_its_mode(Q: int, K: int, pre: int, after: int, layout: str) -> None:
    tensors, tokens = qkv(1, Q, K), {"pre_tockens": pre, "next_tockens": after}
    agree(tensors, layout, attends(0, Q, K, pre, after), atten_mask=torch.zeros(Q, K, dtype=torch.bool), **tokens)
    if pre + Q - K >= 0 and after + K - Q >= 0:
        agree(tensors, layout, attends(4, Q, K, pre, after), atten_mask=triangle(), sparse_mode=4, **tokens)


@pytest.mark.parametrize("mode", range(7))
def test_no_mask_is_full_attention_in_every_mode(mode: int) -> None:
    full = torch.ones(5, 9, dtype=torch.bool)
    agree(qkv(2, 5, 9), "BSND", full, sparse_mode=mode, pre_tockens=0, next_tockens=0, prefix=[9, 9])


def test_an_illegal_prefix_in_mode_5_only_switches_sparsity_off() -> None:
    some = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    agree(qkv(2, 5, 5), "BSND", ~some, atten_mask=some, sparse_mode=5, prefix=[6, 0])


# --- rows without keys


def test_a_row_without_keys_is_a_mean_of_v_or_0() -> None:
    tensors = qkv(1, 4, 4)
    blocked = torch.ones(4, 4, dtype=torch.bool).triu(1)
    blocked[1] = True
    mean = tensors[2].mean(1).repeat_interleave(2, dim=1)
    for layout in PADDED:
        torch.testing.assert_close(run(tensors, layout, atten_mask=blocked)[:, 1], mean)
        zero = run(tensors, layout, atten_mask=blocked, inner_precise=2)
        assert not zero[:, 1].any()
        agree(tensors, layout, ~blocked, atten_mask=blocked, inner_precise=2)


def test_rows_that_the_operator_notices_itself_are_0() -> None:
    tensors = qkv(1, 8, 5)
    assert not run(tensors, "BSND", atten_mask=triangle(), sparse_mode=3)[:, :3].any()
    assert not run(tensors, "BSND", atten_mask=prefix_triangle(), sparse_mode=6, prefix=[0])[:, :3].any()
    band = {"pre_tockens": 2, "next_tockens": -1}
    square = qkv(1, 5, 5)
    assert not run(square, "BSND", atten_mask=triangle(), sparse_mode=4, **band)[:, :1].any()
    assert not run(square, "BSND", atten_mask=torch.zeros(5, 5, dtype=torch.bool), **band)[:, :1].any()


# --- packed sequences


def packed(lengths: list[tuple[int, int]], tail: int = 0, **kwargs: Any) -> tuple[Tensor, list[list[Tensor]]]:
    """The reference's output on packed sequences of `(Sq, Skv)`, and each sequence's q, k, v alone `[1, S, heads, D]`."""
    alone = [qkv(1, q, kv, seed=n) for n, (q, kv) in enumerate(lengths)]
    joined = [torch.cat([parts[i][0] for parts in alone] + [torch.ones_like(alone[0][i][0, :1])] * tail) for i in range(3)]
    q_ends, kv_ends = ([sum(pair[i] for pair in lengths[: n + 1]) for n in range(len(lengths))] for i in (0, 1))
    lists = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends}
    return reference_fusion_attention(*joined, HEADS, "TND", scale=SCALE, **lists, **kwargs)[0], alone


PAIRS = [(3, 3), (0, 0), (2, 6), (1, 1), (5, 5)]


@pytest.mark.parametrize("mode", [2, 3])
def test_packed_sequences_do_not_see_each_other(mode: int) -> None:
    out, alone = packed(PAIRS, atten_mask=triangle(), sparse_mode=mode)
    wanted = [torch_attention(*parts, attends(mode, *pair))[0] for parts, pair in zip(alone, PAIRS) if pair[0]]
    torch.testing.assert_close(out, torch.cat(wanted), atol=1e-9, rtol=0)


def test_packed_bands_prefixes_shared_masks_and_none() -> None:
    calls: list[tuple[dict[str, Any], Callable[[int, int, int], Tensor]]] = [
        ({"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0},
         lambda n, q, k: attends(4, q, k, 2, 0)),
        ({"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": [1, 0, 5, 1, 4]},
         lambda n, q, k: attends(6, q, k, prefix=[1, 0, 5, 1, 4][n])),
        ({"atten_mask": torch.ones(5, 6, dtype=torch.bool).triu(2), "sparse_mode": 1},
         lambda n, q, k: matrix(q, k, lambda i, j: j <= i + 1)),
        ({"atten_mask": torch.zeros(5, 6, dtype=torch.bool), "pre_tockens": 9, "next_tockens": 1},
         lambda n, q, k: attends(0, q, k, 9, 1)),
        ({"sparse_mode": 3}, lambda n, q, k: torch.ones(q, k, dtype=torch.bool)),
    ]  # fmt: skip
    for kwargs, keep in calls:
        out, alone = packed(PAIRS, **kwargs)
        wanted = [torch_attention(*parts, keep(n, *pair))[0] for n, (parts, pair) in enumerate(zip(alone, PAIRS)) if pair[0]]
        torch.testing.assert_close(out, torch.cat(wanted), atol=1e-9, rtol=0)


def test_a_sequence_cut_between_cards_is_the_whole_one() -> None:
    """The documents' own examples of modes 7 and 8: the second sequence's queries are cut, its keys are not."""
    tri = triangle()
    whole, _ = packed([(3, 3), (4, 6)], atten_mask=tri, sparse_mode=3)
    first, _ = packed([(3, 3), (4, 6)], atten_mask=tri, sparse_mode=3)
    alone = [qkv(1, 3, 3, seed=0), qkv(1, 4, 6, seed=1)]
    q, k, v = (torch.cat([part[i][0] for part in alone]) for i in range(3))
    first = reference_fusion_attention(
        q[:5], k, v, HEADS, "TND", scale=SCALE, atten_mask=tri, sparse_mode=7, pre_tockens=6, next_tockens=-2,
        actual_seq_qlen=[3, 5], actual_seq_kvlen=[3, 9],
    )[0]  # fmt: skip
    torch.testing.assert_close(first, whole[:5])
    whole, alone = packed([(5, 4), (5, 5)], atten_mask=tri, sparse_mode=2)
    q, k, v = (torch.cat([part[i][0] for part in alone]) for i in range(3))
    second = reference_fusion_attention(
        q[2:], k, v, HEADS, "TND", scale=SCALE, atten_mask=tri, sparse_mode=8, pre_tockens=4, next_tockens=1,
        actual_seq_qlen=[3, 8], actual_seq_kvlen=[4, 9],
    )[0]  # fmt: skip
    torch.testing.assert_close(second, whole[2:])


def test_tokens_behind_the_last_end_are_0_and_gradients_pass_them_by() -> None:
    out, _ = packed([(3, 3), (2, 2)], tail=2, atten_mask=triangle(), sparse_mode=3)
    assert out.shape[0] == 7
    assert out[:5].any(dim=(1, 2)).all()
    assert not out[5:].any()


def test_v3_lists_are_tensors() -> None:
    tensors = [torch.cat([x[0], x[0]]) for x in qkv(1, 4, 4)]
    lists = [4, 8]
    outs = [
        reference_fusion_attention(*tensors, HEADS, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)[0]
        for ends in (lists, torch.tensor(lists))
    ]
    assert torch.equal(*outs)


# --- the operator's manners


def test_the_seven_outputs_and_their_shapes() -> None:
    q, k, v = (x.to(torch.bfloat16) for x in qkv(2, 5, 5))
    out, top, total, reserved, *numbers = reference_fusion_attention(q, k, v, HEADS, "BSND")
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (top.shape, top.dtype, total.shape) == ((2, HEADS, 5, 8), torch.float32, (2, HEADS, 5, 8))
    assert (reserved.numel(), numbers) == (0, [0, 0, 0])


def test_the_default_scale_is_1_as_the_operators() -> None:
    tensors = qkv(1, 4, 4)
    full = torch.ones(4, 4, dtype=torch.bool)
    loud = [tensors[0] * HEAD_DIM**0.5, *tensors[1:]]
    torch.testing.assert_close(
        reference_fusion_attention(*tensors, HEADS, "BSND")[0], torch_attention(*loud, full), atol=1e-9, rtol=0
    )


def test_its_arguments_are_the_operators_in_order() -> None:
    names = list(inspect.signature(reference_fusion_attention).parameters)
    assert names == ["query", "key", "value", "head_num", *DEFAULTS]
    defaults = {name: p.default for name, p in inspect.signature(reference_fusion_attention).parameters.items()}
    assert all(defaults[name] == value for name, value in DEFAULTS.items() if name != "input_layout")


@pytest.mark.parametrize("layout", [*PADDED, "TND"])
@pytest.mark.parametrize("D", [0, 1, 768, 769])
def test_head_sizes_are_read_off_each_layout_and_bounded(layout: str, D: int) -> None:
    """Sq, Skv, heads, key heads and D all differ, so that no one of them can stand for another."""
    alone = [torch.randn(1, length, heads, D, dtype=torch.float64) for length, heads in ((3, 4), (5, 2), (5, 2))]
    lists = {"actual_seq_qlen": [3], "actual_seq_kvlen": [5]} if layout == "TND" else {}
    given = [x[0] if layout == "TND" else in_layout(x, layout) for x in alone]
    if D in (0, 769):
        with pytest.raises(UnsupportedFormError, match=f"head-size.*got {D}"):
            reference_fusion_attention(*given, 4, layout, **lists)
        return
    mask = torch.ones(3, 5, dtype=torch.bool).triu(2)
    out = reference_fusion_attention(*given, 4, layout, scale=D**-0.5, atten_mask=mask, sparse_mode=1, **lists)[0]
    wanted = torch_attention(*alone, ~mask)
    torch.testing.assert_close(out, wanted[0] if layout == "TND" else in_layout(wanted, layout), atol=1e-9, rtol=0)


def test_a_head_smaller_than_one_element_is_refused_not_divided_by() -> None:
    with pytest.raises(UnsupportedFormError, match="head-size"):
        reference_fusion_attention(torch.zeros(1, 3, 2), *[torch.zeros(1, 3, 2)] * 2, 4, "BSH")


@pytest.mark.parametrize("lists", [("actual_seq_qlen",), ("actual_seq_kvlen",), ()])
def test_packed_calls_without_both_lists_are_refused(lists: tuple[str, ...]) -> None:
    tensors = [x[0] for x in qkv(1, 3, 3)]
    with pytest.raises(UnsupportedFormError, match="tnd-lists"):
        reference_fusion_attention(*tensors, HEADS, "TND", **dict.fromkeys(lists, (3,)))


@pytest.mark.parametrize(
    ("layout", "kwargs", "words"),
    [
        ("BSND", {"atten_mask": torch.zeros(2, 4, dtype=torch.bool)}, "mask-shape"),
        ("BSND", {"atten_mask": torch.zeros(2, 1, 4, 4)}, "mask-dtype"),
        ("BSND", {"atten_mask": ~triangle(), "sparse_mode": 2}, "contents"),
        ("BSND", {"pse": torch.zeros(1)}, "pse"),
        ("BSND", {"keep_prob": 0.5}, "keep_prob"),
        ("BSH", {}, "3 dimensions"),
        ("TND", {}, "3 dimensions"),
    ],
)
def test_what_the_operator_refuses_and_what_is_not_covered_raises(layout: str, kwargs: Any, words: str) -> None:
    with pytest.raises(UnsupportedFormError, match=words):
        reference_fusion_attention(*qkv(2, 4, 4), HEADS, layout, **kwargs)


# --- the vendor's own benchmark


needs_oracle = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def vendor_cases(Q: int, K: int) -> list[tuple[dict[str, Any], Tensor]]:
    """Calls where the benchmark is sound, and which rows have keys: not None with a mode, tokens, mode 6, TND, or mode 4
    with Sq != Skv (it counts that band from the top-left), nor rows without keys (it leaves them unmasked)."""
    some = torch.rand(2, 1, Q, K, generator=torch.Generator().manual_seed(3)) < 0.4
    some[..., 0] = False
    cases: list[tuple[dict[str, Any], Tensor]] = [({}, torch.ones(Q, K, dtype=torch.bool))]
    cases += [({"atten_mask": some, "sparse_mode": mode}, ~some) for mode in (0, 1)]
    cases += [({"atten_mask": some.expand(2, HEADS, Q, K).contiguous()}, ~some), ({"atten_mask": some[0, 0]}, ~some[0, 0])]
    cases += [({"atten_mask": triangle(), "sparse_mode": mode}, attends(mode, Q, K)) for mode in (2, 3)]
    prefix = [max(0, K - Q), K]
    keep = torch.stack([attends(6, Q, K, prefix=n) for n in prefix])[:, None]
    cases.append(({"atten_mask": ~keep, "sparse_mode": 5, "prefix": prefix}, keep))
    if Q == K:
        band = {"sparse_mode": 4, "pre_tockens": 3, "next_tockens": 2}
        cases.append(({"atten_mask": triangle(), **band}, attends(4, Q, K, 3, 2)))
    return cases


@needs_oracle
@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize(("Q", "K"), [(12, 12), (8, 13), (13, 8)])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_vendors_benchmark_agrees_where_it_is_sound(layout: str, Q: int, K: int, key_heads: int) -> None:
    for kwargs, keep in vendor_cases(Q, K):
        tensors = [in_layout(x, layout).requires_grad_() for x in qkv(2, Q, K, key_heads=key_heads)]
        ours = reference_fusion_attention(*tensors, HEADS, layout, scale=SCALE, **kwargs)
        theirs = oracle().npu_fusion_attention(*(x.detach() for x in tensors), HEADS, layout, scale=SCALE, **kwargs)
        rows = keep.any(-1).reshape(-1, Q).expand(2, Q)
        for mine, vendors in zip(ours[:1], theirs[:1]):
            difference = (from_layout(mine, layout) - from_layout(vendors, layout))[rows].abs().max()
            assert difference < 1e-9, kwargs
        assert (ours[1][:, :, rows[0]] - theirs[1][:, :, rows[0]]).abs().max() < 1e-5
        if rows.all():
            dy = torch.randn_like(ours[0])
            wanted = oracle().npu_fusion_attention_grad(
                *(x.detach() for x in tensors), dy, HEADS, layout, scale_value=SCALE, **kwargs
            )
            got = torch.autograd.grad(ours[0], tensors, dy)
            assert max(float((a - b).abs().max()) for a, b in zip(got, wanted)) < 1e-9


@needs_oracle
def test_the_vendors_benchmark_agrees_sequence_by_sequence_under_tnd() -> None:
    for mode in (2, 3):
        out, alone = packed(PAIRS, atten_mask=triangle(), sparse_mode=mode)
        filled = [parts for parts, pair in zip(alone, PAIRS) if pair[0]]
        wanted = [
            oracle().npu_fusion_attention(*parts, HEADS, "BSND", scale=SCALE, atten_mask=triangle(), sparse_mode=mode)[0][0]
            for parts in filled
        ]
        torch.testing.assert_close(out, torch.cat(wanted), atol=1e-9, rtol=0)


@needs_oracle
def test_the_vendors_benchmark_is_wrong_where_the_documents_contradict_it() -> None:
    """Its known deviations: were they fixed, this test would say so and the comparison above could widen."""
    q, k, v = qkv(1, 4, 7)
    bench = oracle().npu_fusion_attention
    none = bench(q, k, v, HEADS, "BSND", scale=SCALE, sparse_mode=3)[0]
    assert (none - run([q, k, v], "BSND", sparse_mode=3)).abs().max() > 0.1, "it builds a mask where the operator has none"
    band = {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 1, "next_tockens": 0}
    assert (bench(q, k, v, HEADS, "BSND", scale=SCALE, **band)[0] - run([q, k, v], "BSND", **band)).abs().max() > 0.1
