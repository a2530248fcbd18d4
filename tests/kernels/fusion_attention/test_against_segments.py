"""With the Segments at hand no wrong call passes: right calls are mutated, and the reference says which went wrong."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import Kwargs, mutations
from npu_batches import HEAD_DIM, HEADS, KEY_HEADS, PADDED, from_layout, in_layout, qkv, segments
from strategies import patterns
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collate_npu import CollateError, Pattern, Segments, UnsupportedFormError, unpad
from collate_npu.kernels.fusion_attention import (
    blocked_scores,
    check_contract,
    contract_breaches,
    fusion_attention_kwargs,
    reference_fusion_attention,
    triangle,
)

HEADS_AND_SIZE = {"N": HEADS, "Nkv": KEY_HEADS, "D": HEAD_DIM}
OPERATORS = ("npu_fusion_attention", "npu_fusion_attention_v3")


def computed(batch: Segments, kwargs: Kwargs, keep_tail: bool) -> Tensor | None:
    """`[T, heads, D]`: the reference's output at the real tokens; None where the operator, or the reference, refuses."""
    layout = kwargs["input_layout"]
    tensors = qkv(*batch.shape, batch.shape[1])
    packed = layout == "TND"
    given_ = [(x[0] if keep_tail else unpad(x, batch)) if packed else in_layout(x, layout) for x in tensors]
    try:
        out = reference_fusion_attention(*given_, HEADS, scale=HEAD_DIM**-0.5, **kwargs)[0]
    except (CollateError, TypeError):
        return None
    if packed:
        return out[batch.keep[0]] if keep_tail else out
    return unpad(from_layout(out, layout), batch)


def refused(batch: Segments, pattern: Pattern, kwargs: Kwargs, keep_tail: bool) -> bool:
    try:
        check_contract(kwargs, **HEADS_AND_SIZE, segments=batch, pattern=pattern, keep_tail=keep_tail)
    except CollateError:
        return True
    return False


def verdict(batch: Segments, pattern: Pattern, kwargs: Kwargs, keep_tail: bool, right: Tensor) -> str:
    """`wrong` or `same` by the reference, `refused` or `passed` by the check."""
    out = computed(batch, kwargs, keep_tail)
    same = out is not None and torch.allclose(out, right, atol=1e-9, rtol=0)
    return f"{'same' if same else 'wrong'}, {'refused' if refused(batch, pattern, kwargs, keep_tail) else 'passed'}"


# --- a sweep


BATCHES = {
    "right": Segments.from_lengths([3, 6]),
    "left": Segments.from_lengths([3, 6], side="left"),
    "even": Segments.from_lengths([5, 5]),
    "flat": Segments.from_lengths([[3, 1, 4]], width=10),
    "square": Segments.from_lengths([4, 2, 4, 1]),
}
PATTERNS = (Pattern.of("causal"), Pattern.of("bidirectional"), Pattern.sliding(2), Pattern.chunked(2), Pattern.prefix(2))


WRONG, HARMLESS = 1000, 150
"""Each pattern's share, at least, of the sweep: five times as many mutated calls in all."""


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_mutated_call_that_computes_something_else_is_refused(pattern: Pattern) -> None:
    counts: Counter[str] = Counter()
    for (name, batch), layout in itertools.product(BATCHES.items(), ("BSND", "TND")):
        for keep_tail in (False, True) if (name, layout) == ("flat", "TND") else (False,):
            kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout=layout, keep_tail=keep_tail)
            right = computed(batch, kwargs, keep_tail)
            assert right is not None
            assert not refused(batch, pattern, kwargs, keep_tail)
            said = {what: verdict(batch, pattern, changed, keep_tail, right) for what, changed in mutations(kwargs, batch)}
            counts.update(said.values())
            assert [what for what, verdict in said.items() if verdict == "wrong, passed"] == [], (name, layout)
    assert counts["wrong, refused"] >= WRONG
    assert counts["same, passed"] >= HARMLESS, "a check that refuses all is no check"


# --- drawn


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_drawn_calls_pass_and_their_mutations_compute_the_same_or_are_refused(data: st.DataObject) -> None:
    batch = data.draw(segments())
    pattern = data.draw(patterns(batch.num_sequences))
    layout = data.draw(st.sampled_from([*PADDED, "TND"]))
    operator = data.draw(st.sampled_from(OPERATORS))
    keep_tail = (
        layout == "TND" and batch.shape[0] == 1 and batch.padding_side in ("none", "right") and data.draw(st.booleans())
    )
    try:
        kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout=layout, operator=operator, keep_tail=keep_tail)
    except UnsupportedFormError:
        return
    right = computed(batch, kwargs, keep_tail)
    assert right is not None
    assert not refused(batch, pattern, kwargs, keep_tail)
    for _ in range(data.draw(st.integers(1, 2))):
        name, kwargs = data.draw(st.sampled_from(list(mutations(kwargs, batch))))
        said = verdict(batch, pattern, kwargs, keep_tail, right)
        assert said != "wrong, passed", name
        if said != "same, passed":
            return


# --- blocks and bytes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_of_any_size_say_the_same(data: st.DataObject) -> None:
    batch = data.draw(segments())
    layout = data.draw(st.sampled_from(["BSND", "TND"]))
    right = fusion_attention_kwargs(batch, pattern=data.draw(st.sampled_from(["causal", "bidirectional"])), layout=layout)
    kwargs = data.draw(st.sampled_from([right, *(changed for _, changed in mutations(right, batch))]))
    found = []
    for size in (1, 7, 2**18):
        with mock.patch.object(blocked_scores, "BLOCK_SCORES", size):
            try:
                found.append(contract_breaches(kwargs, **HEADS_AND_SIZE, segments=batch))
            except UnsupportedFormError:
                raise
            except CollateError as error:
                found.append(str(error))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_one_wrong_score_at_the_very_end_of_a_long_row_is_seen(layout: str) -> None:
    batch = Segments.from_lengths([1500])
    kwargs = fusion_attention_kwargs(batch, layout="BSND") | {"input_layout": layout, "sparse_mode": 1}
    lists = {"actual_seq_qlen": [1500], "actual_seq_kvlen": [1500]} if layout == "TND" else {}
    mask = triangle()[:1500, :1500].contiguous()
    assert not contract_breaches(kwargs | lists | {"atten_mask": mask}, **HEADS_AND_SIZE, segments=batch)
    mask[1499, 0] = True
    (breach,) = contract_breaches(kwargs | lists | {"atten_mask": mask}, **HEADS_AND_SIZE, segments=batch)
    assert breach.got == "the query at (row, column) (0, 1499) does not attend (0, 0)"


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes; views of what was there count as their own size."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, Tensor) and not func._schema.returns[0].alias_info:
            self.bytes = max(self.bytes, out.numel() * out.element_size())
        return out


def allocated(make: Callable[[], Any]) -> tuple[int, int]:
    """The largest tensor made by torch, and the peak of what numpy and Python hold at once."""
    with Largest():
        make()  # imports what it needs
    tracemalloc.start()
    with Largest() as largest:
        make()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return largest.bytes, peak


B, S = 2, 4000
WIDE = {
    "dense": (Segments.from_lengths([S, 9], side="left"), Pattern.of("causal"), "BSND"),
    "dense bidirectional": (Segments.from_lengths([S, 9]), Pattern.of("bidirectional"), "BSND"),
    "dense prefix": (Segments.from_lengths([S, 9], side="left"), Pattern.prefix(3), "BSND"),
    "shared": (Segments.from_lengths([S, 9]), Pattern.chunked(9), "BSND"),
    "triangle": (Segments.from_lengths([S, 9]), Pattern.of("causal"), "BSND"),
    "prefix": (Segments.from_lengths([S, 9]), Pattern.prefix(3), "BSND"),
    "packed chunks": (Segments.from_lengths([500, 9]), Pattern.chunked(9), "TND"),
    "packed": (Segments.from_lengths([S, 9]), Pattern.of("bidirectional"), "TND"),
}
OVERHEAD = 2**21
"""Tables of some numbers a token."""


@pytest.mark.parametrize("name", WIDE)
def test_max_mask_bytes_is_what_the_arguments_cost(name: str) -> None:
    batch, pattern, layout = WIDE[name]
    size = fusion_attention_kwargs(batch, pattern=pattern, layout=layout).get("atten_mask", torch.empty(0)).numel()

    def make(limit: int) -> Callable[[], Any]:
        return lambda: fusion_attention_kwargs(batch, pattern=pattern, layout=layout, max_mask_bytes=limit)

    largest, peak = allocated(make(size))
    assert max(largest, peak) <= size + OVERHEAD
    if size:
        with pytest.raises(UnsupportedFormError, match="max_mask_bytes"):
            make(size - 1)()


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_what_a_check_allocates_does_not_grow_with_the_mask(name: str, dtype: torch.dtype) -> None:
    batch, pattern, layout = WIDE[name]
    kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout=layout)
    if "atten_mask" in kwargs:
        kwargs["atten_mask"] = kwargs["atten_mask"].to(dtype)
    largest, peak = allocated(lambda: check_contract(kwargs, **HEADS_AND_SIZE, segments=batch, pattern=pattern))
    assert max(largest, peak) <= 2**23
    assert largest <= 8 * blocked_scores.BLOCK_SCORES or not name.startswith(("dense", "shared"))


def test_a_mask_for_each_head_is_read_in_blocks_as_small() -> None:
    batch = Segments.from_lengths([1500], width=1600)
    masked = fusion_attention_kwargs(batch, pattern="bidirectional")["atten_mask"].repeat(1, HEADS, 1, 1)
    kwargs = {"input_layout": "BSND", "atten_mask": masked, "sparse_mode": 1}
    largest, _ = allocated(lambda: check_contract(kwargs, **HEADS_AND_SIZE, segments=batch, pattern="bidirectional"))
    assert largest <= 4 * blocked_scores.BLOCK_SCORES


# --- messages and sizes


def test_the_message_names_rows_queries_and_keys() -> None:
    batch = Segments.from_lengths([3, 2, 3], side="left")
    kwargs = fusion_attention_kwargs(Segments.from_lengths([3, 3, 3]), layout="BSND")
    with pytest.raises(UnsupportedFormError) as error:
        check_contract(kwargs, **HEADS_AND_SIZE, segments=batch)
    assert str(error.value) == (
        "npu_fusion_attention:\n[differs-from-segments] atten_mask, sparse_mode: got the query at (row, column) (1, 1) "
        "attends (1, 0). The segments and the pattern, causal, say otherwise. "
        "Use fusion_attention_kwargs(segments, pattern=..., layout='BSND'), "
        "or pass the segments and pattern that this call is for. (Segments)"
    )


def test_every_wrong_row_is_named_until_the_list_is_long() -> None:
    batch = Segments.from_lengths([2] * 9, width=3, side="left")
    kwargs = fusion_attention_kwargs(Segments.from_lengths([3] * 9))
    (breach,) = contract_breaches(kwargs, **HEADS_AND_SIZE, segments=batch)
    assert [f"({b}, 1) attends ({b}, 0)" in breach.got for b in range(9)] == [True] * 8 + [False]
    assert breach.got.endswith("; ...")
    eight = {"segments": Segments.from_lengths([2] * 8, width=3, side="left")}
    (breach,) = contract_breaches(fusion_attention_kwargs(Segments.from_lengths([3] * 8)), **HEADS_AND_SIZE, **eight)  # type: ignore[arg-type]
    assert "(7, 1) attends (7, 0)" in breach.got
    assert "..." not in breach.got
    full = {"input_layout": "BSND"}
    (breach,) = contract_breaches(full, **HEADS_AND_SIZE, segments=Segments.from_lengths([6]))
    assert breach.got == "the query at (row, column) (0, 0) attends (0, 1), (0, 2), (0, 3) and 2 more"


def test_the_remedy_works() -> None:
    batch, pattern = Segments.from_lengths([3, 5]), Pattern.sliding(2)
    for layout in ("BSND", "TND"):
        causal = fusion_attention_kwargs(batch, layout=layout)
        (breach,) = contract_breaches(causal, **HEADS_AND_SIZE, segments=batch, pattern=pattern)
        assert breach.silent
        assert layout in breach.remedy
        right = fusion_attention_kwargs(batch, layout=layout, pattern=pattern)
        check_contract(right, **HEADS_AND_SIZE, segments=batch, pattern=pattern)
        check_contract(causal, **HEADS_AND_SIZE, segments=batch)


def test_sizes_follow_from_the_segments_and_others_are_refused() -> None:
    batch = Segments.from_lengths([[3, 2]], width=9)
    padded, packed = (fusion_attention_kwargs(batch, layout=layout) for layout in ("BSND", "TND"))
    check_contract(padded, **HEADS_AND_SIZE, segments=batch, B=1, Sq=9, Skv=9)
    check_contract(packed, **HEADS_AND_SIZE, segments=batch, B=2, Sq=3, Skv=3, Tq=5, Tkv=5)
    wrong = [(padded, {"B": 2}), (padded, {"Sq": 8}), (padded, {"Skv": 5}), (packed, {"Tq": 9}), (packed, {"Tkv": 4})]
    for kwargs, size in wrong:
        (breach,) = contract_breaches(kwargs, **HEADS_AND_SIZE, segments=batch, **size)
        assert (breach.rule, breach.where, breach.got) == (
            "sizes-differ",
            *((n, str(v)) for n, v in size.items()).__next__(),
        )
    (breach,) = contract_breaches(packed, **HEADS_AND_SIZE, segments=batch, keep_tail=True)[:1]
    assert breach.rule == "unused-tail"
    tail = fusion_attention_kwargs(batch, layout="TND", keep_tail=True)
    check_contract(tail, **HEADS_AND_SIZE, segments=batch, keep_tail=True)
    assert contract_breaches(tail, **HEADS_AND_SIZE, segments=batch)[0].rule == "tnd-total"


def test_heads_that_differ_are_told_apart() -> None:
    batch = Segments.from_lengths([2, 4], side="left")
    kwargs = fusion_attention_kwargs(batch)
    heads = kwargs["atten_mask"].repeat(1, HEADS, 1, 1)
    check_contract(kwargs | {"atten_mask": heads}, **HEADS_AND_SIZE, segments=batch)
    heads[1, HEADS - 1, 3, 0] = True
    (breach,) = contract_breaches(kwargs | {"atten_mask": heads}, **HEADS_AND_SIZE, segments=batch)
    assert breach.got == "the query at (row, column) (1, 3) does not attend (1, 0)"


def test_packed_rows_of_one_length_are_told_apart() -> None:
    """Here a key's column alone says nothing: the same column of the other row is a key too."""
    batch = Segments.from_lengths([4, 4])
    kwargs = fusion_attention_kwargs(batch, layout="TND", pattern="bidirectional")
    joined = kwargs | {"actual_seq_qlen": [8], "actual_seq_kvlen": [8]}
    (breach,) = contract_breaches(joined, **HEADS_AND_SIZE, segments=batch, pattern="bidirectional")
    assert breach.got == "the query at (row, column) (0, 0) attends (1, 0), (1, 1), (1, 2) and 1 more"
    moved = kwargs | {"actual_seq_kvlen": [5, 8]}
    (breach,) = contract_breaches(moved, **HEADS_AND_SIZE, segments=batch, pattern="bidirectional")
    first, second = breach.got.split("; ")
    assert first == "the query at (row, column) (0, 0) attends (1, 0)"
    assert second == "the query at (row, column) (1, 0) does not attend (1, 0)"


def test_one_dense_mask_over_rows_packed_as_one_sequence_passes() -> None:
    batch = Segments.from_lengths([3, 5])
    masked = torch.block_diag(torch.ones(3, 3).tril(), torch.ones(5, 5).tril()) == 0
    kwargs = {"input_layout": "TND", "actual_seq_qlen": [8], "actual_seq_kvlen": [8], "atten_mask": masked, "sparse_mode": 1}
    check_contract(kwargs, **HEADS_AND_SIZE, segments=batch)
    masked[7, 3] = True
    (breach,) = contract_breaches(kwargs, **HEADS_AND_SIZE, segments=batch)
    assert breach.got == "the query at (row, column) (1, 4) does not attend (1, 0)"


def test_what_padding_attends_does_not_matter() -> None:
    """verl's mask on NPU blocks padded rows as well as padded keys."""
    batch = Segments.from_lengths([2, 4])
    keep = batch.keep
    blocked = triangle()[:4, :4] | ~keep[:, None, :, None] | ~keep[:, None, None]
    kwargs = {"input_layout": "BSND", "atten_mask": blocked, "sparse_mode": 1, "inner_precise": 2}
    check_contract(kwargs, **HEADS_AND_SIZE, segments=batch)
