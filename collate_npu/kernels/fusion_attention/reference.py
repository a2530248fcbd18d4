"""A CPU reference of `npu_fusion_attention`: what the documents and host code say it computes, in plain torch.

Written from the contract, never compared with hardware. It refuses what could be read two ways (`refused`) and computes
what the operator takes, silent mistakes included: None is full attention in every mode. Differentiable. Cost: all Sq * Skv
scores.

Legend: B batch, N query heads, Q/K query and key rows, D head size, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.kernels import refuse
from collate_npu.kernels.fusion_attention.contract import (
    COMPRESSED,
    UNLIMITED,
    AttentionCall,
    blocked_scores,
    compressed_contents,
    refusal,
    sizes_of,
)
from collate_npu.validation import checked

SOFTMAX_LANES = 8
"""softmax_max and softmax_sum repeat each value this often (torch_npu op_plugin/meta/_meta_registrations.py:2317-2326)."""


@checked
def reference_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED, next_tockens: int = UNLIMITED, inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | Tensor | None = None, actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
    sink: Tensor | None = None, dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    """The operator's seven outputs on any device: attention in the layout of `query`, softmax max and sum, and fillers.

    Signature of `npu::npu_fusion_attention` (torch_npu 2.13.0), so it registers under that schema. Rows with every key
    blocked are a mean of V, or 0 with `inner_precise=2` and where the operator notices them itself (T:624-682, T:1357).
    Tokens behind the last TND end give 0. Raises `UnsupportedFormError` for what `refused` names, for compressed
    masks with wrong contents, and for pse, sink and dropout, which are not covered.

    >>> x = torch.ones(1, 3, 1, 16)
    >>> reference_fusion_attention(x, x, x, 1, "BSND", atten_mask=torch.ones(3, 3).triu(1).bool(), scale=0.25)[0].shape
    torch.Size([1, 3, 1, 16])
    """
    arguments = {name: value for name, value in locals().items() if name not in ("query", "key", "value", "head_num")}
    call = AttentionCall(arguments, **sizes_of(query, key, head_num, input_layout))
    _check(call)
    q_lengths, kv_lengths = zip(*call.lengths)
    q_rows, k_rows = _rows(query, q_lengths, input_layout, head_num), _rows(key, kv_lengths, input_layout, call.Nkv)
    rows = zip(range(len(q_lengths)), q_rows, k_rows, _rows(value, kv_lengths, input_layout, call.Nkv))
    attended = [_attend(call, n, q, k, v, scale) for n, q, k, v in rows]
    out, top, total = (torch.cat(parts, 2 if call.tnd else 0) for parts in zip(*attended))
    if call.tnd:
        behind = query.shape[0] - sum(q_lengths)
        out, top, total = (pad(x[0].transpose(0, 1), (0, 0) * (x.ndim - 2) + (0, behind)) for x in (out, top, total))
    else:
        out = out.permute(*map(_TO_BNSD[input_layout].index, range(4)))
        out = out.flatten(2) if input_layout in ("BSH", "SBH") else out.contiguous()
    lanes = [x.detach().float().unsqueeze(-1).repeat_interleave(SOFTMAX_LANES, -1) for x in (top, total)]
    return out.to(query.dtype), lanes[0], lanes[1], query.new_empty(0), 0, 0, 0


def _check(call: AttentionCall) -> None:
    refuse("npu_fusion_attention", refusal(call))
    names = [name for name in ("pse", "sink", "dropout_mask") if call.arguments[name] is not None]
    if names or call.arguments["keep_prob"] != 1:
        rule, remedy = "The reference computes no dropout, pse or sink.", "Leave them out of the comparison."
        raise UnsupportedFormError(explain("reference", ", ".join(names) or "keep_prob < 1", rule, remedy))
    if call.atten_mask is not None and call.mode in COMPRESSED:
        takes = "npu_fusion_attention takes, in blocks that no document describes"
        refuse(takes, compressed_contents(call, call.atten_mask))


def _attend(call: AttentionCall, n: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """`[1, N, Q, D]` in, attention and the softmax's max and sum out; masked scores are the lowest finite number."""
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    masked = blocked_scores(call, n).to(q.device)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(masked, torch.finfo(q.dtype).min)
    top = scores.detach().amax(-1) if k.shape[2] else scores.new_zeros(scores.shape[:-1])
    total = (scores.detach() - top[..., None]).exp().sum(-1)
    out = scores.softmax(-1) @ v
    return out.masked_fill(masked.all(-1, keepdim=True), 0) if call.zeroes_empty_rows(n) else out, top, total


_TO_BNSD = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


def _rows(x: Tensor, lengths: Sequence[int], layout: str, heads: int) -> Sequence[Tensor]:
    """`[1, heads, S, D]` of each row or packed sequence, and under TND one more of what stands behind the last."""
    if layout == "TND":
        return torch.split(x.transpose(0, 1)[None], [*lengths, x.shape[0] - sum(lengths)], 2)
    x = x.view(*x.shape[:-1], heads, -1) if layout in ("BSH", "SBH") else x
    return x.permute(_TO_BNSD[layout])[:, None].unbind()
