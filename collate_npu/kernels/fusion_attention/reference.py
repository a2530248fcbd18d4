"""A CPU reference of `npu_fusion_attention`: what the documents and host code say it computes, in plain torch.

Written from the contract, never compared with hardware. It refuses what the operator's host code refuses (`refused`) and
computes what the operator takes, silent mistakes included: None is full attention in every mode. Differentiable. Cost: all
Sq * Skv scores.

Legend: B batch, N query heads, Q/K query and key rows, D head size, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from collate_npu.errors import UnsupportedFormError, explain, shape_of
from collate_npu.kernels.fusion_attention import refused
from collate_npu.kernels.fusion_attention.accepted_wrong import SKIP_EMPTY_ROWS
from collate_npu.kernels.fusion_attention.blocked_scores import blocked_scores
from collate_npu.kernels.fusion_attention.geometry import (
    UNLIMITED,
    Corner,
    band_leaves_rows_empty,
    prefix_triangle,
    triangle,
)
from collate_npu.kernels.fusion_attention.operator_call import Call, Sizes

SOFTMAX_LANES = 8
"""softmax_max and softmax_sum repeat each value this often (torch_npu op_plugin/meta/_meta_registrations.py:2317-2326)."""


def reference_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """The operator's seven outputs on any device: attention in the layout of `query`, softmax max and sum, and fillers.

    Signature of `npu::npu_fusion_attention` (torch_npu 2.13.0), so it registers under that schema. Rows with every key
    blocked are a mean of V, or 0 with `inner_precise=2` and where the operator notices them itself (T:624-682, T:1357).
    Tokens behind the last TND end give 0. Raises `UnsupportedFormError` for what the operator refuses, for compressed
    masks with wrong contents, and for pse, sink and dropout, which are not covered.

    >>> x = torch.ones(1, 3, 1, 16)
    >>> reference_fusion_attention(x, x, x, 1, "BSND", atten_mask=torch.ones(3, 3).triu(1).bool(), scale=0.25)[0].shape
    torch.Size([1, 3, 1, 16])
    """
    arguments = {name: value for name, value in locals().items() if name not in ("query", "key", "value", "head_num")}
    call = Call.read(arguments, _sizes(query, key, head_num, input_layout))
    _check(call)
    if call.tnd:
        out, top, total = _packed(call, query, key, value, scale)
    else:
        q = _to_bnsd(query, input_layout, head_num)
        k, v = (_to_bnsd(x, input_layout, call.sizes.Nkv) for x in (key, value))
        masked = _by_row(call)
        zero = torch.tensor([_zeroes_empty_rows(call, b) for b in range(len(call.lengths))])[:, None, None, None]
        out, top, total = _attend(q, k, v, masked, zero, scale)
        out = _from_bnsd(out, input_layout)
    lanes = [x.detach().float().unsqueeze(-1).repeat_interleave(SOFTMAX_LANES, -1) for x in (top, total)]
    return out.to(query.dtype), lanes[0], lanes[1], query.new_empty(0), 0, 0, 0


def _check(call: Call) -> None:
    if found := list(refused.breaches(call)):
        raise UnsupportedFormError("npu_fusion_attention refuses:\n" + "\n".join(map(str, found)))
    names = [name for name in ("pse", "sink", "dropout_mask") if call.arguments[name] is not None]
    if names or call.arguments["keep_prob"] != 1:
        rule, remedy = "The reference computes no dropout, pse or sink.", "Leave them out of the comparison."
        raise UnsupportedFormError(explain("reference", ", ".join(names) or "keep_prob < 1", rule, remedy))
    if call.atten_mask is None or not refused.is_compressed(call.mode):
        return
    right = prefix_triangle() if call.mode == 6 else triangle()
    if not torch.equal(call.atten_mask.cpu().bool().reshape(right.shape), right):
        rule = "The operator uses a compressed mask's contents unchecked, in blocks that no document describes."
        remedy = "Use geometry.triangle() or geometry.prefix_triangle()."
        raise UnsupportedFormError(explain("atten_mask", shape_of(call.atten_mask), rule, remedy))


# --- which scores are blocked


def _by_row(call: Call) -> Tensor:
    """bool `[B or 1, N or 1, Q, K]` of a padded layout, built once where all rows are blocked alike."""
    differ = call.atten_mask is not None and (call.mode in (5, 6) or (call.mode < 2 and call.atten_mask.ndim == 4))
    rows = [blocked_scores(call, b) for b in range(len(call.lengths) if differ else 1)]
    return torch.stack([row if row.ndim == 3 else row[None] for row in rows])


def _zeroes_empty_rows(call: Call, n: int) -> bool:
    Q, K = call.lengths[n]
    if call.arguments["inner_precise"] == SKIP_EMPTY_ROWS or K == 0:
        return True
    if call.atten_mask is None:
        return False
    if call.mode == 3:
        return Q > K
    if call.mode in (5, 6):
        return bool(call.prefix_is_legal and call.prefix and call.prefix[n] == 0 and Q > K)
    corners: dict[int, Corner] = {0: "top-left", 4: "bottom-right"}
    corner = corners.get(call.mode)
    return corner is not None and band_leaves_rows_empty(Q, K, *call.tokens, corner)


# --- attention


def _attend(q: Tensor, k: Tensor, v: Tensor, masked: Tensor, zero: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, N, Q, D]` in, attention and the softmax's max and sum out; masked scores are the lowest finite number."""
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    masked = masked.to(q.device)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(masked, torch.finfo(q.dtype).min)
    empty = masked.all(-1, keepdim=True) & zero.to(q.device)
    top = scores.detach().amax(-1) if k.shape[2] else scores.new_zeros(scores.shape[:-1])
    total = (scores.detach() - top[..., None]).exp().sum(-1)
    return (scores.softmax(-1) @ v).masked_fill(empty, 0), top, total


def _packed(call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    outs: list[tuple[Tensor, ...]] = []
    q0 = k0 = 0
    for n, (Q, K) in enumerate(call.lengths):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0 : q0 + Q], key[k0 : k0 + K], value[k0 : k0 + K]))
        zero = torch.tensor(_zeroes_empty_rows(call, n))
        outs.append(_attend(q, k, v, blocked_scores(call, n), zero, scale))
        q0, k0 = q0 + Q, k0 + K
    out, top, total = (torch.cat([part[i][0].transpose(0, 1) for part in outs]) for i in range(3))
    left = query.shape[0] - q0
    return pad(out, (0, 0, 0, 0, 0, left)), pad(top, (0, 0, 0, left)), pad(total, (0, 0, 0, left))


# --- layouts


def _sizes(query: Tensor, key: Tensor, head_num: int, layout: str) -> Sizes:
    N = int(head_num)
    if layout == "TND" and query.ndim == key.ndim == 3:
        return Sizes(N=N, Nkv=key.shape[1], D=query.shape[2], Tq=query.shape[0], Tkv=key.shape[0])
    ranks = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4}
    if ranks.get(layout) != query.ndim or query.ndim != key.ndim or N < 1:
        rule, remedy = "BSH, SBH and TND have 3 dimensions, BSND and BNSD 4.", "Name the layout of q, k and v."
        raise UnsupportedFormError(explain("query, key", f"{shape_of(query)}, {shape_of(key)} as {layout}", rule, remedy))
    D = query.shape[-1] if query.ndim == 4 else query.shape[-1] // N
    Nkv = key.shape[layout.index("N")] if query.ndim == 4 else key.shape[-1] // max(D, 1)
    batch, rows = {"SBH": (1, 0), "BNSD": (0, 2)}.get(layout, (0, 1))
    return Sizes(B=query.shape[batch], N=N, Nkv=Nkv, Sq=query.shape[rows], Skv=key.shape[rows], D=D)


_TO_BNSD = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


def _to_bnsd(x: Tensor, layout: str, heads: int) -> Tensor:
    x = x.view(*x.shape[:-1], heads, -1) if layout in ("BSH", "SBH") else x
    return x.permute(_TO_BNSD[layout])


def _from_bnsd(x: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x
    x = x.permute(2, 0, 1, 3) if layout == "SBH" else x.transpose(1, 2)
    return x.flatten(2) if layout in ("BSH", "SBH") else x.contiguous()
