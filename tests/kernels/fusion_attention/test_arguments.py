"""What `fusion_attention_kwargs` says is computed: the reference operator gives torch's attention over the dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_batches import HEAD_DIM, HEADS, PADDED, from_layout, in_layout, packed, qkv, segments, torch_attention
from strategies import patterns

from collate_npu import CollateError, Pattern, Segments, UnsupportedFormError, dense, unpad
from collate_npu.kernels.fusion_attention import choose_form, fusion_attention_kwargs, reference_fusion_attention, triangle
from collate_npu.kernels.fusion_attention.geometry import UNLIMITED

SCALE = HEAD_DIM**-0.5
COMPRESSED = {"causal", "bidirectional", "sliding", "chunked", "prefix"}
"""What the operator's TND layout can say; other patterns are dense masks in the padded layouts."""


class Dilated(Pattern):
    """A pattern of somebody else, of which the operator's room knows nothing: every second token back."""

    name = "dilated"

    def attends(self, q: Any, k: Any, n: Any) -> Any:
        return (k <= q) & ((q - k) % 2 == 0)


def test_a_pattern_nobody_told_the_operator_of_is_a_dense_mask() -> None:
    batch = Segments.from_lengths([3, 5], side="left")
    kwargs = fusion_attention_kwargs(batch, pattern=Dilated())
    assert kwargs["sparse_mode"] == 1
    tensors = [in_layout(x, "BSND") for x in qkv(*batch.shape, batch.shape[1])]
    wanted = torch_attention(*tensors, dense(batch, pattern=Dilated()))
    torch.testing.assert_close(computed(tensors, batch, kwargs), unpad(wanted, batch), atol=1e-9, rtol=0)


def computed(tensors: list[torch.Tensor], batch: Segments, kwargs: dict[str, Any]) -> torch.Tensor:
    """`[T, heads, D]`: the operator's output at the batch's real tokens."""
    layout = kwargs["input_layout"]
    given_ = packed(tensors, batch) if layout == "TND" else [in_layout(x, layout) for x in tensors]
    out = reference_fusion_attention(*given_, HEADS, scale=SCALE, **kwargs)[0]
    return out if layout == "TND" else unpad(from_layout(out, layout), batch)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_form_computes_the_dense_attention_at_every_real_token(data: st.DataObject) -> None:
    batch = data.draw(segments())
    pattern = data.draw(patterns(batch.num_sequences))
    layout = data.draw(st.sampled_from([*PADDED, "TND"]))
    try:
        kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout=layout)
    except UnsupportedFormError:
        assert layout == "TND"
        assert pattern.name not in COMPRESSED - {"sliding"}
        assert pattern.name not in COMPRESSED or not torch.equal(batch.keep, Segments.from_ids(filled(batch)).keep), (
            "refused, but there are no holes"
        )
        return
    tensors = qkv(*batch.shape, batch.shape[1], seed=data.draw(st.integers(0, 99)))
    wanted = torch_attention(*tensors, dense(batch, pattern=pattern))
    torch.testing.assert_close(computed(tensors, batch, kwargs), unpad(wanted, batch), atol=1e-9, rtol=0)


def filled(batch: Segments) -> torch.Tensor:
    ids = batch.ids.clone()
    for b, start, end in batch.spans:
        ids[b, start:end] = ids[b, start]
    return ids


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_gradients_reach_real_tokens_alone(data: st.DataObject) -> None:
    batch = data.draw(segments())
    layout = data.draw(st.sampled_from(PADDED))
    tensors = [x.requires_grad_() for x in qkv(*batch.shape, batch.shape[1])]
    wanted = torch.autograd.grad(unpad(torch_attention(*tensors, dense(batch)), batch).square().sum(), tensors)
    kwargs = fusion_attention_kwargs(batch, layout=layout)
    got = torch.autograd.grad(computed(tensors, batch, kwargs).square().sum(), tensors)
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)


@settings(max_examples=200, deadline=None)
@given(segments(), st.sampled_from(["causal", "bidirectional"]), st.sampled_from([*PADDED, "TND"]))
def test_inner_precise_is_2_exactly_when_a_row_is_blocked_throughout(batch: Segments, pattern: str, layout: Any) -> None:
    kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout=layout)
    is_dense = choose_form(batch, pattern=pattern, layout=layout).name == "dense"
    empty = is_dense and bool((~dense(batch, pattern=pattern)).all(-1).any())
    assert kwargs.get("inner_precise", 0) == (2 if empty else 0)


CHEAPEST = [
    # lengths, side, pattern, layout, form, sparse mode
    ([3, 5], "right", "causal", "BSND", "triangle", 3),
    ([3, 5], "right", "causal", "TND", "triangle", 3),
    ([3, 5], "left", "causal", "TND", "triangle", 3),
    ([3, 5], "left", "causal", "BSH", "dense", 0),
    ([[2, 3]], "right", "causal", "BNSD", "dense", 0),
    ([3, 5], "right", Pattern.sliding(2), "SBH", "band", 4),
    ([3, 5], "left", Pattern.sliding(2), "SBH", "dense", 0),
    ([3, 5], "left", Pattern.sliding(5), "TND", "triangle", 3),
    ([3, 5], "right", Pattern.chunked(2), "BSND", "shared", 0),
    ([3, 5], "right", Pattern.chunked(2), "TND", "triangle", 3),
    ([3, 5], "right", Pattern.prefix(2), "BSND", "prefix", 6),
    ([3, 5], "left", Pattern.prefix(2), "BSND", "dense", 5),
    ([3, 5], "left", Pattern.prefix(2), "TND", "prefix", 6),
    ([3, 5], "right", Pattern.prefix(0), "BSND", "triangle", 3),
    ([5, 5], "right", "bidirectional", "BSND", "full", 0),
    ([3, 5], "right", "bidirectional", "BSND", "dense", 1),
    ([3, 5], "right", "bidirectional", "TND", "full", 0),
    ([3] * 33, "right", Pattern.prefix(2), "BSND", "dense", 1),
    ([3] * 32, "right", Pattern.prefix(2), "BSND", "prefix", 6),
    ([3, 2] * 17, "left", Pattern.prefix(2), "BSND", "dense", 1),
    ([3, 2] * 16, "left", Pattern.prefix(2), "BSND", "dense", 5),
    ([3] * 33, "right", "causal", "BSND", "triangle", 3),
    ([3] * 33, "right", Pattern.sliding(2), "BSND", "band", 4),
]


@pytest.mark.parametrize(("lengths", "side", "pattern", "layout", "name", "mode"), CHEAPEST)
def test_the_cheapest_exact_form_is_chosen(lengths: Any, side: Any, pattern: Any, layout: Any, name: str, mode: int) -> None:
    batch = Segments.from_lengths(lengths, side=side)
    form = choose_form(batch, pattern=pattern, layout=layout)
    assert (form.name, form.sparse_mode) == (name, mode)
    assert form.why
    kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout=layout)
    assert kwargs.get("sparse_mode", 0) == mode
    assert (kwargs.get("atten_mask") is None) == (name == "full")


def test_the_compressed_mask_costs_the_same_at_any_width() -> None:
    kwargs = fusion_attention_kwargs(Segments.from_lengths([3, 60000]))
    assert torch.equal(kwargs["atten_mask"], triangle())
    assert kwargs == {"input_layout": "BSND", "atten_mask": kwargs["atten_mask"], "sparse_mode": 3}


def test_chunks_of_padded_rows_are_one_matrix_for_all() -> None:
    kwargs = fusion_attention_kwargs(Segments.from_lengths([3, 5, 1]), pattern=Pattern.chunked(2))
    assert kwargs["atten_mask"].shape == (1, 1, 5, 5)
    assert (kwargs["pre_tockens"], kwargs["next_tockens"]) == (1, 0)


def test_a_dense_mask_blocks_keys_alone_is_contiguous_and_true_where_blocked() -> None:
    batch = Segments.from_lengths([1, 3], side="left")
    kwargs = fusion_attention_kwargs(batch)
    masked = kwargs["atten_mask"]
    assert masked.shape == (2, 1, 3, 3)
    assert masked.dtype == torch.bool
    assert masked.is_contiguous()
    assert masked[1, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert masked[0, 0].tolist() == [[True, True, True], [True, True, True], [True, True, False]]
    assert (kwargs["pre_tockens"], kwargs["next_tockens"], kwargs["inner_precise"]) == (UNLIMITED, 0, 2)


def test_tnd_lists_are_ends_without_a_leading_0_and_leave_the_tail_out() -> None:
    batch = Segments.from_lengths([[3, 2], [4]], width=7)
    kwargs = fusion_attention_kwargs(batch, layout="TND")
    assert kwargs["actual_seq_qlen"] == kwargs["actual_seq_kvlen"] == [3, 5, 9]


def test_a_kept_tail_is_one_more_sequence() -> None:
    batch = Segments.from_lengths([[3, 2]], width=9)
    assert fusion_attention_kwargs(batch, layout="TND", keep_tail=True)["actual_seq_qlen"] == [3, 5, 9]
    chunked = fusion_attention_kwargs(batch, layout="TND", keep_tail=True, pattern=Pattern.chunked(2))
    assert chunked["actual_seq_qlen"] == [2, 3, 5, 9]
    prefix = fusion_attention_kwargs(batch, layout="TND", keep_tail=True, pattern=Pattern.prefix(9))
    assert prefix["prefix"] == [3, 2, 0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 4), st.data())
def test_a_kept_tail_changes_nothing_for_the_real_tokens(lengths: list[int], tail: int, data: st.DataObject) -> None:
    batch = Segments.from_lengths([lengths], sum(lengths) + tail)
    pattern = data.draw(patterns(len(lengths)).filter(lambda pattern: pattern.name in COMPRESSED))
    tensors = qkv(*batch.shape, batch.shape[1])
    kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout="TND", keep_tail=True)
    out = reference_fusion_attention(*(x[0] for x in tensors), HEADS, scale=SCALE, **kwargs)[0]
    assert kwargs["actual_seq_qlen"][-1] == batch.shape[1]
    wanted = torch_attention(*tensors, dense(batch, pattern=pattern))
    torch.testing.assert_close(out[: sum(lengths)], unpad(wanted, batch), atol=1e-9, rtol=0)


def test_v3_takes_its_lists_as_int64_tensors_on_the_host() -> None:
    lists = fusion_attention_kwargs(
        Segments.from_lengths([3, 5]), layout="TND", operator="npu_fusion_attention_v3", device="meta"
    )["actual_seq_kvlen"]
    assert lists.tolist() == [3, 8]
    assert (lists.dtype, lists.device.type) == (torch.int64, "cpu")


def test_causal_mode_is_transformers_switch() -> None:
    batch = Segments.from_lengths([3, 5])
    assert fusion_attention_kwargs(batch, causal_mode=2)["sparse_mode"] == 2
    with pytest.raises(CollateError, match="causal_mode"):
        fusion_attention_kwargs(batch, causal_mode=1)  # type: ignore[arg-type]


def test_masks_are_built_where_the_kernel_runs() -> None:
    for batch in (Segments.from_lengths([3, 5]), Segments.from_lengths([3, 5], side="left")):
        assert fusion_attention_kwargs(batch, device="meta")["atten_mask"].device.type == "meta"


def test_no_call_can_change_the_masks_of_another() -> None:
    first = fusion_attention_kwargs(Segments.from_lengths([3]))["atten_mask"]
    first.fill_(True)
    assert not fusion_attention_kwargs(Segments.from_lengths([3]))["atten_mask"][0, 0]


@pytest.mark.parametrize(
    ("batch", "arguments", "words"),
    [
        (Segments.from_lengths([0, 0], width=3), {}, "at least one token"),
        (Segments.from_lengths([3]), {"layout": "BHSD"}, "BSH, SBH, BSND, BNSD, TND"),
        (Segments.from_lengths([3]), {"operator": "npu_fusion_attention_v2"}, "npu_fusion_attention_v3"),
        (Segments.from_lengths([3]), {"layout": "TND", "pattern": Dilated()}, "no compressed form"),
        (Segments.from_lengths([3]), {"max_mask_bytes": 2048**2 - 1}, "max_mask_bytes"),
        (Segments.from_lengths([1] * 1025), {"layout": "TND"}, "at most 1024 sequences"),
        (Segments.from_lengths([2] * 33), {"layout": "TND", "pattern": Pattern.prefix(1)}, "at most 32 sequences"),
        (Segments.from_keep([[1, 1, 0, 1]]), {"layout": "TND", "pattern": Pattern.sliding(2)}, "holes"),
        (Segments.from_lengths([3, 5], side="left"), {"max_mask_bytes": 10}, "max_mask_bytes"),
    ],
)
def test_what_has_no_exact_form_is_refused_with_the_remedy(batch: Segments, arguments: Any, words: str) -> None:
    with pytest.raises(CollateError, match=words):
        fusion_attention_kwargs(batch, **arguments)
