"""The short causal convolution in plain torch: each token from itself and the W - 1 before it in its own sequence.

It stands before the rule and mixes neighbours, so a boundary or padding that the rule alone knows comes too late.
Legend: B rows, T tokens, D channels, W taps, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.kernels.gated_delta.reference import row_offsets


def reference_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    initial_state: Tensor | None = None,
) -> Tensor:
    """`x` `[B, T, D]`, `weight` `[D, W]`, `bias` `[D]` -> `[B, T, D]`; fla's layout (causal-conv1d takes `[B, D, T]`).

    Sequences come from `seq_idx` `[B, T]`, of which only equality with a token's own number counts, as in
    causal-conv1d (csrc/causal_conv1d_fwd.cu), or from offsets `cu_seqlens` `[N + 1]` with B = 1. `initial_state`
    `[N or B, D, W - 1]` is what stands before each sequence, with offsets or with neither. `activation` is None, "silu"
    or "swish". Tokens behind the last offset come out NaN: kernels leave them unwritten.

    >>> x, weight = torch.ones(1, 4, 1), torch.ones(1, 2)
    >>> reference_causal_conv1d(x, weight, cu_seqlens=[0, 2, 4])[..., 0].tolist()
    [[1.0, 2.0, 1.0, 2.0]]
    """
    B, T, D = _check(x, weight, activation)
    if seq_idx is not None and (cu_seqlens is not None or initial_state is not None or tuple(seq_idx.shape) != (B, T)):
        rule = f"It is [{B}, {T}], and stands alone: without offsets and initial states."
        raise UnsupportedFormError(explain("seq_idx", shape_of(seq_idx), rule, "Pass one kind of boundary."))
    offsets = row_offsets(cu_seqlens, B, T)
    numbers_BT = _numbers(seq_idx, offsets, x)
    out = x.new_zeros(()).expand(B, T, D) + (0 if bias is None else bias)
    for back in range(weight.shape[1]):
        earlier = pad(x, (0, 0, back, 0))[:, :T]
        same_BT = numbers_BT == pad(numbers_BT, (back, 0), value=-1)[:, :T]
        out = out + weight[:, weight.shape[1] - 1 - back] * earlier.masked_fill(~same_BT[..., None], 0)
    if initial_state is not None:
        out = out + _from_states(initial_state, weight, offsets, out)
    out = out if activation is None else silu(out)
    written_T = torch.arange(T, device=x.device) < offsets[-1]
    return torch.where(written_T[:, None], out, torch.nan)


def _check(x: Tensor, weight: Tensor, activation: str | None) -> tuple[int, int, int]:
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        rule = "x is [B, T, D], weight [D, W]."
        got = f"{shape_of(x)}, {shape_of(weight)}"
        raise UnsupportedFormError(explain("causal_conv1d", got, rule, "Put the channels last."))
    if activation not in (None, "silu", "swish"):
        raise CollateError(explain("activation", repr(activation), "It is None, 'silu' or 'swish'.", "Name one."))
    return x.shape[0], x.shape[1], x.shape[2]


def _numbers(seq_idx: Tensor | None, offsets: Sequence[int], x: Tensor) -> Tensor:
    """`[B, T]`, another number for each sequence."""
    if seq_idx is not None:
        return seq_idx.to(x.device, torch.int64)
    ends = torch.tensor(offsets[1:], device=x.device)
    return torch.bucketize(torch.arange(x.shape[1], device=x.device), ends, right=True).expand(x.shape[:2])


def _from_states(states: Tensor, weight: Tensor, offsets: Sequence[int], out: Tensor) -> Tensor:
    """What the W - 1 inputs before each sequence add to its first W - 1 tokens."""
    W = weight.shape[1]
    added = torch.zeros_like(out)
    rows = torch.split(states, 1 if len(offsets) > 2 else len(states))
    for state, (start, end) in zip(rows, pairwise(offsets)):
        window = pad(state, (0, W - 1)).unfold(-1, W, 1)  # [., D, W - 1, W]
        reach = min(W - 1, end - start)
        added[:, start : start + reach] = torch.einsum("bdtw,dw->btd", window, weight)[:, :reach]
    return added
