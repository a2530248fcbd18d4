"""Operators of fla, causal-conv1d and mamba.

Legend of shapes: B rows, T tokens, H query and key heads, N value heads, K and V head sizes, D channels, W taps, S states.
"""

from __future__ import annotations

from dataclasses import replace

from collate_npu.kernels.gated_delta.operators import Operator

_RULE = {"q": "BTHK", "k": "BTHK", "v": "BTNV", "g": "BTN", "beta": "BTN", "initial_state": "S..."}
_FLA_CHECKS = frozenset({"container", "rows", "chunk-size", "heads", "states", "context", "removed", "backward"})

_FLA = Operator(
    name="fla.chunk_gated_delta_rule",
    package="fla",
    source="fla 0.5.2 ops/gated_delta_rule/chunk.py:505-560, ops/utils/index.py:156",
    offsets=("cu_seqlens",),
    copies=("cu_seqlens_cpu",),
    tables={"chunk_indices": "rule"},
    chunk_sizes=(16, 32, 64),
    checks=_FLA_CHECKS,
    empties="fla",
    shapes=_RULE,
    ranks="whole row",
)

FLA: tuple[Operator, ...] = (
    _FLA,
    replace(
        _FLA,
        name="fla.chunk_kda",
        source="fla 0.5.2 ops/kda/chunk.py:365-420",
        chunk_sizes=(32, 64),
        checks=_FLA_CHECKS | {"shape", "head-size", "state-dtype"},
        shapes=_RULE | {"g": "BTNK"},
        head_sizes=(256, 0),
    ),
    replace(
        _FLA,
        name="fla.fused_recurrent_gated_delta_rule",
        source="fla 0.5.2 ops/gated_delta_rule/fused_recurrent.py:301, 432",
        copies=(),
        tables={},
        chunk_sizes=(),
        backward=False,
    ),
    replace(
        _FLA,
        name="fla.causal_conv1d",
        kernel="fla_conv",
        source="fla 0.5.2 modules/conv/triton/ops.py:64, 191, 383-386, cuda/ops.py:202; fla #955",
        tables={"chunk_indices": "conv"},
        chunk_sizes=(),
        checks=frozenset({"container", "cuda-state", "context"}),
        shapes={"x": "BTD", "residual": "BTD", "dy": "BTD", "weight": "DW", "bias": "D", "initial_state": "S..."},
    ),
    replace(
        _FLA,
        name="fla.build_cp_context",
        kernel="fla_cp",
        source="fla 0.5.2 ops/cp/context.py:60-140",
        needs=frozenset({"cu_seqlens"}),
        tables={},
        chunk_sizes=(),
        checks=frozenset({"container", "missing", "ranks-total"}),
        empties="legal",
        shapes={},
        ranks="state",
    ),
    replace(
        _FLA,
        name="fla.GatedDeltaNet",
        source="fla 0.5.2 layers/gated_deltanet.py:229, layers/utils.py:98-141; fla #838",
        reads=frozenset({"attention_mask"}),
        chunk_sizes=(),
        checks=frozenset({"container", "rows", "mask-rank"}),
        masks="unpadded",
        shapes={},
    ),
    replace(
        _FLA,
        name="fla.ShortConvolution",
        kernel="fla_conv",
        source="fla 0.5.2 modules/convolution/short_conv.py:133, 159; fla #955",
        tables={"chunk_indices": "conv"},
        reads=frozenset({"mask"}),
        chunk_sizes=(),
        checks=frozenset({"container", "mask-and-offsets"}),
        masks="multiplied",
        shapes={"x": "BTD", "residual": "BTD"},
    ),
    Operator(
        name="causal_conv1d.causal_conv1d_fn",
        package="causal_conv1d",
        kernel="causal_conv1d",
        source="causal-conv1d 1.6.1 csrc/causal_conv1d.cpp:175-198, causal_conv1d_interface.py:28-34",
        numbers="seq_idx",
        checks=frozenset(
            {"container", "numbers-dtype", "numbers-shape", "numbers-states", "channels", "taps", "strides", "shape"}
        ),
        shapes={"x": "BDT", "weight": "DW", "bias": "D"},
    ),
    Operator(
        name="mamba.mamba_chunk_scan_combined",
        package="mamba",
        kernel="causal_conv1d",
        source="mamba e9594ce ops/triton/ssd_combined.py:274, 599-604, 642; mamba #1015",
        numbers="seq_idx",
        reads=frozenset({"cu_seqlens"}),
        checks=frozenset({"container", "numbers-shape"}),
    ),
)
"""What runs on GPUs."""
