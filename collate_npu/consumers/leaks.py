"""Where padding reaches the tokens of a transformers model although its mask is right, and why: to be refused, in a word.

Measured on every hybrid family, and every causal and masked family that builds tiny, of transformers 5.23 and 4.57.1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal

from collate_npu.consumers.forwards import counts_places
from collate_npu.consumers.models import config_of, layer_kinds, needs_mask_2d, text_config, windows
from collate_npu.releases import LFM2_MASKED, ZAMBA2_MASKED, Since

MODELS_IGNORING_MASK: dict[str, tuple[Since | None, str]] = {
    "recurrent_gemma": (None, "its recurrent block takes a mask and never reads it (modeling_recurrent_gemma.py:414)"),
    "rwkv": (None, "its forward takes attention_mask and only warns that it is unused (modeling_rwkv.py:547)"),
    "xlstm": (None, "its forward has no attention_mask (modeling_xlstm.py)"),
    "lfm2": (LFM2_MASKED, "its convolutions get the 4D causal mask and skip it (4.57 modeling_lfm2.py:406, 662)"),
    "zamba2": (ZAMBA2_MASKED, "its torch path carries the wrong state from chunk to chunk (4.57 modeling_zamba2.py:879)"),
}
"""Model type -> (the release that masks its recurrent layers, or None; why earlier ones do not)."""


def why_padding_leaks(model: Any, where: Literal["right", "left", "holes"], *, longest: int = sys.maxsize) -> str:
    """Why padding after, before or between the tokens of a row changes them; "" where a right 2D mask keeps it out.

    `model` is a module or a config, `longest` the longest row with its holes: a window that no row fills is not cut
    short by one. Not told here: positions (`position_rule`), and the mask of a single row before transformers 5.15.
    """
    config = config_of(model)
    text = text_config(config)
    names = {getattr(config, "model_type", ""), getattr(text, "model_type", ""), *layer_kinds(text)}
    recurrent = needs_mask_2d(text)
    tables = [_MIXING]
    reasons = []
    if where != "right":
        ignoring = {name: why for name, (mended, why) in MODELS_IGNORING_MASK.items() if not (mended and mended.holds())}
        tables += [ignoring, _COUNTING_PLACES]
        reasons += [_bias_leak(text) if recurrent else ""]
        reasons += [_NO_POSITIONS if counts_places(model) else ""]
    if where == "holes":
        tables += [_COUNTING_HOLES]
        sizes = [size for size in windows(text) if size < longest]
        reasons += [HOLE_IN_A_STATE if recurrent else "", _CUT.format(sizes[0]) if sizes else ""]
    listed = (why for table in tables for name, why in table.items() if name in names)
    return next(listed, "") or next(filter(None, reasons), "")


def _bias_leak(config: Any) -> str:
    """Masked tokens enter these projections as zeros and leave them as the bias; behind the scan one does no harm."""
    harmless = "mamba_proj_bias" if getattr(config, "model_type", "") == "nemotron_h" else ""
    fields = (name for name in _PROJECTION_BIASES if getattr(config, name, False) is True and name != harmless)
    leak = "with {}=True the projection into its recurrent layers turns masked padding into its bias"
    return next(map(leak.format, fields), "")


# mamba, mamba2, falcon_mamba, nemotron_h; bamba, falcon_h1, granitemoehybrid, jamba, zamba; lfm2, lfm3; zamba2. The bias of
# the convolution alone (use_conv_bias, mamba_conv_bias) is masked again behind it (5.23 modeling_mamba.py:375, 431).
_PROJECTION_BIASES = ("use_bias", "mamba_proj_bias", "conv_bias", "add_bias_linear")
HOLE_IN_A_STATE = "the state of a recurrent layer decays over a hole, and its convolution reaches into it"
_CUT = "its window of {} counts places, those of a hole included"

# By model type or kind of layer, transformers 5.23.
_MIXING = {
    "canine": "it convolves neighbouring characters, padding or not (modeling_canine.py:187)",
    "convbert": "it convolves neighbouring tokens, padding or not (modeling_convbert.py:191)",
    "cpmant": "it tells padding by the id 0 alone (modeling_cpmant.py:605)",
    "fnet": "its Fourier transform runs over the whole width (modeling_fnet.py:145)",
    "funnel": "it pools every two places into one (modeling_funnel.py:253)",
    "mobilebert": "its embeddings take in the neighbours of a token, padding or not (modeling_mobilebert.py:123)",
    "nystromformer": "its landmarks are means over the whole width (modeling_nystromformer.py:182)",
    "prophetnet": "the offsets of its second stream are counted from the width (modeling_prophetnet.py:44)",
    "yoso": "its attention hashes and convolves the whole width (modeling_yoso.py:347)",
}
_COMPRESSES = "it compresses every few places into one key, padding or not (modeling_deepseek_v4.py:419-431)"
_CAPACITY = "its experts take tokens by place up to their capacity, padding too (modeling_{}.py)"
_COUNTING_PLACES = {
    "switch_transformers": _CAPACITY.format("switch_transformers"),
    "nllb-moe": _CAPACITY.format("nllb_moe"),
    "compressed_sparse_attention": _COMPRESSES,
    "heavily_compressed_attention": _COMPRESSES,
    "minimax_m3_sparse": "its indexer compares places with positions (modeling_minimax_m3_vl.py:567)",
}
_NO_POSITIONS = "its positions are places, and its forward takes no position_ids"
_DISTANCE = "the distance between two tokens is counted in places, those of a hole included"
_COUNTING_HOLES = dict.fromkeys(("gpt_neo", "mpnet", "mpt", "roformer", "ultrabert", "xlnet"), _DISTANCE)


def width_dependence(model: Any) -> int | None:
    """The longest sequence whose attention does not depend on the width of the tensor, padded or not; None: any length.

    An indexer keeps the best `index_topk` keys; ReLU makes many scores exactly zero where it has few heads, and which of
    equal scores win depends on how many there are. Measured on 5.23: with 2 heads every family moves, with 8 none.
    Source: modeling_deepseek_v32.py:228-241, modeling_glm5_next.py:863-889.
    """
    config = text_config(config_of(model))
    heads, topk = getattr(config, "index_n_heads", None), getattr(config, "index_topk", None)
    if heads is None or heads >= 8 or topk is None:
        return None
    return int(topk * (getattr(config, "compress_rates", None) or {}).get("compressed_sparse_attention", 1))


def sparse_from(model: Any) -> int | None:
    """The width beyond which attention is sparse, by blocks that are drawn for a width; None where it never is.

    Source: modeling_big_bird.py:1576, modeling_bigbird_pegasus.py, 5.23.
    """
    config = text_config(config_of(model))
    if getattr(config, "attention_type", "") != "block_sparse":
        return None
    return int((5 + 2 * config.num_random_blocks) * config.block_size)


def rope_limit(model: Any) -> int | None:
    """The position from which "longrope" and "dynamic" rotary frequencies change for the whole batch; None without them.

    They follow the highest position of the tensor, padding included, so that such a model must be given `position_ids`
    wherever the width passes the limit. Source: transformers 5.23 modeling_rope_utils.py `dynamic_rope_update`.
    """
    config, original = text_config(config_of(model)), "original_max_position_embeddings"
    if not {"longrope", "dynamic"} & {each["rope_type"] for each in _ropes(config)}:
        return None
    limits = [each.get(original) or getattr(config, original, None) for each in _ropes(config)]
    whole = [size for size in [*limits, getattr(config, "max_position_embeddings", None)] if isinstance(size, int)]
    return min(whole, default=None)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary settings, one for each kind of layer where a config has several: `rope_scaling` is that of 4.x."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [each for each in settings.values() if isinstance(each, dict)]
    return [{"rope_type": each.get("type"), **each} for each in nested or [settings]]


def why_lengths_clash(model: Any, lengths: Iterable[int]) -> str:
    """Why these sequences (of all rows) must not share a batch; "" where they may."""
    limit, sizes = rope_limit(model), set(lengths)
    if limit is None or max(sizes, default=0) <= limit or len(sizes) == 1:
        return ""
    if min(sizes) > limit and all(each["rope_type"] != "dynamic" for each in _ropes(text_config(config_of(model)))):
        return ""
    return f"a sequence longer than {limit} changes the rotary frequencies of every other one in its batch"
