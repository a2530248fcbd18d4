"""Calls whose fate is known: an operator's own arguments, and whether it takes them, refuses them, or takes them wrongly.

Facts read in the operators' sources, or run; each with its place. `dev` is a tensor, `meta` one whose shape alone counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from collate_npu import ContextParallel, Segments
from collate_npu.kernels.gated_delta import chunk_indices, gated_delta_kwargs

FULL = {"transformers": "5.23.0", "fla": "0.5.2", "causal_conv1d": "1.6.1"}
MAIN = {"megatron": "main"}
TWO = Segments.from_lengths([[3, 70]])
PACK = [0, 3, 73, 75, 139]


class Case(NamedTuple):
    operator: str
    T: int
    kwargs: dict[str, Any]
    verdict: str
    source: str
    says: dict[str, Any] = {}
    """What else the caller says: B (1 without), chunk_size, training, versions, context_parallel, segments."""


def dev(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ids(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """`[1, T]`: 0 0 0 1 1 ..."""
    return torch.cat([torch.full((n,), i, dtype=dtype) for i, n in enumerate(lengths)])[None]


def i32(*values: int) -> Tensor:
    return dev(*values, dtype=torch.int32)


def padded(side: str = "right", B: int = 2) -> Tensor:
    """A 2D mask `[B, 25]`, five columns of padding in the first row."""
    keep = torch.ones(B, 25, dtype=torch.int64)
    keep[0, {"left": slice(0, 5), "right": slice(20, 25), "hole": slice(9, 14)}[side]] = 0
    return keep


PACKED = Segments.from_lengths([[3, 70]])
BOTH = gated_delta_kwargs(PACKED, kernel="transformers")
TAILED = Segments.from_lengths([[3, 70]], width=80)
LEFT, RIGHT = (Segments.from_lengths([20, 25], side=side) for side in ("left", "right"))  # type: ignore[arg-type]
HOLE = Segments.from_keep(padded("hole"))
ONE_LEFT = Segments.from_lengths([20], width=25, side="left")
FLAT = {"B": 1, "T": 73}
ROWS = {"B": 2, "T": 25}


def pairs(offsets: list[int], block: int) -> Tensor:
    return torch.from_numpy(chunk_indices(offsets, block))


def fla_conv(offsets: Tensor, **more: Any) -> dict[str, Any]:
    return {"cu_seqlens": offsets, **more}


def cp(layout: str = "contiguous", size: int = 2) -> dict[str, Any]:
    return {"context_parallel": ContextParallel(size, 0, layout=layout)}  # type: ignore[arg-type]


def thd(*actual: int, padded_to: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    given = {"qkv_format": "thd", "cu_seqlens_q": i32(*actual), "cu_seqlens_kv": i32(*actual)}
    return given | ({"cu_seqlens_q_padded": i32(*padded_to)} if padded_to else {}) | fields


def qkv(H: int = 4, HV: int = 4, T: int = 73) -> dict[str, Tensor]:
    return {"q": meta(1, T, H, 128), "k": meta(1, T, H, 128), "v": meta(1, T, HV, 128)}


RULE, KDA, CONV, CONTEXT = "fla.chunk_gated_delta_rule", "fla.chunk_kda", "fla.causal_conv1d", "fla.build_cp_context"
CC, MAMBA, HF = "causal_conv1d.causal_conv1d_fn", "mamba.mamba_chunk_scan_combined", "transformers.gdn_layer"
WU, WY, DHU = "fla_npu.recompute_w_u_fwd", "fla_npu.prepare_wy_repr_bwd_full", "fla_npu.chunk_gated_delta_rule_bwd_dhu"
FWD_H, FWD_O, DV = "fla_npu.chunk_gated_delta_rule_fwd_h", "fla_npu.chunk_fwd_o", "fla_npu.chunk_bwd_dv_local"
DQKWG, CUMSUM, KKT = "fla_npu.chunk_bwd_dqkwg", "fla_npu.chunk_local_cumsum", "fla_npu.chunk_scaled_dot_kkt"
NPU_CONV, NPU_CONV_BWD, SOLVE = "fla_npu.causal_conv1d", "fla_npu.causal_conv1d_bwd", "fla_npu.solve_tri"
KDA_FWD, KDA_INTRA, KDA_BWD = "fla_npu.chunk_kda_fwd", "fla_npu.chunk_kda_bwd_intra", "fla_npu.chunk_kda_bwd"
NPU_KDA, NPU_GDR = "fla_npu.recurrent_kda", "fla_npu.recurrent_gated_delta_rule"
MASKED = "torch_npu.npu_masked_causal_conv1d"
MG, MBR, MS = "megatron_core.GatedDeltaNet", "mcore_bridge.GatedDeltaNet", "mindspeed.GatedDeltaNet"
BRIDGED = "mcore_bridge.Qwen3_5MoeGatedDeltaNet(USE_MCORE_GDN=0)"
MSL, VERL, TITAN, TE = "mindspeed_llm.qwen3_next", "verl.qwen3_5_gdn", "torchtitan.qwen3_5_gdn", "te.fused_gdn"
OK, REJECT, SILENT = "accept", "reject", "silent_wrong"
CU = {"cu_seqlens": dev(0, 3, 73)}
HOST = {"cu_seqlens": [0, 3, 73]}
TABLE = [0, 0, 1, 0, 1, 1]

CASES = [
    Case(RULE, 73, CU, OK, "FLA ops/gated_delta_rule/chunk.py:290-291,551"),
    Case(RULE, 73, {"cu_seqlens": i32(0, 3, 73)}, OK, "FLA ops/gated_delta_rule/chunk.py:290-291,551"),
    Case(RULE, 73, CU, OK, "FLA ops/gated_delta_rule/chunk.py:538-540", {"chunk_size": 16}),
    Case(RULE, 73, CU, REJECT, "FLA ops/gated_delta_rule/chunk.py:539", {"chunk_size": 128}),
    Case(RULE, 73, CU, REJECT, "FLA ops/gated_delta_rule/chunk.py:551", {"B": 2}),
    Case(RULE, 73, CU | {"initial_state": meta(2, 4, 128, 128)}, OK, "FLA ops/gated_delta_rule/chunk.py:556"),
    Case(RULE, 73, CU | {"initial_state": meta(1, 4, 128, 128)}, REJECT, "FLA ops/gated_delta_rule/chunk.py:556"),
    Case(RULE, 73, CU | qkv(4, 6), REJECT, "FLA ops/gated_delta_rule/chunk.py:527"),
    Case(RULE, 73, CU | qkv(4, 8), OK, "FLA ops/gated_delta_rule/chunk.py:527"),
    Case(RULE, 73, CU | {"head_first": True}, REJECT, "FLA ops/gated_delta_rule/chunk.py:533"),
    Case(RULE, 73, {"cu_seqlens": dev(3, 70)}, SILENT, "FLA ops/utils/index.py:156"),
    Case(RULE, 80, CU, SILENT, "fla PR #892; FLA ops/common/chunk_o.py:739-742"),
    Case(RULE, 80, {"cu_seqlens": dev(0, 3, 73, 80)}, OK, "FLA contract T == cu[-1]"),
    Case(RULE, 16, {"cu_seqlens": dev(0, 12, 8, 16)}, SILENT, "FLA ops/utils/index.py:156"),
    Case(
        RULE, 73, {"cu_seqlens": dev(0, 3, 3, 73)}, OK, "FLA index.py:156", {"versions": {"fla": "0.5.1"}, "training": False}
    ),
    Case(RULE, 73, {"cu_seqlens": dev(0, 3, 3, 73)}, SILENT, "FLA #909", {"versions": {"fla": "0.5.0"}}),
    Case(RULE, 73, {"cu_seqlens": dev(0, 3, 73, 73)}, OK, "FLA index.py:156"),
    Case(RULE, 73, CU | {"cu_seqlens_cpu": dev(0, 40, 73)}, SILENT, "FLA index.py:156"),
    Case(RULE, 73, CU | {"cp_context": object(), "initial_state": meta(2, 4, 128, 128)}, REJECT, "FLA chunk.py:543"),
    Case(RULE, 73, {"cu_seqlens": [0, 3, 73]}, REJECT, "FLA ops/utils/index.py:156: a list has no device"),
    Case(RULE, 1, {"cu_seqlens": dev(0, 1)}, OK, "FLA ops/gated_delta_rule/chunk.py"),
    Case(KDA, 73, CU, OK, "FLA ops/kda/chunk.py:373"),
    Case(KDA, 73, CU, REJECT, "FLA ops/kda/chunk.py:394", {"chunk_size": 16}),
    Case(KDA, 73, CU, REJECT, "FLA ops/kda/chunk.py:374", {"B": 2}),
    Case(KDA, 73, CU | qkv() | {"g": meta(1, 73, 4)}, REJECT, "FLA ops/kda/chunk.py:414"),
    Case("fla.fused_recurrent_gated_delta_rule", 73, CU, OK, "FLA fused_recurrent.py:432", {"training": False}),
    Case("fla.fused_recurrent_gated_delta_rule", 73, CU, REJECT, "FLA fused_recurrent.py:301"),
    Case(CONV, 73, CU | {"backend": "triton", "x": meta(1, 73, 16)}, OK, "FLA modules/conv/triton/ops.py:383-386"),
    Case(CONV, 73, {"cu_seqlens": dev(0, 73, 146), "backend": "triton"}, SILENT, "fla #955; triton/ops.py:192", {"B": 2}),
    Case(
        CONV,
        73,
        CU | {"chunk_indices": torch.tensor([[0, 0], [1, 0], [1, 1], [1, 2]])},
        SILENT,
        "FLA modules/conv/triton/ops.py:383",
        {"chunk_size": 32},
    ),
    Case(CONV, 16, {"x": meta(1, 16, 16)}, SILENT, "layout not recognisable"),
    Case(CONV, 80, CU, SILENT, "FLA modules/conv/triton/ops.py:64,191"),
    Case(CONTEXT, 128, {"cu_seqlens": dev(0, 3, 73, 128)}, OK, "FLA ops/cp/context.py", cp()),
    Case(CONTEXT, 1, {"cu_seqlens": dev(0, 1)}, REJECT, "FLA ops/cp/context.py:83", cp()),
    Case(CONTEXT, 80, {"cu_seqlens": dev(0, 3, 74)}, SILENT, "FLA ops/cp/context.py", cp()),
    Case(CONTEXT, 128, {"cu_seqlens": dev(0, 3, 73, 128)}, SILENT, "FLA ops/cp/context.py:91", cp("zigzag")),
    Case(
        CONTEXT,
        128,
        {"cu_seqlens": dev(0, 128)},
        SILENT,
        "prime-rl #3002, mcore-bridge #162",
        cp() | {"segments": Segments.from_lengths([[3, 70, 55]])},
    ),
    Case(CC, 73, {"seq_idx": ids(3, 70)}, OK, "CC csrc/causal_conv1d.cpp:195"),
    Case(CC, 73, {"seq_idx": ids(3, 70, dtype=torch.int64)}, REJECT, "CC csrc/causal_conv1d.cpp:195"),
    Case(CC, 73, {"seq_idx": ids(3, 70)[0]}, REJECT, "CC csrc/causal_conv1d.cpp:198"),
    Case(CC, 73, {"seq_idx": ids(3, 70), "x": meta(1, 73, 12).transpose(1, 2)}, REJECT, "CC csrc/causal_conv1d.cpp:179"),
    Case(CC, 73, {"seq_idx": ids(3, 70), "x": meta(1, 73, 16).transpose(1, 2)}, OK, "CC csrc/causal_conv1d.cpp:179"),
    Case(CC, 73, {"seq_idx": ids(3, 70), "x": meta(1, 16, 73)}, REJECT, "CC csrc/causal_conv1d.cpp:175"),
    Case(CC, 73, {"seq_idx": ids(3, 70), "initial_states": meta(1, 16, 3)}, REJECT, "CC causal_conv1d_interface.py:28-30"),
    Case(CC, 73, {"seq_idx": ids(3, 70), "return_final_states": True}, REJECT, "CC causal_conv1d_interface.py:31-33"),
    Case(CC, 7, {"seq_idx": ids(7)}, SILENT, "ids compared for equality", {"segments": Segments.from_lengths([[3, 4]])}),
    Case(MAMBA, 73, {"seq_idx": ids(3, 70)}, OK, "MA ops/triton/ssd_combined.py:274"),
    Case(MAMBA, 73, CU, SILENT, "MA ssd_combined.py:599-604,642"),
    Case(HF, 139, {"cu_seq_lens_q": i32(*PACK), "seq_idx": ids(3, 70, 2, 64)}, OK, "HF 5.23", {"versions": FULL}),
    Case(HF, 139, {"seq_idx": ids(3, 70, 2, 64)}, SILENT, "HF 5.23", {"versions": FULL}),
    Case(HF, 139, {"cu_seq_lens_q": i32(*PACK)}, SILENT, "HF 5.23", {"versions": FULL}),
    Case(
        HF,
        139,
        {"position_ids": torch.cat([torch.arange(n) for n in (3, 70, 2, 64)])[None]},
        SILENT,
        "HF 5.23",
        {"versions": FULL},
    ),
    *(
        Case(
            HF,
            139,
            {"cu_seq_lens_q": i32(*PACK), "seq_idx": ids(3, 70, 2, 64)},
            verdict,
            "HF hub_kernels.py:1033",
            {"versions": FULL | {"transformers": version, "causal_conv1d": ""}},
        )
        for version, verdict in (("5.23.0", REJECT), ("5.19.0", SILENT))
    ),
    Case(
        HF,
        139,
        {"cu_seq_lens_q": i32(*PACK)},
        REJECT,
        "HF 5.23 hub_kernels.py:1033",
        {"versions": {"transformers": "5.23.0", "fla": "", "causal_conv1d": ""}},
    ),
    Case(
        HF,
        139,
        {"cu_seq_lens_q": i32(*PACK), "seq_idx": ids(3, 70, 2, 64), "chunk_size": 32},
        OK,
        "HF 5.23 hub_kernels.py:1050",
        {"versions": FULL, "chunk_size": 32},
    ),
    Case(HF, 139, {"cu_seqlens": dev(*PACK)}, REJECT, "HF 5.23", {"versions": FULL}),
    Case(HF, 25, {"attention_mask": padded()}, OK, "HF 5.23", {"B": 2}),
    Case(HF, 25, {"attention_mask": padded("left")}, OK, "HF 5.23", {"B": 2}),
    Case(HF, 25, {"attention_mask": padded("hole")}, SILENT, "HF 5.23", {"B": 2}),
    Case(HF, 25, {"attention_mask": padded("left"), "bias": meta(16)}, SILENT, "HF 5.23", {"B": 2}),
    Case(WU, 73, HOST | {"chunk_indices": TABLE}, OK, "FNPU recompute_w_u_fwd_tiling_processor.h:352-385"),
    Case(WU, 73, HOST | {"chunk_indices": [0, 0, 1, 0]}, OK, "FNPU ...:299", {"chunk_size": 128}),
    Case(WU, 73, HOST, REJECT, "FNPU recompute_w_u_fwd_tiling_processor.h:331"),
    Case(WU, 73, HOST | {"chunk_indices": [1, 0, 0, 0, 1, 1]}, REJECT, "FNPU ...:382"),
    Case(WU, 73, {"cu_seqlens": [0, 3, 3, 73], "chunk_indices": [0, 0, 2, 0, 2, 1]}, REJECT, "FNPU ...:360"),
    Case(WU, 80, HOST | {"chunk_indices": TABLE}, SILENT, "FNPU ...: no comparison with T"),
    Case(WY, 73, {"cu_seqlens": [0, 3, 3, 73], "chunk_indices": [0, 0, 2, 0, 2, 1]}, REJECT, "FNPU ...bwd_full:410-417"),
    Case(WY, 73, HOST | {"chunk_indices": TABLE}, REJECT, "FNPU ...bwd_full:410-417", {"B": 2}),
    Case(
        "fla_npu.prepare_wy_repr_bwd_da",
        73,
        {"cu_seqlens": [0, 3, 3, 73], "chunk_indices": [0, 0, 2, 0, 2, 1]},
        REJECT,
        "FNPU prepare_wy_repr_bwd_da_tiling_processor.h:379-386",
    ),
    Case(FWD_H, 73, HOST, OK, "FNPU _aclnn_ctypes.py:575-588"),
    Case(FWD_H, 73, HOST | {"chunk_indices": TABLE, "initial_state": meta(1, 4, 128, 128)}, REJECT, "FNPU ...:575-588"),
    Case(FWD_H, 73, {"cu_seqlens": [0, 3, 3, 73], "chunk_indices": TABLE}, SILENT, "vllm-ascend #11807"),
    Case(
        FWD_O,
        256,
        {"cu_seqlens": [0, 80, 144, 208, 256], "chunk_indices": [0, 0, 0, 1, 1, 0, 2, 0, 3, 0]},
        OK,
        "FNPU chunk_fwd_o_tiling_processor.h:222-235",
    ),
    Case(FWD_O, 73, HOST, REJECT, "FNPU chunk_fwd_o_tiling_processor.h:108,226"),
    Case(FWD_O, 17, {"cu_seqlens": [0, 1, 2, 3], "chunk_indices": [0, 0, 1, 0, 2, 0]}, SILENT, "vllm-ascend #10707"),
    Case(DV, 128, {"cu_seqlens": [0, 12, 8, 16], "chunk_indices": [0, 0, 2, 0]}, SILENT, "FNPU #497"),
    Case(DV, 128, {"cu_seqlens": [0, 16], "chunk_indices": [0, 0, 1, 0]}, SILENT, "FNPU #498"),
    Case(DV, 64, {"cu_seqlens": [0, 57, 59, 64], "chunk_indices": [0, 0, 1, 0, 2, 0]}, REJECT, "FNPU ...h:262", {"B": 2}),
    Case(DQKWG, 73, HOST | {"chunk_indices": TABLE}, OK, "FNPU chunk_bwd_dqkwg_tiling.cpp:105-121"),
    Case(DQKWG, 8192, {"cu_seqlens": [0, 8192]}, REJECT, "FNPU chunk_bwd_dqkwg_tiling.cpp:119; #285", {"B": 4}),
    Case(DHU, 73, HOST | {"chunk_indices": TABLE}, OK, "FNPU ...bwd_dhu_tiling_processor.h:413-440"),
    Case(DHU, 73, HOST, REJECT, "FNPU ...bwd_dhu_tiling_processor.h:413"),
    Case(DHU, 73, HOST | {"chunk_indices": TABLE, "dht": meta(2, 4, 128, 128)}, SILENT, "FNPU #312"),
    Case(CUMSUM, 73, HOST, REJECT, "FNPU chunk_local_cumsum_tiling.cpp:260"),
    Case(CUMSUM, 73, HOST | {"chunk_indices_out": [0, 0, 1, 0]}, OK, "FNPU chunk_local_cumsum_tiling.cpp:275"),
    Case(CUMSUM, 1500, {"cu_seqlens": [0, 1500], "chunk_indices_out": [0, 0]}, SILENT, "FNPU ...:275", {"chunk_size": 128}),
    Case(CUMSUM, 73, HOST | {"chunk_indices_out": [0, 0, 1, 0]}, REJECT, "FNPU ...:231", {"chunk_size": 48}),
    Case(KKT, 73, HOST, REJECT, "FNPU chunk_scaled_dot_kkt_tiling.cpp:251"),
    Case(SOLVE, 73, HOST | {"chunk_indices": TABLE}, SILENT, "FNPU solve_tri_tiling.cpp:89-90"),
    Case(SOLVE, 73, HOST | {"chunk_indices": TABLE, "layout": "tnd"}, OK, "FNPU solve_tri_tiling.cpp:89-90"),
    Case(
        NPU_CONV,
        73,
        {"query_start_loc": [0, 3, 73], "x": meta(73, 16), "weight": meta(4, 16)},
        OK,
        "FNPU causal_conv1d_tiling_validation.h:196-240",
        {"B": None},
    ),
    Case(NPU_CONV, 73, {"query_start_loc": [3, 73]}, REJECT, "FNPU ...:221", {"B": None}),
    Case(NPU_CONV, 73, {"query_start_loc": [0, 3, 3, 73]}, OK, "FNPU ...:236", {"B": None}),
    Case(NPU_CONV, 16, {"query_start_loc": [0, 12, 8, 16]}, REJECT, "FNPU ...:236", {"B": None}),
    Case(NPU_CONV, 73, {"activation_mode": 1}, SILENT, "FNPU ops/ascendc/__init__.py:323"),
    Case(NPU_CONV_BWD, 73, {"input_layout": "TND"}, REJECT, "FNPU _aclnn_ctypes.py:1007", {"B": None}),
    Case(
        NPU_CONV_BWD,
        80,
        {"input_layout": "TND", "query_start_loc": [0, 3, 73]},
        REJECT,
        "FNPU causal_conv1d_bwd_tiling.cpp:227",
        {"B": None},
    ),
    Case(KDA_FWD, 73, HOST | {"layout": "BSND"}, OK, "FNPU _aclnn_ctypes.py:1159-1171"),
    Case(KDA_FWD, 80, HOST, REJECT, "FNPU _aclnn_ctypes.py:1161"),
    Case(KDA_FWD, 73, {"cu_seqlens": [3, 73]}, REJECT, "FNPU _aclnn_ctypes.py:1161"),
    Case(KDA_FWD, 73, HOST, REJECT, "FNPU _aclnn_ctypes.py:1165", {"B": 2}),
    Case(KDA_FWD, 73, HOST, REJECT, "FNPU _aclnn_ctypes.py:1095", {"chunk_size": 32}),
    Case(KDA_FWD, 2050, {"cu_seqlens": list(range(0, 2051, 2))}, REJECT, "FNPU _aclnn_ctypes.py:1163"),
    Case(KDA_FWD, 130, {"cu_seqlens": list(range(0, 131, 2))}, OK, "FNPU _aclnn_ctypes.py:1163"),
    Case(KDA_INTRA, 130, {"cu_seqlens": list(range(0, 131, 2)), "layout": "TND"}, REJECT, "FNPU ...:1681", {"B": None}),
    Case(KDA_INTRA, 73, HOST | {"layout": "BNSD"}, REJECT, "FNPU _aclnn_ctypes.py:1620", {"B": None}),
    Case(
        KDA_INTRA,
        73,
        HOST | {"layout": "TND", "q": meta(4, 73, 128).transpose(0, 1)},
        REJECT,
        "FNPU _aclnn_ctypes.py:1611",
        {"B": None},
    ),
    Case(KDA_BWD, 1408, {"cu_seqlens": [0, 640, 1408]}, OK, "FNPU #544"),
    Case(KDA_BWD, 128, {"cu_seqlens": [0, 65, 128], "disable_recompute": False}, REJECT, "FNPU #733"),
    Case(NPU_KDA, 8, {"cu_seqlens": i32(0, 4, 8)}, OK, "FNPU _aclnn_ctypes.py:1385-1394"),
    Case(NPU_KDA, 8, {"cu_seqlens": [0, 4, 8]}, REJECT, "FNPU _aclnn_ctypes.py:1386"),
    *(
        Case(NPU_GDR, T, {"actual_seq_lengths": lengths}, verdict, "FNPU #641", {"B": None, "training": False})
        for T, lengths, verdict in (
            (8, i32(4, 4), SILENT),
            (4, i32(0, 8), SILENT),
            (8, dev(0, 4, 4), REJECT),
            (8, i32(0, 4, 4), OK),
        )
    ),
    Case(MASKED, 25, {"mask": padded("left").bool()}, SILENT, "OPP documentation", {"B": 2}),
    Case(MASKED, 25, {"mask": padded().bool(), "weight": meta(3, 16)}, OK, "OPP documentation", {"B": 2}),
    *(
        Case(MG, 73, thd(0, 3, 73), REJECT, "MG ssm/gated_delta_net.py:297", {"versions": {"megatron": version}})
        for version in ("0.16.1", "0.17.0")
    ),
    Case(MG, 73, thd(0, 3, 73), OK, "MG gated_delta_net/common.py:469-493", {"versions": MAIN}),
    Case(MG, 80, thd(0, 3, 73), REJECT, "MG common.py:480", {"versions": MAIN}),
    Case(MG, 12, thd(0, 6, 12), SILENT, "MG common.py:586-618", {"versions": MAIN} | cp("zigzag")),
    Case(MG, 16, thd(0, 8, 8, 16), OK, "MG common.py", {"versions": MAIN} | cp("zigzag")),
    Case(MG, 73, thd(0, 3, 73, deterministic_mode=True), REJECT, "MG gdn.py:138", {"versions": MAIN}),
    Case(MBR, 73, thd(0, 3, 73), OK, "MBR modules/gated_delta_net.py:146-163,244-251"),
    Case(MBR, 80, thd(0, 3, 73), SILENT, "MBR modules/gated_delta_net.py:146-163,244-251"),
    Case(MBR, 80, thd(0, 3, 73, padded_to=(0, 4, 76)), SILENT, "MBR modules/gated_delta_net.py:146-163,244-251"),
    Case(MBR, 74, thd(0, 3, 74), SILENT, "MBR modules/gated_delta_net.py:146-163,244-251", cp("zigzag")),
    Case(MBR, 25, {"attention_mask": padded("left")}, SILENT, "MBR gated_delta_net.py:203", {"B": 2}),
    Case(MBR, 25, {"attention_mask": padded()}, OK, "MBR gated_delta_net.py:203", {"B": 2}),
    Case(
        BRIDGED,
        139,
        {"cu_seq_lens_q": i32(*PACK)},
        SILENT,
        "MBR mm_gpts/qwen3_5.py",
        {"versions": FULL | {"transformers": "5.19.0"}},
    ),
    Case(
        BRIDGED,
        139,
        {"cu_seq_lens_q": i32(*PACK)},
        OK,
        "MBR mm_gpts/qwen3_5.py",
        {"versions": FULL | {"transformers": "5.12.0"}},
    ),
    Case(MS, 73, thd(0, 3, 73), OK, "MS core_r0.16.0 ssm/gated_delta_net.py:592-665", {"versions": {"mindspeed": "0.16"}}),
    Case(MS, 80, thd(0, 3, 73), REJECT, "MS core_r0.16.0 ssm/gated_delta_net.py:652", {"versions": {"mindspeed": "0.16"}}),
    Case(
        MS,
        73,
        thd(0, 3, 73, initial_state=meta(2, 4, 128, 128)),
        SILENT,
        "MS core_r0.17.0 npu_chunk_gated_delta_rule.py:337-352",
        {"versions": {"mindspeed": "0.17", "megatron": "main"}},
    ),
    Case(MSL, 25, {"attention_mask": padded("left", B=1)}, SILENT, "MSL modeling_qwen3_next.py:520"),
    Case(MSL, 73, thd(0, 3, 73), SILENT, "MSL qwen3_next_gated_deltanet_attention.py:341-440"),
    Case(
        VERL,
        80,
        {"cu_seqlens": dev(0, 3, 73, 80), "cu_seqlens_cpu": dev(0, 3, 73, 80)},
        OK,
        "VE workers/engine/fsdp/transformer_impl.py:1259-1272",
    ),
    Case(VERL, 73, CU, REJECT, "VE qwen3_5.py:213", {"B": 2}),
    Case(TITAN, 64, {"attention_masks": None}, SILENT, "TT model.py:112", {"B": 2}),
    Case(TITAN, 64, {"cu_seqlens": dev(0, 64, 128)}, REJECT, "TT model.py:414", {"B": 2}),
    Case(TITAN, 64, {"cu_seqlens": dev(0, 64, 128), "cu_seqlens_cpu": dev(0, 64, 128)}, OK, "TT model.py:398-430", {"B": 2}),
    Case(TE, 25, {"attention_mask": padded()}, REJECT, "TE PR #3351", {"B": 2}),
]
