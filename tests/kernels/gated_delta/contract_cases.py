"""Calls whose fate is known: an operator's own arguments, and whether it takes them, refuses them, or takes them wrongly.

Facts read in the operators' sources, or run; each with its place, or with the rule that the call breaks, what the remedy
makes of it, and its number among the silent traps of the contract. `dev` is a tensor, `meta` one whose shape alone counts.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from collate_npu import ContextParallel, Segments
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.masks import dense

OK, REJECT, SILENT = "accept", "reject", "silent_wrong"
Kwargs = dict[str, Any]


def known(operator, kwargs, expected, source="", right=None, mended=None, trap=0, looks="", tells="", silent=None, **says):
    """A call, and what is expected of it: a verdict, or the rule that it breaks; and what the numbers look like instead.

    `tells` is a fragment of what the breach says, `silent` whether the kernel does not. `right` is what the remedy makes of
    the arguments, None where it is to leave something out; `mended` what the caller then says besides.
    """
    says = {"kernel": operator, "B": 1, "T": 73} | says
    mended = says | (mended or {})
    return SimpleNamespace(**locals())


def dev(*values: int) -> Tensor:
    return torch.tensor(values)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def meta(*shape: int, **more: Any) -> Tensor:
    return torch.empty(*shape, device="meta", **{"dtype": torch.bfloat16} | more)


def ids(*lengths: int) -> Tensor:
    """`[1, T]`: 0 0 0 1 1 ..."""
    return torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]


def argument(name: str, make: Callable[..., Any]) -> Callable[..., Kwargs]:
    return lambda *values: {name: make(*values)}


def listed(*values: int) -> list[int]:
    return [*values]


cu, host = argument("cu_seqlens", dev), argument("cu_seqlens", listed)
cu_q, lengths = argument("cu_seq_lens_q", i32), argument("actual_seq_lengths", i32)
starts, numbered = argument("query_start_loc", listed), argument("seq_idx", ids)


def padded(side: str = "right", B: int = 2) -> Tensor:
    """A 2D mask `[B, 25]`, five columns of padding in the first row."""
    keep = torch.ones(B, 25, dtype=torch.int64)
    keep[0, {"left": slice(0, 5), "right": slice(20, 25), "hole": slice(9, 14)}[side]] = 0
    return keep


def keep(side: str = "right", B: int = 2) -> Kwargs:
    return {"attention_mask": padded(side, B)}


def cp(layout: str = "contiguous") -> Kwargs:
    return {"context_parallel": ContextParallel(2, 0, layout=layout)}  # type: ignore[arg-type]


def thd(*actual: int, padded_to: tuple[int, ...] = (), **fields: Any) -> Kwargs:
    given = {"qkv_format": "thd", "cu_seqlens_q": i32(*actual), "cu_seqlens_kv": i32(*actual)}
    return given | ({"cu_seqlens_q_padded": i32(*padded_to)} if padded_to else {}) | fields


def qkv(H: int = 4, HV: int = 4, T: int = 73) -> Kwargs:
    return {"q": meta(1, T, H, 128), "k": meta(1, T, H, 128), "v": meta(1, T, HV, 128)}


RULE, KDA, CONV, CONTEXT = "fla.chunk_gated_delta_rule", "fla.chunk_kda", "fla.causal_conv1d", "fla.build_cp_context"
DECODE = "fla.fused_recurrent_gated_delta_rule"
CC, MAMBA, HF = "causal_conv1d.causal_conv1d_fn", "mamba.mamba_chunk_scan_combined", "transformers.gdn_layer"
CUMSUM, FLASH = "fla_npu.chunk_local_cumsum", "fla_npu.flash_gated_delta_rule"
NPU_CONV, NPU_GDR = "fla_npu.causal_conv1d", "fla_npu.recurrent_gated_delta_rule"
MG, MS = "megatron_core.GatedDeltaNet", "mindspeed.GatedDeltaNet"
TORCH_NPU = "torch_npu"
FULL = {"transformers": "5.23.0", "fla": "0.6.0", "causal_conv1d": "1.6.1"}
MAIN = {"megatron": "main"}
ENDS = "ends without the leading 0"
PACKED, LONG = Segments.from_lengths([[3, 70]]), Segments.from_lengths([[3, 125]])
TAILED, HOLE = Segments.from_lengths([[3, 70]], width=80), Segments.from_keep(padded("hole"))
LEFT, RIGHT = (Segments.from_lengths([20, 25], side=side) for side in ("left", "right"))  # type: ignore[arg-type]
BIAS = dense(RIGHT, polarity="bias")
BOTH = gated_delta_kwargs(PACKED, kernel="transformers")
ROWS = {"B": 2, "T": 25}
TABLE_32, TABLE_64 = (
    {"chunk_indices": gated_delta_kwargs(PACKED, kernel="fla", chunk_size=n, tables=True)["chunk_indices"]} for n in (32, 64)
)
CU, HOST, TABLE = cu(0, 3, 73), host(0, 3, 73), [0, 0, 1, 0, 1, 1]
PACK = [0, 3, 73, 75, 139]
PACKED_TWICE = cu_q(*PACK) | numbered(3, 70, 2, 64)
X = {"x": meta(73, 16), "weight": meta(4, 16)}
LEARNING = {"x": meta(73, 16, requires_grad=True)}
STATES = {"initial_state": meta(2, 4, 128, 128)}

CALLS = [
    # what sources say
    known(RULE, CU, OK, "FLA ops/gated_delta_rule/chunk.py:538-540", chunk_size=16),
    known(RULE, CU, REJECT, "FLA ops/gated_delta_rule/chunk.py:539", chunk_size=128),
    known(RULE, CU, REJECT, "FLA ops/gated_delta_rule/chunk.py:551", B=2),
    known(RULE, CU | {"initial_state": meta(2, 4, 128, 128)}, OK, "FLA ops/gated_delta_rule/chunk.py:556"),
    known(RULE, CU | {"initial_state": meta(1, 4, 128, 128)}, REJECT, "FLA ops/gated_delta_rule/chunk.py:556"),
    known(RULE, CU | qkv(4, 8), OK, "FLA ops/gated_delta_rule/chunk.py:527"),
    known(RULE, cu(0, 3, 73, 73), OK, "FLA index.py:156", versions={"fla": "0.5.0"}),
    known(RULE, host(0, 3, 73), REJECT, "FLA ops/utils/index.py:156: a list has no device"),
    known(RULE, cu(0, 1), OK, "FLA ops/gated_delta_rule/chunk.py", T=1),
    known(KDA, CU, REJECT, "FLA ops/kda/chunk.py:394", chunk_size=16),
    known(KDA, CU | qkv() | {"g": meta(1, 73, 4)}, REJECT, "FLA ops/kda/chunk.py:414"),
    known(DECODE, CU, OK, "FLA fused_recurrent.py:432", training=False),
    known(DECODE, CU, REJECT, "FLA fused_recurrent.py:301"),
    known(CONV, CU | {"backend": "triton", "x": meta(1, 73, 16)}, OK, "FLA modules/conv/triton/ops.py:383-386"),
    known(CONV, {"cu_seqlens": dev(0, 73, 146), "backend": "triton"}, SILENT, "fla #955; triton/ops.py:192", B=2),
    known(CONV, CU, SILENT, "FLA modules/conv/triton/ops.py:64,191", T=80),
    known(CONTEXT, cu(0, 3, 73, 128), OK, "FLA ops/cp/context.py", T=128, **cp()),
    known(CONTEXT, cu(0, 1), SILENT, "FLA 0.5.2 drops the last tokens; bc3b101 refuses", T=1, **cp()),
    known(CONTEXT, cu(0, 3, 73, 128), SILENT, "FLA ops/cp/context.py:91", T=128, **cp("zigzag")),
    *(known(CONTEXT, cu(0, 3, 73, 128) | {"layout": held}, verdict, "FLA 0.6.0 ops/cp/context.py:229-274", T=128,
            versions={"fla": release}, **cp(ranks))
      for held, ranks, release, verdict in (("zigzag", "zigzag", "0.6.0", OK), ("zigzag", "contiguous", "0.6.0", SILENT),
          ("contiguous", "zigzag", "0.6.0", SILENT), ("contiguous", "contiguous", "0.6.0", OK),
          ("zigzag", "document_zigzag", "0.6.0", SILENT))),
    known(RULE, {"cp_context": SimpleNamespace(layout="zigzag")} | cu(0, 3, 128), OK, T=128, **cp("zigzag")),
    known(RULE, {"cp_context": SimpleNamespace(layout="zigzag")} | cu(0, 3, 128), SILENT, T=128, **cp()),
    known(CONTEXT, cu(0, 128), SILENT, "prime-rl #3002, mcore-bridge #162", T=128,
        segments=Segments.from_lengths([[3, 70, 55]]), **cp()),
    known(CC, numbered(3, 70) | {"x": meta(1, 73, 16).transpose(1, 2)}, OK, "CC csrc/causal_conv1d.cpp:179"),
    known(CC, numbered(7), SILENT, "ids compared for equality", T=7, segments=Segments.from_lengths([[3, 4]])),
    known("mamba.mamba_split_conv1d_scan_combined", {"zxbcdt": meta(1, 73, 40)} | CU, SILENT, "MA ssd_combined.py:599"),
    known(MAMBA, CU, SILENT, "MA ssd_combined.py:599-604,642"),
    known(HF, PACKED_TWICE, OK, "HF 5.23", T=139, versions=FULL),
    known(HF, numbered(3, 70, 2, 64), SILENT, "HF 5.23", T=139, versions=FULL),
    known(HF, cu_q(*PACK), SILENT, "HF 5.23", T=139, versions=FULL),
    known(HF, {"position_ids": torch.cat([torch.arange(n) for n in (3, 70, 2, 64)])[None]}, SILENT, "HF 5.23", T=139,
        versions=FULL),
    known(HF, PACKED_TWICE, SILENT, "HF hub_kernels.py:1033", T=139,
        versions=FULL | {"transformers": "5.19.0", "causal_conv1d": ""}),
    known(HF, PACKED_TWICE | {"chunk_size": 32}, OK, "HF 5.23 hub_kernels.py:1050", T=139, versions=FULL, chunk_size=32),
    known(HF, cu(*PACK), REJECT, "HF 5.23", T=139, versions=FULL),
    known(HF, {"attention_mask": padded("left"), "bias": meta(16)}, SILENT, "HF 5.23", **ROWS),
    known(CUMSUM, HOST | {"chunk_indices_out": [0, 0, 1, 0]}, OK, "FNPU chunk_local_cumsum_tiling.cpp:275"),
    known(CUMSUM, HOST | {"chunk_indices_out": [0, 0, 1, 0]}, REJECT, "FNPU ...:231", chunk_size=48),
    known(NPU_CONV, starts(0, 3, 73) | {"x": meta(73, 16), "weight": meta(4, 16)}, OK,
        "FNPU causal_conv1d_tiling_validation.h:196-240", B=None),
    known(NPU_CONV, starts(3, 73), REJECT, "FNPU ...:221", B=None, looks=ENDS),
    known(NPU_CONV, starts(0, 3, 3, 73), OK, "FNPU ...:236", B=None),
    known(NPU_CONV, starts(0, 8, 16) | {"x": meta(2, 8, 16)}, OK, "FNPU ...:223, 263", B=2, T=8, training=False),
    known(NPU_CONV, starts(0, 1, 2) | {"x": meta(2, 1, 16)}, OK, "FNPU ...:223, 263", B=2, T=1, training=False),
    known(NPU_CONV, starts(0, 3, 16) | {"x": meta(2, 8, 16)}, SILENT, "FNPU op_kernel/causal_conv1d.h:50-60", B=2, T=8,
        training=False),
    known(NPU_CONV, starts(0, 3, 8, 16), REJECT, "FNPU ...:263", B=2, T=8, training=False),
    known(NPU_CONV, starts(0, 3, 73) | {"x": meta(1, 73, 16)}, REJECT, "FNPU ...:263", training=False),
    known(NPU_CONV, starts(0, 12, 8, 16), REJECT, "FNPU ...:236", T=16, B=None),
    known(NPU_CONV, {"activation_mode": 1}, SILENT, "FNPU ops/ascendc/__init__.py:323"),
    known(NPU_GDR, lengths(0, 8), SILENT, "FNPU #641", B=None, T=4, training=False),
    known(NPU_GDR, {"actual_seq_lengths": dev(0, 4, 4)}, REJECT, "FNPU #641", B=None, T=8, training=False),
    known(MG, thd(0, 3, 73), OK, "MG gated_delta_net/common.py:469-493", versions=MAIN),
    known(MG, thd(0, 3, 73), REJECT, "MG common.py:480", T=80, versions=MAIN),
    known(MG, thd(0, 6, 12), SILENT, "MG common.py:586-618", T=12, versions=MAIN, **cp("zigzag")),
    known(MG, thd(0, 8, 8, 16), OK, "MG common.py", T=16, versions=MAIN, **cp("document_zigzag")),
    known(MG, thd(0, 8, 32), SILENT, "MG common.py _build_thd_cp_a2a_perm: each sequence's own", T=32, versions=MAIN,
        **cp("zigzag")),
    known(MS, thd(0, 3, 73), OK, "MS core_r0.16.0 ssm/gated_delta_net.py:592-665", versions={"mindspeed": "0.16"}),
    known(MS, thd(0, 3, 73), REJECT, "MS core_r0.16.0 ssm/gated_delta_net.py:652", T=80, versions={"mindspeed": "0.16"}),
    known(MS, thd(0, 3, 73, initial_state=meta(2, 4, 128, 128)), SILENT,
        "MS core_r0.17.0 npu_chunk_gated_delta_rule.py:337-352", versions={"mindspeed": "0.17", "megatron": "main"}),
    known("fla_npu", HOST | {"chunk_indices": [1, 0, 0, 0, 1, 1]}, REJECT, "FNPU ...:382"),
    known("fla_npu", host(0, 3, 3, 73) | {"chunk_indices": [0, 0, 2, 0, 2, 1]}, REJECT, "FNPU ...:360"),
    known("fla_npu", HOST | {"chunk_indices": TABLE}, REJECT, "FNPU ...bwd_full:410-417", B=2),
    # rules
    known(HF, {"cu_seq_lens_q": BOTH["cu_seq_lens_q"]}, "pair", right=BOTH, trap=1, versions=FULL, tells="convolution runs"),
    known(HF, {"seq_idx": BOTH["seq_idx"]}, "pair", right=BOTH, trap=1, versions=FULL, tells="rule runs"),
    known(HF, {"cu_seq_lens_q": BOTH["cu_seq_lens_q"]}, "pair", right=BOTH, mended={"versions": FULL}, trap=2,
        versions=FULL | {"causal_conv1d": ""}),
    known(HF, BOTH, "package", right=BOTH, mended={"versions": FULL | {"transformers": "5.19.0"}}, trap=2,
        versions={"transformers": "5.19.0", "fla": "0.5.2"}),
    known(RULE, cu(3, 70), "first", right=CU, trap=3, looks="lengths"),
    known(RULE, cu(3, 73), "first", right=CU, trap=3, looks=ENDS),
    known(RULE, cu(0, 3, 70), "last", right=CU, trap=3, looks="lengths", tells="unwritten"),
    known(NPU_GDR, lengths(4, 4), "first", right=lengths(0, 4, 4), trap=3, looks="lengths", T=8, training=False),
    known(TORCH_NPU, lengths(0, 4, 8), "last", right=lengths(4, 4), looks="offsets", T=8, training=False),
    known(TORCH_NPU, lengths(0, 4, 4), "empty", right=lengths(4, 4), trap=3, T=8, training=False),
    known(RULE, CU, "last", right=gated_delta_kwargs(TAILED, kernel="fla"), trap=4, T=80),
    known(RULE, cu(0, 3, 80), "last", right=CU, trap=5, tells="somebody else"),
    known(RULE, cu(3, 80), "first"),
    known(RULE, cu(0, 70, 3, 73), "falling", right=CU, trap=5),
    known(RULE, cu(0, 3, 3, 73), "empty", right=CU, trap=6, versions={"fla": "0.5.0"}),
    known(MS, thd(0, 3, 3, 73), "empty", right=thd(0, 3, 73), trap=6, versions={"mindspeed": "0.16"}),
    known(RULE, CU | TABLE_32, "table", right=CU | TABLE_64, trap=7),
    known(CONV, CU | TABLE_32, "table", right=CU | TABLE_64, trap=7, chunk_size=32),
    known(CUMSUM, host(0, 1500) | {"chunk_indices_out": [0, 0]}, "table",
        right=host(0, 1500) | {"chunk_indices_out": [0, 0, 0, 1]}, trap=7, T=1500, chunk_size=128),
    known(RULE, CU | {"cu_seqlens_cpu": dev(0, 40, 73)}, "copy", right=CU | {"cu_seqlens_cpu": dev(0, 3, 73)}, trap=8),
    known(CONV, cu(0, 73, 146), "rows", right=cu(0, 73, 146), mended={"B": 1, "T": 146}, trap=9, B=2),
    known(CC, numbered(73), "differs-from-segments", right=numbered(3, 70), trap=10, segments=PACKED),
    known(CC, {"seq_idx": i32(0, 0, 1, 0, 0)[None]}, "numbers-return", right={"seq_idx": i32(0, 0, 1, 2, 2)[None]}, trap=10,
        T=5),
    known(MAMBA, {"seq_idx": torch.cat([ids(9), ids(9) + 1, ids(9)], 1)}, "numbers-return", right=numbered(9, 9, 9), trap=10,
        T=27),
    known(HF, {"attention_mask": padded("left")[:, None, None]}, "mask-rank", right=keep("left"), trap=11, **ROWS),
    known(HF, {"attention_mask": padded("left") * 2}, "mask-values", right=keep("left"), trap=11, **ROWS),
    known(HF, {"attention_mask": (1 - padded("left")).float() * -1e9}, "mask-values", right=keep("left"), trap=11, **ROWS),
    known(HF, {"attention_mask": padded() * 0 + 1}, "differs-from-segments", right={"attention_mask": LEFT.keep.long()},
        trap=11, **ROWS, segments=LEFT),
    known(HF, BOTH | {"attention_mask": (torch.arange(73) > 5).long()[None]}, "mask-and-offsets", right=BOTH, trap=12,
        versions=FULL, silent=True),
    known(HF, keep("hole"), "hole", right=gated_delta_kwargs(HOLE, kernel="transformers", keep_padding=False),
        mended={"B": 1, "T": 45}, trap=13, **ROWS, segments=HOLE, versions=FULL),
    known(HF, keep("left", B=1), "mask-dropped", right=keep(B=1), trap=14, T=25, versions={"transformers": "4.57.1"}),
    known(MG, keep("left"), "mask-unread", right=keep(), trap=15, **ROWS),
    known(MG, {}, "differs-from-segments", right=thd(0, 20, 45), mended={"B": 1, "T": 45}, trap=15, **ROWS,
        segments=LEFT, versions=MAIN),
    known(MG, thd(0, 5, 73, padded_to=(0, 4, 76)), "padded-actual", right=thd(0, 3, 73, padded_to=(0, 4, 76)), trap=16, T=76,
        versions=MAIN),
    known(MG, thd(0, 6, 12), "ranks", right=thd(0, 6, 12, padded_to=(0, 8, 16)), mended={"T": 16}, trap=17, T=12,
        versions=MAIN, **cp("document_zigzag")),
    known(CONTEXT, cu(0, 3, 64), "last", right=cu(0, 3, 73, 128), trap=18, T=128, **cp()),
    known(CONTEXT, cu(0, 3, 128), "ranks", right=cu(0, 3, 128), mended=cp(), trap=18, T=128, **cp("zigzag")),
    known(RULE, cu(0, 3, 128), "ranks", right=cu(0, 3, 128), mended=cp(), trap=18, T=128, **cp("zigzag")),
    known(RULE, cu(0, 3, 128), OK, T=128, **cp("ulysses")),
    known(MG, thd(0, 8, 16), "ranks", right=thd(0, 8, 16), mended=cp("document_zigzag"), trap=18, T=16, versions=MAIN,
        **cp()),
    known(RULE, CU | {"q": meta(1, 4, 73, 128)}, "shape", right=CU | {"q": meta(1, 73, 4, 128)}, trap=19),
    known(NPU_CONV, starts(0, 3, 73) | LEARNING, "history", right=starts(0, 3, 73) | LEARNING, mended={"training": False},
        trap=20, B=None),
    known(NPU_CONV, X | {"activation_mode": 1, "query_start_loc": [0, 73]}, "history", right=X | starts(0, 73), trap=20,
        B=None),
    known(DECODE, CU, "backward", right=CU, mended={"training": False}, trap=21),
    known(HF, {"attention_mask_2d": padded("left")}, "unread", right=keep("left"), trap=22, tells="int64 [2, 25]", **ROWS),
    known(HF, BOTH | CU, "unread", right=BOTH, trap=22, versions=FULL),
    known(RULE, {"cu_seqlen": dev(0, 3, 73)}, "unread", right=CU, trap=22),
    known(RULE, keep("left"), "unread", right={}, trap=22, **ROWS),
    known(MG, keep("left"), "differs-from-segments", versions=MAIN, segments=LEFT, **ROWS),
    known(MAMBA, CU, "offsets-alone", right=CU | numbered(3, 70), trap=24),
    known(RULE, {"cp_context": object()}, "context-unread", segments=PACKED),
    known(RULE, TABLE_64, "alone"),
    known(RULE, {"cu_seqlens": torch.empty(3, dtype=torch.int64, device="meta")}, "container"),
    known(RULE, CU | {"cu_seqlens_cpu": [0, 3, 73]}, "container"),
    known(RULE, CU | {"chunk_indices": TABLE}, "container"),
    known(RULE, cu(0), "count"),
    known(RULE, cu(0, 3, 74), "sizes-differ", T=74, segments=PACKED),
    known(RULE, CU, "ranks", **cp("ulysses")),
    known(CONV, {"cu_seqlens": dev(0, 2, 73), "output_final_state": True}, "short-state", versions={"fla": "0.5.2"}),
    known(CONV, {"cu_seqlens": dev(0, 2, 73), "output_final_state": True}, OK, versions={"fla": "0.6.0"}),
    known("fla.chunk_kda", CU | {"initial_state": STATES["initial_state"].float()}, OK, "FLA ops/kda/chunk.py:385"),
    known(CC, {"seq_idx": torch.zeros(73, 2, dtype=torch.int32)[:, :1].T}, OK, "CC interface.py: .contiguous()"),
    known(CC, {"seq_idx": torch.cat([ids(8)] * 2), "x": meta(2, 8, 16).transpose(1, 2)}, OK, B=2, T=8),
    known(CC, {"seq_idx": torch.stack([i32(0, 1, 2), i32(0, 0, 0)])}, OK, B=2, T=3),
    known(CUMSUM, HOST | {"chunk_indices_out": TABLE[:4]}, REJECT, "FNPU chunk_local_cumsum_tiling.cpp:277", chunk_size=512),
    known(CUMSUM, HOST | {"chunk_indices": TABLE}, "unread"),
    known(CUMSUM, HOST | {"chunk_indices_out": TABLE[:4]}, REJECT, "FNPU chunk_local_cumsum_tiling.cpp:269", B=2),
    known(FLASH, CU | {"cu_seqlens_list": [0, 3, 73]}, OK, segments=PACKED),
    known(FLASH, CU | {"chunk_indices": {"64": TABLE_64["chunk_indices"]}, "chunk_indices_list": {"64": TABLE}}, OK),
    known(FLASH, CU | {"cu_seqlens_list": [0, 4, 73]}, "copy"),
    known(FLASH, CU | {"chunk_indices_list": {"64": [0, 0, 1, 0]}}, "table", silent=True),
    known(FLASH, cu(0, 3) | {"chunk_indices_list": {"1": [0, 0, 0, 1, 0, 2]}}, OK, T=3),
    known(FLASH, {"cu_seqlens_list": [0, 3, 73]}, "alone"),
    known(TORCH_NPU, lengths(3, 70), "scale", right=lengths(3, 70) | {"scale": 0.5}, training=False, segments=PACKED),
    known(MAMBA, {"seq_idx": torch.zeros(2, 30_501, dtype=torch.int32)}, "tokens", B=2, T=30_501, tells="61002"),
    known(MAMBA, numbered(61_000), OK, T=61_000),
    known(HF, {"position_ids": torch.cat([torch.arange(3), torch.arange(70)])[None]}, "positions-alone", versions=FULL),
    *(known(HF, {"position_ids": positions}, OK, versions=FULL) for positions in (torch.arange(73)[None], torch.arange(73))),
    known(HF, {"position_ids": dev(-1, -1, 0, 1)[None]}, OK, T=4, versions=FULL),
    *(known(HF, {"position_ids": dev(0, 0, 0, 1)[None], "attention_mask": mask[None]}, expected, T=4, versions=FULL)
      for mask, expected in ((dev(0, 0, 1, 1), OK), (dev(1, 1, 1, 1), "positions-alone"))),
    known(HF, BOTH | numbered(4, 69), "disagree", versions=FULL),
    known(HF, BOTH | numbered(4, 69), "differs-from-segments", versions=FULL, segments=PACKED),
    known(HF, cu_q(0, 1, 73), "pair", versions=FULL),
    *(known(HF, one, OK, versions=FULL) for one in (cu_q(0, 73), cu_q(0, 73, 73), numbered(73))),
    known(HF, BOTH, "release", versions={"transformers": "4.57.1"}, silent=True),
    known(HF, {"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]), "bias": meta(16)}, "bias", B=2, T=3),
    known(HF, {"attention_mask": [[1] * 25] * 2}, "mask-form", **ROWS),
    known(HF, {"attention_mask": padded()[:, 1:]}, "mask-shape", **ROWS),
    known("fla_npu", gated_delta_kwargs(Segments.from_lengths([[32768]]), kernel="fla_npu"), "release", T=32768,
        versions={"fla_npu": "26.6.0"}),
    known("fla_npu", gated_delta_kwargs(Segments.from_lengths([[40000]]), kernel="fla_npu"), SILENT, T=40000,
        versions={"fla_npu": "26.6.0"}),
    known(NPU_GDR, lengths(0, 9), "length", T=9, training=False),
    known(TORCH_NPU, lengths(4, 4), "backward", T=8),
    known(TORCH_NPU, lengths(8) | {"q": meta(8, 64, 128), "v": meta(8, 64, 128), "beta": meta(8, 64),
        "initial_state": meta(1, 64, 128, 128)}, OK, T=8, training=False),
    known(MG, thd(0, 3, 73, padded_to=(0, 4, 76), cu_seqlens_q=[0, 3, 73]), "container", T=76, versions=MAIN),
    known(MG, thd(0, 3, 73, total_tokens=74), "total", versions=MAIN),
    known(MG, {}, "ranks", B=2, T=74, **cp("zigzag")),
    known(MG, {"attention_mask": torch.zeros(2, 1, 25, 25, dtype=torch.bool)}, "mask-unread", **ROWS),
    known(MS, {"q": meta(1, 73, 4, 8)}, OK, versions={"mindspeed": "0.18"}),
    # right calls
    known(RULE, CU | {"attention_mask": None, "position_ids_unused": None}, OK),
    known(RULE, CU | qkv(4, 8) | {"g": meta(1, 73, 8), "beta": meta(1, 73, 8), "initial_state": meta(2, 8, 128, 128)}, OK),
    known(RULE, CU | qkv(4, 8) | STATES, "shape"),
    known(RULE, {"cp_context": object()}, OK),
    known(RULE, {"cp_context": object()}, OK, T=128, **cp()),
    known(RULE, gated_delta_kwargs(RIGHT, kernel="fla", keep_padding=True), OK, T=50, segments=RIGHT),
    known(RULE, cu(0, 1, 2, 4), OK, T=4, segments=Segments.from_lengths([[1, 1], [2]])),
    *(known(MG, {"attention_mask": mask}, OK, **ROWS) for mask in (BIAS, BIAS[:, 0])),
    known(NPU_CONV, {"x": meta(1, 73, 16, requires_grad=True)}, OK),
    known(RULE, {"cu_seqlens": dev(0, 3, 3, 73), "output_final_state": True}, OK, versions={"fla": "0.5.1"}),
    known(RULE, qkv(4, 8, T=4), OK, T=4),
    known(CONV, cu(0, 73, 146), OK, B=2, training=False),
    known(CONV, {"x": meta(1, 73, 4, 8), "weight": meta(32, 4)}, OK),
    known(CONV, CU | {"output_final_state": True, "backend": "cuda"}, OK),
    known(CC, {"seq_idx": ids(3, 70) + 9, "weight": meta(16, 4)}, OK),
    known(CC, {"seq_idx": i32(1, 0, 0, 0, 1)[None]}, OK, T=5),
    known(CC, {"seq_idx": i32(1, 0, 1)[None], "weight": meta(16, 2)}, OK, T=3),
    known(HF, keep("left", B=1), OK, T=25, versions=FULL),
    known(HF, BOTH | {"attention_mask": (torch.arange(73) < 60).long()[None], "position_ids": torch.arange(73)[None]}, OK,
        versions=FULL),
    known(CUMSUM, HOST | {"chunk_indices_out": (0, 0, 1, 0), "g": meta(1, 4, 73)}, OK),
    known(CUMSUM, HOST | {"chunk_indices_out": (0, 0, 1, 0)}, OK, chunk_size=1),
    known(CUMSUM, HOST | {"chunk_indices_out": (0, 0, 1, 0), "g": meta(1, 73, 4)}, "shape", trap=19),
    known(NPU_CONV, X | {"x": meta(1, 73, 16)}, OK),
    known(RULE, {"cu_seqlens": dev(0, 3, 128), "cp_context": object()}, OK, T=128, segments=LONG, **cp()),
    known(MG, {"packed_seq_params": SimpleNamespace(**thd(0, 3, 73))}, OK, versions={"megatron": "0.18.0"}),
    known(MG, {"attention_mask": torch.ones(1, 1, 25, 25).tril() == 0}, OK, T=25, segments=Segments.from_lengths([20], 25)),
    known(MS, thd(0, 3, 73), OK, versions={"mindspeed": "0.18"}),
    known(MG, thd(0, 3, 73) | {"packed_seq_params": SimpleNamespace(**thd(0, 4, 74))}, OK, versions=MAIN),
    known(MAMBA, {"seq_idx": torch.zeros(2, 25, dtype=torch.int32)}, OK, segments=Segments.from_lengths([25, 25]), **ROWS),
]  # fmt: skip
