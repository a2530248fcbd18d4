"""Check a call of `npu_fusion_attention` against the operator's contract, before the operator does or does not.

Costs a few passes over a mask, block by block, and with `segments` a look at every score; check in the collator or once per
shape, not at every step. Some wrong calls are legal: a window one token short, an inverted padding mask, another batch's
lists. With the Segments at hand none of them passes: what the call computes is compared with them at every real query.

Legend: T tokens of the tensor the operator gets (packed, or all B * S places), Q queries and K keys of one row or packed
sequence, W tokens that its queries attend by either side, H heads of the mask. A place is row * S + column of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from collate_npu.arrays import whole_number
from collate_npu.kernels import Breach, refuse
from collate_npu.kernels.fusion_attention.operator_call import INTEGER_LISTS, AttentionCall, blocked_scores, query_blocks
from collate_npu.kernels.fusion_attention.rules import breaches, refusals
from collate_npu.masks.forms import mask_mod, varlen
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments
from collate_npu.validation import checked

LISTED = 8
"""Rows or sequences that a message names."""
MASK_ARGUMENTS = ("atten_mask", "sparse_mode", "pre_tockens", "next_tockens", *INTEGER_LISTS)


@checked
def contract_breaches(
    kwargs: Mapping[str, Any],
    *,
    segments: Segments | None = None,
    pattern: str | Pattern = "causal",
    keep_tail: bool = False,
    **sizes: int | None,
) -> tuple[Breach, ...]:
    """Every rule that the arguments break, the operator's own refusals first; arguments as in `check_contract`."""
    follow: dict[str, int] = {}  # the sizes of query and key that the batch tells
    if segments is not None and str(kwargs.get("input_layout")).upper() == "TND":
        follow = dict.fromkeys(("Tq", "Tkv"), varlen(segments, keep_tail=keep_tail).cu_seqlens_host[-1])
    elif segments is not None:
        follow = dict(zip(("B", "Sq", "Skv"), (*segments.shape, segments.shape[1])))
    call = AttentionCall(kwargs, **(sizes | follow))  # type: ignore[arg-type]
    found = list(_other_sizes(sizes, follow)) or list(refusals(call)) or list(breaches(call))
    if segments is not None:
        found += () if found else _against_segments(call, segments, Pattern.of(pattern), keep_tail)
        found += _beside_the_mask(call)
    return tuple(found)


@checked
def check_contract(
    kwargs: Mapping[str, Any],
    *,
    N: int,
    Nkv: int,
    D: int,
    B: int | None = None,
    Sq: int | None = None,
    Skv: int | None = None,
    Tq: int | None = None,
    Tkv: int | None = None,
    segments: Segments | None = None,
    pattern: str | Pattern = "causal",
    keep_tail: bool = False,
) -> None:
    """Raise `UnsupportedFormError`, with rule, remedy and source, unless the operator computes what the arguments say.

    `kwargs` are those of `npu_fusion_attention` or its `_v3`, `input_layout` among them. N query and Nkv key heads of
    size D. With `segments`, what the call attends is compared with what they and `pattern` say at every real query; `scale`
    must be given, of any size above 0, and nothing dropped. Under TND the packed tensors are then those of `unpad`, or with
    `keep_tail` the whole flat row. Whether the tensors lie as `input_layout` says, their shapes tell, where query, key and
    value are among `kwargs`: not where sizes are alike.

    Without `segments` the sizes must be given: B rows, Sq and Skv of the padded layouts; Tq and Tkv, the tokens of the
    packed tensors, under TND. The check is stricter than the operator where that says nothing, leaves to it most of what it
    refuses by itself (`refused`), and believes a legal mask: `~keep` and `keep` of a bidirectional padding mask both pass.
    Raises `CollateError` where a size is missing.

    >>> left = Segments.from_lengths([3, 5], side="left")
    >>> check_contract({"input_layout": "BSND", "sparse_mode": 3, "scale": 0.125}, N=4, Nkv=2, D=64, segments=left)
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: npu_fusion_attention:
    [none-is-full] atten_mask: got None with sparse_mode 3, pre 2147483647, next 2147483647. Without a mask every mode
        and token is ignored: full attention, the future included. Pass the compressed mask fusion_attention.triangle(), or
        sparse_mode 0 if full attention is meant. (T:799, T:4121, PD:176, MS:102)
    """
    refuse("npu_fusion_attention", contract_breaches(**locals()))


def _other_sizes(given: Mapping[str, int | None], follow: Mapping[str, int]) -> Iterator[Breach]:
    """One breach for each size that was given and is another than the one that follows."""
    remedy = "Leave it out, or pass the segments of this batch (keep_tail=True if the tail is in the tensor)."
    for name, size in follow.items():
        if given.get(name) is not None and whole_number(name, given[name]) != size:
            says = f"By the segments it is {size}."
            yield Breach("sizes-differ", name, str(given[name]), says, remedy, "Segments", silent=True)


def _beside_the_mask(call: AttentionCall) -> Iterator[Breach]:
    """What makes the output of right scores another one."""
    scale, keep = call.arguments["scale"], call.arguments["keep_prob"]
    if "scale" not in call.given or not 0 < scale < inf:
        got, says = str(scale) if "scale" in call.given else "nothing", "Left out it is 1.0, which no model means."
        yield Breach("scale", "scale", got, says, "Pass scale=D**-0.5, or the model's own.", "PD:36", silent=True)
    if 0 < keep < 1:
        says = "What dropout leaves of a sequence is another at every call."
        remedy = "Pass keep_prob=1.0; or check the call without it, and know that no output can be compared."
        yield Breach("dropout", "keep_prob", str(keep), says, remedy, "PD:15", silent=True)


def _against_segments(call: AttentionCall, segments: Segments, pattern: Pattern, keep_tail: bool) -> Iterator[Breach]:
    """One breach that names the first wrong query of each row or sequence; read where no other rule is broken."""
    found = list(islice(_differences(call, segments, pattern, keep_tail), LISTED + 1))
    if found:
        where = ", ".join(name for name in MASK_ARGUMENTS if name in call.given) or "atten_mask"
        got = "; ".join([*found[:LISTED], *["..."] * (len(found) > LISTED)])
        says = f"The segments and the pattern, {pattern}, say otherwise."
        remedy = f"Use fusion_attention_kwargs(segments, pattern=..., layout={call.layout!r}), "
        remedy += "or pass the segments and pattern that this call is for."
        yield Breach("differs-from-segments", where, got, says, remedy, "Segments", silent=True)


def _differences(call: AttentionCall, segments: Segments, pattern: Pattern, keep_tail: bool) -> Iterator[str]:
    """A sentence for each row or sequence with a real query that attends other keys than it should."""
    B, S = segments.shape
    places_T = segments.indices if call.tnd and not keep_tail else torch.arange(B * S)
    real_T = segments.keep.flatten()[places_T]
    spans = np.array(segments.spans, np.int64).reshape(-1, 3)
    first_N, end_N = (np.searchsorted(places_T.numpy(), spans[:, 0] * S + spans[:, i]) for i in (1, 2))
    within_a_row = mask_mod(segments, pattern)
    q0 = k0 = 0
    for n, (Q, K) in enumerate(call.lengths):
        touched = slice(np.searchsorted(end_N, q0, "right"), np.searchsorted(first_N, q0 + Q))
        w0 = min([k0, *first_N[touched].tolist()])  # every key of every sequence that one of the queries belongs to
        w1 = max([k0 + K, *end_N[touched].tolist()])
        for queries in query_blocks(Q, (w1 - w0) * call.mask_heads):
            at = slice(q0 + queries.start, q0 + queries.stop)
            attended_QW = _attended(within_a_row, places_T[at], places_T[w0:w1], S)
            blocked = pad(blocked_scores(call, n, queries), (k0 - w0, w1 - k0 - K), value=True)
            wrong_HQW = ((blocked == attended_QW) & real_T[at, None]).reshape(-1, *attended_QW.shape)
            if bool(wrong_HQW.any()):
                yield _sentence(wrong_HQW, attended_QW, places_T[at], places_T[w0:w1], S)
                break
        q0, k0 = q0 + Q, k0 + K


def _attended(within_a_row: Callable[..., Any], queries: Tensor, keys: Tensor, S: int) -> Tensor:
    """Places `[Q]` and `[W]` to bool `[Q, W]`; with one row for all there is nothing to gather."""
    row_Q1, row_W = queries[:, None] // S, keys // S
    one_row = bool((row_Q1 == row_Q1[0]).all()) and bool((row_W == row_Q1[0]).all())
    row = row_Q1[:1] if one_row else row_Q1
    attended_QW: Tensor = within_a_row(row, row, queries[:, None] % S, keys % S)
    return attended_QW if one_row else attended_QW & (row_Q1 == row_W)


def _sentence(wrong_HQW: Tensor, attended_QW: Tensor, queries: Tensor, keys: Tensor, S: int) -> str:
    h, q, _ = (int(x) for x in wrong_HQW.nonzero()[0])
    wrong_W = wrong_HQW[h, q]
    parts = [f"the query at (row, column) {divmod(int(queries[q]), S)}"]
    for verb, keys_W in (("attends", wrong_W & ~attended_QW[q]), ("does not attend", wrong_W & attended_QW[q])):
        if at := [str(divmod(int(place), S)) for place in keys[keys_W]]:
            parts.append(f"{verb} {', '.join(at[:3])}" + (f" and {len(at) - 3} more" if len(at) > 3 else ""))
    return " ".join(parts)
