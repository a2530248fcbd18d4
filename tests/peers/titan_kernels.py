"""The kernels that torchtitan's models call and a CPU lacks, in torch, with a backward; importing this patches nothing.

FlexAttention has no backward on a CPU: `dense_flex_attention` reads a BlockMask as the real one does: full blocks are not
asked, partial blocks ask `mask_mod`, other blocks are skipped. flash-linear-attention needs a GPU: its two kernels of
Qwen3.5 are the recurrence itself, document by document; `fla_modules()` are the modules that torchtitan imports. Shown is
that masks and offsets arrive and keep documents apart, not what a card computes.
"""

from __future__ import annotations

import importlib.machinery
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import conv1d, silu

RECEIVED: list[Tensor] = []
"""bool `[B, Q, K]` of each call of FlexAttention: what a query attends."""

OFFSETS: list[Tensor] = []
"""The offsets of each call of the recurrence."""


# --- FlexAttention


def attended(mask: BlockMask) -> Tensor:
    """bool `[B, 1, Q, K]`, as FlexAttention's kernels read the tables."""
    Q, K = mask.seq_lengths
    B = mask.kv_num_blocks.shape[0]
    asked = create_mask(mask.mask_mod, B, 1, Q, K, device="cpu")
    partial = _places(mask.kv_num_blocks, mask.kv_indices, mask)
    if mask.full_kv_num_blocks is None:
        return partial & asked
    return _places(mask.full_kv_num_blocks, mask.full_kv_indices, mask) | (partial & asked)


def _places(count: Tensor, indices: Tensor, mask: BlockMask) -> Tensor:
    B, H, rows, columns = indices.shape
    used = torch.arange(columns) < count[..., None]
    blocks = torch.zeros(B, H, rows, columns + 1, dtype=torch.bool)
    blocks.scatter_(-1, torch.where(used, indices, columns).long(), True)
    q, k = mask.BLOCK_SIZE
    Q, K = mask.seq_lengths
    return blocks[..., :columns].repeat_interleave(q, 2).repeat_interleave(k, 3)[:, :, :Q, :K]


def dense_flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: Any, **other: Any) -> Any:
    """`flex_attention` on dense scores, with a backward. As there, a mask of more rows is read from its first."""
    assert (other["score_mod"], other["return_aux"].lse) == (None, False)
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
    keep = attended(block_mask)[: len(q)]
    RECEIVED.append(keep[:, 0])
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(~keep, -torch.inf), -1)
    return torch.nan_to_num(weights) @ v, None  # a query that sees nothing gets 0


# --- flash-linear-attention


def by_document(function: Any, offsets: Tensor, *sequences: Tensor) -> Tensor:
    parts = [function(*(x[:, a:b] for x in sequences)) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
    return torch.cat(parts, 1)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor, None]:
    """The recurrence, one token at a time."""
    assert use_qk_l2norm_in_kernel
    if cu_seqlens is None:
        return _document(q, k, v, g, beta), None
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    OFFSETS.append(cu_seqlens)
    return by_document(_document, cu_seqlens, q, k, v, g, beta), None


def _document(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
    state, outs = torch.zeros(*k.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state * g[0, t].exp()[:, None, None]
        change = (v[0, t] - torch.einsum("nk,nkv->nv", k[0, t], state)) * beta[0, t][:, None]
        state = state + k[0, t][:, :, None] * change[:, None, :]
        outs.append(torch.einsum("nk,nkv->nv", q[0, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outs)[None]


def convolution(
    *, x: Tensor, weight: Tensor, bias: None, activation: str, backend: str, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor
) -> tuple[Tensor, None]:
    def document(x: Tensor) -> Tensor:
        padded = nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
        return silu(conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2)

    assert (bias, activation) == (None, "silu")
    return by_document(document, cu_seqlens, x), None


def fla_modules() -> dict[str, ModuleType]:
    function = {name: type(name, (torch.autograd.Function,), {}) for name in ("Conv", "Chunk", "Recurrent")}
    contents: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.modules": {},
        "fla.modules.conv": {},
        "fla.modules.conv.causal_conv1d": {"causal_conv1d": convolution},
        "fla.modules.conv.triton": {},
        "fla.modules.conv.triton.ops": {"CausalConv1dFunction": function["Conv"]},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule, "fused_recurrent_gated_delta_rule": None},
        "fla.ops.gated_delta_rule.chunk": {"ChunkGatedDeltaRuleFunction": function["Chunk"]},
        "fla.ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": function["Recurrent"]},
    }
    made = {}
    for name, held in contents.items():
        made[name] = ModuleType(name)
        made[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        made[name].__path__ = []
        vars(made[name]).update(held)
    return made
