"""Operator call: one call of `npu_fusion_attention` as its host code sees it, and which scores it computes.

Legend: B batch, N query heads, Sq/Skv query and key rows, D head size, Tq/Tkv packed tokens (layout TND).

The sources that rules cite, none of which is copied here:

    T   hicann/ops-transformer c29bc106 (CANN 8.5.0.alpha001), flash_attention_score_tiling_general.cpp
    A   the same, op_host/op_api/aclnn_flash_attention_score.cpp
    G   the same, flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp
    K   the same, attention/flash_attention_score/op_kernel
    P   Ascend/op-plugin 517f2e7d, FlashAttentionKernelNpuOpApi.cpp
    PD  the same, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    D   hicann/ops-transformer, sparse_mode documentation
    MS  Ascend/MindSpeed 028de58c, docs/zh/ops/fusion_attention.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import check_places, host_array, once, whole_number
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.validation import here, wrong_kind

UNLIMITED = 2**31 - 1
"""The operator's default of `pre_tockens` and `next_tockens`."""
INTEGERS = ("pre_tockens", "next_tockens", "inner_precise", "sparse_mode")
TENSORS = ("query", "key", "value")
LISTS = ("actual_seq_qlen", "actual_seq_kvlen")
INTEGER_LISTS = ("prefix", *LISTS)
DEFAULTS: dict[str, Any] = (
    dict.fromkeys(("input_layout", "pse", "padding_mask", "atten_mask", *INTEGER_LISTS, "sink"))
    | {"scale": 1.0, "keep_prob": 1.0, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED, "inner_precise": 0}
    | {"sparse_mode": 0, "gen_mask_parallel": True, "sync": False, "softmax_layout": ""}
    | {"dropout_mask": None, "seed": 0, "offset": 0}
)
"""`npu_fusion_attention` behind query, key, value and head_num (torch_npu 2.13.0); `_v3` lacks the last three."""
RANKS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
"""Layouts of q, k and v, and how many dimensions they have."""


def sizes_of(query: Any, key: Any, head_num: Any, input_layout: Any) -> dict[str, int]:
    """The sizes that the tensors of a call tell. Raises `UnsupportedFormError` for tensors that are not of this layout."""
    q, k = (tuple(x.shape) if isinstance(x, Tensor) else () for x in (query, key))
    input_layout = upper_layout(input_layout)
    if len(q) != len(k) or not q or RANKS.get(str(input_layout)) != len(q) or whole_number("head_num", head_num or 0) < 1:
        got = f"{shape_of(query)}, {shape_of(key)} as {input_layout} of {head_num} heads"
        rule, remedy = "BSH, SBH and TND have 3 dimensions, BSND and BNSD 4.", "Name the layout of q, k and v."
        raise UnsupportedFormError(explain("query, key", got, rule, remedy))
    N = int(head_num)
    if input_layout == "TND":
        return {"N": N, "Nkv": k[1], "D": q[2], "Tq": q[0], "Tkv": k[0]}
    D = q[-1] if len(q) == 4 else q[-1] // N
    Nkv = k[input_layout.index("N")] if len(q) == 4 else k[-1] // max(D, 1)
    batch, rows = {"SBH": (1, 0), "BNSD": (0, 2)}.get(input_layout, (0, 1))
    return {"N": N, "Nkv": Nkv, "D": D, "B": q[batch], "Sq": q[rows], "Skv": k[rows]}


@dataclass
class AttentionCall:
    """Arguments with the operator's defaults filled in, lists read as tuples of host numbers, and the sizes.

    query, key and value may be among them, for their shapes. Sizes are None where nobody gave them: under TND the lists
    say B (sequences), Sq and Skv (the longest) as well.
    Raises `CollateError` for values that the operator's schema does not take.
    """

    kwargs: Mapping[str, Any]
    N: int
    Nkv: int
    D: int
    B: int | None = None
    Sq: int | None = None
    Skv: int | None = None
    Tq: int | None = None
    Tkv: int | None = None

    def __post_init__(self) -> None:
        for name in ("N", "Nkv", "D", "B", "Sq", "Skv", "Tq", "Tkv"):
            if getattr(self, name) is not None:
                setattr(self, name, whole_number(name, getattr(self, name)))
        for S in (self.Sq, self.Skv):
            check_places("B, Sq, Skv", (self.B or 1) * (S or 1), "Pass the sizes of the call's tensors.")
        given = {name: value for name, value in self.kwargs.items() if name not in (*TENSORS, "head_num")}
        self.given = given.keys()
        self.arguments = arguments = DEFAULTS | given
        arguments |= {name: _integers(name, arguments[name]) for name in INTEGER_LISTS}
        arguments |= {name: whole_number(name, arguments[name], least=-(2**63)) for name in INTEGERS}
        for name in ("scale", "keep_prob"):
            if not isinstance(arguments[name], (int, float, np.integer, np.floating)):
                raise CollateError(explain(name, f"a {type(arguments[name]).__name__}", "It is a number.", "Pass a float."))
        mask = arguments["atten_mask"]
        if not isinstance(mask, Tensor | None):
            raise wrong_kind("atten_mask", mask, "The operator", Tensor, NoneType)
        self.layout = upper_layout(arguments["input_layout"])
        self.tnd = bool(self.layout == "TND")
        self.mode: int = arguments["sparse_mode"]
        # As given: mode 0 counts them from the top-left corner, modes 4, 7 and 8 from the bottom-right.
        self.tokens: tuple[int, int] = (arguments["pre_tockens"], arguments["next_tockens"])
        self.prefix: tuple[int, ...] | None = arguments["prefix"]
        self.ends: list[tuple[int, ...] | None] = [arguments[name] for name in LISTS]
        # The host code counts a mask of rank 0 as none (T:1498).
        self.atten_mask: Tensor | None = None if mask is None or mask.ndim == 0 else mask

    @once
    def lengths(self) -> list[tuple[int, int]]:
        """`(Sq, Skv)` of each sequence; outside TND the same for each of the B rows. Raises where no size says it."""
        if self.tnd:  # an end that falls counts 0, as in the host code (T `GetActualSeqLenData`)
            q, kv = ([max(b - a, 0) for a, b in pairwise((0, *(ends or ())))] for ends in self.ends)
            return list(zip(q, kv))
        B, Sq, Skv = self.B, self.Sq, self.Skv
        if B is None or Sq is None or Skv is None:
            rule = f"Layout {self.layout} needs the rows of query and key, and their number."
            raise CollateError(explain("B, Sq, Skv", f"{B}, {Sq}, {Skv}", rule, "Pass all three, or segments."))
        return [(Sq, Skv)] * B

    @once
    def longest(self) -> tuple[int, int]:
        """`(max Sq, max Skv)`: the size of a dense mask."""
        return max((q for q, _ in self.lengths), default=0), max((kv for _, kv in self.lengths), default=0)

    @property
    def mask_heads(self) -> int:
        """Heads that the mask tells apart."""
        return self.atten_mask.shape[1] if self.atten_mask is not None and self.atten_mask.ndim == 4 else 1

    @property
    def cut_sequence(self) -> int:
        """The sequence with the band of modes 7 (the last with queries) and 8 (the first); -1 where none has queries."""
        filled = [n for n, (q, _) in enumerate(self.lengths) if q]
        return (filled[-1] if self.mode == 7 else filled[0]) if filled else -1

    @once
    def prefix_is_legal(self) -> bool:
        """One entry for each sequence, in `[max(0, Skv - Sq), Skv]` (T:1325-1352, TND T:4045-4082)."""
        pairs = self.lengths
        if self.prefix is None or len(self.prefix) != len(pairs):
            return False
        return all(max(0, kv - q) <= n <= kv for n, (q, kv) in zip(self.prefix, pairs))


def _integers(name: str, values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    array = host_array(name, values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        rule, remedy = "The operator takes a list of whole numbers on the host.", "Pass a list, or for _v3 an int64 tensor."
        raise CollateError(explain(name, shape_of(array), rule, remedy))
    return tuple(array.tolist())


def upper_layout(layout: Any) -> Any:
    """The layout in capitals: the operator reads small letters too, but judges a small tnd as padded (P:771-790)."""
    return layout.upper() if isinstance(layout, str) and layout != "tnd" else layout


# --- geometry: which scores a call computes, True = blocked, a block of query rows at a time, so that what a check allocates
# does not grow with the mask; and the compressed masks, the 2048 triangle and its form with a prefix block, in small::
#
#     ⬚ ■ ■ ■      ⬚ ■ ■ ■      the first 2048 rows are the triangle again
#     ⬚ ⬚ ■ ■      ⬚ ⬚ ■ ■
#     ⬚ ⬚ ⬚ ■      ⬚ ⬚ ⬚ ■
#     ⬚ ⬚ ⬚ ⬚      ⬚ ⬚ ⬚ ⬚
#                  ⬚ ⬚ ■ ■      1024 more: the left half open, the right half closed
#                  ⬚ ⬚ ■ ■
# Legend: Q query rows, K keys, H heads of the mask (1 where all heads share it).

TRIANGLE = (2048, 2048)
PREFIX_TRIANGLE = (3072, 2048)
EVERY = slice(None)
BLOCK_SCORES = 2**18
"""Scores of one block: some MiB of numbers on the way, and few enough steps in Python."""


def triangle(device: torch.device | str = "cpu") -> Tensor:
    """bool `[2048, 2048]`, True above the diagonal: the compressed mask of sparse modes 2, 3, 4, 7 and 8.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 2 (compressed lower triangle, True = blocked).

    >>> triangle().shape, triangle()[:3, :3].int().tolist()
    (torch.Size([2048, 2048]), [[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    """
    return outside_band(*TRIANGLE, sum(TRIANGLE), 0).to(here(device))


def prefix_triangle(device: torch.device | str = "cpu") -> Tensor:
    """bool `[3072, 2048]`: the triangle over 1024 rows whose right half is True, for sparse mode 6.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 6.
    """
    rows, K = PREFIX_TRIANGLE
    below = (torch.arange(K) >= K // 2).expand(rows - TRIANGLE[0], K)
    return torch.cat([triangle(), below]).to(here(device))


def outside_band(Q: int, K: int, before: int, after: int, shift: int = 0, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]`, True where key - query is not in `[-before, after]`, both counted from the top-left corner.

    `shift=K - Q` counts them from the bottom-right one, where the last query stands on the last key (op-plugin
    torch_npu-npu_fusion_attention.md, "sparse_mode" 0 and 4). `queries` picks rows, here and below; only they are built.
    """
    keys_K, at_Q1 = torch.arange(K), torch.arange(Q)[queries, None] + shift
    masked = keys_K > at_Q1 + after
    return masked if before >= Q + K else masked | (keys_K < at_Q1 - before)


def band_leaves_rows_empty(Q: int, K: int, before: int, after: int, shift: int = 0) -> bool:
    """True if some query row of `outside_band` is True throughout."""
    at_Q = torch.arange(Q) + shift
    return bool(((at_Q - before).clamp(min=0) > (at_Q + after).clamp(max=K - 1)).any())


def outside_prefix(Q: int, K: int, prefix: int, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]`, modes 5 and 6: causal from the bottom-right, and the first `prefix` keys for every query (T:777)."""
    return outside_band(Q, K, Q + K, 0, K - Q, queries) & (torch.arange(K) >= prefix)


def query_blocks(Q: int, scores_of_a_query: int) -> Iterator[slice]:
    """The Q query rows in stretches of at most `BLOCK_SCORES` scores, but at least one row."""
    step = max(1, BLOCK_SCORES // max(1, scores_of_a_query))
    yield from (slice(at, min(at + step, Q)) for at in range(0, Q, step))


def blocked_scores(call: AttentionCall, n: int, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]` or `[H, Q, K]`: what the mask blocks or the sparse mode leaves out, for row or sequence n."""
    (Q, K), mode = call.lengths[n], call.mode
    if call.atten_mask is None:
        return torch.zeros(len(range(Q)[queries]), K, dtype=torch.bool)
    if mode in (2, 3) or (mode in (7, 8) and n != call.cut_sequence):
        return outside_band(Q, K, Q + K, 0, 0 if mode in (2, 8) else K - Q, queries)
    if mode in (4, 7, 8):
        return outside_band(Q, K, *call.tokens, K - Q, queries)
    if mode == 6 and call.prefix is not None:
        return outside_prefix(Q, K, call.prefix[n], queries)
    skipped, dense = skipped_scores(call, n, queries), dense_scores(call, n, queries)
    return dense if skipped is None else dense | skipped


def dense_scores(call: AttentionCall, n: int, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]` or `[H, Q, K]` on the host: what a dense mask blocks, for row or sequence n."""
    given, (Q, K) = call.atten_mask, call.lengths[n]
    assert given is not None
    if call.tnd and given.ndim == 4:  # the kernel steps by packed Sq * Skv (K flash_attention_var_len_score.h:354,376)
        rule, remedy = "A 4-D mask under TND is not covered.", "Pass one [maxSq, maxSkv] mask, or the compressed triangle."
        raise UnsupportedFormError(explain("atten_mask", shape_of(given), rule, remedy))
    q0 = k0 = 0
    if call.tnd and tuple(given.shape) != call.longest:
        q0, k0 = (sum(pair[axis] for pair in call.lengths[:n]) for axis in (0, 1))
    matrix = given if given.ndim == 2 else given[n if given.shape[0] > 1 else 0]
    part: Tensor = matrix[..., q0 : q0 + Q, k0 : k0 + K][..., queries, :].cpu().bool()
    return part


def skipped_scores(call: AttentionCall, n: int, queries: slice = EVERY) -> Tensor | None:
    """bool `[Q, K]`: what tokens or prefix leave out beside a dense mask, for row or sequence n; None for nothing."""
    Q, K = call.lengths[n]
    if call.mode == 0 and (call.tokens[0] < Q - 1 or call.tokens[1] < K - 1):
        return outside_band(Q, K, *call.tokens, queries=queries)
    if call.mode == 5 and call.prefix is not None and call.prefix_is_legal:
        return outside_prefix(Q, K, call.prefix[n], queries)
    return None
