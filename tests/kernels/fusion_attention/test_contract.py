"""`check_contract` takes what the operator computes rightly, and nothing else.

The facts of `data/npu-mask-cases.csv` are the vendor's own test expectations and cases derived from the tiling code, with
the line of each rule. A case has no mask contents, so each gets the ones its sparse mode asks for.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_batches import HEADS, KEY_HEADS, PADDED, segments, sizes
from strategies import patterns
from torch import Tensor

from collate_npu import CollateError, Pattern, Segments, UnsupportedFormError
from collate_npu.kernels.fusion_attention import (
    check_contract,
    contract_breaches,
    fusion_attention_kwargs,
    prefix_triangle,
    triangle,
)
from collate_npu.kernels.fusion_attention.geometry import UNLIMITED, outside_band, outside_prefix

# --- the vendor's cases

with (Path(__file__).parents[2] / "data" / "npu-mask-cases.csv").open(encoding="utf-8", newline="") as facts:
    CASES = list(csv.DictReader(facts))

# Accepted by the operator, refused here: the end of the case's source, and this library's stricter rules.
STRICTER = {
    "FullCore_SpecCase_001": {"tnd-packed-mask"},
    "FullCore_Case_009": {"prefix-ignored"},
    "FullCore_Case_013": {"compressed-as-dense"},
    "SpecCore_Case_013": {"none-is-full"},
    "SpecCore_Case_025": {"dense-as-compressed"},
    "SpecCore_Case_027": {"dense-as-compressed"},
    "SpecCore_Case_037": {"lists-disagree"},
    "varlen_cov_nomask_causal_path": {"compressed-as-dense"},
    "varlen_cov_band_left_up_causal_valid": {"leading-zero"},
    "when B == Sq == Skv": {"rows-or-queries"},
    "becomes full attention": {"none-is-full"},
    "full attention per sequence": {"none-is-full"},
    "(var_len_score.h:354,376)": {"tnd-4d"},
    "in mode 5 only turns sparsity off": {"prefix-ignored"},
}


def arguments(case: dict[str, str]) -> tuple[dict[str, Any], dict[str, int]]:
    """The case as keyword arguments and sizes."""
    kwargs: dict[str, Any] = {
        "input_layout": case["layout"],
        "sparse_mode": int(case["sparse_mode"]),
        "pre_tockens": int(case["pre"]),
        "next_tockens": int(case["next"]),
    }
    for name in ("prefix", "actual_seq_qlen", "actual_seq_kvlen"):
        kwargs[name] = json.loads(case[name]) if case[name] else None
    dims = {name: int(case[name]) for name in ("B", "Sq", "Skv", "D")}
    for size, name in (("Tq", "actual_seq_qlen"), ("Tkv", "actual_seq_kvlen")):
        if kwargs[name]:
            dims[size] = max(kwargs[name])
    kwargs["atten_mask"] = contents(case, kwargs)
    return kwargs, dims | {"N": int(case["N1"]), "Nkv": int(case["N2"])}


def contents(case: dict[str, str], kwargs: dict[str, Any]) -> Tensor | None:
    if case["atten_mask_shape"] == "None":
        return None
    shape, dtype, mode = json.loads(case["atten_mask_shape"]), getattr(torch, case["dtype"]), kwargs["sparse_mode"]
    if shape == [2048, 2048] and mode in (2, 3, 4, 7, 8):
        return triangle().to(dtype)
    if shape == [3072, 2048]:
        return prefix_triangle().to(dtype)
    masked = torch.zeros(shape, dtype=torch.bool)
    if mode == 0:
        masked |= outside_band(*shape[-2:], kwargs["pre_tockens"], kwargs["next_tockens"])
    if mode == 5 and kwargs["prefix"] and masked.ndim == 4 and len(kwargs["prefix"]) == shape[0]:
        for b, n in enumerate(kwargs["prefix"]):
            masked[b] |= outside_prefix(*shape[-2:], n)
    return masked.to(dtype)


def name_of(case: dict[str, str]) -> str:
    return f"{case['layout']}-mode{case['sparse_mode']}-{case['source'].split('/')[-1][-40:]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_vendors_verdict_holds(case: dict[str, str]) -> None:
    kwargs, dims = arguments(case)
    found = contract_breaches(kwargs, **dims)
    if case["verdict"] == "REJECT":
        assert found, "the operator refuses this"
        assert not any(breach.silent for breach in found)
    else:
        stricter = [rules for end, rules in STRICTER.items() if case["source"].endswith(end)]
        assert {breach.rule for breach in found} == (stricter[0] if stricter else set())
        assert all(breach.silent for breach in found)


def test_the_facts_are_all_there() -> None:
    verdicts = [case["verdict"] for case in CASES]
    assert (verdicts.count("REJECT"), verdicts.count("ACCEPT")) == (31, 54)
    assert all(any(case["source"].endswith(end) for case in CASES) for end in STRICTER)


# --- what we make is taken, what is near it is not


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_everything_this_library_makes_is_accepted(data: st.DataObject) -> None:
    batch = data.draw(segments())
    pattern = data.draw(patterns(batch.num_sequences))
    layout = data.draw(st.sampled_from([*PADDED, "TND"]))
    operator = data.draw(st.sampled_from(["npu_fusion_attention", "npu_fusion_attention_v3"]))
    try:
        kwargs = fusion_attention_kwargs(batch, pattern=pattern, layout=layout, operator=operator)
    except UnsupportedFormError:
        return
    check_contract(kwargs, **sizes(batch, kwargs))


def padded(batch: Segments, **changes: Any) -> tuple[str, ...]:
    """Rules broken by the dense call of this batch with some arguments changed."""
    kwargs = fusion_attention_kwargs(batch, pattern="bidirectional") | changes
    return rules(kwargs, sizes(batch, kwargs))


def rules(kwargs: dict[str, Any], dims: dict[str, int]) -> tuple[str, ...]:
    found = contract_breaches(kwargs, **dims)
    if found:
        with pytest.raises(UnsupportedFormError) as error:
            check_contract(kwargs, **dims)
        assert all(breach.remedy in str(error.value) and breach.source in str(error.value) for breach in found)
    return tuple(breach.rule for breach in found)


@st.composite
def rows(draw: st.DrawFn) -> Segments:
    """Two or more columns, some padding in each batch: the dense form."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    return Segments.from_lengths(lengths, max(lengths) + draw(st.integers(1, 3)), "left")


@settings(max_examples=200, deadline=None)
@given(rows(), st.data())
def test_a_mask_in_a_foreign_form_is_refused(batch: Segments, data: st.DataObject) -> None:
    B, S = batch.shape
    dense = fusion_attention_kwargs(batch, pattern="bidirectional")["atten_mask"]
    assert padded(batch, atten_mask=dense) == ()
    assert padded(batch, atten_mask=~batch.keep) in (("mask-shape",), ("rows-or-queries",))
    assert padded(batch, atten_mask=~batch.keep[:, None, None]) == ("mask-shape",)
    assert padded(batch, atten_mask=dense[:, 0]) == ("mask-rank",)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8):
        assert padded(batch, atten_mask=dense.to(dtype)) == ("mask-dtype",)
    assert padded(batch, sparse_mode=data.draw(st.sampled_from([2, 3, 4]))) == ("compressed-shape",)
    assert padded(batch, sparse_mode=6, prefix=[0] * B) == ("compressed-shape",)
    compressed = data.draw(st.sampled_from([0, 1]))
    assert padded(batch, atten_mask=triangle(), sparse_mode=compressed) == ("mask-shape",)
    turned = dense.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert padded(batch, atten_mask=turned) == ("not-contiguous",)
    assert padded(batch, atten_mask=dense[:, :, :1].expand(B, 1, S, S)) == ("not-contiguous",)
    assert padded(batch, atten_mask=dense.expand(B, KEY_HEADS, S, S)) == ("mask-shape",)
    assert padded(batch, atten_mask=dense.repeat(1, HEADS, 1, 1)) == ()
    assert padded(batch, atten_mask=dense.to(torch.uint8)) == ()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from(["causal", "bidirectional"]))
def test_packed_lists_that_are_off_are_refused(lengths: list[int], pattern: str) -> None:
    batch = Segments.from_lengths(lengths)
    kwargs = fusion_attention_kwargs(batch, layout="TND", pattern=pattern)
    dims, ends = sizes(batch, kwargs), kwargs["actual_seq_qlen"]

    def both(values: list[int]) -> tuple[str, ...]:
        changed = kwargs | {"actual_seq_qlen": values, "actual_seq_kvlen": values}
        return tuple(sorted(set(rules(changed, dims | {"B": len(values)}))))

    longest = max(lengths)
    assert both(ends) == ()
    assert both([0, *ends]) == (), "one more, empty sequence"
    assert both([0, 0, *ends]) == ()
    unknown = {name: size for name, size in dims.items() if name not in ("Tq", "Tkv")}
    assert rules(kwargs, unknown) == ("tokens-unknown", "tokens-unknown")
    assert both([*ends, 0, 0]) == (), "documented: trailing zeros are unused slots"
    assert "unused-tail" in rules(kwargs, dims | {"Tq": ends[-1] + 1})
    assert rules(kwargs, dims | {"Tkv": ends[-1] - 1}) == ("tnd-total",)
    assert rules(kwargs | {"actual_seq_kvlen": None}, dims) == ("tnd-lists",)
    assert rules(kwargs, dims | {"Sq": longest + 1}) == ("lists-disagree",)
    if len(ends) > 1:
        assert "falling-ends" in both(ends[::-1])
        assert rules(kwargs | {"actual_seq_kvlen": ends[1:]}, dims) == ("tnd-lists",)
    blocked = torch.zeros(longest, longest, dtype=torch.bool)
    blocked[0] = True
    shared = kwargs | {"atten_mask": blocked, "sparse_mode": 1}
    assert "empty-row" in rules(shared, dims)
    assert "empty-row" in rules(shared | {"inner_precise": 2}, dims), "not even inner_precise helps under TND"


# --- the list of what the operator takes in silence, one by one

ROWS, WIDTH = 3, 6
DIMS = {"B": ROWS, "N": HEADS, "Nkv": KEY_HEADS, "Sq": WIDTH, "Skv": WIDTH, "D": 8}
PACKED = {"input_layout": "TND", "actual_seq_qlen": [2, 8], "actual_seq_kvlen": [2, 8]}
PACKED_DIMS = DIMS | {"B": 2, "Tq": 8, "Tkv": 8}
LEADING = PACKED | {"actual_seq_qlen": [0, 2, 8], "actual_seq_kvlen": [0, 2, 8]}
LEADING_DIMS = PACKED_DIMS | {"B": 3}

WIDE = PACKED | {"actual_seq_qlen": [2, 4], "actual_seq_kvlen": [6, 12]}
WIDE_DIMS = DIMS | {"B": 2, "Sq": 2, "Skv": 6, "Tq": 4, "Tkv": 12}


def causal_mask(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool).triu(1)


SILENT = {
    "1 None in mode 1": ({"sparse_mode": 1}, {}, "none-is-full"),
    "1 None in mode 2": ({"sparse_mode": 2}, {}, "none-is-full"),
    "1 None in mode 3": ({"sparse_mode": 3}, {}, "none-is-full"),
    "1 None with causal tokens": ({"next_tockens": 0}, {}, "none-is-full"),
    "1 None with a window": ({"pre_tockens": 2}, {}, "none-is-full"),
    "1 None in mode 3, TND": (PACKED | {"sparse_mode": 3}, PACKED_DIMS, "none-is-full"),
    "1 None in mode 7, TND": (PACKED | {"sparse_mode": 7}, PACKED_DIMS, "none-is-full"),
    "1 a mask of rank 0": ({"atten_mask": torch.tensor(True), "sparse_mode": 2}, {}, "none-is-full"),
    "2 [B, S] with B = S": ({"atten_mask": causal_mask(WIDTH, WIDTH)}, {"B": WIDTH}, "rows-or-queries"),
    "3 [B, 1, 1, S] with one query": (
        {"atten_mask": torch.zeros(ROWS, 1, 1, WIDTH, dtype=torch.bool)}, {"Sq": 1}, "one-query"),
    "4 triangle of zeros": ({"atten_mask": triangle() & False, "sparse_mode": 3}, {}, "compressed-contents"),
    "4 triangle inverted": ({"atten_mask": ~triangle(), "sparse_mode": 2}, {}, "compressed-contents"),
    "4 triangle transposed": ({"atten_mask": triangle().T.contiguous(), "sparse_mode": 3}, {}, "compressed-contents"),
    "4 band inverted": (
        {"atten_mask": ~triangle(), "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0}, {}, "compressed-contents"),
    "a band without tokens": ({"atten_mask": triangle(), "sparse_mode": 4}, {}, "tokens-left-out"),
    "a band without next": ({"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 2}, {}, "tokens-left-out"),
    "a band without pre": ({"atten_mask": triangle(), "sparse_mode": 4, "next_tockens": 0}, {}, "tokens-left-out"),
    "a packed band without next": (
        PACKED | {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 2}, PACKED_DIMS, "tokens-left-out"),
    "mode 8 without next": (
        PACKED | {"atten_mask": triangle(), "sparse_mode": 8, "pre_tockens": 2}, PACKED_DIMS, "tokens-left-out"),
    "a mask without contents": (
        {"atten_mask": torch.zeros(1, 1, WIDTH, WIDTH, dtype=torch.bool, device="meta")}, {}, "no-contents"),
    "a prefix in mode 3": ({"atten_mask": triangle(), "sparse_mode": 3, "prefix": [1] * ROWS}, {}, "prefix-unread"),
    "a prefix in mode 1": ({"atten_mask": causal_mask(1, 1, WIDTH, WIDTH), "prefix": [1] * ROWS}, {}, "prefix-unread"),
    "4 triangle with the diagonal": (
        {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(), "sparse_mode": 3}, {}, "compressed-contents"),
    "4 prefix triangle inverted": (
        {"atten_mask": ~prefix_triangle(), "sparse_mode": 6, "prefix": [0] * ROWS}, {}, "compressed-contents"),
    "4 triangle inverted, TND": (
        PACKED | {"atten_mask": ~triangle(), "sparse_mode": 3}, PACKED_DIMS, "compressed-contents"),
    "5 inverted causal": ({"atten_mask": ~causal_mask(ROWS, 1, WIDTH, WIDTH)}, {}, "polarity"),
    "5 inverted causal, shared": ({"atten_mask": ~causal_mask(1, 1, WIDTH, WIDTH), "sparse_mode": 1}, {}, "polarity"),
    "6 triangle in mode 0": ({"atten_mask": triangle()}, {"Sq": 2048, "Skv": 2048}, "compressed-as-dense"),
    "6 dense in mode 2": (
        {"atten_mask": causal_mask(1, 1, 2048, 2048), "sparse_mode": 2},
        {"B": 1, "Sq": 2048, "Skv": 2048}, "dense-as-compressed"),
    "7 tokens narrower than the mask": (
        {"atten_mask": causal_mask(1, 1, WIDTH, WIDTH), "pre_tockens": 1}, {}, "sparsity-disagrees"),
    "7 causal tokens over a full mask": (
        {"atten_mask": torch.zeros(1, 1, WIDTH, WIDTH, dtype=torch.bool), "next_tockens": 0}, {}, "sparsity-disagrees"),
    "7 prefix smaller than the mask": (
        {"atten_mask": torch.zeros(ROWS, 1, WIDTH, WIDTH, dtype=torch.bool), "sparse_mode": 5, "prefix": [1] * ROWS},
        {}, "sparsity-disagrees"),
    "8 4-D under TND": (
        PACKED | {"atten_mask": causal_mask(2, 1, WIDTH, WIDTH)}, PACKED_DIMS, "tnd-4d"),
    "8 all tokens under TND": (PACKED | {"atten_mask": causal_mask(8, 8)}, PACKED_DIMS, "tnd-packed-mask"),
    "9 leading 0 and prefixes": (
        LEADING | {"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": [0, 1, 1]}, LEADING_DIMS, "leading-zero"),
    "9 leading 0 and the first sequence cut": (
        LEADING | {"atten_mask": triangle(), "sparse_mode": 8, "next_tockens": 0}, LEADING_DIMS, "leading-zero"),
    "9 leading 0 past the limit": (
        PACKED | {"actual_seq_qlen": [*range(1025)], "actual_seq_kvlen": [*range(1025)]},
        {"B": 1025, "Sq": 1, "Skv": 1}, "documented-limit"),
    "packed, but how many tokens": (PACKED, {"B": 2}, "tokens-unknown"),
    "9 lengths for ends": (
        PACKED | {"actual_seq_qlen": [6, 2], "actual_seq_kvlen": [6, 2]}, PACKED_DIMS | {"Tq": 6, "Tkv": 6}, "falling-ends"),
    "9 a tail in no sequence": (PACKED, PACKED_DIMS | {"Tq": 9, "Tkv": 9}, "unused-tail"),
    "10 a prefix beyond the keys in mode 5": (
        {"atten_mask": causal_mask(ROWS, 1, WIDTH, WIDTH), "sparse_mode": 5, "prefix": [7, 0, 0]}, {}, "prefix-ignored"),
    "10 too few prefixes in mode 5": (
        {"atten_mask": causal_mask(ROWS, 1, WIDTH, WIDTH), "sparse_mode": 5, "prefix": [1]}, {}, "prefix-ignored"),
    "11 padding_mask": ({"padding_mask": torch.zeros(ROWS, WIDTH)}, {}, "padding-mask"),
    "fully blocked rows": (
        {"atten_mask": causal_mask(1, 1, WIDTH, WIDTH) | torch.eye(WIDTH, dtype=torch.bool), "sparse_mode": 1},
        {}, "empty-row"),
    "a shared mask that leaves a short sequence no key": (
        PACKED | {"atten_mask": torch.arange(6)[:, None] + torch.arange(6) < 2, "sparse_mode": 1}, PACKED_DIMS, "empty-row"),
    "queries without keys": (
        PACKED | {"actual_seq_kvlen": [2, 2]}, PACKED_DIMS | {"Tkv": 2, "Skv": 2}, "no-keys"),
    "length lists outside TND": ({"actual_seq_qlen": [2, 8], "actual_seq_kvlen": [2, 8]}, {}, "lists-outside-tnd"),
    "pse": ({"pse": torch.zeros(1)}, {}, "pse"),
    "uint8 255": (
        {"atten_mask": causal_mask(1, 1, WIDTH, WIDTH).to(torch.uint8) * 255}, {}, "mask-values"),
    "too many heads": ({}, {"N": 512}, "documented-limit"),
    "too long": ({}, {"Sq": 2**20 + 1, "Skv": 2**20 + 1}, "documented-limit"),
    "too many sequences": (
        PACKED | {"actual_seq_qlen": [*range(1, 1026)], "actual_seq_kvlen": [*range(1, 1026)]},
        {"B": 1025, "Sq": 1, "Skv": 1}, "documented-limit"),
    "too many prefixes": (
        {"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": [0] * 33}, {"B": 33}, "documented-limit"),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_the_operator_takes_in_silence_is_refused(name: str) -> None:
    kwargs, dims, rule = SILENT[name]
    found = contract_breaches({"input_layout": "BSND"} | kwargs, **DIMS | dims)
    assert rule in {breach.rule for breach in found}
    assert all(breach.silent for breach in found), "this one is loud"


def test_the_messages_say_what_arrived_the_rule_the_remedy_and_the_source() -> None:
    with pytest.raises(UnsupportedFormError) as error:
        check_contract({"input_layout": "BSND", "atten_mask": ~triangle(), "sparse_mode": 2}, **DIMS)
    assert str(error.value) == (
        "npu_fusion_attention:\n[compressed-contents] atten_mask: got inverted: True = keep. sparse_mode 2 reads its mask "
        "as one that is True above the diagonal; contents are never checked. Use geometry.triangle(). (PD:554-606, D)"
    )


LOUD = {
    "pre_tokens, as v2 spells it": ({"pre_tokens": 1}, {}, "argument"),
    "no layout": ({"input_layout": None}, {}, "layout"),
    "mode 7 outside TND": ({"sparse_mode": 7}, {}, "sparse-mode"),
    "mode 5 under TND": (PACKED | {"sparse_mode": 5}, PACKED_DIMS, "sparse-mode"),
    "heads that do not divide": ({}, {"N": 6, "Nkv": 4}, "heads"),
    "head size": ({}, {"D": 769}, "head-size"),
    "keep_prob 0": ({"keep_prob": 0.0}, {}, "keep-prob"),
    "mode 5 with one mask for all rows": (
        {"atten_mask": causal_mask(1, 1, WIDTH, WIDTH), "sparse_mode": 5, "prefix": [0] * ROWS}, {}, "prefix-shape"),
    "mode 8 with too narrow a band": (
        PACKED | {"atten_mask": triangle(), "sparse_mode": 8, "pre_tockens": 1}, PACKED_DIMS, "outer-cut"),
    "mode 8 with a band past the corner": (
        PACKED | {"atten_mask": triangle(), "sparse_mode": 8, "next_tockens": -1}, PACKED_DIMS, "outer-cut"),
    "a band before the first key": (
        {"atten_mask": triangle(), "sparse_mode": 4, "next_tockens": -WIDTH}, {}, "tokens"),
    "a band behind the last key": (
        {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": -WIDTH, "next_tockens": WIDTH}, {}, "tokens"),
    "a band that ends before it begins": (
        {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 1, "next_tockens": -2}, {}, "tokens"),
    "a band that begins behind its end": (
        {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": -2, "next_tockens": 1}, {}, "tokens"),
    "a band that misses, from the bottom-right": (
        {"atten_mask": triangle(), "sparse_mode": 4, "next_tockens": -5}, {"Sq": 9, "Skv": 5}, "tokens"),
    "packed mode 4, pre negative": (
        WIDE | {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": -1}, WIDE_DIMS, "tokens"),
    "packed mode 4, empty band": (
        WIDE | {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 1, "next_tockens": -2}, WIDE_DIMS, "tokens"),
    "packed mode 4, a query before the first key": (
        WIDE | {"atten_mask": triangle(), "sparse_mode": 4, "next_tockens": -5}, WIDE_DIMS, "tokens"),
    "packed mode 0, next negative": (
        PACKED | {"atten_mask": causal_mask(WIDTH, WIDTH), "next_tockens": -1}, PACKED_DIMS, "tokens"),
    "packed mode 0, empty band": (
        WIDE | {"atten_mask": causal_mask(2, 6), "pre_tockens": -2, "next_tockens": 1}, WIDE_DIMS, "tokens"),
    "mode 7 past the corner": (
        PACKED | {"atten_mask": triangle(), "sparse_mode": 7, "next_tockens": 1}, PACKED_DIMS, "outer-cut"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOUD)
def test_what_the_operator_refuses_is_refused_first(name: str) -> None:
    kwargs, dims, rule = LOUD[name]
    found = contract_breaches({"input_layout": "BSND"} | kwargs, **DIMS | dims)
    assert {breach.rule for breach in found} == {rule}
    assert not any(breach.silent for breach in found)


# --- what must not be refused


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"pre_tockens": 65536, "next_tockens": 65536},
        {"atten_mask": causal_mask(WIDTH, WIDTH)},
        {"atten_mask": causal_mask(1, 1, WIDTH, WIDTH), "next_tockens": 0},
        {"atten_mask": causal_mask(ROWS, HEADS, WIDTH, WIDTH).to(torch.uint8), "sparse_mode": 1},
        {"atten_mask": triangle().to(torch.uint8), "sparse_mode": 2},
        {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1},
        {"atten_mask": prefix_triangle(), "sparse_mode": 6, "prefix": torch.tensor([0, 3, 6])},
        {"atten_mask": outside_band(WIDTH, WIDTH, 3, -1)[None, None], "pre_tockens": 3, "next_tockens": -1},
        {"scale": 0.5, "keep_prob": 0.9, "seed": 1},
    ],
)
def test_documented_calls_pass(kwargs: dict[str, Any]) -> None:
    check_contract({"input_layout": "BNSD"} | kwargs, **DIMS)


def test_a_band_of_mode_4_counts_from_the_bottom_right() -> None:
    kwargs = {"input_layout": "BNSD", "atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 10, "next_tockens": -5}
    check_contract(kwargs, **DIMS | {"Sq": 5, "Skv": 9})


def test_packed_bands_pass() -> None:
    band = {"atten_mask": triangle(), "sparse_mode": 4, "pre_tockens": 4, "next_tockens": -2}
    check_contract(WIDE | band, **WIDE_DIMS)
    for mode in (7, 8):
        check_contract(WIDE | band | {"sparse_mode": mode, "pre_tockens": 6, "next_tockens": -4}, **WIDE_DIMS)


def test_a_band_that_empties_rows_is_noticed_by_the_operator_itself() -> None:
    kwargs = {
        "input_layout": "BSND",
        "pre_tockens": 3,
        "next_tockens": -1,
        "atten_mask": outside_band(6, 6, 3, -1)[None, None],
    }
    assert kwargs["atten_mask"].all(-1).any()
    check_contract(kwargs, **DIMS)
    blocked = kwargs | {"pre_tockens": UNLIMITED, "next_tockens": UNLIMITED}
    assert "empty-row" in {breach.rule for breach in contract_breaches(blocked, **DIMS)}


def test_masks_row_and_column_of_padding_pass_with_inner_precise() -> None:
    """verl's mask on NPU blocks padded rows as well as padded keys."""
    keep = Segments.from_lengths([2, 6, 4]).keep
    blocked = causal_mask(ROWS, 1, WIDTH, WIDTH) | ~keep[:, None, :, None] | ~keep[:, None, None]
    kwargs = {"input_layout": "BSND", "atten_mask": blocked, "sparse_mode": 1}
    assert {breach.rule for breach in contract_breaches(kwargs, **DIMS)} == {"empty-row"}
    check_contract(kwargs | {"inner_precise": 2}, **DIMS)


def test_chunks_longer_than_the_batch_and_windows_pass() -> None:
    batch = Segments.from_lengths([2, 6, 4], side="left")
    for pattern in (Pattern.chunked(3), Pattern.sliding(2), Pattern.prefix([1, 6, 0])):
        check_contract(fusion_attention_kwargs(batch, pattern=pattern), **DIMS)


# --- leading zeros, limits, sizes, values


@pytest.mark.parametrize("mode", [2, 3])
def test_mindspeeds_packed_call_passes(mode: int) -> None:
    """cu_seqlens with its leading 0, and tokens that modes 2 and 3 do not read (MindSpeed's `pre_tockens` is 65536)."""
    batch = Segments.from_lengths([[2, 6]])
    tokens = {"pre_tockens": 65536, "next_tockens": 0}
    kwargs = LEADING | tokens | {"atten_mask": triangle(), "sparse_mode": mode}
    check_contract(kwargs, **LEADING_DIMS)
    check_contract(kwargs, N=HEADS, Nkv=KEY_HEADS, D=8, segments=batch)
    lists = {name: torch.tensor([0, 2, 8]) for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    check_contract(kwargs | lists, N=HEADS, Nkv=KEY_HEADS, D=8, segments=batch)


@pytest.mark.parametrize("mode", [4, 8])
def test_tokens_that_are_passed_are_taken_at_their_word(mode: int) -> None:
    """Unlimited tokens see the future; whoever writes that may mean it, and the Segments say whether."""
    kwargs = PACKED | {"atten_mask": triangle(), "sparse_mode": mode, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED}
    check_contract(kwargs, **PACKED_DIMS)
    found = contract_breaches(kwargs, N=HEADS, Nkv=KEY_HEADS, D=8, segments=Segments.from_lengths([2, 6]))
    assert [breach.rule for breach in found] == ["differs-from-segments"]


def with_prefixes(count: int) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """One call of each mode that reads a prefix, for rows of two tokens."""
    dims = DIMS | {"B": count, "Sq": 2, "Skv": 2}
    ends = [2 * n for n in range(1, count + 1)]
    lists = {"input_layout": "TND", "actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    prefix = {"prefix": [1] * count}
    compressed = prefix | {"atten_mask": prefix_triangle(), "sparse_mode": 6}
    return [
        ({"input_layout": "BSND"} | prefix | {"atten_mask": causal_mask(count, 1, 2, 2), "sparse_mode": 5}, dims),
        ({"input_layout": "BSND"} | compressed, dims),
        (lists | compressed, dims | {"Tq": 2 * count, "Tkv": 2 * count}),
    ]


def test_32_prefixes_pass_and_33_do_not() -> None:
    for kwargs, dims in with_prefixes(32):
        check_contract(kwargs, **dims)
    for kwargs, dims in with_prefixes(33):
        assert [(b.rule, b.got) for b in contract_breaches(kwargs, **dims)] == [("documented-limit", "33")]
        check_contract(kwargs | {"prefix": None, "sparse_mode": 2, "atten_mask": triangle()}, **dims)


def test_sizes_that_the_lists_say_need_not_be_given_and_others_must() -> None:
    kwargs = PACKED | {"atten_mask": triangle(), "sparse_mode": 3}
    check_contract(kwargs, N=HEADS, Nkv=KEY_HEADS, D=8, Tq=8, Tkv=8)
    padded = {"input_layout": "BSND", "atten_mask": triangle(), "sparse_mode": 3}
    with pytest.raises(CollateError, match="Pass all three, or segments"):
        check_contract(padded, N=HEADS, Nkv=KEY_HEADS, D=8, B=2, Sq=3)
    check_contract(padded, N=HEADS, Nkv=KEY_HEADS, D=8, B=2, Sq=3, Skv=3)
    check_contract(padded, N=HEADS, Nkv=KEY_HEADS, D=8, segments=Segments.from_lengths([2, 3]))


@pytest.mark.parametrize(
    "values",
    [
        {"sparse_mode": 1.5},
        {"sparse_mode": None},
        {"sparse_mode": "3"},
        {"pre_tockens": 2.0},
        {"next_tockens": torch.tensor([1, 2])},
        {"actual_seq_qlen": [2.0, 8.0]},
        {"actual_seq_qlen": torch.tensor([2.0, 8.0])},
        {"actual_seq_kvlen": 8},
        {"actual_seq_kvlen": torch.tensor([[2, 8]])},
        {"prefix": "12"},
        {"atten_mask": [[False]]},
        {"atten_mask": triangle().numpy()},
    ],
)
def test_values_that_the_schema_does_not_take_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(CollateError, match=next(iter(values))):
        check_contract(PACKED | values, **PACKED_DIMS)
