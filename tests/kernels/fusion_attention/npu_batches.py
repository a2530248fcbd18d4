"""Batches, patterns and layouts for the tests of `kernels.fusion_attention`, and attention by torch to compare with."""

from typing import Any

import torch
from attention_oracle import reference_fusion_attention
from hypothesis import reject, strategies as st
from strategies import attentions, segments
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from collate_npu import Pattern, Segments, unpad
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
from collate_npu.masks import dense

PADDED = ("BSND", "BNSD", "BSH", "SBH")
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8
SCALE = {"scale": HEAD_DIM**-0.5}


COMPRESSED = {"causal", "bidirectional", "sliding", "chunked", "prefix"}
"""What the operator's TND layout can say; other patterns are dense masks in the padded layouts."""


@st.composite
def right_calls(draw: st.DrawFn) -> tuple[Segments, Pattern, dict[str, Any]]:
    """A batch and a pattern, and the arguments for them in some layout."""
    batch, pattern = draw(attentions(segments().filter(lambda batch: batch.num_tokens > 0)))
    layout: Any = draw(st.sampled_from([*PADDED, "TND"]))
    try:
        return batch, pattern, SCALE | fusion_attention_kwargs(batch, pattern=pattern, layout=layout)
    except UnsupportedFormError:
        assert layout == "TND"
        holes = any(end - start != n for (_, start, end), n in zip(batch.spans, batch.sequence_lengths))
        assert pattern.name not in COMPRESSED or (pattern.name == "sliding" and holes)
        reject()


def qkv(B: int, Sq: int, Skv: int, heads: int = HEADS, key_heads: int = KEY_HEADS, seed: int = 0) -> list[Tensor]:
    """Three tensors `[B, S, heads, D]` in float64, large enough that a wrong mask shows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Sq, heads), (B, Skv, key_heads), (B, Skv, key_heads))
    return [torch.randn(*shape, HEAD_DIM, dtype=torch.float64, generator=generator) * 2 for shape in shapes]


def in_layout(x: Tensor, layout: str) -> Tensor:
    """`[B, S, heads, D]` as the operator's layout wants it."""
    if layout == "BNSD":
        return x.transpose(1, 2)
    if layout in ("BSH", "SBH"):
        x = x.flatten(2)
    return x.transpose(0, 1) if layout == "SBH" else x


def from_layout(x: Tensor, layout: str, heads: int = HEADS) -> Tensor:
    """Inverse of `in_layout`."""
    if layout == "BNSD":
        return x.transpose(1, 2)
    x = x.transpose(0, 1) if layout == "SBH" else x
    return x.unflatten(-1, (heads, HEAD_DIM)) if layout in ("BSH", "SBH") else x


def torch_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """torch's own attention over `[B, S, heads, D]`; keep `[.., Sq, Skv]`, True = attends."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True).transpose(1, 2)


def tensors_of(batch: Segments) -> list[Tensor]:
    return qkv(*batch.shape, batch.shape[1])


def computed(batch: Segments, kwargs: dict[str, Any]) -> Tensor:
    """`[T, heads, D]`: what the oracle gives for `tensors_of(batch)` at the real tokens."""
    layout, tensors = kwargs["input_layout"], tensors_of(batch)
    given = [unpad(x, batch) if layout == "TND" else in_layout(x, layout) for x in tensors]
    out = reference_fusion_attention(*given, HEADS, **kwargs)[0]
    return out if layout == "TND" else unpad(from_layout(out, layout), batch)


def wanted(batch: Segments, pattern: str | Pattern) -> Tensor:
    """The same by torch, over the dense mask."""
    return unpad(torch_attention(*tensors_of(batch), dense(batch, pattern=pattern)), batch)
