"""Which scores a call computes: for each row or packed sequence, as `masked` blocks of query rows (True = blocked).

The reference attends over them, the checks compare them; a check looks at one block at a time, so that what it allocates
does not grow with the mask.

Legend: Q query rows, K keys, H heads of the mask (1 where all heads share it).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from collate_npu.errors import UnsupportedFormError, explain, shape_of
from collate_npu.kernels.fusion_attention.geometry import EVERY, above_diagonal, outside_band, outside_prefix
from collate_npu.kernels.fusion_attention.operator_call import Call

BLOCK_SCORES = 2**18
"""Scores of one block: some MiB of numbers on the way, and few enough steps in Python."""


def query_blocks(Q: int, scores_of_a_query: int) -> Iterator[slice]:
    """The Q query rows in stretches of at most `BLOCK_SCORES` scores, but at least one row."""
    step = max(1, BLOCK_SCORES // max(1, scores_of_a_query))
    yield from (slice(at, min(at + step, Q)) for at in range(0, Q, step))


def blocked_scores(call: Call, n: int, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]` or `[H, Q, K]`: what the mask blocks or the sparse mode leaves out, for row or sequence n."""
    Q, K = call.lengths[n]
    if call.atten_mask is None:
        return torch.zeros(len(range(Q)[queries]), K, dtype=torch.bool)
    if call.mode in (2, 3) or (call.mode in (7, 8) and n != _cut(call)):
        return above_diagonal(Q, K, "top-left" if call.mode in (2, 8) else "bottom-right", queries)
    if call.mode in (4, 7, 8):
        return outside_band(Q, K, *call.tokens, "bottom-right", queries)
    if call.mode == 6 and call.prefix is not None:
        return outside_prefix(Q, K, call.prefix[n], queries)
    skipped, dense = skipped_scores(call, n, queries), dense_scores(call, n, queries)
    return dense if skipped is None else dense | skipped


def dense_scores(call: Call, n: int, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]` or `[H, Q, K]` on the host: what a dense mask blocks, for row or sequence n."""
    given, (Q, K) = call.atten_mask, call.lengths[n]
    assert given is not None
    if (
        call.tnd and given.ndim == 4
    ):  # the kernel steps by the packed sum of Sq * Skv (K flash_attention_var_len_score.h:354,376)
        rule, remedy = "A 4-D mask under TND is not covered.", "Pass one [maxSq, maxSkv] mask, or the compressed triangle."
        raise UnsupportedFormError(explain("atten_mask", shape_of(given), rule, remedy))
    q0 = k0 = 0
    if call.tnd and tuple(given.shape) != call.longest:
        q0, k0 = (sum(pair[axis] for pair in call.lengths[:n]) for axis in (0, 1))
    matrix = given if given.ndim == 2 else given[n if given.shape[0] > 1 else 0]
    part: Tensor = matrix[..., q0 : q0 + Q, k0 : k0 + K][..., queries, :].cpu().bool()
    return part


def skipped_scores(call: Call, n: int, queries: slice = EVERY) -> Tensor | None:
    """bool `[Q, K]`: what tokens or prefix leave out beside a dense mask, for row or sequence n; None for nothing."""
    Q, K = call.lengths[n]
    if call.mode == 0 and (call.tokens[0] < Q - 1 or call.tokens[1] < K - 1):
        return outside_band(Q, K, *call.tokens, queries=queries)
    if call.mode == 5 and call.prefix is not None and call.prefix_is_legal:
        return outside_prefix(Q, K, call.prefix[n], queries)
    return None


def dense_blocks(call: Call) -> Iterator[tuple[int, slice, Tensor]]:
    """`(n, queries, masked)`: every block of every distinct part of a dense mask."""
    given = call.atten_mask
    assert given is not None
    differ = call.tnd or call.mode == 5 or (given.ndim == 4 and given.shape[0] > 1)
    for n in range(len(call.lengths) if differ else 1):
        Q, K = call.lengths[n]
        for queries in query_blocks(Q, K * (given.shape[1] if given.ndim == 4 else 1)):
            yield n, queries, dense_scores(call, n, queries)


def _cut(call: Call) -> int:
    """The sequence that modes 7 (last) and 8 (first) cut: the one with the band."""
    filled = [n for n, (q, _) in enumerate(call.lengths) if q]
    return (filled[-1] if call.mode == 7 else filled[0]) if filled else -1
