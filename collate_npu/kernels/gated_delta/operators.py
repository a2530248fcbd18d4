"""The operators that take recurrent boundaries: what each reads, what its host code checks, and what else is known.

One row an operator; rules are judged for all of them alike (`sequence_rules`, `tensor_rules`, `padding_rules`), and a rule
that stands in `checks` is refused by the operator itself, any other is taken without a word. What is true of one stack
alone is in `stack_rules`.

Releases read: fla 0.5.2 (bc3b101), flash-linear-attention-npu 17e24fd (after v26.6.0), causal-conv1d 1.6.1 (0d2252d), mamba
e9594ce, transformers 4.57 to 5.23, megatron-core 0.16.1 to 0.19, mcore-bridge 1.6.5, MindSpeed core_r0.15.3 to 0.18,
MindSpeed-LLM c77308a, verl 0.9.1, torchtitan 0.3.0, op-plugin 517f2e7 (documentation), TransformerEngine #3351 (text alone).

Legend of shapes: B rows, T tokens, H query and key heads, N value heads, K and V head sizes, D channels, W taps, S states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from collate_npu.errors import CollateError, explain

Form = Literal["offsets", "lengths", "prefix and lengths", "ends"]
Masks = Literal["none", "multiplied", "unpadded", "ignored", "output"]
Empties = Literal["legal", "fla", "never"]
Ranks = Literal["whole row", "zigzag row", "state", "documents", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator. Arguments are named as its call names them."""

    name: str
    package: str
    source: str
    kernel: str = "fla"
    """The `kernel` of `gated_delta_kwargs` that makes its arguments."""
    offsets: tuple[str, ...] = ()
    """Arguments that hold the boundaries; the first that is given counts."""
    form: Form = "offsets"
    numbers: str = ""
    """The argument that holds a sequence number for each token."""
    copies: tuple[str, ...] = ()
    """Host copies of the offsets."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Chunk tables, and what a chunk of each is: `"rule"` (chunk_size), `"conv"` (64), `"cumsum"` (2**17 / chunk_size)."""
    needs: frozenset[str] = frozenset()
    """Arguments without which boundaries are not taken."""
    reads: frozenset[str] = frozenset()
    """Other arguments of its own whose names look like boundaries or masks."""
    host: bool = False
    """Boundaries are ints on the host (a list or tuple), not tensors."""
    dtypes: tuple[str, ...] = ("int32", "int64")
    chunk_sizes: tuple[int, ...] = ()
    checks: frozenset[str] = frozenset()
    empties: Empties = "never"
    repairs_ends: bool = False
    """Offsets without the leading 0 that end at T get one."""
    folds: bool = False
    """Offsets run over all B * T tokens, row after row."""
    masks: Masks = "none"
    shapes: Mapping[str, str] = field(default_factory=dict)
    head_sizes: tuple[int, int] = (0, 0)
    """Largest K and V, 0 for no limit known."""
    most_sequences: int = 0
    longest: int = 0
    backward: bool = True
    ranks: Ranks = "whole row"


_RULE = {"q": "BTHK", "k": "BTHK", "v": "BTNV", "g": "BTN", "beta": "BTN", "initial_state": "S..."}
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
_MEGATRON = Operator(
    name="megatron_core.GatedDeltaNet",
    package="megatron",
    kernel="megatron",
    source="Megatron-LM d98e8a6 ssm/gated_delta_net/common.py:469-618; 0.16.1 ssm/gated_delta_net.py:297",
    offsets=("cu_seqlens_q_padded", "cu_seqlens_q"),
    reads=frozenset({"cu_seqlens_kv", "cu_seqlens_kv_padded", "attention_mask", "qkv_format", "total_tokens"}),
    checks=frozenset({"container", "rows", "last", "release", "deterministic", "ranks", "format", "keys"}),
    empties="fla",
    masks="ignored",
    ranks="documents",
)
_FIELDS = _MEGATRON.reads
_TRANSFORMERS = Operator(
    name="transformers.gdn_layer",
    package="transformers",
    kernel="transformers",
    source="transformers 5.23 integrations/hub_kernels.py:1033-1050, masking_utils.py:1521-1529",
    offsets=("cu_seq_lens_q",),
    numbers="seq_idx",
    reads=frozenset({"cu_seq_lens_k", "attention_mask", "position_ids", "seq_lens"}),
    checks=frozenset({"container", "numbers-dtype", "numbers-shape", "rows", "unread"}),
    empties="fla",
    masks="multiplied",
)

OPERATORS: dict[str, Operator] = {
    row.name: row
    for row in (
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
        _TRANSFORMERS,
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
        _MEGATRON,
        replace(
            _MEGATRON,
            name="mcore_bridge.GatedDeltaNet",
            package="mcore_bridge",
            source="mcore-bridge 1.6.5 modules/gated_delta_net.py:146-163, 203, 244-251",
            checks=frozenset({"container", "rows"}),
            repairs_ends=True,
        ),
        replace(
            _TRANSFORMERS,
            name="mcore_bridge.Qwen3_5MoeGatedDeltaNet(USE_MCORE_GDN=0)",
            package="mcore_bridge",
            source="mcore-bridge 1.6.5 mm_gpts/qwen3_5.py:31, 48, 90",
            offsets=("cu_seq_lens_q", "cu_seqlens_q"),
            numbers="",
            reads=_TRANSFORMERS.reads | _FIELDS,
            ranks="never",
        ),
        replace(
            _MEGATRON,
            name="mcore_bridge.Qwen3NextGatedDeltaNet(USE_MCORE_GDN=0)",
            package="mcore_bridge",
            source="mcore-bridge 1.6.5, the transformers layer un-packed to [N, max]",
            masks="multiplied",
            ranks="never",
        ),
        replace(
            _MEGATRON,
            name="mindspeed.GatedDeltaNet",
            package="mindspeed",
            source="MindSpeed core_r0.16.0 ssm/gated_delta_net.py:592-665, ops/triton/utils.py:73-78; "
            "core_r0.17.0 ssm/npu_chunk_gated_delta_rule.py:300-355",
            empties="never",
            repairs_ends=True,
        ),
        Operator(
            name="mindspeed_llm.qwen3_next",
            package="mindspeed_llm",
            kernel="megatron",
            source="MindSpeed-LLM c77308a qwen3_next_gated_deltanet_attention.py:51, 341-440",
            offsets=("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens", "actual_seq_len"),
            reads=_FIELDS,
            masks="multiplied",
        ),
        Operator(
            name="mindspeed_llm.qwen3_next_fsdp2",
            package="mindspeed_llm",
            source="MindSpeed-LLM c77308a fsdp2 modeling_qwen3_next.py:409, 520, 842, 871-876",
            offsets=("actual_seq_len",),
            form="ends",
            reads=frozenset({"attention_mask"}),
            masks="multiplied",
            ranks="zigzag row",
        ),
        Operator(
            name="verl.qwen3_5_gdn",
            package="verl",
            source="verl 0.9.1 models/transformers/qwen3_5.py:192-225",
            offsets=("cu_seqlens",),
            copies=("cu_seqlens_cpu",),
            reads=frozenset({"attention_mask"}),
            checks=frozenset({"container", "rows", "last", "ranks"}),
            empties="fla",
            masks="multiplied",
            ranks="state",
        ),
        Operator(
            name="torchtitan.qwen3_5_gdn",
            package="torchtitan",
            source="torchtitan 0.3.0 models/qwen3_5/model.py:112, 192-236, 398-483",
            offsets=("cu_seqlens", "cu_seq_q"),
            copies=("cu_seqlens_cpu", "cu_seq_q_host"),
            needs=frozenset({"a host copy"}),
            reads=frozenset({"attention_masks", "masks", "cu_seq_k"}),
            checks=frozenset({"missing", "ranks"}),
            empties="fla",
            folds=True,
            ranks="never",
        ),
        Operator(
            name="te.fused_gdn",
            package="te",
            kernel="megatron",
            source="TransformerEngine #3351",
            offsets=("cu_seqlens_q",),
            reads=frozenset({"qkv_format", "total_tokens"}),
            checks=frozenset({"unread", "count", "container"}),
        ),
    )
}
"""Every operator by its name; `KERNELS` are further names for some of them."""

KERNELS: dict[str, str] = {
    "transformers": "transformers.gdn_layer",
    "fla": "fla.chunk_gated_delta_rule",
    "fla_conv": "fla.causal_conv1d",
    "fla_cp": "fla.build_cp_context",
    "causal_conv1d": "causal_conv1d.causal_conv1d_fn",
    "fla_npu_conv": "fla_npu.causal_conv1d",
    "fla_npu_recurrent": "fla_npu.recurrent_gated_delta_rule",
    "torch_npu": "torch_npu.npu_chunk_gated_delta_rule",
    "megatron": "megatron_core.GatedDeltaNet",
}


def operator_named(kernel: str) -> Operator:
    """The row of this kernel; `fla_npu.npu_x` is `fla_npu.x`. Raises `CollateError` with close matches for other names."""
    name = KERNELS.get(kernel, str(kernel).replace("fla_npu.npu_", "fla_npu."))
    if name not in OPERATORS:
        known = [*KERNELS, *OPERATORS]
        near = get_close_matches(str(kernel), known, 3, 0.5) or list(KERNELS)
        rule = "Kernels are those of gated_delta_kwargs, and the operators of kernels/gated_delta/operators.py."
        raise CollateError(explain("kernel", repr(kernel), rule, f"Close to it: {', '.join(near)}."))
    return OPERATORS[name]
