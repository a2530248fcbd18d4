"""A stack nobody integrates: layers `forward(hidden, cu_seqlens)`, as slime's (slime_plugins models/qwen3_next.py), over
kernels of the usual names, here plain torch references that read boundaries.
"""

import torch
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from torch import nn

WIDTH = 16


def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None):
    return reference_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)


def causal_conv1d_fn(x, weight, seq_idx=None):
    return reference_causal_conv1d(x.transpose(1, 2), weight, None, seq_idx=seq_idx).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=(-1, -1)
):
    out = torch.zeros_like(q)
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist()):
        part = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        past = causal or window_size[1] == 0
        out[start:end] = nn.functional.scaled_dot_product_attention(*part, is_causal=past)[0].transpose(0, 1)
    return out


class DeltaLayer(nn.Module):
    """`faults`: arguments that a faulty stack hands to its kernels instead, by their names; a function of the right ones."""

    def __init__(self, faults):
        super().__init__()
        self.inner, self.faults = nn.Linear(WIDTH, 3 * WIDTH, bias=False), faults
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, 4))

    def forward(self, hidden, cu_seqlens):
        hidden = self.faults.get("hidden", lambda x: x)(hidden)
        seq_idx = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None].int()
        told = {"seq_idx": seq_idx, "rule": cu_seqlens}
        told |= {name: change(told[name]) for name, change in self.faults.items() if name in told}
        x = causal_conv1d_fn(self.inner(hidden).transpose(1, 2), self.weight, seq_idx=told["seq_idx"]).transpose(1, 2)
        q, k, v = (part[:, :, None] for part in x.chunk(3, dim=-1))
        g, beta = -torch.ones(*hidden.shape[:2], 1), torch.full((*hidden.shape[:2], 1), 0.5)
        out = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=told["rule"])
        return hidden + (out[0] if isinstance(out, tuple) else out)[:, :, 0]


class VarlenAttention(nn.Module):
    def __init__(self, faults):
        super().__init__()
        self.inner, self.faults = nn.Linear(WIDTH, 3 * WIDTH), faults

    def forward(self, hidden, cu_seqlens):
        offsets = self.faults.get("attention", lambda x: x)(cu_seqlens)
        q, k, v = (part[0, :, None] for part in self.inner(hidden).chunk(3, dim=-1))
        size, window = int(offsets.diff().max()), self.faults.get("window", (-1, -1))
        out = flash_attn_varlen_func(q, k, v, offsets, offsets, size, size, self.faults.get("causal", True), window)
        return hidden + out[None, :, 0]


class Model(nn.Module):
    """Two recurrent layers and one of attention; `faults` by layer."""

    def __init__(self, faults=()):
        super().__init__()
        faults = dict(faults)
        self.embed = nn.Embedding(64, WIDTH)
        kinds = (DeltaLayer, DeltaLayer, VarlenAttention)
        self.layers = nn.ModuleList(kind(faults.get(n, {})) for n, kind in enumerate(kinds))
        self.again = False

    def forward(self, input_ids, cu_seqlens):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            if self.again:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, cu_seqlens, use_reentrant=False)
            else:
                hidden = layer(hidden, cu_seqlens)
        return hidden
