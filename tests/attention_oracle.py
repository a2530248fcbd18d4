"""Attention oracle: what the documents and host code of `npu_fusion_attention` say it computes, in plain torch.

Written from them, never compared with hardware. It refuses what the host code refuses and what could be read two ways, and
computes what the operator takes, silent mistakes included: None is full attention in every mode. Differentiable. Sources:

    T   hicann/ops-transformer c29bc106 (CANN 8.5.0.alpha001), flash_attention_score_tiling_general.cpp
    K   the same, attention/flash_attention_score/op_kernel
    P   Ascend/op-plugin 517f2e7d, FlashAttentionKernelNpuOpApi.cpp
    PD  the same, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md

Legend: B batch, N query heads, D head size, Q/K query and key rows of one row or packed sequence, H heads of the mask.
"""

import inspect
from itertools import pairwise

import torch
from torch.nn.functional import pad

from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels import prefix_triangle, triangle

UNLIMITED, SKIP_EMPTY_ROWS = 2**31 - 1, 2
RANKS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
COMPRESSED = dict.fromkeys((2, 3, 4, 7, 8), (2048, 2048)) | {6: (3072, 2048)}
SOFTMAX_LANES = 8
"""softmax_max and softmax_sum repeat each value this often (torch_npu op_plugin/meta/_meta_registrations.py:2317-2326)."""


def refuse_unless(right, why):
    if not right:
        raise UnsupportedFormError(f"npu_fusion_attention refuses it: {why}")


class Call:
    """One call as the host code reads it."""

    def __init__(self, q, k, N, layout, mask, mode, tokens, prefix, ends, inner_precise):
        self.layout = layout.upper() if isinstance(layout, str) and layout != "tnd" else layout  # P:771-790
        refuse_unless(RANKS.get(self.layout) == q.ndim == k.ndim, f"{list(q.shape)} as {layout} has other dimensions")
        self.tnd, self.mode, self.tokens, self.inner_precise = self.layout == "TND", mode, tokens, inner_precise
        self.mask = None if mask is None or mask.ndim == 0 else mask  # rank 0 counts as none (T:1498)
        self.prefix = None if prefix is None else [int(n) for n in prefix]
        D = q.shape[-1] if q.ndim == 4 or self.tnd else q.shape[-1] // N
        refuse_unless(D >= 1, f"heads of {D} elements")
        self.Nkv = k.shape[1] if self.tnd else k.shape[self.layout.index("N")] if q.ndim == 4 else k.shape[-1] // D
        refuse_unless(N % self.Nkv == 0, f"{N} query heads, {self.Nkv} key heads")
        if self.tnd:
            given = all(each is not None and len(each) for each in ends)
            refuse_unless(given, "actual_seq_qlen or actual_seq_kvlen is missing")
            q_lengths, k_lengths = ([max(b - a, 0) for a, b in pairwise([0, *map(int, each)])] for each in ends)
            refuse_unless(len(q_lengths) == len(k_lengths), "actual_seq_qlen and actual_seq_kvlen are not as long")
            refuse_unless(sum(q_lengths) <= len(q) and sum(k_lengths) <= len(k), "lengths add up to more tokens (T:1181)")
            self.lengths = list(zip(q_lengths, k_lengths))
        else:
            batch, rows = {"SBH": (1, 0), "BNSD": (0, 2)}.get(self.layout, (0, 1))
            self.lengths = [(q.shape[rows], k.shape[rows])] * q.shape[batch]
        self.longest = tuple(max((pair[at] for pair in self.lengths), default=0) for at in (0, 1))
        self._check(N)

    def _check(self, N):
        modes = (0, 1, 2, 3, 4, 6, 7, 8) if self.tnd else range(7)
        refuse_unless(self.mode in modes, f"sparse_mode {self.mode} in layout {self.layout} (P:772-786)")
        if self.mask is None:  # every mode and token value is let through, and ignored (T:799, T:4121)
            return
        refuse_unless(self.mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {self.mask.dtype} (T:1501)")
        refuse_unless(tuple(self.mask.shape) in self._shapes(N), f"atten_mask is {list(self.mask.shape)} (T:1511-1571)")
        refuse_unless(self.mode != 6 or self.prefix_is_legal, f"prefix {self.prefix} (T:1325-1352)")
        if self.mode in COMPRESSED:
            right = prefix_triangle() if self.mode == 6 else triangle()
            same = torch.equal(self.mask.cpu().bool().reshape(right.shape), right)
            refuse_unless(same, "contents of the compressed mask that no document describes")
        refuse_unless(not (self.tnd and self.mask.ndim == 4), "a 4-D mask under TND is not covered")

    def _shapes(self, N):
        """Shapes the host code takes for a mask, whatever the layout of q, k and v (T:1511-1571)."""
        shapes = [self.longest, (1, 1, *self.longest), *((len(self.lengths), H, *self.longest) for H in (1, N))]
        shapes += [tuple(sum(pair[at] for pair in self.lengths) for at in (0, 1))] * self.tnd
        right = COMPRESSED.get(self.mode)
        return shapes if right is None else [right, *(each for each in shapes if each[2:] == right)]

    @property
    def prefix_is_legal(self):
        """One entry for each sequence, in `[max(0, Skv - Sq), Skv]` (T:1325-1352, TND T:4045-4082)."""
        pairs, prefix = self.lengths, self.prefix
        legal = prefix is not None and len(prefix) == len(pairs)
        return legal and all(max(0, K - Q) <= n <= K for n, (Q, K) in zip(prefix, pairs))

    def zeroes_empty_rows(self, n):
        """True if a query of sequence n whose every key is blocked gives 0, not a mean of V (T:624-682, T:1357)."""
        Q, K = self.lengths[n]
        if self.inner_precise == SKIP_EMPTY_ROWS or K == 0:
            return True
        if self.mask is None:
            return False
        if self.mode == 3:
            return Q > K
        if self.mode in (5, 6):
            return bool(self.prefix_is_legal and self.prefix[n] == 0 and Q > K)
        return self.mode in (0, 4) and bool(outside_band(Q, K, *self.tokens, self.mode == 4).all(-1).any())

    def blocked(self, n):
        """bool `[Q, K]` or `[H, Q, K]`: what the mask blocks or the sparse mode leaves out, for row or sequence n."""
        (Q, K), mode = self.lengths[n], self.mode
        filled = [n for n, (queries, _) in enumerate(self.lengths) if queries]
        if self.mask is None:
            return torch.zeros(Q, K, dtype=torch.bool)
        if mode in (2, 3) or (mode in (7, 8) and n != (filled[-1] if mode == 7 else filled[0])):
            return outside_band(Q, K, UNLIMITED, 0, mode in (3, 7))
        if mode in (4, 7, 8):
            return outside_band(Q, K, *self.tokens, True)
        past = outside_band(Q, K, UNLIMITED, 0, True)
        if mode == 6:
            return past & (torch.arange(K) >= self.prefix[n])
        dense = self._dense(n)
        if mode == 0:
            return dense | outside_band(Q, K, *self.tokens, False)
        return dense | (past & (torch.arange(K) >= self.prefix[n])) if mode == 5 and self.prefix_is_legal else dense

    def _dense(self, n):
        Q, K = self.lengths[n]
        q0 = k0 = 0
        if self.tnd and tuple(self.mask.shape) != self.longest:
            q0, k0 = (sum(pair[axis] for pair in self.lengths[:n]) for axis in (0, 1))
        matrix = self.mask if self.mask.ndim == 2 else self.mask[n if self.mask.shape[0] > 1 else 0]
        return matrix[..., q0 : q0 + Q, k0 : k0 + K].cpu().bool()


def outside_band(Q, K, before, after, from_last):
    """bool `[Q, K]`, True where key - query is not in `[-before, after]`, counted from the top-left corner or `from_last`,
    where the last query stands on the last key."""
    away = torch.arange(K) - torch.arange(Q)[:, None] - (K - Q) * from_last
    return (away > after) | (away < -before)


def reference_fusion_attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=UNLIMITED, next_tockens=UNLIMITED, inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None,
    sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None, dropout_mask=None, seed=0, offset=0,
):  # fmt: skip
    """The operator's seven outputs on any device: attention in the layout of `query`, softmax max and sum, and fillers.

    Signature of `npu::npu_fusion_attention` (torch_npu 2.13.0), so it registers under that schema. Tokens behind the last
    TND end give 0."""
    if pse is not None or sink is not None or dropout_mask is not None or keep_prob != 1:
        raise UnsupportedFormError("the oracle computes no dropout, keep_prob, pse or sink")
    tokens, ends = (pre_tockens, next_tockens), (actual_seq_qlen, actual_seq_kvlen)
    call = Call(query, key, head_num, input_layout, atten_mask, sparse_mode, tokens, prefix, ends, inner_precise)
    q_lengths, kv_lengths = zip(*call.lengths)
    q_rows = _rows(query, q_lengths, call.layout, head_num)
    k_rows, v_rows = (_rows(x, kv_lengths, call.layout, call.Nkv) for x in (key, value))
    attended = [_attend(call, n, q, k, v, scale) for n, (q, k, v) in enumerate(zip(q_rows, k_rows, v_rows))]
    out, top, total = (torch.cat(parts, 2 if call.tnd else 0) for parts in zip(*attended))
    if call.tnd:
        behind = query.shape[0] - sum(q_lengths)
        out, top, total = (pad(x[0].transpose(0, 1), (0, 0) * (x.ndim - 2) + (0, behind)) for x in (out, top, total))
    else:
        out = out.permute(*map(_TO_BNSD[call.layout].index, range(4)))
        out = out.flatten(2) if call.layout in ("BSH", "SBH") else out.contiguous()
    lanes = [x.detach().float().unsqueeze(-1).repeat_interleave(SOFTMAX_LANES, -1) for x in (top, total)]
    return out.to(query.dtype), lanes[0], lanes[1], query.new_empty(0), 0, 0, 0


def _attend(call, n, q, k, v, scale):
    """`[1, N, Q, D]` in, attention and the softmax's max and sum out; masked scores are the lowest finite number."""
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    masked = call.blocked(n).to(q.device)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(masked, torch.finfo(q.dtype).min)
    top = scores.detach().amax(-1) if k.shape[2] else scores.new_zeros(scores.shape[:-1])
    total = (scores.detach() - top[..., None]).exp().sum(-1)
    out = scores.softmax(-1) @ v
    return out.masked_fill(masked.all(-1, keepdim=True), 0) if call.zeroes_empty_rows(n) else out, top, total


_TO_BNSD = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


def _rows(x, lengths, layout, heads):
    """`[1, heads, S, D]` of each row or packed sequence."""
    if layout == "TND":
        return torch.split(x.transpose(0, 1)[None], [*lengths, x.shape[0] - sum(lengths)], 2)[:-1]
    x = x.view(*x.shape[:-1], heads, -1) if layout in ("BSH", "SBH") else x
    return x.permute(_TO_BNSD[layout])[:, None].unbind()


DEFAULTS = {
    name: None if name == "input_layout" else parameter.default
    for name, parameter in list(inspect.signature(reference_fusion_attention).parameters.items())[4:]
}
"""The operator's, behind query, key, value and head_num (torch_npu 2.13.0); `_v3` lacks the last three."""
