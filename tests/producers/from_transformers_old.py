"""transformers' older mask builders: AttentionMaskConverter and what is built on it, ModuleUtilsMixin (4.x).

`_unmask_unattended` runs on a card alone; here it is called by hand, as 4.x calls it (modeling_attn_mask_utils.py:410).
Legend: B rows, S width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from drawing import ONE_SEQUENCE, Draw, sliding, together
from from_transformers import HF, config
from producing import BIDIRECTIONAL, Producer, case, keep_2d
from torch import Tensor
from verdicts import Case

from collate_npu import Pattern

OLD = ("transformers<5",)


def _builders() -> Any:
    from transformers import modeling_attn_mask_utils

    return modeling_attn_mask_utils


def _embeds(draw: Draw, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*draw.shape, 1, dtype=dtype)


def decoder(draw: Draw, *, sdpa: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    """`_prepare_4d_causal_attention_mask`, or its form for SDPA, which may be None."""
    name = "_prepare_4d_causal_attention_mask" + "_for_sdpa" * sdpa
    mask = getattr(_builders(), name)(keep_2d(draw), draw.shape, _embeds(draw, dtype), 0)
    return case(draw, mask, polarity="bias")


def window(draw: Draw) -> Case:
    """The converter's window counts without the token itself: one more than `create_sliding_window_causal_mask` sees."""
    size = int(draw.rng.integers(1, draw.shape[1] + 2))
    mask = _builders()._prepare_4d_causal_attention_mask(keep_2d(draw), draw.shape, _embeds(draw), 0, sliding_window=size)
    return case(draw, mask, attends=sliding(draw.ids, size + 1), pattern=Pattern.sliding(size + 1), polarity="bias")


def triangle(draw: Draw) -> Case:
    """`to_causal_4d`: no padding at all."""
    S = draw.shape[1]
    mask = _builders().AttentionMaskConverter(is_causal=True).to_causal_4d(draw.shape[0], S, S, dtype=torch.float32)
    return case(draw, mask, polarity="bias", silent=True)


def converted(draw: Draw) -> Case:
    mask = (
        _builders()
        .AttentionMaskConverter(is_causal=True)
        .to_4d(keep_2d(draw), draw.shape[1], dtype=torch.float32, key_value_length=draw.shape[1])
    )
    return case(draw, mask, polarity="bias")


def unmasked(draw: Draw) -> Case | None:
    """Rows that attend nothing are made to attend everything; of a single place that is not to be told from a token."""
    if draw.shape[1] == 1:
        return None
    low = torch.finfo(torch.float32).min
    mask = _builders()._prepare_4d_causal_attention_mask(keep_2d(draw), draw.shape, _embeds(draw), 0)
    return case(draw, _builders().AttentionMaskConverter._unmask_unattended(mask, min_dtype=low), polarity="bias")


def encoder(draw: Draw, *, sdpa: bool = False) -> Case:
    name = "_prepare_4d_attention_mask" + "_for_sdpa" * sdpa
    mask = getattr(_builders(), name)(keep_2d(draw), torch.float32)
    return case(draw, mask, attends=together(draw.ids), pattern=BIDIRECTIONAL, polarity="bias")


def extended(draw: Draw, *, is_decoder: bool, rank: int = 2) -> Case:
    """`ModuleUtilsMixin.get_extended_attention_mask` of a 2D mask, or of a 3D one."""
    from transformers.modeling_utils import ModuleUtilsMixin

    mixin = ModuleUtilsMixin()
    mixin.config = config("eager")
    mixin.config.is_decoder = is_decoder
    given = keep_2d(draw) if rank == 2 else torch.from_numpy(together(draw.ids))
    mask = mixin.get_extended_attention_mask(given, draw.shape, dtype=torch.float32)
    if is_decoder:
        return case(draw, mask, polarity="bias")
    return case(draw, mask, attends=together(draw.ids), pattern=BIDIRECTIONAL, polarity="bias")


def inverted(draw: Draw) -> Case:
    """`invert_attention_mask`, as encoders and cross-attention call it: additive, `[B, 1, 1, S]`."""
    from transformers.modeling_utils import PreTrainedModel

    class Any32(PreTrainedModel):
        dtype = torch.float32

    mask = Any32.invert_attention_mask(Any32.__new__(Any32), keep_2d(draw))
    return case(draw, mask, attends=together(draw.ids), pattern=BIDIRECTIONAL, polarity="bias")


PRODUCERS = [
    Producer("hf _prepare_4d_causal", HF, decoder, ONE_SEQUENCE),
    Producer("hf _prepare_4d_causal bf16", HF, partial(decoder, dtype=torch.bfloat16), ONE_SEQUENCE),
    Producer("hf _prepare_4d_causal for sdpa", HF, partial(decoder, sdpa=True), ONE_SEQUENCE),
    Producer("hf _prepare_4d_causal, sliding", HF, window, ONE_SEQUENCE),
    Producer("hf to_4d", HF, converted, ONE_SEQUENCE),
    Producer("hf to_causal_4d", HF, triangle, ("none", "right", "left"), ("says nothing",)),
    Producer("hf _unmask_unattended", HF, unmasked, ONE_SEQUENCE, ("unmasked rows",)),
    Producer("hf _prepare_4d (encoder)", HF, encoder, ONE_SEQUENCE),
    Producer("hf _prepare_4d (encoder) for sdpa", HF, partial(encoder, sdpa=True), ONE_SEQUENCE),
    Producer("hf extended, encoder", OLD, partial(extended, is_decoder=False), ONE_SEQUENCE),
    Producer("hf extended, decoder", OLD, partial(extended, is_decoder=True), ONE_SEQUENCE),
    Producer("hf extended, 3D documents", OLD, partial(extended, is_decoder=False, rank=3)),
    Producer("hf invert_attention_mask", OLD, inverted, ONE_SEQUENCE),
]
