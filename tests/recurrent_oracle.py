"""Recurrent oracle: the gated delta rule and the short convolution in plain torch, from their definitions. Forward and
backward, any device.

One state `S [K, V]` a head and sequence, zero (or `initial_state`) at its first token, then at each token::

    S = S * exp(g)                        decay; g <= 0, in log space
    S = S + k (beta * (v - k S))          the delta rule: write only what k does not predict yet
    o = scale * q S

(Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10.) Before the rule stands the short causal convolution:
each token from itself and the W - 1 before it in its own sequence.
Legend: B rows, T tokens, H query and key heads, HV value heads (a multiple of H), K and V head sizes, N sequences, D
channels, W taps.
"""

from itertools import pairwise

import torch
from torch.nn.functional import pad, silu

from collate_npu import CollateError
from collate_npu.segments import as_offsets


def reference_gated_delta_rule(
    query,
    key,
    value,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """`query`, `key` `[B, T, H, K]`, `value` `[B, T, HV, V]`, `g`, `beta` `[B, T, HV]` -> the output, as `value`, and the
    final state or None. With `g` `[B, T, HV, K]` each channel of the key decays by itself: KDA.

    Arguments as fla's `chunk_gated_delta_rule` (0.5.2 ops/gated_delta_rule/chunk.py:280-300). With `cu_seqlens`, offsets
    `[N + 1]`, B is 1 and each sequence has a state of its own, `[N, HV, K, V]` in and out; else each row has one. Computes
    in float32, float64 where the input is. Tokens behind the last offset come out NaN: kernels leave them unwritten."""
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
    shape = (count, v.shape[2], k.shape[-1], v.shape[-1])
    states = v.new_zeros(shape) if initial_state is None else initial_state.to(v.dtype)
    assert states.shape == shape
    finals, outs = [], []
    for state, (start, end) in zip(torch.split(states, together), pairwise(offsets)):
        for t in range(start, end):
            state = state * decay[:, t].exp()[..., None]
            change = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * write[:, t, :, None]
            state = state + k[:, t, :, :, None] * change[..., None, :]
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        finals.append(state)
    outs += [torch.full_like(v[:, 0], torch.nan)] * (T - offsets[-1])
    out = torch.stack(outs, 1) if outs else torch.zeros_like(v)
    return out.to(value.dtype), torch.cat(finals) if output_final_state else None


def row_offsets(cu_seqlens, B, T):
    """The offsets of a call on the host, `(0, T)` without any. Raises for what means no sequences of one row of T tokens."""
    if cu_seqlens is None:
        return 0, T
    offsets = tuple(as_offsets("cu_seqlens", cu_seqlens, T).tolist())
    if B != 1 or len(offsets) < 2:
        raise CollateError(f"cu_seqlens: {offsets} are no offsets of {B} rows of {T} tokens")
    return offsets


def reference_causal_conv1d(x, weight, bias=None, activation=None, seq_idx=None, cu_seqlens=None, initial_state=None):
    """`x` `[B, T, D]`, `weight` `[D, W]`, `bias` `[D]` -> `[B, T, D]`: the depthwise causal convolution.

    Boundaries are numbers `seq_idx` `[B, T]`, of which only equality counts (causal-conv1d), or offsets `cu_seqlens` of one
    row (fla). `initial_state` `[., D, W - 1]` is what stands before each sequence, with offsets or with neither. Tokens
    behind the last offset come out NaN: kernels leave them unwritten."""
    B, T, D = x.shape
    assert activation in (None, "silu", "swish")
    assert seq_idx is None or (cu_seqlens is None and initial_state is None and tuple(seq_idx.shape) == (B, T))
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


def _from_states(states, weight, offsets, out):
    """What the W - 1 inputs before each sequence add to its first W - 1 tokens."""
    W = weight.shape[1]
    added = torch.zeros_like(out)
    rows = torch.split(states, 1 if len(offsets) > 2 else len(states))
    for state, (start, end) in zip(rows, pairwise(offsets)):
        window = pad(state, (0, W - 1)).unfold(-1, W, 1)  # [., D, W - 1, W]
        reach = min(W - 1, end - start)
        added[:, start : start + reach] = torch.einsum("bdtw,dw->btd", window, weight)[:, :reach]
    return added


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """causal-conv1d 1.6.1 causal_conv1d_interface.py:10, `x` and the output `[B, D, T]`, `seq_idx` int32 `[B, T]`."""
    return reference_causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, seq_idx=seq_idx).transpose(1, 2)
