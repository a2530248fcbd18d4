"""Contract of a call of `npu_fusion_attention`: what the operator would take in silence, and compute something else from.

Costs a few passes over a mask, block by block, and with `segments` a look at every score; check in the collator or once per
shape, not at every step. Some wrong calls are legal: a window one token short, an inverted padding mask, another batch's
lists. With the Segments at hand none of them passes: what the call computes is compared with them at every real query.

What the operator's own host code refuses is left to it, but for what a call cannot be read without, which is one rule,
`refused`. The sources that rules cite, none of which is copied here:

    T   hicann/ops-transformer c29bc106 (CANN 8.5.0.alpha001), flash_attention_score_tiling_general.cpp
    A   the same, op_host/op_api/aclnn_flash_attention_score.cpp
    G   the same, flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp
    K   the same, attention/flash_attention_score/op_kernel
    P   Ascend/op-plugin 517f2e7d, FlashAttentionKernelNpuOpApi.cpp
    PD  the same, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    D   hicann/ops-transformer, sparse_mode documentation
    MS  Ascend/MindSpeed 028de58c, docs/zh/ops/fusion_attention.md

Legend: B batch, N query heads, D head size, Sq/Skv query and key rows, Tq/Tkv packed tokens (layout TND), T tokens of the
tensor the operator gets (packed, or all B * S places), Q queries and K keys of one row or packed sequence, H heads of the
mask (1 where all heads share it). A place is row * S + column of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from math import inf
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from collate_npu.arrays import check_places, once, whole_number
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.kernels import Breach
from collate_npu.kernels.call_boundaries import attention_reason, offset_values, row_of
from collate_npu.masks.forms import mask_mod
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments
from collate_npu.validation import here, wrong_kind

UNLIMITED = 2**31 - 1
"""The operator's default of `pre_tockens` and `next_tockens`."""
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
SKIP_EMPTY_ROWS = 2
"""The `inner_precise` under which a row without keys gives 0."""
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
        arguments |= {name: offset_values(arguments, name) for name in INTEGER_LISTS if arguments[name] is not None}
        numbers = ("pre_tockens", "next_tockens", "inner_precise", "sparse_mode")
        arguments |= {name: whole_number(name, arguments[name], least=-(2**63)) for name in numbers}
        if not isinstance(scale := arguments["scale"], (int, float, np.integer, np.floating)):
            raise CollateError(explain("scale", shape_of(scale), "It is a number.", "Pass a float."))
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

    def zeroes_empty_rows(self, n: int) -> bool:
        """True if the output of a query of row or sequence n is 0 where every key is blocked, not a mean of V
        (T:624-682, T:1357; K `flash_attention_score_s1s2_bn2gs1.h`)."""
        Q, K = self.lengths[n]
        if self.arguments["inner_precise"] == SKIP_EMPTY_ROWS or K == 0:
            return True
        if self.atten_mask is None:
            return False
        if self.mode == 3:
            return Q > K
        if self.mode in (5, 6):
            return bool(self.prefix_is_legal and self.prefix and self.prefix[n] == 0 and Q > K)
        return self.mode in (0, 4) and band_leaves_rows_empty(Q, K, *self.tokens, K - Q if self.mode == 4 else 0)

    @once
    def prefix_is_legal(self) -> bool:
        """One entry for each sequence, in `[max(0, Skv - Sq), Skv]` (T:1325-1352, TND T:4045-4082)."""
        pairs = self.lengths
        if self.prefix is None or len(self.prefix) != len(pairs):
            return False
        return all(max(0, kv - q) <= n <= kv for n, (q, kv) in zip(self.prefix, pairs))


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


# --- the contract

LISTED = 8
"""Rows or sequences that a message names."""
MASK_ARGUMENTS = ("atten_mask", "sparse_mode", "pre_tockens", "next_tockens", *INTEGER_LISTS)


def contract_breaches(
    kwargs: Mapping[str, Any], *, segments: Segments | None = None, pattern: str | Pattern = "causal", **sizes: int | None
) -> tuple[Breach, ...]:
    """Return every rule that a call breaks; arguments as in `check.check_call`, N, Nkv and D among the sizes."""
    follow: dict[str, int] = {}  # the sizes of query and key that the batch tells
    keep_tail = segments is not None and sizes.get("Tq") == segments.array.size
    if segments is not None and str(kwargs.get("input_layout")).upper() == "TND":
        follow = dict.fromkeys(("Tq", "Tkv"), segments.array.size if keep_tail else segments.num_tokens)
    elif segments is not None:
        follow = dict(zip(("B", "Sq", "Skv"), (*segments.shape, segments.shape[1])))
    call = AttentionCall(kwargs, **(sizes | follow))  # type: ignore[arg-type]
    found = list(_other_sizes(sizes, follow)) or list(refusal(call)) or list(_silent(call))
    if segments is not None:
        found = found or list(_against_segments(call, segments, Pattern.of(pattern), keep_tail))
        found += _scale(call)
    return tuple(found)


def _other_sizes(given: Mapping[str, int | None], follow: Mapping[str, int]) -> Iterator[Breach]:
    """One breach for each size that was given and is another than the one that follows."""
    remedy = "Leave it out, or pass the segments of this batch."
    for name, size in follow.items():
        if given.get(name) is not None and whole_number(name, given[name]) != size:
            says = f"By the segments it is {size}."
            yield Breach("sizes-differ", name, str(given[name]), says, remedy, "Segments")


def _scale(call: AttentionCall) -> Iterator[Breach]:
    scale, given = call.arguments["scale"], "scale" in call.given
    if not given or not 0 < scale < inf:
        says, remedy = "Without it the operator uses 1.0, which no model means.", "Pass scale=D**-0.5, or the model's own."
        yield Breach("scale", "scale", str(scale) if given else "nothing", says, remedy, "PD:36")


def _against_segments(call: AttentionCall, segments: Segments, pattern: Pattern, keep_tail: bool) -> Iterator[Breach]:
    """One breach that names the first wrong query of each row or sequence; read where no other rule is broken."""
    found = list(islice(_differences(call, segments, pattern, keep_tail), LISTED + 1))
    if found:
        where = ", ".join(name for name in MASK_ARGUMENTS if name in call.given) or "atten_mask"
        got = "; ".join([*found[:LISTED], *["..."] * (len(found) > LISTED)])
        says = f"The segments and the pattern, {pattern}, say otherwise."
        remedy = f"Use fusion_attention_kwargs(segments, pattern=..., layout={call.layout!r}), "
        remedy += "or pass the segments and pattern that this call is for."
        yield Breach("differs-from-segments", where, got, says, remedy, "Segments")


def _differences(call: AttentionCall, segments: Segments, pattern: Pattern, keep_tail: bool) -> Iterator[str]:
    """A sentence for each row or sequence with a real query that attends other keys than it should."""
    B, S = segments.shape
    places_T = segments.indices if call.tnd and not keep_tail else torch.arange(B * S)
    spans = np.array(segments.spans, np.int64).reshape(-1, 3)
    first_N, end_N = (np.searchsorted(places_T.numpy(), spans[:, 0] * S + spans[:, i]) for i in (1, 2))
    attends = mask_mod(segments, pattern)
    q0 = k0 = 0
    for n, (Q, K) in enumerate(call.lengths):
        touched = slice(np.searchsorted(end_N, q0, "right"), np.searchsorted(first_N, q0 + Q))
        w0 = min([k0, *first_N[touched].tolist()])  # every key of every sequence that one of the queries belongs to
        w1 = max([k0 + K, *end_N[touched].tolist()])
        for queries in query_blocks(Q, (w1 - w0) * call.mask_heads):
            kept = pad(~blocked_scores(call, n, queries), (k0 - w0, w1 - k0 - K))
            places_Q, places_K = places_T[q0 + queries.start : q0 + queries.stop], places_T[w0:w1]
            if reason := attention_reason(segments, pattern, 0, row_of(kept, 0), places_Q, places_K, attends):
                yield reason
                break
        q0, k0 = q0 + Q, k0 + K


# --- rules of the operator

COMPRESSED = {2: TRIANGLE, 3: TRIANGLE, 4: TRIANGLE, 6: PREFIX_TRIANGLE, 7: TRIANGLE, 8: TRIANGLE}
"""The shape of the mask that each compressed sparse mode takes."""


def refusal(call: AttentionCall) -> Iterator[Breach]:
    """The first thing for which the host code refuses the call, so that it cannot be read further."""
    for where, got, source in islice(_refused(call), 1):
        yield Breach("refused", where, got, "The operator refuses it.", "Take it from fusion_attention_kwargs.", source)


def _refused(call: AttentionCall) -> Iterator[tuple[str, str, str]]:
    """Argument, what arrived, source; each line reads what the ones before it have judged."""
    if call.layout not in tuple(RANKS):
        yield "input_layout", f"{call.layout!r}, not one of {', '.join(RANKS)}", "P:743"
    if call.mode not in ((0, 1, 2, 3, 4, 6, 7, 8) if call.tnd else range(7)):
        yield "sparse_mode", f"{call.mode} in layout {call.layout}", "P:772-786, T:768, T:4098"
    if min(call.N, call.Nkv, call.D) < 1 or call.N % call.Nkv:
        yield "head_num", f"{call.N} query heads, {call.Nkv} key heads, of {call.D} elements", "T:1099"
    counts = [len(ends or ()) for ends in call.ends]
    if call.tnd and (0 in counts or counts[0] != counts[1]):
        yield ", ".join(LISTS), f"{counts[0]} and {counts[1]} ends", "P:779, T:1176"
    for axis, T in enumerate((call.Tq, call.Tkv) if call.tnd else ()):
        if T is not None and (total := sum(pair[axis] for pair in call.lengths)) > T:
            yield LISTS[axis], f"lengths that add up to {total}, of {T} tokens", "T:1181"
    if call.atten_mask is None:  # every mode and token value is let through, and ignored (T:799, T:4121)
        return
    if tuple(call.atten_mask.shape) not in (shapes := _shapes_of_masks(call)):
        taken = " or ".join(str(list(each)) for each in shapes)
        got = f"{shape_of(call.atten_mask)}, and sparse_mode {call.mode} takes {taken}: no form for keys alone"
        yield "atten_mask", got, "T:1511-1571"
    if call.mode == 6 and not call.prefix_is_legal:
        got = f"{call.prefix}, and each sequence has one in [max(0, Skv - Sq), Skv]"
        yield "prefix", got, "T:780, T:1325-1352, T:4045-4082"


def _shapes_of_masks(call: AttentionCall) -> list[tuple[int, ...]]:
    """Shapes the host code takes for a mask, whatever the layout of q, k and v (T:1511-1571)."""
    Sq, Skv = call.longest
    shapes: list[tuple[int, ...]] = [(Sq, Skv), (1, 1, Sq, Skv)]
    shapes += [(len(call.lengths), heads, Sq, Skv) for heads in (1, call.N)]
    if call.tnd:
        shapes.append((sum(q for q, _ in call.lengths), sum(kv for _, kv in call.lengths)))
    if call.mode not in COMPRESSED:
        return shapes
    right = COMPRESSED[call.mode]  # a dense mask of this very size passes, too
    return [right, *(each for each in shapes if len(each) == 4 and each[2:] == right)]


MOST_SEQUENCES = 20_000
REQUIRED_TOKENS = {4: ("pre_tockens", "next_tockens"), 8: ("next_tockens",)}
"""Modes whose band comes from the tokens alone. Mode 7 without `next_tockens` is refused by the host code itself."""


def _silent(call: AttentionCall) -> Iterator[Breach]:
    """Every rule whose breach the operator takes without an error, and computes something else."""
    yield from _shapes(call)
    yield from _unused(call)
    if call.tnd:
        yield from _lists(call)
    (Sq, Skv), (pre, after), mask = call.longest, call.tokens, call.atten_mask
    if mask is None:
        if call.mode != 0 or pre < Sq - 1 or after < Skv - 1:
            got = f"None with sparse_mode {call.mode}, pre {pre}, next {after}"
            says = "Without a mask the operator ignores modes and tokens: every query attends all keys."
            remedy = "Pass the compressed mask fusion_attention.triangle(), or sparse_mode 0 if full attention is meant."
            yield Breach("none-is-full", "atten_mask", got, says, remedy, "T:799, T:4121, PD:176, MS:102")
        return
    yield from list(_form(call, mask)) or _contents(call, mask)


def _shapes(call: AttentionCall) -> Iterator[Breach]:
    """The tensors of the call, where it has them, in the layout that it names; a value's head may be smaller (A:209)."""
    for name, x in ((name, call.kwargs.get(name)) for name in TENSORS):
        if not isinstance(x, Tensor):
            continue
        N, S, T = (call.N, call.Sq, call.Tq) if name == "query" else (call.Nkv, call.Skv, call.Tkv)
        sizes = {"B": call.B, "S": S, "T": T, "N": N, "D": call.D, "H": N * call.D}
        wanted = [sizes[axis] for axis in call.layout]
        wanted[-1] = None if name == "value" else wanted[-1]
        if len(wanted) != x.ndim or any(size not in (None, given) for size, given in zip(wanted, x.shape)):
            says = f"As {call.layout} it is [{', '.join('.' if n is None else str(n) for n in wanted)}]."
            remedy = "Name the layout that q, k and v are in, with head_num query heads."
            yield Breach("tensor-shape", name, shape_of(x), says, remedy, "P:806-836")


def _unused(call: AttentionCall) -> Iterator[Breach]:
    for name in ("padding_mask", "pse", "sink", "dropout_mask", "prefix"):
        if call.arguments[name] is not None and (name != "prefix" or call.mode not in (5, 6)):
            says = f"The operator or this check does not read {name} in sparse_mode {call.mode}."
            remedy = "Express padding in atten_mask, and a prefix in mode 5 or 6; check a call with the others by hand."
            yield Breach("unread", name, "given", says, remedy, "PD:34, PD:181, D")


def _lists(call: AttentionCall) -> Iterator[Breach]:
    if len(call.lengths) > MOST_SEQUENCES:
        got, says = f"{len(call.lengths)} ends", f"The host code has {MOST_SEQUENCES} slots for them, and overruns."
        yield Breach("too-many", ", ".join(LISTS), got, says, "Split the batch.", "A:449, T MAX_VAR_LEN_SEQ_LEN")
    for name, ends, T in zip(LISTS, call.ends, (call.Tq, call.Tkv)):
        yield from _ends(call, name, ends or (), T)
    if rows := [pair for pair in call.lengths if pair[0] and not pair[1]]:
        says, remedy = "A sequence with queries has keys.", "Drop the sequence from both lists."
        yield Breach("no-keys", "actual_seq_kvlen", f"(Sq, Skv) {rows[:8]}", says, remedy, "MS:111")


def _ends(call: AttentionCall, name: str, ends: tuple[int, ...], T: int | None) -> Iterator[Breach]:
    if ends[0] == 0 and call.mode == 8:
        says = "A leading 0 is one more, empty sequence, and mode 8 cuts the first sequence."
        yield Breach("leading-zero", name, str(ends[:6]), says, "Pass cu_seqlens[1:].", "PD:47-53, T:1176")
    used = [n for i, n in enumerate(ends) if n or not i or any(ends[i:])]
    last = max(used, default=0)
    if any(later < earlier for earlier, later in pairwise(used)):
        says = "Ends never fall, but for trailing zeros; a falling one counts as length 0."
        remedy, source = "Pass cumulative ends, not lengths.", "T GetActualSeqLenData, PD:183"
        yield Breach("falling-ends", name, str(ends[:12]), says, remedy, source)
    elif T is None:
        says = "Tokens after the last end belong to no sequence, and only the packed tensor's size shows them."
        remedy = "Pass Tq=query.shape[0] and Tkv=key.shape[0], or segments."
        yield Breach("tokens-unknown", name, f"no size of the packed tensor, {last} tokens", says, remedy, "T:1181")
    elif last < T:
        says = "Tokens after the last end belong to no sequence; nothing is promised for them."
        remedy = "unpad() the tail, or count it as one more sequence (keep_tail=True)."
        yield Breach("unused-tail", name, f"{last} of {T} tokens", says, remedy, "T:1181")


# --- a shape that is taken, but for something else


def _form(call: AttentionCall, atten_mask: Tensor) -> Iterator[Breach]:
    got = shape_of(atten_mask)
    if missing := [name for name in REQUIRED_TOKENS.get(call.mode, ()) if name not in call.given]:
        says = f"sparse_mode {call.mode} is limited only by these two; without them every query attends all keys."
        remedy = "Pass both: next_tockens=0 is causal, pre_tockens=window-1 a window."
        yield Breach("tokens-left-out", ", ".join(missing), "nothing", says, remedy, "T:689, T:3978-3986, D")
    if atten_mask.is_meta:
        says, remedy = "A mask on device meta has no contents to check.", "Check the mask that the operator will get."
        yield Breach("no-contents", "atten_mask", got, says, remedy, "rule of this library")
    if call.mode in COMPRESSED:
        if atten_mask.ndim == 4:
            says = f"sparse_mode {call.mode} reads it as the compressed mask, because its size happens to fit."
            remedy = "Pass the 2-D compressed mask, or sparse_mode 1 with a dense one."
            yield Breach("dense-as-compressed", "atten_mask", got, says, remedy, "T:1527-1568")
        return
    shape = tuple(atten_mask.shape)
    if call.tnd and atten_mask.ndim == 4:
        says = "The kernel steps through it by packed Sq * Skv, which is right for equal lengths only."
        remedy = "Pass one [maxSq, maxSkv] mask, or the compressed triangle."
        yield Breach("tnd-4d", "atten_mask", got, says, remedy, "PD:35, K flash_attention_var_len_score.h:354,376")
    elif not call.tnd and len(shape) == 2 and shape[0] == len(call.lengths) > 1:
        says = "With B = Sq a [B, S] padding mask reads as one [Sq, Skv] matrix for every row."
        remedy = "Write a shared mask as [1, 1, Sq, Skv], padding as [B, 1, Sq, Skv]."
        yield Breach("rows-or-queries", "atten_mask", got, says, remedy, "T:1551")


def _contents(call: AttentionCall, atten_mask: Tensor) -> Iterator[Breach]:
    if atten_mask.dtype == torch.uint8:
        top = max(int(block.cpu().max()) for block in torch.split(atten_mask.flatten(), BLOCK_SCORES))
        if top > 1:
            says, remedy = "A uint8 mask holds 0 and 1.", "Pass bool."
            yield Breach("mask-values", "atten_mask", f"values up to {top}", says, remedy, "PD:35")
    if call.mode in COMPRESSED:
        yield from compressed_contents(call, atten_mask)
    else:
        yield from _dense_contents(call)
    if call.mode == 5 and not call.prefix_is_legal:
        says = "Each row has a prefix N in [max(0, Skv - Sq), Skv]; a wrong one only switches sparsity off."
        yield Breach("prefix-ignored", "prefix", str(call.prefix), says, "Pass legal ones, or sparse_mode 1.", "T:777")


def compressed_contents(call: AttentionCall, atten_mask: Tensor) -> Iterator[Breach]:
    """The operator uses them unchecked, in blocks that no document describes."""
    right = prefix_triangle() if call.mode == 6 else triangle()
    blocked = atten_mask.cpu().bool().reshape(right.shape)
    if torch.equal(blocked, right):
        return
    got = f"{int((blocked != right).sum())} wrong cells"
    says = f"sparse_mode {call.mode} expects a mask that is True above the diagonal, and does not check it."
    remedy = f"Use fusion_attention.{'prefix_triangle' if call.mode == 6 else 'triangle'}()."
    yield Breach("compressed-contents", "atten_mask", got, says, remedy, "PD:554-606, D")


def _dense_contents(call: AttentionCall) -> Iterator[Breach]:
    empty, odd, disagrees, given = 0, 0, False, call.atten_mask
    # In self-attention a query that cannot see itself is padding, and then nobody sees it.
    square = (call.mode != 0 or min(call.tokens) >= 0) and all(q == kv for q, kv in call.lengths)
    differ = call.tnd or call.mode == 5 or (given is not None and given.ndim == 4 and given.shape[0] > 1)
    for n, (Q, K) in enumerate(call.lengths if differ else call.lengths[:1]):  # every distinct part of the mask
        attended, to_itself = torch.zeros(K, dtype=torch.bool), []
        for queries in query_blocks(Q, K * call.mask_heads):
            masked = dense_scores(call, n, queries)
            empty += 0 if not call.tnd and call.zeroes_empty_rows(n) else int(masked.all(-1).sum())
            attended = attended | ~masked.all(-2)
            to_itself.append(masked.diagonal(queries.start, -2, -1).clone())  # a view would hold the block
            if not disagrees and (skipped := skipped_scores(call, n, queries)) is not None:
                disagrees = bool((~masked & skipped).any())
        odd += int((torch.cat(to_itself, -1) & attended).sum()) if square and to_itself else 0
    if odd:
        says = "True = blocked. Here tokens that others attend cannot attend themselves: this looks like a keep mask."
        remedy = "Invert it (~keep), or use dense(segments, polarity='masked')."
        yield Breach("polarity", "atten_mask", f"{odd} such tokens", says, remedy, "PD:35, D")
    if disagrees:
        says = "Blocks outside the tokens or prefix are skipped, whatever the mask says."
        remedy = "Make the two agree; tokens from the top-left corner, or sparse_mode 1 to compute everything."
        outside = f"the diagonal and prefix {call.prefix}" if call.mode == 5 else "pre {}, next {}".format(*call.tokens)
        got, source = f"keys attended outside {outside}", "PD:178, D, T:705-812"
        yield Breach("sparsity-disagrees", "atten_mask", got, says, remedy, source)
    if empty:
        got, says = f"{empty} rows that are True throughout", "A row with every key blocked gives a mean of V."
        remedy = "Pass inner_precise=2, which makes it 0, or pad on the right and block keys alone."
        source = "PD:43-44, K flash_attention_score_common.h:58"
        if call.tnd:
            says, source = "Under TND no query may have every key blocked.", "PD:168, D"
            remedy = "Leave padding out of the packed tensor."
        yield Breach("empty-row", "atten_mask", got, says, remedy, source)
