"""Hybrid families, and what is known of their packed rows: by reading and by running each of transformers 5.23."""

from collate_npu.testing import hybrid_model_types

HERE = hybrid_model_types()
GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid")
KDA = ("kimi_linear", "bailing_hybrid")
MAMBA_2 = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
CONVOLUTION = ("lfm2", "lfm2_moe")
EXACT = [name for name in (*GATED_DELTA, *KDA, *MAMBA_2, *CONVOLUTION) if name in HERE]
MIXED = sorted(set(HERE) - set(EXACT))
