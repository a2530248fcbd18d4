"""Layers and modules of training stacks, as far as they read boundaries and masks."""

from __future__ import annotations

from dataclasses import replace

from collate_npu.kernels.gated_delta.operators import Operator

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

STACKS: tuple[Operator, ...] = (
    _TRANSFORMERS,
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
        name="twinkle.qwen3_5_gdn",
        package="twinkle",
        source="twinkle-kit 0.5.1, which patches the layer of Qwen3.5 for packed rows",
        numbers="",
    ),
    replace(
        _TRANSFORMERS,
        name="veomni.qwen3_5_gdn",
        package="veomni",
        source="VeOmni d977449; #845, #1076",
        numbers="",
        needs=frozenset({"cu_seq_lens_q"}),
        checks=_TRANSFORMERS.checks | {"missing"},
        empties="never",
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
"""Whose forward a user calls."""
