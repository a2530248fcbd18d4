"""Known kernels: their names, and how the arguments of a call name sequences and padding.

One row a name, whoever defines it: stacks copy kernels under their own names, or call fla's, and transformers' plain
functions take the place of both. The boundaries of a call are read off its arguments. A call of `npu_fusion_attention` that
its operator refuses, or reads otherwise than anybody can mean, is a `MisusedError` (op-plugin 517f2e7d
torch_npu-npu_fusion_attention.md; ops-transformer c29bc106 flash_attention_score_tiling_general.cpp:799, 1501-1571).
Legend: B rows, T tokens, H heads, D sizes, Q queries, K keys, N value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.kernels.fusion_attention import LAYOUTS, UNLIMITED, prefix_triangle, triangle
from collate_npu.masks.mask_values import BLOCKED_BELOW
from collate_npu.proof import boundaries
from collate_npu.proof.boundaries import Attended, CallBoundaries, Kind, by_offsets, offset_values, row_of, row_starts

Reader = Callable[[str, Mapping[str, Any]], CallBoundaries]


class UnreadError(Exception):
    """Why a call says nothing of sequences: other queries than keys, a state that it begins with, a mask too large."""


class MisusedError(Exception):
    """Why an operator refuses a call, or computes what nobody asks for, whatever the batch; and a remedy."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


# --- recurrent layers

_ALIASES = {"query": "q", "key": "k", "value": "v", "hidden_states": "x", "input": "x", "u": "x", "xz": "x"}
_WRITES = ("k", "x", "zxbcdt")
"""What a token writes into a state or a window: the key of a rule, the input of a convolution or a scan."""


@dataclass(frozen=True)
class _Signature:
    """How recurrent kernels name tensors and boundaries."""

    shapes: Mapping[str, str]
    """The order of dimensions of each tensor; the first that is given tells B and T."""
    offsets: str = ""
    """The argument that holds offsets."""
    numbers: str = ""
    """The argument that holds a number for each token."""
    lengths: bool = False
    """True if lengths stand in the place of offsets."""


_RULE = _Signature({"q": "BTHD", "k": "BTHD", "v": "BTND", "g": "BTN", "beta": "BTN"}, "cu_seqlens")
_FLASH_RULE = _Signature({"q": "BHTD", "k": "BHTD", "v": "BHTD", "g": "BTH", "beta": "BTH"}, "cu_seqlens")
_NPU_RULE = _Signature({"q": "THD", "k": "THD", "v": "TND", "g": "TN", "beta": "TN"}, "actual_seq_lengths", lengths=True)
_CONV = _Signature({"x": "BDT"}, numbers="seq_idx")
_FLA_CONV = _Signature({"x": "BTD"}, "cu_seqlens")
_NPU_CONV = _Signature({"x": "BTD"}, "query_start_loc")
_PLAIN_CONV = _Signature({"x": "BDT"})
"""A depthwise convolution of torch, and Mamba's first scan; `mamba_inner_fn` is both in one, of `xz` `[B, 2 D, T]`."""
_SCAN = _Signature({"x": "BTHD", "dt": "BTH"}, numbers="seq_idx")
_SPLIT_SCAN = _Signature({"zxbcdt": "BTD"}, numbers="seq_idx")


def _boundaries_of(row: _Signature, kind: Kind, kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    given = {_ALIASES.get(name, name): value for name, value in values.items() if value is not None}
    if "initial_state" in given or "initial_states" in given:
        raise UnreadError("it goes on from a state")
    x = given.get("x")
    if row in (_NPU_CONV, _PLAIN_CONV) and isinstance(x, Tensor) and x.ndim == 2:
        row = replace(row, shapes={"x": row.shapes["x"].replace("B", "")})
    tensors = ((given[name], order) for name, order in row.shapes.items() if isinstance(given.get(name), Tensor))
    sizes = next((dict(zip(order, each.shape)) for each, order in tensors if each.ndim == len(order)), None)
    if sizes is None:
        raise UnreadError("no tensor has its tokens")
    B, T = sizes.get("B", 1), sizes["T"]
    first_T, by, left_T = row_starts(B, T), "", np.zeros(B * T, bool)
    numbers_BT = given.get(row.numbers)
    offsets = offset_values(given, row.offsets)
    offsets = (0, *np.cumsum(offsets).tolist()) if row.lengths and offsets else offsets
    if len(offsets) > 1:
        (first_T, left_T), by = by_offsets(offsets, B * T), row.offsets
    elif isinstance(numbers_BT, Tensor) and tuple(numbers_BT.shape) == (B, T) and not numbers_BT.is_floating_point():
        first_T, by = boundaries.by_numbers(numbers_BT.cpu().numpy()), row.numbers
    neutral_T = _neutral(row, given, first_T) | left_T
    return CallBoundaries(kernel, kind, (B, T), first_T, neutral_T, by or "zeros" * bool(neutral_T.any()))


def _neutral(row: _Signature, given: Mapping[str, Any], first_T: np.ndarray) -> np.ndarray:
    """Return bool `[T]`: tokens that write zero. Of a rule also those with values of zero before the first state."""
    name = next((name for name in _WRITES if isinstance(given.get(name), Tensor) and name in row.shapes), "")
    if not name or given[name].is_meta:
        return np.zeros(len(first_T), bool)
    neutral_T = boundaries.zeros_of(given[name], row.shapes[name])
    if name == "k" and isinstance(given.get("v"), Tensor) and "v" in row.shapes:
        empty_T = neutral_T | boundaries.zeros_of(given["v"], row.shapes["v"])
        written_T = np.concatenate([[0], np.cumsum(~empty_T)])
        neutral_T |= written_T[1:] == written_T[first_T]
    return neutral_T


# --- attention


def _attention(kernel: str, shape: tuple[int, int], rows: Callable[[int], Attended], by: str) -> CallBoundaries:
    """Return the boundaries of rows `[B, T]`, each with whom its queries attend by this argument."""
    if shape[1] ** 2 > boundaries.MOST_SCORES:
        raise UnreadError(f"a mask of {shape[1]} x {shape[1]} is too large to look at")
    first_T, neutral_T, digest = boundaries.by_mask(rows, *shape)
    return CallBoundaries(kernel, "attention", shape, first_T, neutral_T, by, digest=digest, allowed=rows)


def _bare(kernel: str, shape: tuple[int, int], causal: bool, window: int | None = None) -> CallBoundaries:
    """Return the boundaries of rows without a mask: causal queries read the keys before them, others all keys."""
    (B, T), more = shape, {"causal": True} if causal else {"allowed": lambda b: (torch.ones(T, T, dtype=torch.bool),) * 2}
    return CallBoundaries(kernel, "attention", shape, row_starts(B, T), np.zeros(B * T, bool), window=window, **more)


def _flat(
    kernel: str,
    offsets: tuple[int, ...],
    keys: tuple[int, ...],
    total: int,
    by: str,
    window: int | None,
    causal: bool | None = None,
) -> CallBoundaries:
    """Return the boundaries of a flat row by its offsets; queries and keys are the same tokens."""
    first_T, neutral_T = by_offsets(offsets, total)
    if keys and keys != offsets:
        if len(keys) != len(offsets) or keys[-1] != offsets[-1] or neutral_T.any():
            raise UnreadError("its queries are other tokens than its keys")
        first_T = np.repeat(keys[:-1], np.diff(offsets))  # each sequence reads the keys of its number
    return CallBoundaries(kernel, "attention", (1, total), first_T, neutral_T, by, window, causal)


def _same_tokens(q: Tensor, k: Tensor, at: int) -> None:
    if q.shape[at] != k.shape[at]:
        raise UnreadError("its queries are other tokens than its keys")


def _masked(kernel: str, values: Mapping[str, Any], mask: Tensor | None, causal: bool) -> CallBoundaries:
    """q `[B, H, T, D]` beside a mask of any rank, True = attends, or additive."""
    q, k = values["query"], values["key"]
    B, T, K = (q.shape[0] if q.ndim > 2 else 1), q.shape[-2], k.shape[-2]
    if mask is None:
        _same_tokens(q, k, -2)
        return _bare(kernel, (B, T), causal)
    keep = mask.detach()
    keep = keep if keep.dtype == torch.bool else keep > BLOCKED_BELOW
    keep = keep[:, None] if keep.ndim == 3 == q.ndim else keep
    keep = keep.expand(*keep.shape[:-2], T, K)

    def rows(b: int) -> Attended:
        any_QK, all_QK = row_of(keep, b)
        return (any_QK.tril(), all_QK.tril()) if causal else (any_QK, all_QK)

    if K != T:  # of a rank that has a part of the queries, and all keys
        return replace(_bare(kernel, (B, T), causal=True), by="mask", allowed=rows, causal=None, keys=K)
    return _attention(kernel, (B, T), rows, "mask")


def _sdpa(kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    return _masked(kernel, values, values.get("attn_mask"), bool(values.get("is_causal")))


def _by_module(kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    """transformers' functions `(module, query, key, value, attention_mask, ...)` add the mask to the scores: a bool mask
    blocks nothing there."""
    bias = values.get("attention_mask")
    if isinstance(bias, Tensor) and not bias.is_floating_point():
        bias = torch.ones_like(bias, dtype=torch.bool)
    return _masked(kernel, values, bias, causal=False)


def _flex(kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    """A call may have a BlockMask, a dense mask, and a score_mod that gives minus infinity to blocked scores."""
    q, k, score = values["query"], values["key"], values.get("score_mod")
    mask = values.get("block_mask", values.get("attention_mask"))
    if score is None and not hasattr(mask, "mask_mod"):
        return _masked(kernel, values, mask, causal=False)
    _same_tokens(q, k, -2)
    nothing, zero = torch.zeros((), device=q.device), torch.zeros((), dtype=torch.int64, device=q.device)

    def attends(b: Tensor, h: Tensor, *at: Tensor) -> Tensor:
        kept = mask.mask_mod(b, h, *at) if hasattr(mask, "mask_mod") else nothing == 0
        if isinstance(mask, Tensor):
            where = (b if len(mask) > 1 else zero, h if mask.shape[1] > 1 else zero, *at)
            kept = (mask if mask.dtype == torch.bool else mask > BLOCKED_BELOW)[where]
        return kept if score is None else kept & (score(nothing, b, h, *at) > BLOCKED_BELOW)

    def rows(b: int) -> Attended:
        return boundaries.evaluated(attends, b, q.shape[1], (q.shape[-2], k.shape[-2]), q.device)

    return _attention(kernel, (q.shape[0], q.shape[-2]), rows, "score_mod" if mask is None else "block_mask")


def _window(values: Mapping[str, Any]) -> int | None:
    """flash-attn's windows say how many keys stand before a query (flash_attn_interface.py, window_size)."""
    size = values.get("window_size")
    left: Any = size[0] if isinstance(size, (tuple, list)) else size
    return None if left is None or left < 0 else int(left) + 1


def _causal(values: Mapping[str, Any]) -> bool:
    """Return True for causal calls; a window without keys behind the query is causal too."""
    size = values.get("window_size")
    return bool(values.get("causal")) or (isinstance(size, (tuple, list)) and len(size) > 1 and size[1] == 0)


def _flash(kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    """q `[B, T, H, D]`, or all three in one tensor `[B, T, 3, H, D]`."""
    q = values["q"] if "q" in values else values.get("qkv", values.get("kv"))
    if not isinstance(q, Tensor) or q.ndim < 4:
        raise UnreadError(f"{shape_of(q)} is not rows of tokens")
    if isinstance(values.get("k"), Tensor):
        _same_tokens(q, values["k"], 1)
    return _bare(kernel, (q.shape[0], q.shape[1]), _causal(values), _window(values))


def _varlen(kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    """q `[T, H, D]` beside offsets: flash-attn's, and torch's `varlen_attn`."""
    names = [name for name in ("cu_seqlens_q", "cu_seq_q", "cu_seqlens") if values.get(name) is not None]
    q = next(values[name] for name in ("q", "query", "qkv") if name in values)
    if not names:
        raise UnreadError("it has no offsets")
    keys = offset_values(values, names[0].replace("_q", "_k")) if names[0] != "cu_seqlens" else ()
    offsets, size = offset_values(values, names[0]), _window(values)
    return _flat(kernel, offsets, keys, q.shape[0], names[0], size, _causal(values))


def _fusion(kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    """torch_npu's operator: ends of sequences under TND, else masks and modes as its host code reads them. Queries and keys
    are the same tokens, so that a mode counts from either corner alike."""
    q, k, layout = values["query"], values["key"], str(values.get("input_layout")).upper()
    if layout not in LAYOUTS or q.ndim != (4 if "N" in layout and "B" in layout else 3):
        raise UnreadError(f"{shape_of(q)} is no {layout}")
    mask, mode = values.get("atten_mask"), int(values.get("sparse_mode") or 0)
    mask = None if mask is None or mask.ndim == 0 else mask  # the host code counts rank 0 as none
    pre, after = (values.get(name, UNLIMITED) for name in ("pre_tockens", "next_tockens"))
    window = pre + 1 if mask is not None and mode in (0, 4) and pre < UNLIMITED else None
    if layout == "TND":
        ends, keys = ((0, *offset_values(values, name)) for name in ("actual_seq_qlen", "actual_seq_kvlen"))
        longest = (int(np.diff(ends).max(initial=0)), int(np.diff(keys).max(initial=0)))
        shapes = _dense_shapes(len(ends) - 1, values["head_num"], *longest)
        _check_mask(mask, mode, (pre, after), [*shapes, (ends[-1], keys[-1])])
        causal = None if mode in (0, 1, 6, 7, 8) and mask is not None else mask is not None and (mode != 4 or after <= 0)
        return _flat(kernel, ends, keys, q.shape[0], "actual_seq_qlen", window, causal)
    batch, rows = {"SBH": (1, 0), "BNSD": (0, 2)}.get(layout, (0, 1))
    B, Q = q.shape[batch], q.shape[rows]
    _same_tokens(q, k, rows)
    _check_mask(mask, mode, (pre, after), _dense_shapes(B, values["head_num"], Q, Q))
    if mask is None:
        return _bare(kernel, (B, Q), causal=False)
    prefix = offset_values(values, "prefix")
    legal = len(prefix) == B and all(0 <= n <= Q for n in prefix)
    if mode == 6 and not legal:
        raise MisusedError(f"prefix {list(prefix)} is not one number up to {Q} for each row", _OURS)

    def attended(b: int) -> Attended:
        return row_of(~_blocked(mask, mode, (pre, after), prefix[b] if legal else Q, b, Q), b)

    return _attention(kernel, (B, Q), attended, "atten_mask")


_OURS = "Take the mask arguments from kernels.fusion_attention_kwargs"
_COMPRESSED = {2: triangle, 3: triangle, 4: triangle, 6: prefix_triangle, 7: triangle, 8: triangle}
"""The mask that each compressed sparse mode takes: its contents are used unchecked."""


def _dense_shapes(B: int, heads: int, Q: int, K: int) -> list[tuple[int, ...]]:
    return [(Q, K), (1, 1, Q, K), (B, 1, Q, K), (B, heads, Q, K)]


def _check_mask(mask: Tensor | None, mode: int, tokens: tuple[int, int], taken: list[tuple[int, ...]]) -> None:
    """Raise `MisusedError` for a mask that the operator refuses, and for one that nobody can mean. `taken`: the shapes of
    dense masks, queries and keys first."""
    if mask is None:
        if mode or tokens[0] < taken[0][0] - 1 or tokens[1] < taken[0][1] - 1:
            raise MisusedError(f"atten_mask=None is full attention in every sparse mode, here {mode}", _OURS)
        return
    if mask.dtype not in (torch.bool, torch.uint8):
        raise MisusedError(f"atten_mask is {mask.dtype}: the operator takes bool and uint8, True or 1 is blocked", _OURS)
    if mode in _COMPRESSED:
        right = _COMPRESSED[mode](mask.device)
        taken = [tuple(right.shape)]
    if tuple(mask.shape) not in taken:
        shapes = " or ".join(str(list(each)) for each in dict.fromkeys(taken))
        raise MisusedError(f"atten_mask is {list(mask.shape)}: in sparse_mode {mode} the operator takes {shapes}", _OURS)
    if mode in _COMPRESSED and not torch.equal(mask.bool(), right):
        raise MisusedError(f"atten_mask is not the compressed triangle that sparse_mode {mode} takes", _OURS)


def _blocked(mask: Tensor, mode: int, tokens: tuple[int, int], prefix: int, b: int, Q: int) -> Tensor:
    """Return bool `[Q, Q]` or `[H, Q, Q]`: the scores of row b that the mask blocks or the sparse mode leaves out."""
    at_K, at_Q1 = torch.arange(Q), torch.arange(Q)[:, None]
    ahead = at_K > at_Q1
    outside = (at_K > at_Q1 + tokens[1]) | (at_K < at_Q1 - tokens[0])
    if mode in (2, 3):
        return ahead
    if mode == 4:
        return outside
    if mode == 6:
        return ahead & (at_K >= prefix)
    dense = (mask if mask.ndim == 2 else mask[b if len(mask) > 1 else 0]).cpu().bool()
    if mode == 0:
        return dense | outside
    return dense | (ahead & (at_K >= prefix)) if mode == 5 else dense


def _core(kernel: str, values: Mapping[str, Any]) -> CallBoundaries:
    """Megatron's `DotProductAttention` and TransformerEngine's, whose masks say True where they block
    (megatron-core core/transformer/dot_product_attention.py, te_dot_product_attention; TE 2 dot_product_attention.py)."""
    module, packed = values["self"], values.get("packed_seq_params")
    read = {**values, **(vars(packed) if packed is not None else {})}
    layout = read.get("qkv_format") or getattr(module, "qkv_format", None) or "sbhd"
    kind = values.get("attn_mask_type") or getattr(module, "attn_mask_type", None) or "causal"
    kind = getattr(kind, "name", str(kind))
    q = values["query"] if "query" in values else values["query_layer"]
    k, mask = values.get("key"), values.get("attention_mask")
    offsets = next((name for name in ("cu_seqlens_q_padded", "cu_seqlens_q") if read.get(name) is not None), "")
    if layout == "thd" and offsets:
        return _packed(kernel, read, offsets, q.shape[0])
    B, T = (q.shape[1], q.shape[0]) if layout == "sbhd" else (q.shape[0], q.shape[1])
    if isinstance(k, Tensor):
        _same_tokens(q, k, 0 if layout == "sbhd" else 1)
    ours = "transformer_engine" in {base.__module__.partition(".")[0] for base in type(module).__mro__}
    fused = getattr(getattr(module, "scale_mask_softmax", None), "scaled_masked_softmax_fusion", False) and q.is_cuda
    if mask is None or ((ours or fused) and kind == "causal"):
        return _bare(kernel, (B, T), "causal" in kind, _window(read))
    rows = q.movedim(0, 2) if layout == "sbhd" else q.transpose(1, 2)
    return _masked(kernel, {"query": rows, "key": rows}, ~mask.bool(), causal=False)


def _packed(kernel: str, read: Mapping[str, Any], name: str, total: int) -> CallBoundaries:
    """Return the boundaries by the padded offsets, if there are any; the other offsets say how many tokens are real."""
    ranks = getattr(getattr(read["self"], "config", None), "context_parallel_size", 1) or 1
    offsets, keys = (offset_values(read, each) for each in (name, name.replace("_q", "_kv")))
    total *= ranks if offsets[-1:] == (ranks * total,) else 1  # of the whole row, on each rank
    found, lengths = _flat(kernel, offsets, keys, total, name, _window(read)), np.diff(offset_values(read, "cu_seqlens_q"))
    if name == "cu_seqlens_q" or not len(lengths):
        return found
    if len(lengths) != len(offsets) - 1:  # of other sequences
        return replace(found, neutral_T=np.ones(total, bool))
    given_T = dict(zip(offsets, lengths.tolist()))
    behind_T = np.arange(total) - found.first_T >= [given_T.get(first, total) for first in found.first_T.tolist()]
    return replace(found, neutral_T=found.neutral_T | behind_T)


def _by_name(*rows: tuple[Kind, Reader | _Signature, str]) -> dict[str, tuple[Kind, Reader]]:
    readers = ((k, partial(_boundaries_of, row, k) if isinstance(row, _Signature) else row, names) for k, row, names in rows)
    return {name: (kind, read) for kind, read, names in readers for name in names.split()}


_RULES = """
    chunk_gated_delta_rule fused_recurrent_gated_delta_rule torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule
    fused_chunk_gated_delta_rule chunk_kda fused_recurrent_kda
    torch_chunk_kda chunk_kimi_delta_attention chunk_gla chunk_simple_gla chunk_delta_rule chunk_lightning_attn
"""
KERNELS = _by_name(
    ("rule", _RULE, _RULES),
    ("rule", _FLASH_RULE, "flash_gated_delta_rule"),
    ("rule", _NPU_RULE, "npu_chunk_gated_delta_rule"),
    ("rule", _SCAN, "mamba_chunk_scan_combined mamba2_chunk_scan"),
    ("rule", _SPLIT_SCAN, "mamba_split_conv1d_scan_combined mamba2_split_conv1d_scan_combined"),
    ("rule", _PLAIN_CONV, "selective_scan_fn mamba_selective_scan mamba_inner_fn"),
    ("convolution", _CONV, "causal_conv1d_fn"),
    ("convolution", _FLA_CONV, "causal_conv1d"),
    ("convolution", _NPU_CONV, "npu_causal_conv1d"),
    ("convolution", _PLAIN_CONV, "conv1d"),
    ("attention", _sdpa, "scaled_dot_product_attention"),
    ("attention", _by_module, "eager_attention_forward"),
    ("attention", _flex, "flex_attention flex_attention_forward"),
    ("attention", _flash, "flash_attn_func flash_attn_qkvpacked_func"),
    ("attention", _varlen, "flash_attn_varlen_func flash_attn_varlen_qkvpacked_func varlen_attn"),
    ("attention", _fusion, "npu_fusion_attention npu_fusion_attention_v3"),
)
"""Functions, by their names."""
MODULES = _by_name(("attention", _core, "DotProductAttention TEDotProductAttention"))
"""Modules that are kernels themselves, by the names of their classes."""
OF_TORCH = ("torch", "torch.nn.functional", "torch.nn.attention.flex_attention", "torch.nn.attention.varlen")
"""Modules of torch whose functions are wrapped."""
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FUSION = (
    *("query", "key", "value", "head_num", "input_layout", "pse", "padding_mask", "atten_mask", "scale", "keep_prob"),
    *("pre_tockens", "next_tockens", "inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"),
)
POSITIONAL: dict[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": _SDPA, "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "npu_fusion_attention": _FUSION, "npu_fusion_attention_v3": _FUSION,
}  # fmt: skip
"""Parameters of functions of C++, which have no signature."""
