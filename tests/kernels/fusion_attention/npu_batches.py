"""Batches, patterns and layouts for the tests of `kernels.fusion_attention`, and attention by torch to compare with."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from collate_npu import Segments, unpad

PADDED = ("BSND", "BNSD", "BSH", "SBH")
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


@st.composite
def _free_rows(draw: st.DrawFn) -> Segments:
    """Rows of several sequences, with padding before, between and after them, and holes inside."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = [0] * draw(st.integers(0, 3))
        for label in range(1, draw(st.integers(1, 3)) + 1):
            length = draw(st.integers(1, 6))
            hole = draw(st.integers(1, length)) if draw(st.booleans()) else length
            row += [label] * hole + [0] * (length > hole) + [label] * (length - hole) + [0] * draw(st.integers(0, 2))
        rows.append(row)
    width = max(map(len, rows))
    return Segments.from_ids(torch.tensor([row + [0] * (width - len(row)) for row in rows]))


def segments(holes: bool = True) -> st.SearchStrategy[Segments]:
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)
    packed = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3)
    tail = st.integers(0, 3)
    built = [
        st.builds(
            lambda rows, extra, side: Segments.from_lengths(rows, max(rows) + extra, side),
            lengths,
            tail,
            st.sampled_from(["left", "right"]),
        ),
        st.builds(lambda rows, extra: Segments.from_lengths(rows, max(map(sum, rows)) + extra), packed, tail),
    ]
    return st.one_of(*built, _free_rows()) if holes else st.one_of(*built)


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


def sizes(batch: Segments, kwargs: dict[str, Any]) -> dict[str, int]:
    """The sizes `check_contract` wants for self-attention over this batch."""
    heads = {"N": HEADS, "Nkv": KEY_HEADS, "D": HEAD_DIM}
    if kwargs["input_layout"] != "TND":
        B, S = batch.shape
        return heads | {"B": B, "Sq": S, "Skv": S}
    ends = [0, *(int(n) for n in kwargs["actual_seq_qlen"])]
    longest = max(end - start for start, end in itertools.pairwise(ends))
    return heads | {"B": len(ends) - 1, "Sq": longest, "Skv": longest, "Tq": ends[-1], "Tkv": ends[-1]}


def packed(tensors: list[Tensor], batch: Segments) -> list[Tensor]:
    return [unpad(x, batch) for x in tensors]
