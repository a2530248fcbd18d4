"""Small stacks that nobody integrates, of parts that mix tokens in every way; a fault stands between a part and its way.

`told` of a part: `ids` and `keep` `[B, S]`, `allowed` `[B, 1, S, S]`, `cu` of a flat row. Legend: B rows, S width, H heads.
"""

import pytest
import torch
from attention_oracle import reference_fusion_attention
from stranger import Model, causal_conv1d_fn, chunk_gated_delta_rule, flash_attn_varlen_func
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from collate_npu import Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.fusion_attention import triangle
from collate_npu.outputs import per_sequence

VOCAB, D, H = 61, 24, 4
IDS, OFFSETS = torch.arange(16)[None] % 60 + 1, torch.tensor([0, 6, 11, 16])
"""What the models of `stranger` are called with."""


def planted(*given):
    """What a faulty stack hands over, whatever was right."""
    return lambda right: torch.tensor(given).int() if given else None


class DotProductAttention(nn.Module):
    """Megatron's, of states `[S, B, H, D]` and a mask that blocks."""

    qkv_format, attn_mask_type = "sbhd", "causal"

    def forward(self, query, key, value, attention_mask=None, packed_seq_params=None, attn_mask_type=None):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        blocked = torch.ones(len(query), len(query)).triu(1).bool() if attention_mask is None else attention_mask
        blocked = torch.zeros_like(blocked) if attn_mask_type == "no_mask" else blocked
        return softmax(q, k, v, ~blocked).permute(2, 0, 1, 3)


def softmax(q, k, v, allowed):
    scores = (q @ k.transpose(-1, -2) * 0.4).masked_fill(~allowed, -1e9)
    return scores.softmax(-1) @ v


def heads(part, x):
    """`[B, H, S, D / H]` each."""
    return part.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)


def joined(out):
    return out.transpose(1, 2).flatten(2)


def own(part, x, told):
    return joined(softmax(*heads(part, x), told["allowed"]))


def sdpa(part, x, told):
    return joined(F.scaled_dot_product_attention(*heads(part, x), attn_mask=told["allowed"]))


def flex(part, x, told):
    ids = told["ids"]
    if (tells := told.get("tells")) is None:
        tells = lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]) & (ids[b, k] > 0) | (q == k)  # noqa: E731
    blocks = None if told.get("bare") else create_block_mask(tells, len(x), H, x.shape[1], x.shape[1], device="cpu")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        pytest.skip("its flex_attention takes heads of powers of two")
    return joined(flex_attention(*heads(part, x), block_mask=blocks, score_mod=told.get("score")))


def core(part, x, told):
    q, k, v = (each.permute(2, 0, 1, 3) for each in heads(part, x))
    out = part.core(q, k, v, told.get("blocked", ~told["allowed"]), attn_mask_type=told.get("kind"))
    return out.transpose(0, 1).flatten(2)


def npu_fusion_attention(query, key, value, head_num, input_layout, **given):
    """Ascend's operator by its oracle; a call that a card refuses attends the whole past, as on a stand-in for a card."""
    try:
        return reference_fusion_attention(query, key, value, head_num, input_layout, **given)
    except UnsupportedFormError:
        q, k, v = (x[None] if input_layout == "TND" else x for x in (query, key, value))
        past = torch.ones(q.shape[1], q.shape[1]).tril().bool()
        out = softmax(*(x.transpose(1, 2) for x in (q, k, v)), past).transpose(1, 2)
        return (out[0] if input_layout == "TND" else out,)


def fusion(part, x, told):
    """Padded rows by a dense mask, a flat row by its ends and the compressed triangle."""
    given = {"atten_mask": ~told["allowed"], "sparse_mode": 1}
    layout, cu = "BSND", told["cu"]
    if cu is not None:
        given, layout = {"atten_mask": triangle(), "sparse_mode": 3}, "TND"
        given |= {name: told.get("ends", cu[1:]).tolist() for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    q, k, v = part.qkv(x).unflatten(-1, (3, H, D // H)).unbind(-3)
    rows = (each[0] if layout == "TND" else each for each in (q, k, v))
    return npu_fusion_attention(*rows, H, layout, scale=0.4, **given | told.get("given", {}))[0].flatten(-2).reshape(x.shape)


def varlen(part, x, told):
    q, k, v = part.qkv(x).flatten(0, 1).unflatten(-1, (3, H, D // H)).unbind(1)
    cu = torch.arange(0, x.shape[:2].numel() + 1, x.shape[1]) if told["cu"] is None else told["cu"]
    keys = told.get("keys", cu)
    window, size = told.get("window", (-1, -1)), int(cu.diff().max())
    return flash_attn_varlen_func(q, k, v, cu, keys, size, size, told.get("causal", True), window).reshape(x.shape)


def rule(part, x, told):
    """Of a flat row by its offsets; of padded rows by zeros at padding."""
    keep = told["keep"][..., None]
    numbers = None if told["cu"] is None else told.get("numbers", told["ids"] - 1).int()
    x = causal_conv1d_fn((part.qkv(x) * told.get("written", keep)).transpose(1, 2), part.weight, seq_idx=numbers)
    x = told.get("behind", lambda x: x)(x.transpose(1, 2) * keep)
    q, k, v = x.unflatten(-1, (3, H, D // H)).unbind(2)
    g = torch.full(k.shape[:3], -0.2)
    k = F.normalize(k, dim=-1) * keep[..., None]
    return chunk_gated_delta_rule(q, k, v, g, g.exp(), cu_seqlens=told.get("offsets", told["cu"]))[0].flatten(2)


class Two(nn.Module):
    """A policy and its reward model, on other rows, inside one module."""

    def __init__(self, faults=()):
        super().__init__()
        self.policy, self.reward = Model(), Model(faults)

    def forward(self, input_ids, cu_seqlens):
        other = self.reward(input_ids=IDS.flip(1), cu_seqlens=OFFSETS)
        return self.policy(input_ids=input_ids, cu_seqlens=cu_seqlens) + other.mean()


class Part(nn.Module):
    def __init__(self, way, fault=None):
        super().__init__()
        self.norm, self.qkv, self.core = nn.RMSNorm(D), nn.Linear(D, 3 * D), DotProductAttention()
        self.gru, self.weight = nn.GRU(D, D, batch_first=True), nn.Parameter(torch.randn(3 * D, 4) / 2)
        self.way, self.fault = way, fault

    def forward(self, x, told):
        normed = self.norm(x)
        return x + (self.way(self, normed, told) if self.fault is None else self.fault(self, normed, told, self.way))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(F.dropout(F.silu(self.up(x)), 0.1, self.training))


class Net(nn.Module):
    """Two parts, each with an MLP behind it. `faults`: of each part; `after`: what becomes of the states behind them."""

    device = torch.device("cpu")

    def __init__(self, ways, faults=(None, None), after=lambda x, told: x):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.after = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB), after
        self.layers = nn.ModuleList(Part(way, fault) for way, fault in zip(ways, faults))
        self.mlps = nn.ModuleList(Mlp() for _ in self.layers)
        with torch.no_grad():
            for each in self.parameters():
                each.mul_(2)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None, cu_seqlens=None):
        B, S = input_ids.shape
        ids = torch.ones(B, S).int() if attention_mask is None else attention_mask.int()
        if cu_seqlens is not None:
            ids = torch.repeat_interleave(torch.arange(1, len(cu_seqlens)), cu_seqlens.diff())[None].int()
        same = (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None]
        allowed = (same & torch.ones(S, S).tril().bool() | torch.eye(S).bool())[:, None]
        told, x = {"ids": ids, "keep": ids > 0, "allowed": allowed, "cu": cu_seqlens}, self.embed(input_ids)
        for part, mlp in zip(self.layers, self.mlps):
            x = mlp(part(x, told))
        return self.head(self.after(x, told))


def padded(features, side="left", pad=3):
    width = max(len(each["input_ids"]) for each in features)
    batch = {}
    for name, fill in (("input_ids", pad), ("attention_mask", 0), ("labels", -100)):
        rows = [each.get(name, [1] * len(each["input_ids"])) for each in features]
        pads = [[fill] * (width - len(row)) for row in rows]
        batch[name] = torch.tensor([more + row if side == "left" else row + more for row, more in zip(rows, pads)])
    batch["labels"][batch["attention_mask"].cumsum(1) < 2] = -100  # nothing predicts a first token
    return batch


def packed(features):
    ids, labels = (torch.tensor([[x for each in features for x in each[key]]]) for key in ("input_ids", "labels"))
    cu = torch.tensor([0, *(len(each["input_ids"]) for each in features)]).cumsum(0)
    labels[0, cu[:-1]] = -100
    return {"input_ids": ids, "labels": labels, "cu_seqlens": cu}


def stack_of(model, collate):
    """`run(samples)` for `conformance`."""

    def run(samples):
        batch = collate([{"input_ids": ids, "labels": ids} for ids in samples])
        lengths = [len(ids) for ids in samples]
        side = "left" if collate is padded else "right"
        segments = Segments.from_lengths([lengths] if collate is packed else lengths, side=side)
        with torch.no_grad():
            given = model(**{key: value for key, value in batch.items() if key != "labels"})
        rows = per_sequence(given.log_softmax(-1), segments)
        return [row[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0] for row, ids in zip(rows, samples)]

    return run
