"""The families of torchtitan 0.3.0's parity list, in a few layers with windows that a short row fills."""

from __future__ import annotations

from functools import partial
from typing import Any

import titan_kernels  # noqa: F401
from torch import nn
from torchtitan.models import deepseek_v3, gpt_oss, llama3, muse_glimmer, qwen3

from collate_npu import Pattern

WINDOW = 3
WINDOWED = Pattern.sliding(WINDOW)


def config_of(family: str, backend: str = "flex", vocabulary: int = 512) -> Any:
    """Two layers, or as many as kinds of attention need; of llama3 and qwen3 every layer is alike."""
    config = {
        "llama3": lambda: llama3.llama3_configs["debugmodel"](backend),
        "qwen3": lambda: qwen3.qwen3_configs["debugmodel"](backend),
        "deepseek_v3": lambda: deepseek_v3.deepseekv3_configs["debugmodel"](backend, "standard"),
        "gpt_oss": lambda: gpt_oss.gptoss_configs["debugmodel"]("standard", backend),
        "muse_glimmer": lambda: muse_glimmer.muse_glimmer_configs["debugmodel"](backend),
    }[family]()
    config.layers = config.layers[2:4] if family == "muse_glimmer" else config.layers[:2]
    config.enable_weight_tying = False
    config.vocab_size = config.lm_head.out_features = vocabulary
    embedding = getattr(config.tok_embeddings, "embedding", config.tok_embeddings)
    embedding.num_embeddings, embedding.param_init = vocabulary, {"weight": partial(nn.init.normal_, std=0.02)}
    for layer in config.layers:
        for name in ("window_size", "sliding_window_size"):
            if getattr(layer.attention, name, None) is not None and name in layer.attention.__slots__:
                setattr(layer.attention, name, WINDOW)
        if backend == "varlen" and layer.attention.inner_attention.window_size[0] > 0:
            layer.attention.inner_attention.window_size = (WINDOW - 1, 0)
    return config


LAYERS: dict[str, Any] = {
    "gpt_oss": {"basic_mask": "causal", "sliding_window_mask": WINDOWED},
    "muse_glimmer": {"global": "causal", f"swa_{WINDOW}": WINDOWED},  # a window with rope, every fourth without both
}
"""Where masks have names of their own; the others are read off the model."""
