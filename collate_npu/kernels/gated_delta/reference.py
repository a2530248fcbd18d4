"""Reference: the gated delta rule and the short convolution in plain torch, from their definitions: forward and backward,
any device.

One state `S [K, V]` a head and sequence, zero (or `initial_state`) at its first token, then at each token::

    S = S * exp(g)                        decay; g <= 0, in log space
    S = S + k (beta * (v - k S))          the delta rule: write only what k does not predict yet
    o = scale * q S

(Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10.) It is slow and takes memory for every step: it is
what fast kernels are compared with, and what stands in for them on a CPU.

Before the rule stands the short causal convolution: each token from itself and the W - 1 before it in its own sequence.
Legend: B rows, T tokens, H query and key heads, HV value heads (a multiple of H), K and V head sizes, N sequences, D
channels, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.segments import as_offsets
from collate_npu.validation import checked


@checked
def reference_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`query`, `key` `[B, T, H, K]`, `value` `[B, T, HV, V]`, `g`, `beta` `[B, T, HV]` -> the output, as
    `value`, and the final state or None. With `g` `[B, T, HV, K]` each channel of the key decays by itself: KDA.

    Arguments as fla's `chunk_gated_delta_rule` (0.5.2 ops/gated_delta_rule/chunk.py:280-300). With `cu_seqlens`,
    offsets `[N + 1]`, B is 1 and each sequence has a state of its own, `[N, HV, K, V]` in and out; else each row has one.
    Computes in float32, float64 where the input is. `scale` is K ** -0.5 by default.

    Tokens behind the last offset come out NaN: kernels leave them unwritten. An empty sequence keeps its initial state.
    Raises `CollateError` for offsets that fall or leave the row, which kernels take, and for shapes they refuse.

    >>> x, gate = torch.ones(1, 5, 1, 2), torch.zeros(1, 5, 1)
    >>> out, state = reference_gated_delta_rule(x, x, x, gate, gate + 1, cu_seqlens=[0, 3, 5], output_final_state=True)
    >>> out.shape, state.shape
    (torch.Size([1, 5, 1, 2]), torch.Size([2, 1, 2, 2]))
    """
    _check_shapes(query, key, value, g, beta)
    B, T = value.shape[:2]
    offsets = row_offsets(cu_seqlens, B, T)
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    q, k, v, decay, write = (x.to(dtype) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:  # eps inside the root (fla 0.5.2 modules/l2norm.py)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(value.shape[2] // key.shape[2], dim=2) for x in (q, k))
    q = q * (query.shape[-1] ** -0.5 if scale is None else scale)
    decay = decay[..., None] if g.ndim == 3 else decay
    count, together = (B, B) if cu_seqlens is None else (len(offsets) - 1, 1)
    states = torch.split(_initial(initial_state, count, k, v), together)
    finals, outs = [], []
    for state, (start, end) in zip(states, pairwise(offsets)):
        for t in range(start, end):
            state = state * decay[:, t].exp()[..., None]
            change = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * write[:, t, :, None]
            state = state + k[:, t, :, :, None] * change[..., None, :]
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        finals.append(state)
    outs += [torch.full_like(v[:, 0], torch.nan)] * (T - offsets[-1])
    out = torch.stack(outs, 1) if outs else torch.zeros_like(v)
    return out.to(value.dtype), torch.cat(finals) if output_final_state else None


def row_offsets(cu_seqlens: Tensor | Sequence[int] | None, B: int, T: int) -> tuple[int, ...]:
    """The offsets of a call on the host, `(0, T)` without any. Raises for what means no sequences of one row of T tokens."""
    if cu_seqlens is None:
        return 0, T
    offsets = tuple(as_offsets("cu_seqlens", cu_seqlens, T).tolist())
    if B != 1 or len(offsets) < 2:
        rule = f"They are 0, then the end of each sequence of one row; the call has {B} rows of {T} tokens."
        remedy = "Take them from gated_delta_kwargs(segments, kernel='fla')."
        raise CollateError(explain("cu_seqlens", str(list(offsets))[:80], rule, remedy))
    return offsets


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> None:
    B, T = value.shape[:2]
    heads = value.ndim == key.ndim == 4 and value.shape[2] % key.shape[2] == 0
    gates = beta.shape == value.shape[:3] and g.shape in (beta.shape, (*beta.shape, key.shape[-1]))
    if not heads or query.shape != key.shape or key.shape[:2] != (B, T) or not gates:
        got = ", ".join(shape_of(x) for x in (query, key, value, g, beta))
        rule = "query and key are [B, T, H, K], value [B, T, HV, V] with HV a multiple of H, g and beta [B, T, HV]."
        raise UnsupportedFormError(explain("gated delta rule", got, rule, "Put the tokens before the heads."))


def _initial(initial: Tensor | None, count: int, k: Tensor, v: Tensor) -> Tensor:
    shape = (count, v.shape[2], k.shape[-1], v.shape[-1])
    if initial is None:
        return v.new_zeros(shape)
    if tuple(initial.shape) != shape:
        rule = f"One state a sequence: {list(shape)}."
        raise UnsupportedFormError(explain("initial_state", shape_of(initial), rule, "Build one for each sequence."))
    return initial.to(v.dtype)


@checked
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
    own_T = torch.bucketize(torch.arange(T, device=x.device), torch.tensor(offsets[1:], device=x.device), right=True)
    numbers_BT = own_T.expand(B, T) if seq_idx is None else seq_idx.to(x.device, torch.int64)
    out = x.new_zeros(()).expand(B, T, D) + (0 if bias is None else bias)
    for back in range(weight.shape[1]):
        earlier = pad(x, (0, 0, back, 0))[:, :T]
        same_BT = numbers_BT == pad(numbers_BT, (back, 0), value=-1)[:, :T]
        out = out + weight[:, weight.shape[1] - 1 - back] * earlier.masked_fill(~same_BT[..., None], 0)
    if initial_state is not None:
        out = out + _from_states(initial_state, weight, offsets, out)
    out = out if activation is None else silu(out)
    return torch.where((own_T < len(offsets) - 1)[:, None], out, torch.nan)


def _check(x: Tensor, weight: Tensor, activation: str | None) -> tuple[int, int, int]:
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        rule = "x is [B, T, D], weight [D, W]."
        got = f"{shape_of(x)}, {shape_of(weight)}"
        raise UnsupportedFormError(explain("causal_conv1d", got, rule, "Put the channels last."))
    if activation not in (None, "silu", "swish"):
        raise CollateError(explain("activation", repr(activation), "It is None, 'silu' or 'swish'.", "Name one."))
    return x.shape[0], x.shape[1], x.shape[2]


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
