"""What a call computes against what `Segments` and a pattern say, at every real query.

The other rules look at arguments alone, and some wrong calls are legal: a window one token short, an inverted padding mask,
another batch's lists. With the Segments at hand none of them passes. Every score is looked at, in blocks: some nanoseconds
each, and memory that does not grow with their number.

Legend: T tokens of the tensor the operator gets (packed, or all B * S places), Q queries and K keys of one row or packed
sequence, W tokens that its queries attend by either side, H heads of the mask. A place is row * S + column of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from collate_npu.kernels.breach import Breach
from collate_npu.kernels.fusion_attention.blocked_scores import blocked_scores, query_blocks
from collate_npu.kernels.fusion_attention.operator_call import Call
from collate_npu.masks.forms import mask_mod
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

LISTED = 8
"""Rows or sequences that a message names."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What each token of the operator's tensor is, and whom it attends."""

    places: Tensor
    """int64 `[T]`."""
    real: Tensor
    """bool `[T]`, False for padding."""
    first: npt.NDArray[np.int64]
    """`[N]`, index in T of each sequence's first token; `end` is the one behind its last."""
    end: npt.NDArray[np.int64]
    attends: Callable[[Tensor, Tensor], Tensor]
    """Places `[Q]` and `[W]` to bool `[Q, W]`."""

    @classmethod
    def of(cls, segments: Segments, pattern: Pattern, *, packed: bool, keep_tail: bool) -> Tokens:
        B, S = segments.shape
        places = segments.indices if packed and not keep_tail else torch.arange(B * S)
        spans = np.array(segments.spans, np.int64).reshape(-1, 3)
        first, end = (np.searchsorted(places.numpy(), spans[:, 0] * S + spans[:, i]) for i in (1, 2))
        return cls(places, segments.keep.flatten()[places], first, end, _attends(segments, pattern))

    def sequences_of(self, queries: range) -> range:
        """The tokens of every sequence that one of these queries belongs to."""
        touched = slice(np.searchsorted(self.end, queries.start, "right"), np.searchsorted(self.first, queries.stop))
        first, end = self.first[touched], self.end[touched]
        return range(int(first[0]), int(end[-1])) if len(first) else range(queries.start, queries.start)


def _attends(segments: Segments, pattern: Pattern) -> Callable[[Tensor, Tensor], Tensor]:
    S = segments.shape[1]
    within_a_row = mask_mod(segments, pattern)

    def attends(queries: Tensor, keys: Tensor) -> Tensor:
        row_Q1, row_W = queries[:, None] // S, keys // S
        one_row = bool((row_Q1 == row_Q1[0]).all()) and bool((row_W == row_Q1[0]).all())
        row = row_Q1[:1] if one_row else row_Q1
        attended_QW = within_a_row(row, row, queries[:, None] % S, keys % S)
        return attended_QW if one_row else attended_QW & (row_Q1 == row_W)

    return attends


def breaches(call: Call, segments: Segments, pattern: Pattern, keep_tail: bool) -> Iterator[Breach]:
    """One breach that names the first wrong query of each row or sequence; read where no other rule is broken."""
    tokens = Tokens.of(segments, pattern, packed=call.tnd, keep_tail=keep_tail)
    found = list(islice(_differences(call, tokens, segments.shape[1]), LISTED + 1))
    if found:
        names = ("atten_mask", "sparse_mode", "pre_tockens", "next_tockens", "prefix", "actual_seq_qlen", "actual_seq_kvlen")
        yield Breach(
            rule="differs-from-segments",
            where=", ".join(name for name in names if name in call.given) or "atten_mask",
            got="; ".join([*found[:LISTED], *["..."] * (len(found) > LISTED)]),
            says=f"The segments and the pattern, {pattern}, say otherwise.",
            remedy=f"Use fusion_attention_kwargs(segments, pattern=..., layout={call.layout!r}), "
            "or pass the segments and pattern that this call is for.",
            source="Segments",
            silent=True,
        )


def _differences(call: Call, tokens: Tokens, S: int) -> Iterator[str]:
    """A sentence for each row or sequence with a real query that attends other keys than it should."""
    starts = zip(accumulate((q for q, _ in call.lengths), initial=0), accumulate((k for _, k in call.lengths), initial=0))
    for n, ((q0, k0), (Q, K)) in enumerate(zip(starts, call.lengths)):
        own = tokens.sequences_of(range(q0, q0 + Q))
        window = range(min(k0, own.start), max(k0 + K, own.stop)) if own else range(k0, k0 + K)
        for queries in query_blocks(Q, len(window) * _heads(call)):
            at = slice(q0 + queries.start, q0 + queries.stop)
            attended_QW = tokens.attends(tokens.places[at], tokens.places[window.start : window.stop])
            blocked = pad(blocked_scores(call, n, queries), (k0 - window.start, window.stop - k0 - K), value=True)
            wrong_HQW = ((blocked == attended_QW) & tokens.real[at, None]).reshape(-1, *attended_QW.shape)
            if bool(wrong_HQW.any()):
                yield _sentence(wrong_HQW, attended_QW, tokens.places, at.start, window.start, S)
                break


def _heads(call: Call) -> int:
    return call.atten_mask.shape[1] if call.atten_mask is not None and call.atten_mask.ndim == 4 else 1


def _sentence(wrong_HQW: Tensor, attended_QW: Tensor, places: Tensor, q0: int, k0: int, S: int) -> str:
    h, q, _ = (int(x) for x in wrong_HQW.nonzero()[0])
    wrong_W = wrong_HQW[h, q]
    parts = [f"the query at (row, column) {_place(places[q0 + q], S)}"]
    for verb, keys_W in (("attends", wrong_W & ~attended_QW[q]), ("does not attend", wrong_W & attended_QW[q])):
        if at := [_place(places[k0 + int(k)], S) for k in keys_W.nonzero()[:3]]:
            parts.append(f"{verb} {', '.join(at)}" + (f" and {int(keys_W.sum()) - 3} more" if int(keys_W.sum()) > 3 else ""))
    return " ".join(parts)


def _place(place: Tensor, S: int) -> str:
    return f"({int(place) // S}, {int(place) % S})"
