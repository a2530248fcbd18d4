"""Where padding or another sequence changes the tokens of a transformers model by its sizes, which a tiny copy (probe.py)
has not: windows, the budget of an indexer, the width of sparse blocks, rotary frequencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from collate_npu.consumers.models import config_of, text_config, windows

HOLE_IN_A_STATE = "the state of a recurrent layer decays over a hole, and its convolution reaches into it"


def why_holes_cut(config: Any, longest: int) -> str:
    """Why padding between tokens cuts a window short; "" where no row, of `longest` places with its holes, fills one."""
    sizes = [size for size in windows(text_config(config)) if size < longest]
    return f"its window of {sizes[0]} counts places, those of a hole included" if sizes else ""


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
