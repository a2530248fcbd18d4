"""`check_call` takes what the operator computes rightly, and nothing else.

The facts of `data/npu-mask-cases.csv` are the vendor's own test expectations and cases derived from the tiling code, with
the line of each rule. A case has no mask contents, so each gets the ones its sparse mode asks for.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from npu_batches import HEADS, KEY_HEADS
from torch import Tensor

from collate_npu import CollateError
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.check import call_breaches, check_call
from collate_npu.kernels.fusion_attention import prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.contract import COMPRESSED, UNLIMITED, outside_band, outside_prefix

NAME = "npu_fusion_attention"

# --- the vendor's cases

with (Path(__file__).parents[2] / "data" / "npu-mask-cases.csv").open(encoding="utf-8", newline="") as facts:
    CASES = list(csv.DictReader(facts))

# Accepted by the operator, refused here: the end of the case's source, and this library's stricter rules.
STRICTER = {
    "FullCore_Case_009": {"prefix-ignored"},
    "SpecCore_Case_013": {"none-is-full"},
    "SpecCore_Case_025": {"dense-as-compressed"},
    "SpecCore_Case_027": {"dense-as-compressed"},
    "varlen_cov_band_left_up_causal_valid": {"leading-zero"},
    "when B == Sq == Skv": {"rows-or-queries"},
    "becomes full attention": {"none-is-full"},
    "full attention per sequence": {"none-is-full"},
    "(var_len_score.h:354,376)": {"tnd-4d"},
    "in mode 5 only turns sparsity off": {"prefix-ignored"},
}


LEFT_TO_THE_CARD = (
    "both tokens neg",
    "next negative",
    "pre negative",
    "TND mode 0: ",
    "TND mode 3: ",
    "TND mode 4: ",
    "mode 7: ",
    "mask dtype ",
)
"""How rules begin that the host code keeps by itself, and that leave a call readable."""


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
    prefixes = kwargs["prefix"] or ()
    if mode == 5 and len(shape) == 4 and len(prefixes) == shape[0]:
        masked |= torch.stack([outside_prefix(*shape[-2:], n) for n in prefixes])[:, None]
    return masked.to(dtype)


def name_of(case: dict[str, str]) -> str:
    return f"{case['layout']}-mode{case['sparse_mode']}-{case['source'].split('/')[-1][-40:]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_vendors_verdict_holds(case: dict[str, str]) -> None:
    kwargs, dims = arguments(case)
    found = call_breaches(NAME, kwargs, **dims)
    if case["verdict"] == "REJECT":
        left = case["rule"].startswith(LEFT_TO_THE_CARD)
        assert left or [breach.rule for breach in found] == ["refused"]
    else:
        stricter = [rules for end, rules in STRICTER.items() if case["source"].endswith(end)]
        assert {breach.rule for breach in found} == (stricter[0] if stricter else set())


def test_the_facts_are_all_there() -> None:
    verdicts = [case["verdict"] for case in CASES]
    assert (verdicts.count("REJECT"), verdicts.count("ACCEPT")) == (31, 54)
    assert all(any(case["source"].endswith(end) for case in CASES) for end in STRICTER)


# --- calls that are wrong, one by one

ROWS, WIDTH = 3, 6
TRIANGLE, PREFIX = triangle(), prefix_triangle()


def causal_mask(*shape: int) -> Tensor:
    return torch.ones(*(shape or (1, 1, WIDTH, WIDTH)), dtype=torch.bool).triu(1)


def zeros(*shape: int, **settings: Any) -> Tensor:
    return torch.zeros(*(shape or (1, 1, WIDTH, WIDTH)), dtype=torch.bool, **settings)


def lists(*ends: int) -> dict[str, Any]:
    return {"actual_seq_qlen": [*ends], "actual_seq_kvlen": [*ends]}


DIMS = {"B": ROWS, "N": HEADS, "Nkv": KEY_HEADS, "Sq": WIDTH, "Skv": WIDTH, "D": 8}
PADDED = ({"input_layout": "BSND"}, DIMS)
PACKED = ({"input_layout": "TND", **lists(2, 8)}, DIMS | {"B": 2, "Tq": 8, "Tkv": 8})
LEADING = (PACKED[0] | lists(0, 2, 8), PACKED[1] | {"B": 3})
WIDE = (
    {"input_layout": "TND", "actual_seq_qlen": [2, 4], "actual_seq_kvlen": [6, 12]},
    DIMS | {"B": 2, "Sq": 2, "Skv": 6, "Tq": 4, "Tkv": 12},
)

BAND = {"atten_mask": TRIANGLE, "sparse_mode": 4}
MINDSPEED = {"atten_mask": TRIANGLE, "pre_tockens": 65536, "next_tockens": 0}
"""Its packed call: cu_seqlens with their leading 0, and tokens that modes 2 and 3 do not read."""
OBLONG = (PADDED[0], DIMS | {"Sq": 5, "Skv": 9})
BY_ROW, EYE = causal_mask(ROWS, 1, WIDTH, WIDTH), torch.eye(WIDTH, dtype=torch.bool)

LAYOUTS = ("BSND", "BNSD", "BSH", "SBH", "TND")
CALLS: list[tuple[Any, ...]] = [
    # rule, base, arguments, sizes: what the operator takes without a word
    ("none-is-full", PADDED, {"sparse_mode": 3}),
    ("none-is-full", OBLONG, {"pre_tockens": 3}),
    ("none-is-full", OBLONG, {"next_tockens": 7}),
    ("none-is-full", PACKED, {"sparse_mode": 3}),
    ("none-is-full", PADDED, {"atten_mask": torch.tensor(True), "sparse_mode": 2}),
    ("rows-or-queries", PADDED, {"atten_mask": causal_mask(2, 2)}, {"B": 2, "Sq": 2, "Skv": 2}),
    ("tokens-left-out", PADDED, {"atten_mask": TRIANGLE, "sparse_mode": 4}),
    ("tokens-left-out", PADDED, {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tockens": 2}),
    ("tokens-left-out", PACKED, {"atten_mask": TRIANGLE, "sparse_mode": 8, "pre_tockens": 2}),
    ("no-contents", PADDED, {"atten_mask": zeros(device="meta")}),
    ("polarity sparsity-disagrees empty-row", PADDED, {"atten_mask": ~BY_ROW, "next_tockens": 0}),
    ("dense-as-compressed", PADDED, {"atten_mask": TRIANGLE[None, None], "sparse_mode": 2}, {"Sq": 2048, "Skv": 2048}),
    ("sparsity-disagrees", PADDED, {"atten_mask": causal_mask(), "pre_tockens": WIDTH - 2}),
    ("sparsity-disagrees", PADDED, {"atten_mask": zeros(), "next_tockens": WIDTH - 2}),
    ("sparsity-disagrees", PADDED, {"atten_mask": zeros(ROWS, 1, WIDTH, WIDTH), "sparse_mode": 5, "prefix": [1] * ROWS}),
    ("tnd-4d", PACKED, {"atten_mask": causal_mask(2, 1, WIDTH, WIDTH)}),
    ("leading-zero", LEADING, {"atten_mask": TRIANGLE, "sparse_mode": 8, "next_tockens": 0}),
    ("tokens-unknown", PACKED, {}, {"Tq": None, "Tkv": None}),
    ("falling-ends", PACKED, lists(6, 2), {"Tq": 6, "Tkv": 6}),
    ("unused-tail", PACKED, {}, {"Tq": 9, "Tkv": 9}),
    ("prefix-ignored", PADDED, {"atten_mask": BY_ROW, "sparse_mode": 5, "prefix": [7, 0, 0]}),
    ("prefix-ignored", PADDED, {"atten_mask": BY_ROW, "sparse_mode": 5, "prefix": [1]}),
    ("polarity empty-row", PADDED, {"atten_mask": causal_mask() | EYE, "sparse_mode": 1}),
    ("empty-row", PADDED, {"atten_mask": torch.cat([zeros(), ~zeros()])}, {"B": 2}),  # the last row alone
    ("polarity empty-row", PACKED, {"atten_mask": ~TRIANGLE[:6, :6].flip(0), "sparse_mode": 1, "inner_precise": 2}),
    ("no-keys", PACKED, {"actual_seq_kvlen": [2, 2]}, {"Tkv": 2, "Skv": 2}),
    ("tensor-shape", PADDED, {"query": zeros(ROWS, HEADS, WIDTH, 8).float()}),
    ("tensor-shape", PADDED, {"value": zeros(ROWS, WIDTH, HEADS, 8).float()}),
    ("unread", PADDED, {"atten_mask": TRIANGLE, "sparse_mode": 3, "prefix": [1] * ROWS}),
    *(("unread", PADDED, {name: torch.zeros(ROWS, WIDTH)}) for name in ("padding_mask", "pse", "sink", "dropout_mask")),
    ("mask-values", PADDED, {"atten_mask": causal_mask().to(torch.uint8) * 2}),
    *((rule, PACKED, lists(*range(1, n + 1)), {"Tq": n, "Tkv": n}) for n, rule in ((20_000, ""), (20_001, "too-many"))),
    # compressed contents
    *(("compressed-contents", PACKED, {"sparse_mode": mode, "pre_tockens": 9, "next_tockens": 0, "atten_mask": mask}
        | ({"prefix": [0, 0]} if mode == 6 else {}))
      for mode in COMPRESSED for right in (PREFIX if mode == 6 else TRIANGLE,)
      for mask in (~right, right & False, right | True, right | (torch.arange(2048) == 0))),
    # what the operator refuses, and nothing can be read of; more of it in the vendor's cases
    ("refused", PADDED, {"atten_mask": zeros(ROWS, 1, 1, WIDTH)}),
    ("refused", PACKED, {"actual_seq_kvlen": None}),
    ("refused", PACKED, {"actual_seq_kvlen": [2, 4, 8]}),
    ("refused", PACKED, {}, {"Tkv": 7}),
    ("refused", PADDED, {"input_layout": "tnd"}),
    ("refused", PADDED, {"input_layout": None}),
    ("refused", PADDED, {"sparse_mode": 7}),
    ("refused", PADDED, {}, {"N": 6, "Nkv": 4}),
    ("refused", PADDED, {}, {"D": 0}),
    # documented calls
    ("", PADDED, {}),
    ("", PADDED, {}, {"B": 0}),
    ("", PADDED, {"input_layout": "bsnd"}),
    ("", PACKED, {"softmax_layout": "TND"}),
    ("", PADDED, {"value": zeros(ROWS, WIDTH, KEY_HEADS, 4).float()}),
    ("", OBLONG, {"pre_tockens": 4, "next_tockens": 8}),
    ("", OBLONG, {"atten_mask": zeros(5, 9)}, {"B": 9}),
    ("", PADDED, {"atten_mask": zeros(1, WIDTH)}, {"B": 1, "Sq": 1}),
    ("", PADDED, {"atten_mask": causal_mask(), "sparse_mode": 5, "prefix": [0]}, {"B": 1}),
    ("", PADDED, {"atten_mask": causal_mask(WIDTH, WIDTH)}),
    ("", PADDED, {"atten_mask": causal_mask(), "next_tockens": 0}),
    ("", PADDED, {"atten_mask": causal_mask(ROWS, HEADS, WIDTH, WIDTH).to(torch.uint8), "sparse_mode": 1}),
    ("", PADDED, {"atten_mask": TRIANGLE.to(torch.uint8), "sparse_mode": 2}),
    *(("", PADDED, BAND | {"pre_tockens": a, "next_tockens": b}) for a, b in ((2, 1), (-5, 5), (5, -5))),
    ("", PADDED, {"atten_mask": PREFIX, "sparse_mode": 6, "prefix": torch.tensor([0, 3, 6])}),
    ("", PADDED, {"scale": 0.5, "keep_prob": 0.9, "seed": 1}),
    ("", OBLONG, BAND | {"pre_tockens": 10, "next_tockens": -5}),  # a band of mode 4 counts from the bottom-right
    # one that empties rows is noticed by the operator itself
    ("", PADDED, {"atten_mask": outside_band(6, 6, 3, -1)[None, None], "pre_tockens": 3, "next_tockens": -1}),
    ("", PACKED, lists(0, 0, 2, 8)),
    ("", PACKED, lists(2, 8, 0, 0)),  # trailing zeros are unused slots
    ("", PACKED, BAND | {"pre_tockens": UNLIMITED, "next_tockens": UNLIMITED}),  # whoever writes that may mean it
    ("", PACKED, BAND | {"sparse_mode": 8, "next_tockens": UNLIMITED}),
    ("", PACKED, BAND | {"sparse_mode": 7, "next_tockens": 0}),
    ("", PACKED, BAND | {"pre_tockens": 0, "next_tockens": 0}),
    ("", PACKED, {"atten_mask": causal_mask(WIDTH, WIDTH), "next_tockens": 0}),
    ("", WIDE, BAND | {"pre_tockens": 4, "next_tockens": -4}),  # one key for every query is the narrowest
    ("", WIDE, {"atten_mask": outside_band(2, 6, -4, 4), "pre_tockens": -4, "next_tockens": 4}),
    *(("", WIDE, BAND | {"sparse_mode": mode, "pre_tockens": 6, "next_tockens": -4}) for mode in (7, 8)),
    *(("", LEADING, MINDSPEED | {"sparse_mode": mode}) for mode in (2, 3)),
    ("", LEADING, {"atten_mask": PREFIX, "sparse_mode": 6, "prefix": [0, 1, 1]}),  # one for the empty sequence too
]  # fmt: skip


def call_of(base: Any, changes: dict[str, Any], dims: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    return base[0] | changes, base[1] | (dims or {})


def tensors(layout: str, dims: dict[str, int]) -> dict[str, Any]:
    """query, key and head_num of these sizes, without memory."""
    B, D = dims["B"], dims["D"]

    def empty(S: int, T: int, N: int) -> Tensor:
        shapes = {"BSND": (B, S, N, D), "BNSD": (B, N, S, D), "BSH": (B, S, N * D), "SBH": (S, B, N * D), "TND": (T, N, D)}
        return torch.empty(shapes[layout], device="meta")

    query, key = empty(dims["Sq"], dims.get("Tq", 0), dims["N"]), empty(dims["Skv"], dims.get("Tkv", 0), dims["Nkv"])
    return {"query": query, "key": key, "head_num": dims["N"]}


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row[0])
def test_what_is_known_of_a_call_holds(row: Any) -> None:
    """Sizes are read off the tensors, where a call with them can be made."""
    rules, (kwargs, dims) = {*row[0].split()}, call_of(*row[1:])
    layout = str(kwargs["input_layout"])
    if layout.upper() in LAYOUTS and layout != "tnd" and dims["D"] and "tokens-unknown" not in rules:
        kwargs, dims = tensors(layout.upper(), dims) | kwargs, {}
    found = call_breaches(f"torch_npu.{NAME}", kwargs, **dims)
    assert {breach.rule for breach in found} == rules
    if not rules:
        check_call(NAME, kwargs, **dims)
        return
    with pytest.raises(UnsupportedFormError) as error:
        check_call(NAME, kwargs, **dims)
    assert all(breach.remedy in str(error.value) and breach.source in str(error.value) for breach in found)


def test_every_rule_is_in_the_table(rules_of: Callable[[str], set[str]]) -> None:
    of_segments = {"sizes-differ", "differs-from-segments", "scale"}
    assert {rule for row in CALLS for rule in row[0].split()} | of_segments == rules_of("fusion_attention")


FIRST_EMPTY = causal_mask() | EYE


@pytest.mark.parametrize(
    ("rule", "kwargs", "fact"),
    [
        ("sparsity-disagrees", {"atten_mask": zeros(), "pre_tockens": 2}, "pre 2"),
        ("sparsity-disagrees", {"atten_mask": zeros(3, 1, 6, 6), "sparse_mode": 5, "prefix": [1, 2, 3]}, "(1, 2, 3)"),
        ("empty-row", {"atten_mask": FIRST_EMPTY}, "got 1 "),  # a shared mask is counted once
        ("empty-row", {"atten_mask": FIRST_EMPTY[0, 0]}, "got 1 "),
        ("empty-row", {"atten_mask": FIRST_EMPTY.repeat(ROWS, 1, 1, 1)}, "got 3 "),
        ("refused", {"atten_mask": zeros(ROWS, WIDTH)}, "[6, 6] or [1, 1, 6, 6] or [3, 1, 6, 6]"),
        ("compressed-contents", {"atten_mask": TRIANGLE ^ (torch.arange(2048) == 2047), "sparse_mode": 3}, "got 2048 wrong"),
    ],
)
def test_a_message_carries_the_fact(rule: str, kwargs: dict[str, Any], fact: str) -> None:
    (found,) = (breach for breach in call_breaches(NAME, PADDED[0] | kwargs, **DIMS) if breach.rule == rule)
    assert fact in str(found)


def test_sizes_that_the_lists_say_need_not_be_given_and_others_must() -> None:
    heads, causal = {"N": HEADS, "Nkv": KEY_HEADS, "D": 8}, {"atten_mask": TRIANGLE, "sparse_mode": 3}
    check_call(NAME, PACKED[0] | causal, **heads, Tq=8, Tkv=8)
    with pytest.raises(CollateError, match="Pass all three, or segments"):
        check_call(NAME, PADDED[0] | causal, **heads, B=2, Sq=3)
    for size in ("B", "Sq", "N", "D"):
        with pytest.raises(CollateError, match=f"{size}: got -2"):
            check_call(NAME, PADDED[0], **PADDED[1] | {size: -2})


NO_VALUES: dict[str, list[Any]] = {
    "sparse_mode": [1.5, None, "3"],
    "pre_tockens": [2.0],
    "next_tockens": [torch.tensor([1, 2])],
    "actual_seq_qlen": [[2.0, 8.0], torch.tensor([2.0, 8.0])],
    "actual_seq_kvlen": [8, torch.tensor([[2, 8]])],
    "prefix": ["12"],
    "scale": ["0.5", None],
    "atten_mask": [[[False]], TRIANGLE.numpy()],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_VALUES.items() for value in values])
def test_values_that_the_schema_does_not_take_are_named(name: str, value: Any) -> None:
    with pytest.raises(CollateError, match=name):
        check_call(NAME, PACKED[0] | {name: value}, **PACKED[1])
