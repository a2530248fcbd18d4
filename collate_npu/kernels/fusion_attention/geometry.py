"""Which scores the operator computes, as `masked` matrices (True = blocked), and the two compressed masks it takes.

The 2048 triangle and its form with a prefix block, both shrunk to four rows and columns (`■` blocked, `⬚` attends)::

    ⬚ ■ ■ ■      ⬚ ■ ■ ■      the first 2048 rows are the triangle again
    ⬚ ⬚ ■ ■      ⬚ ⬚ ■ ■
    ⬚ ⬚ ⬚ ■      ⬚ ⬚ ⬚ ■
    ⬚ ⬚ ⬚ ⬚      ⬚ ⬚ ⬚ ⬚
                 ⬚ ⬚ ■ ■      1024 more: the left half open, the right half closed
                 ⬚ ⬚ ■ ■

Legend: Q query rows, K keys.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

Corner = Literal["top-left", "bottom-right"]

UNLIMITED = 2**31 - 1
"""The operator's default of `pre_tockens` and `next_tockens`."""
TRIANGLE = (2048, 2048)
PREFIX_TRIANGLE = (3072, 2048)
EVERY = slice(None)


def triangle(device: torch.device | str = "cpu") -> Tensor:
    """bool `[2048, 2048]`, True above the diagonal: the compressed mask of sparse modes 2, 3, 4, 7 and 8.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 2 (compressed lower triangle, True = blocked).

    >>> triangle().shape, triangle()[:3, :3].int().tolist()
    (torch.Size([2048, 2048]), [[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    """
    return torch.from_numpy(_triangle_view().copy()).to(device)


def prefix_triangle(device: torch.device | str = "cpu") -> Tensor:
    """bool `[3072, 2048]`: the triangle over 1024 rows whose right half is True, for sparse mode 6.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 6.
    """
    (Q, K), (rows, _) = TRIANGLE, PREFIX_TRIANGLE
    masked = np.empty((rows, K), np.bool_)
    masked[:Q] = _triangle_view()
    masked[Q:, : K // 2], masked[Q:, K // 2 :] = False, True
    return torch.from_numpy(masked).to(device)


def _triangle_view() -> npt.NDArray[Any]:
    """Read-only, over one vector: each row is the one above, moved right by one."""
    Q, K = TRIANGLE
    return sliding_window_view(np.arange(1 - Q, K) > 0, K)[::-1]


def outside_band(Q: int, K: int, before: int, after: int, corner: Corner = "top-left", queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]`, True where key - query is not in `[-before, after]`, both counted from the corner.

    `queries` picks rows of it, here and below; nothing else is built.
    From the bottom-right corner the last query stands on the last key, so every row moves by K - Q
    (op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 0 and 4).
    """
    shift = K - Q if corner == "bottom-right" else 0
    keys_K, at_Q1 = torch.arange(K), torch.arange(Q)[queries, None] + shift
    return (keys_K < at_Q1 - before) | (keys_K > at_Q1 + after)


def band_leaves_rows_empty(Q: int, K: int, before: int, after: int, corner: Corner = "top-left") -> bool:
    """Whether some query row of `outside_band` is True throughout."""
    at_Q = torch.arange(Q) + (K - Q if corner == "bottom-right" else 0)
    return bool(((at_Q - before).clamp(min=0) > (at_Q + after).clamp(max=K - 1)).any())


def above_diagonal(Q: int, K: int, corner: Corner, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]`, the causal mask of mode 2 (`"top-left"`) or 3 (`"bottom-right"`)."""
    return outside_band(Q, K, Q + K, 0, corner, queries)


def outside_prefix(Q: int, K: int, prefix: int, queries: slice = EVERY) -> Tensor:
    """bool `[Q, K]`, modes 5 and 6: causal from the bottom-right, and the first `prefix` keys for every query (T:777)."""
    return above_diagonal(Q, K, "bottom-right", queries) & (torch.arange(K) >= prefix)
