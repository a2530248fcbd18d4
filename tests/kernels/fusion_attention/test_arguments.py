"""What `fusion_attention_kwargs` says is computed: the reference operator gives torch's attention over the dense mask."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from npu_batches import SCALE, computed, right_calls, wanted

from collate_npu import CollateError, Pattern, Segments
from collate_npu.kernels.fusion_attention import UNLIMITED, choose_form, fusion_attention_kwargs, prefix_triangle, triangle
from collate_npu.masks import dense


class Dilated(Pattern):
    """A pattern of somebody else, of which the operator's room knows nothing: every second token back."""

    name = "dilated"

    def attends(self, q: Any, k: Any, n: Any) -> Any:
        return (k <= q) & ((q - k) % 2 == 0)


def test_a_pattern_nobody_told_the_operator_of_is_a_dense_mask() -> None:
    batch = Segments.from_lengths([3, 5], side="left")
    kwargs = SCALE | fusion_attention_kwargs(batch, pattern=Dilated())
    assert kwargs["sparse_mode"] == 1
    torch.testing.assert_close(computed(batch, kwargs), wanted(batch, Dilated()), atol=1e-9, rtol=0)


@settings(max_examples=400, deadline=None)
@given(right_calls())
def test_every_form_computes_the_dense_attention_at_every_real_token(call: Any) -> None:
    batch, pattern, kwargs = call
    torch.testing.assert_close(computed(batch, kwargs), wanted(batch, pattern), atol=1e-9, rtol=0)
    is_dense = choose_form(batch, pattern=pattern, layout=kwargs["input_layout"]).name == "dense"
    empty = is_dense and bool((~dense(batch, pattern=pattern)).all(-1).any())
    assert kwargs.get("inner_precise", 0) == (2 if empty else 0), "2 exactly where a row is blocked throughout"


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
    ([3, 5], "left", Pattern.chunked(2), "BSND", "dense", 0),
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
    ([2] * 1024, "right", "causal", "TND", "triangle", 3),
    ([2] * 32, "right", Pattern.prefix(2), "TND", "prefix", 6),
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
    before = UNLIMITED if pattern == "causal" else 1  # sizes are 2
    tokens = (before, 0) if mode in (0, 4) and name != "full" else (None, None)
    assert (kwargs.get("pre_tockens"), kwargs.get("next_tockens")) == tokens


@pytest.mark.parametrize(
    ("batch", "prefix", "settings", "wanted"),
    [
        (Segments.from_lengths([3, 5], side="left"), [1, 9], {}, [3, 5]),
        (Segments.from_lengths([[2, 3], [5]]), [1, 2, 0], {}, [4, 0]),
        (Segments.from_lengths([[3, 2]], 6), [9, 1], {"layout": "TND"}, [3, 1]),
    ],
)
def test_a_prefix_ends_where_the_last_key_is_that_somebody_sees_early(
    batch: Segments, prefix: list[int], settings: Any, wanted: list[int]
) -> None:
    assert fusion_attention_kwargs(batch, pattern=Pattern.prefix(prefix), **settings)["prefix"] == wanted


def test_the_compressed_masks_are_the_documents() -> None:
    rows, columns = torch.arange(2048)[:, None], torch.arange(2048)
    assert torch.equal(triangle(), columns > rows)
    assert torch.equal(prefix_triangle(), torch.cat([triangle(), (columns >= 1024).expand(1024, 2048)]))
    for make in (triangle, prefix_triangle):
        make().logical_not_()
        assert not make()[0, 0], "each call returns a tensor of its own"


def test_masks_are_built_where_the_kernel_runs_and_for_each_call() -> None:
    for batch in (Segments.from_lengths([3, 5]), Segments.from_lengths([3, 5], side="left")):
        assert fusion_attention_kwargs(batch, device="meta")["atten_mask"].device.type == "meta"
        fusion_attention_kwargs(batch)["atten_mask"].fill_(True)
        assert not fusion_attention_kwargs(batch)["atten_mask"].all()


@pytest.mark.parametrize(
    ("batch", "arguments", "words"),
    [
        (Segments.from_lengths([0, 0], width=3), {}, "at least one token"),
        (Segments.from_lengths([3]), {"layout": "BHSD"}, "BSH, SBH, BSND, BNSD, TND"),
        (Segments.from_lengths([3]), {"layout": "TND", "pattern": Dilated()}, "no compressed form"),
        (Segments.from_lengths([1] * 1025), {"layout": "TND"}, "at most 1024 sequences"),
        (Segments.from_lengths([2] * 33), {"layout": "TND", "pattern": Pattern.prefix(1)}, "at most 32 sequences"),
        (Segments.from_keep([[1, 1, 0, 1]]), {"layout": "TND", "pattern": Pattern.sliding(2)}, "holes.* such as BSND"),
    ],
)
def test_what_has_no_exact_form_is_refused_with_the_remedy(batch: Segments, arguments: Any, words: str) -> None:
    with pytest.raises(CollateError, match=words):
        fusion_attention_kwargs(batch, **arguments)
