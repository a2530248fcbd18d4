"""The tensors of an operator, as its vendor lists them: the right call passes by its name, and none that lies otherwise.

Orders are written from the hosts of flash-linear-attention-npu 17e24fd and from fla 0.5.2, not from the rows of the check.
Legend: B rows, T tokens, H key and N value heads, K and V head sizes, C tokens of a chunk, S states, U values of torch_npu.
"""

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from collate_npu import CollateError, Segments
from collate_npu.kernels.check import call_breaches
from collate_npu.kernels.gated_delta import gated_delta_kwargs, reference_gated_delta_rule

SIZES = {"B": 1, "T": 7, "H": 3, "N": 6, "K": 128, "V": 256, "C": 64, "S": 2, "U": 64}
PACKED = Segments.from_lengths([[3, 4]])
RULE = "q:BTHK k:BTHK v:BTNV g:BTN beta:BTN initial_state:SNKV"
CALLS = {
    "fla_npu.npu_chunk_local_cumsum": ("fla_npu_cumsum", "g:BNT"),
    "fla.chunk_gated_delta_rule": ("fla", RULE),
    "fla.chunk_kda": ("fla", RULE.replace("g:BTN", "g:BTNK")),
    "fla.fused_recurrent_gated_delta_rule": ("fla_cp", RULE),
    "fla_npu.flash_gated_delta_rule": ("fla_npu_flash", "q:BHTK k:BHTK v:BHTV g:BTH beta:BTH initial_state:SHKV"),
    "fla_npu.npu_recurrent_gated_delta_rule": ("fla_npu_recurrent", "q:THK k:THK v:TNV g:TN beta:TN state:SNVK"),
    "torch_npu.npu_chunk_gated_delta_rule": ("torch_npu", "q:THK k:THK v:TNU g:TN beta:TN initial_state:SNUK"),
}
SCALED = ("npu_recurrent_gated_delta_rule", "npu_chunk_gated_delta_rule")
SAYS = {"training": False}
SMALL = st.sampled_from((1, 2, 3))


def right(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The right call, and the order of each of its tensors."""
    kernel, text = CALLS[name]
    orders = dict(pair.split(":") for pair in text.split())
    call: dict[str, Any] = resized(orders)
    call |= gated_delta_kwargs(PACKED, kernel=kernel)  # type: ignore[arg-type]
    return call | ({"scale": 0.5} if name.endswith(SCALED) else {}), orders


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def resized(orders: dict[str, str], **sizes: int) -> dict[str, Tensor]:
    """All tensors of the call, with an axis of another size. States are float32 (_aclnn_ctypes.py:1180)."""
    dtypes = {"initial_state": torch.float32}
    shapes = {x: [(SIZES | sizes)[axis] for axis in order] for x, order in orders.items()}
    return {x: meta(*shape, dtype=dtypes.get(x, torch.bfloat16)) for x, shape in shapes.items()}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_lie_otherwise_are_refused_by_the_name_of_the_operator(name: str) -> None:
    call, orders = right(name)
    wrong = [resized(orders, T=9)]
    wrong += [resized(orders, B=2)] if any("B" in order for order in orders.values()) else []
    wrong.append({x: meta(*(SIZES[axis] for axis in tokens_first(order))) for x, order in orders.items()})
    for x, order in orders.items():
        shape = tuple(SIZES[axis] for axis in order)
        others = {*permutations(shape), (*shape, 1), *(shape[:n] for n in range(len(shape)))} - {shape}
        wrong += [{x: meta(*other, dtype=call[x].dtype)} for other in others]
        wrong += [{x: resized(orders, T=9)[x]}] * ("T" in order)
    for segments in (None, PACKED):
        assert not call_breaches(name, call, segments=segments, **SAYS)
        assert [change for change in wrong if passes(name, call | change, segments)] == []


def passes(name: str, call: dict[str, Any], segments: Segments | None) -> bool:
    try:
        return not call_breaches(name, call, segments=segments, **SAYS)
    except CollateError:  # nothing tells how many tokens there are
        return False


def tokens_first(order: str) -> str:
    """`[B, T, H, K]` for `[B, H, T, K]`, and the other way round."""
    heads = next((axis for axis in "HN" if axis in order), "T")
    return order.translate(str.maketrans({"T": heads, heads: "T"}))


@pytest.mark.parametrize("name", [name for name, (_, text) in CALLS.items() if "q:" in text])
@given(scale=st.floats())
@example(scale=0.0)
@example(scale=-0.5)
@example(scale=math.inf)
@example(scale=math.nan)
def test_a_scale_is_above_zero_and_finite(name: str, scale: float) -> None:
    call, _ = right(name)
    for segments in (None, PACKED):
        found = call_breaches(name, call | {"scale": scale}, segments=segments, **SAYS)
        assert [breach.rule for breach in found] == ([] if 0 < scale < math.inf else ["scale"])
    for other in ("x", [1.0], torch.tensor(0.5), np.complex64(1), 0, -1):
        assert [breach.rule for breach in call_breaches(name, call | {"scale": other}, **SAYS)] == ["scale"]
    for other in (1, np.float32(0.5), np.int64(2)):
        assert not call_breaches(name, call | {"scale": other}, **SAYS)


def test_the_scale_of_a_cumulative_sum_has_any_sign() -> None:
    name = "fla_npu.npu_chunk_local_cumsum"
    assert not call_breaches(name, right(name)[0] | {"scale": -1.4426950408889634}, **SAYS)


STATED = [name for name, (_, text) in CALLS.items() if "initial_state:" in text]


@pytest.mark.parametrize("name", STATED)
def test_a_state_is_one_of_each_value_head_in_the_order_that_the_call_says(name: str) -> None:
    call, orders = right(name)
    S, N, *heads = (SIZES[axis] for axis in orders["initial_state"])
    lying = {"initial_state": meta(S, N, *heads[::-1], dtype=torch.float32)}
    assert [breach.rule for breach in call_breaches(name, call | lying, **SAYS)] == ["shape"]
    square = dict.fromkeys("KVU", 128)  # the two orders cannot be told apart
    assert not call_breaches(name, call | resized(orders, **square), **SAYS)
    for heads_of in {2, 3, 6, 12} - {N}:
        assert call_breaches(name, call | {"initial_state": meta(S, heads_of, *heads, dtype=torch.float32)}, **SAYS)
    if "torch_npu" not in name:
        for flag in ("state_v_first", "transpose_state_layout"):
            assert not call_breaches(name, call | lying | {flag: True}, **SAYS)
            assert call_breaches(name, call | {flag: True}, **SAYS)
            assert not call_breaches(name, call | {flag: False}, **SAYS)


@given(
    shape=st.lists(st.sampled_from((1, 2, 3, 4)), max_size=5),
    sizes=st.fixed_dictionaries({"H": st.sampled_from((1, 2)), "N": st.sampled_from((2, 4)), "K": SMALL, "V": SMALL}),
)
@example(shape=[2, 4, 3, 1], sizes={"H": 2, "N": 4, "K": 3, "V": 1})
def test_the_contract_takes_the_states_that_the_reference_takes(shape: list[int], sizes: dict[str, int]) -> None:
    orders = {"q": "BTHK", "k": "BTHK", "v": "BTNV", "g": "BTN", "beta": "BTN"}
    call = {x: torch.zeros([(SIZES | sizes)[axis] for axis in order]) for x, order in orders.items()}
    offsets, state = gated_delta_kwargs(PACKED, kernel="fla"), torch.zeros(shape)
    found = call_breaches("fla.chunk_gated_delta_rule", call | offsets | {"initial_state": state})
    try:
        reference_gated_delta_rule(*call.values(), initial_state=state, cu_seqlens=offsets["cu_seqlens"])
    except CollateError:
        assert found
    else:
        assert not found


@given(B=st.integers(1, 4), S=st.integers(1, 4), rank=st.sampled_from((2, 3)), data=st.data())
def test_the_convolution_of_fla_npu_takes_rows_or_one_flat_row(B: int, S: int, rank: int, data: st.DataObject) -> None:
    """causal_conv1d_tiling_validation.h:221-240, 263; op_kernel/causal_conv1d.h:50-60 reads rows of S whatever they say."""
    inner = data.draw(st.lists(st.integers(0, B * S), min_size=B - 1, max_size=B + 1).map(sorted))
    ends = data.draw(st.sampled_from(([*range(S, B * S, S)], inner)))
    offsets = [0, *ends, data.draw(st.sampled_from((B * S, B * S, B * S + 1, S)))]
    x = meta(B * S, 32) if rank == 2 else meta(B, S, 32)
    call = {"x": x, "weight": meta(4, 32), "query_start_loc": offsets}
    found = call_breaches("fla_npu.npu_causal_conv1d", call, training=False)
    counted = offsets[-1] == B * S and offsets == sorted(offsets)
    taken, right_rows = counted and (rank == 2 or len(offsets) == B + 1), offsets == [*range(0, B * S + 1, S)]
    assert bool(found) == (not taken or (rank == 3 and not right_rows))
    assert not taken or all(breach.silent for breach in found)


@pytest.mark.parametrize("segments", [PACKED, Segments.from_lengths([[3, 2]], width=9), Segments.from_lengths([3, 5])])
def test_the_boundaries_that_are_made_for_the_convolution_are_those_of_a_flat_tensor(segments: Segments) -> None:
    call = gated_delta_kwargs(segments, kernel="fla_npu_conv") | {"weight": meta(4, 32)}
    T = call["query_start_loc"][-1]
    assert not call_breaches("fla_npu.npu_causal_conv1d", call | {"x": meta(T, 32)}, segments=segments, **SAYS)
    (breach,) = call_breaches("fla_npu.npu_causal_conv1d", call | {"x": meta(1, T, 32)}, segments=segments, **SAYS)
    assert (breach.rule, breach.silent) == ("rows", False)
    rows, B, S = gated_delta_kwargs(segments, kernel="fla_npu_conv", keep_padding=True), *segments.shape
    rows |= {"query_start_loc": tuple(range(0, B * S + 1, S)), "x": meta(B, S, 32)}
    assert bool(call_breaches("fla_npu.npu_causal_conv1d", rows, segments=segments, **SAYS)) == segments.packed
