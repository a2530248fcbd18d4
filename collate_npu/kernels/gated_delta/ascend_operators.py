"""Operators of flash-linear-attention-npu and torch_npu.

Legend of shapes: B rows, T tokens, H query and key heads, N value heads, K and V head sizes, D channels, W taps, S states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from collate_npu.kernels.gated_delta.operators import Operator

_RULE_BNSD = {
    "q": "BHTK",
    "k": "BHTK",
    "v": "BNTV",
    "u": "BNTV",
    "w": "BNTK",
    "g": "BNT",
    "beta": "BNT",
    "initial_state": "S...",
}
_FLA_NPU = Operator(
    name="fla_npu",
    package="fla_npu",
    kernel="fla_npu",
    source="flash-linear-attention-npu 17e24fd recompute_w_u_fwd_tiling_processor.h:299-385, "
    "chunk_local_cumsum_tiling.cpp:259-288",
    offsets=("cu_seqlens",),
    tables={"chunk_indices": "rule", "chunk_indices_out": "cumsum"},
    needs=frozenset({"chunk_indices", "chunk_indices_out"}),
    host=True,
    chunk_sizes=(64, 128),
    checks=frozenset({"container", "rows", "first", "falling", "empty", "table", "missing", "chunk-size", "states"}),
    shapes=_RULE_BNSD,
)


def _npu(name: str, source: str, *checks: str, **changes: Any) -> Operator:
    """One operator of the chain: the table of its own chunks, and only the checks that its host code has."""
    settings: dict[str, Any] = {
        "tables": {"chunk_indices": "rule"},
        "needs": frozenset({"chunk_indices"}),
        "checks": frozenset({"container", "missing", "chunk-size", "states", *checks}),
        "source": f"flash-linear-attention-npu 17e24fd {source}",
    }
    return replace(_FLA_NPU, name=f"fla_npu.{name}", **(settings | changes))


_STRICT = ("rows", "first", "falling", "empty", "table")
_KDA: dict[str, Any] = {
    "shapes": {},
    "empties": "legal",
    "needs": frozenset(),
    "chunk_sizes": (64, 128),
}

ASCEND: tuple[Operator, ...] = (
    _FLA_NPU,
    _npu("recompute_w_u_fwd", "recompute_w_u_fwd_tiling_processor.h:299-385", *_STRICT),
    _npu("prepare_wy_repr_bwd_full", "prepare_wy_repr_bwd_full_tiling_processor.h:410-417", *_STRICT),
    _npu("prepare_wy_repr_bwd_da", "prepare_wy_repr_bwd_da_tiling_processor.h:379-386", *_STRICT),
    _npu("chunk_gated_delta_rule_fwd_h", "_aclnn_ctypes.py:552-600; vllm-ascend #11807", needs=frozenset()),
    _npu("chunk_fwd_o", "chunk_fwd_o_tiling_processor.h:108, 222-235", "rows", "table-odd"),
    _npu("chunk_bwd_dv_local", "chunk_bwd_dv_local_tiling_processor.h:262; #497, #498, #635", "rows", "table-odd"),
    _npu("chunk_bwd_dqkwg", "chunk_bwd_dqkwg_tiling.cpp:105-121; #285", "rows", "table-odd"),
    _npu(
        "chunk_gated_delta_rule_bwd_dhu",
        "chunk_gated_delta_rule_bwd_dhu_tiling_processor.h:413-440; #309",
        "rows",
        "table-odd",
    ),
    _npu(
        "chunk_local_cumsum",
        "chunk_local_cumsum_tiling.cpp:231, 259-288",
        "rows",
        "table-odd",
        tables={"chunk_indices_out": "cumsum", "chunk_indices": "cumsum"},
        needs=frozenset({"chunk_indices_out"}),
        chunk_sizes=tuple(2**n for n in range(4, 10)),
    ),
    _npu("chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt_tiling.cpp:249-262"),
    _npu("solve_tri", "solve_tri_tiling.cpp:60-140", chunk_sizes=(16, 32, 64, 128), shapes={}),
    _npu(
        "chunk_kda_fwd",
        "_aclnn_ctypes.py:1066-1182; aclnn_chunk_kda_fwd.cpp:201-255",
        *("rows", "first", "falling", "last", "limit", "table", "layout", "state-dtype"),
        **_KDA,
        most_sequences=1024,
    ),
    _npu(
        "chunk_kda_bwd_intra",
        "_aclnn_ctypes.py:1534-1708",
        *("rows", "first", "falling", "last", "limit", "table", "layout", "strides"),
        **(_KDA | {"chunk_sizes": (64,)}),
        most_sequences=64,
    ),
    _npu("chunk_kda_bwd", "#508, #544, #699, #733", "rows", "first", "falling", "last", "limit", **_KDA),
    Operator(
        name="fla_npu.causal_conv1d",
        package="fla_npu",
        kernel="fla_npu_conv",
        source="flash-linear-attention-npu 17e24fd causal_conv1d_tiling_validation.h:190-245, "
        "ops/ascendc/__init__.py:321-329",
        offsets=("query_start_loc",),
        host=True,
        checks=frozenset(
            {"container", "first", "falling", "last", "missing", "rows", "channels", "taps", "states", "layout"}
        ),
        empties="legal",
    ),
    Operator(
        name="fla_npu.causal_conv1d_bwd",
        package="fla_npu",
        kernel="fla_npu_conv",
        source="flash-linear-attention-npu 17e24fd _aclnn_ctypes.py:988-1036, causal_conv1d_bwd_tiling.cpp:224-236",
        offsets=("query_start_loc",),
        host=True,
        checks=frozenset({"container", "first", "falling", "last", "missing", "layout", "taps", "channels"}),
        empties="legal",
    ),
    Operator(
        name="fla_npu.recurrent_kda",
        package="fla_npu",
        kernel="fla_cp",
        source="flash-linear-attention-npu 17e24fd _aclnn_ctypes.py:1385-1394, recurrent_kda.h:276-290",
        offsets=("cu_seqlens",),
        checks=frozenset({"container", "first", "falling", "above", "count"}),
        empties="legal",
    ),
    Operator(
        name="fla_npu.recurrent_gated_delta_rule",
        package="fla_npu",
        kernel="fla_npu_recurrent",
        source="flash-linear-attention-npu 17e24fd _aclnn_ctypes.py:654-830; #641",
        offsets=("actual_seq_lengths",),
        form="prefix and lengths",
        dtypes=("int32",),
        needs=frozenset({"actual_seq_lengths"}),
        checks=frozenset({"container", "count", "rows", "missing"}),
        longest=8,
        backward=False,
    ),
    Operator(
        name="torch_npu.npu_recurrent_gated_delta_rule",
        package="torch_npu",
        kernel="torch_npu",
        source="op-plugin 517f2e7 documentation of npu_recurrent_gated_delta_rule",
        offsets=("actual_seq_lengths",),
        form="lengths",
        dtypes=("int32",),
        needs=frozenset({"actual_seq_lengths"}),
        checks=frozenset({"container", "missing"}),
        longest=8,
        backward=False,
    ),
    Operator(
        name="torch_npu.npu_chunk_gated_delta_rule",
        package="torch_npu",
        kernel="torch_npu",
        source="op-plugin 517f2e7 documentation of npu_chunk_gated_delta_rule",
        offsets=("actual_seq_lengths",),
        form="lengths",
        dtypes=("int32",),
        needs=frozenset({"actual_seq_lengths"}),
        checks=frozenset({"container", "missing"}),
        shapes={"q": "THK", "k": "THK", "v": "TNV", "g": "TN", "beta": "TN", "initial_state": "S..."},
        head_sizes=(128, 128),
        backward=False,
    ),
    Operator(
        name="torch_npu.npu_masked_causal_conv1d",
        package="torch_npu",
        source="op-plugin 517f2e7 documentation of npu_masked_causal_conv1d",
        reads=frozenset({"mask", "attention_mask"}),
        checks=frozenset({"mask-rank", "mask-shape", "taps"}),
        masks="output",
        shapes={"x": "TBD"},
    ),
    Operator(
        name="torch_npu.npu_fused_causal_conv1d",
        package="torch_npu",
        kernel="fla_npu_conv",
        source="op-plugin 517f2e7 documentation of npu_fused_causal_conv1d",
        offsets=("query_start_loc", "cu_seqlens"),
        dtypes=("int32", "int64"),
        checks=frozenset({"container"}),
        most_sequences=256,
        backward=False,
    ),
)
"""What runs on NPUs; `fla_npu` is what a whole training chain takes, the intersection of its operators."""
