"""Which scores a call computes, as `masked` matrices (True = blocked), and the two compressed masks the operator takes.

The 2048 triangle and its form with a prefix block, both shrunk to four rows and columns (`■` blocked, `⬚` attends)::

    ⬚ ■ ■ ■      ⬚ ■ ■ ■      the first 2048 rows are the triangle again
    ⬚ ⬚ ■ ■      ⬚ ⬚ ■ ■
    ⬚ ⬚ ⬚ ■      ⬚ ⬚ ⬚ ■
    ⬚ ⬚ ⬚ ⬚      ⬚ ⬚ ⬚ ⬚
                 ⬚ ⬚ ■ ■      1024 more: the left half open, the right half closed
                 ⬚ ⬚ ■ ■

The reference attends over the scores, the checks compare them, one block of query rows at a time, so that what a check
allocates does not grow with the mask. Legend: Q query rows, K keys, H heads of the mask (1 where all heads share it).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from collate_npu.checked import here
from collate_npu.errors import UnsupportedFormError, explain, shape_of
from collate_npu.kernels.fusion_attention.operator_call import AttentionCall

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
    """Whether some query row of `outside_band` is True throughout."""
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
