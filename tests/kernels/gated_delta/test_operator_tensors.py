"""The tensors of an operator, as its vendor lists them: the right call passes by its name, and none that lies otherwise.

Orders are written from the hosts of flash-linear-attention-npu 17e24fd and from fla 0.5.2, not from the rows of the check.
Legend: B rows, T tokens, H key and N value heads, K and V head sizes, C tokens of a chunk, S sequences, D channels, W taps.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from collate_npu import CollateError, Segments
from collate_npu.kernels.check import call_breaches
from collate_npu.kernels.gated_delta import gated_delta_kwargs

SIZES = {"B": 1, "T": 73, "H": 2, "N": 4, "K": 128, "V": 256, "C": 64, "S": 2, "D": 32, "W": 4}
PACKED = Segments.from_lengths([[3, 70]])
CHAIN = {
    "prepare_wy_repr_bwd_full": "k:BHTK v:BNTV beta:BNT A:BNTC dA:BNTC dw:BNTK du:BNTV g:BNT",
    "prepare_wy_repr_bwd_da": "k:BHTK v:BNTV beta:BNT A:BNTC dw:BNTK du:BNTV g:BNT",
    "chunk_fwd_o": "q:BHTK k:BHTK v:BNTV g:BNT",
    "chunk_bwd_dv_local": "q:BHTK k:BHTK d_o:BNTV g:BNT A:BNTC",
    "chunk_bwd_dqkwg": "q:BHTK k:BHTK v:BNTV g:BNT dox:BNTV dv:BNTV",
    "chunk_gated_delta_rule_bwd_dhu": "q:BHTK k:BHTK w:BNTK d_o:BNTV dv:BNTV g:BNT",
    "recompute_w_u_fwd": "k:BHTK v:BNTV beta:BNT A:BNTC g:BNT gk:BNTK",
    "chunk_gated_delta_rule_fwd_h": "k:BHTK w:BNTK u:BNTV g:BNT",
    "chunk_scaled_dot_kkt": "k:BHTK g:BNT beta:BNT",
    "chunk_local_cumsum": "g:BNT",
    "solve_tri": "x:TNC",
}
KERNELS = {"chunk_local_cumsum": "fla_npu_cumsum"}
CALLS = {f"fla_npu.npu_{name}": (KERNELS.get(name, "fla_npu"), orders) for name, orders in CHAIN.items()}
SCALED = ("dqkwg", "dhu", "dv_local", "fwd_o")


def right(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The right call, and the order of each of its tensors."""
    kernel, text = CALLS[name]
    orders = dict(pair.split(":") for pair in text.split())
    call = {x: meta(*(SIZES[axis] for axis in order)) for x, order in orders.items()}
    call |= gated_delta_kwargs(PACKED, kernel=kernel)  # type: ignore[arg-type]
    call |= {"scale": 0.5} if name.endswith(SCALED) else {}
    return call | ({"layout": "tnd"} if "solve" in name else {}), orders


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def resized(orders: dict[str, str], **sizes: int) -> dict[str, Tensor]:
    """All tensors of the call, with an axis of another size."""
    return {x: meta(*((SIZES | sizes)[axis] for axis in order)) for x, order in orders.items()}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_lie_otherwise_are_refused_by_the_name_of_the_operator(name: str) -> None:
    call, orders = right(name)
    wrong = [resized(orders, T=80)]
    wrong += [resized(orders, B=2)] if any("B" in order for order in orders.values()) else []
    wrong.append({x: meta(*(SIZES[axis] for axis in tokens_first(order))) for x, order in orders.items()})
    for x, order in orders.items():
        shape = tuple(SIZES[axis] for axis in order)
        wrong += [{x: meta(*turned)} for turned in {*permutations(shape)} - {shape}]
        wrong += [{x: meta(*shape[:-1])}, {x: meta(*shape, 1)}, {x: resized(orders, T=80)[x]}]
    for segments in (None, PACKED):
        assert not call_breaches(name, call, segments=segments)
        assert [change for change in wrong if passes(name, call | change, segments)] == []


def passes(name: str, call: dict[str, Any], segments: Segments | None) -> bool:
    try:
        return not call_breaches(name, call, segments=segments)
    except CollateError:  # nothing tells how many tokens there are
        return False


def tokens_first(order: str) -> str:
    """`[B, T, H, K]` for `[B, H, T, K]`, and the other way round."""
    heads = "H" if "H" in order else "N"
    return order.translate(str.maketrans({"T": heads, heads: "T"}))


@pytest.mark.parametrize("layout", ["tnd", "ntd", "bsnd", "bnsd", "bhtd"])
def test_solve_tri_reads_its_layout_to_the_letter(layout: str) -> None:
    orders = {"tnd": "TNC", "ntd": "NTC", "bsnd": "BTNC"}
    x = meta(*(SIZES[axis] for axis in orders.get(layout, "BNTC")))
    varlen = gated_delta_kwargs(PACKED, kernel="fla_npu") if len(layout) == 3 else {}
    call = {"x": x, "layout": layout, **varlen}
    assert not call_breaches("fla_npu.npu_solve_tri", call)
    for other in (layout.upper(), layout.title(), layout[:-1] + layout[-1].upper(), f"{layout} ", ""):
        found = call_breaches("fla_npu.npu_solve_tri", call | {"layout": other}, segments=PACKED)
        assert [breach.rule for breach in found if breach.silent and breach.where == "layout"] == ["layout"]


def test_tokens_that_are_read_off_another_axis_are_told_so() -> None:
    call, _ = right("fla_npu.npu_chunk_bwd_dqkwg")
    (breach, *_) = call_breaches("fla_npu.npu_chunk_bwd_dqkwg", call | {"q": meta(1, 73, 2, 128)})
    assert breach.remedy.endswith("Or put q in the order [B, H, T, K].")
    (breach, *_) = call_breaches("fla_npu.npu_chunk_bwd_dqkwg", call | resized({"q": "BHTK", "k": "BHTK"}, T=80))
    assert "order" not in breach.remedy
