"""Families: whose recurrent layers keep the sequences of a flat row apart, by which kernels, and why the others do not.

A list, because a layer's own code does not tell: Mamba-2 and Inkling ask in the layer, and drop the keys on the way to it.
Every hybrid family of transformers 5.23 stands here, each measured with reference kernels; sources are its modeling files.
The table of the guide is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from collate_npu.consumers.consumer import Case
from collate_npu.consumers.models import text_config
from collate_npu.releases import KERNELS_TOLD, MISSING_KERNEL_RAISES

_GATED_DELTA = "causal_conv1d_fn by seq_idx, chunk_gated_delta_rule by cu_seq_lens_q"
KDA = "causal_conv1d_fn by seq_idx, chunk_kda by cu_seqlens"
"""The layer hands its keywords on as they are, and the kernel drops `cu_seq_lens_q` (modeling_kimi_linear.py:683-705): so
the batch says it under both names."""
_MAMBA2 = "causal_conv1d_fn and mamba_chunk_scan_combined by seq_idx"
_CONVOLUTION = "causal_conv1d_fn by seq_idx"
READ_BY: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid"), _GATED_DELTA),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), KDA),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"), _MAMBA2),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTION),
}
"""Family -> the kernels of its recurrent layers, and the key of the batch that tells each where a sequence begins."""

_SELECTIVE = "selective_scan_fn of mamba-ssm takes no boundaries"
_UNTOLD = "{} calls its short convolutions without the seq_idx that these would read"
_PLAIN = "{} is plain torch and knows no boundary"
RUNS_ON: Mapping[str, str] = {
    "mamba": _SELECTIVE,
    "falcon_mamba": _SELECTIVE,
    "jamba": _SELECTIVE,
    "zamba": _SELECTIVE,
    "mamba2": "Mamba2Model takes no seq_idx, which its kernels would read (modeling_mamba2.py:905-912)",
    "glm5_next_text": "Glm5NextTextIndexer chooses among all earlier places of the row, whatever its chunk_kda is told "
    "(modeling_glm5_next.py:891)",
    "inkling_text": f"{_UNTOLD.format('InklingAttention')} (modeling_inkling.py:231, 587)",
    "inkling2_text": f"{_UNTOLD.format('Inkling2SlidingAttention')} (modeling_inkling2.py:449), and "
    f"{_PLAIN.format('Inkling2DynamicShortConvolution')}",
    "lfm3": f"{_PLAIN.format('the convolution of Lfm3ShortConv')}: it has 7 taps, and causal-conv1d takes 2 to 4 "
    "(modeling_lfm3.py:299)",
    "minimax": f"{_PLAIN.format('MiniMaxLightningAttention')} (modeling_minimax.py:125); fla's chunk_lightning_attn, which "
    "takes cu_seqlens, is not called",
    "zaya": f"{_PLAIN.format('ZayaCCAProjection')} (modeling_zaya.py:143)",
    "recurrent_gemma": f"{_PLAIN.format('the convolution before RecurrentGemmaRglru')} (modeling_recurrent_gemma.py:454)",
    "rwkv": "rwkv_linear_attention takes no boundaries, and the shift before it neither (modeling_rwkv.py:206)",
    "xlstm": "its mLSTM layers take no boundaries (modeling_xlstm.py)",
}
"""Family -> the layer or kernel in which the state of a flat row runs on; no release up to 5.23 tells it."""


def why_state_runs_on(case: Case) -> str:
    """Why a recurrent layer computes a flat row wrong although it is told its offsets: its state runs from one sequence into
    the next, for lack of a question in its code, or of a kernel that reads the answer."""
    if not (case.padding_free and case.recurrent and case.segments.packed):
        return ""
    family = case.model.model_type
    if not family:
        return "nobody said which model it is"
    if family not in READ_BY:
        return f"in {family}, {RUNS_ON.get(family, 'of which nothing is known here')}"
    if case.model.config is not None and getattr(text_config(case.model.config), "ple_layer_ids", None):
        return f"in {family}, {_PLAIN.format('each layer of ple_layer_ids')} (modeling_qwen4_exp.py:1074, 1208)"
    if case.model.boundaries_unread != "" and not KERNELS_TOLD.holds():
        hidden = "nobody can see what its recurrent layers ask for, and in most they do not ask"
        return f"before transformers {KERNELS_TOLD} {hidden}"
    if case.model.boundaries_unread is None and not MISSING_KERNEL_RAISES.holds():
        return f"before {MISSING_KERNEL_RAISES} transformers trains on where a kernel is missing, and a config does not tell"
    return case.model.boundaries_unread or ""


def also_told(case: Case) -> tuple[str, ...]:
    """Under which other names its kernels read `cu_seq_lens_q`."""
    return ("cu_seqlens",) if READ_BY.get(case.model.model_type) == KDA else ()
