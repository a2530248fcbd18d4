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

from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Corner = Literal["top-left", "bottom-right"]

UNLIMITED = 2**31 - 1
"""The operator's default of `pre_tockens` and `next_tockens`."""
TRIANGLE = (2048, 2048)
PREFIX_TRIANGLE = (3072, 2048)


def triangle(device: torch.device | str = "cpu") -> Tensor:
    """bool `[2048, 2048]`, True above the diagonal: the compressed mask of sparse modes 2, 3, 4, 7 and 8.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 2 (compressed lower triangle, True = blocked).
    """
    return torch.tensor(_triangle(), device=device)


def prefix_triangle(device: torch.device | str = "cpu") -> Tensor:
    """bool `[3072, 2048]`: the triangle over 1024 rows whose right half is True, for sparse mode 6.

    Source: op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 6.
    """
    return torch.tensor(_prefix_triangle(), device=device)


@cache
def _triangle() -> npt.NDArray[Any]:
    return np.triu(np.ones(TRIANGLE, np.bool_), k=1)


@cache
def _prefix_triangle() -> npt.NDArray[Any]:
    below = np.zeros((PREFIX_TRIANGLE[0] - TRIANGLE[0], PREFIX_TRIANGLE[1]), np.bool_)
    below[:, PREFIX_TRIANGLE[1] // 2 :] = True
    return np.concatenate([_triangle(), below])


def outside_band(Q: int, K: int, before: int, after: int, corner: Corner = "top-left") -> Tensor:
    """bool `[Q, K]`, True where key - query is not in `[-before, after]`, both counted from the corner.

    From the bottom-right corner the last query stands on the last key, so every row moves by K - Q
    (op-plugin torch_npu-npu_fusion_attention.md, "sparse_mode" 0 and 4).
    """
    shift = K - Q if corner == "bottom-right" else 0
    distance_QK = torch.arange(K) - torch.arange(Q)[:, None] - shift
    return (distance_QK < -before) | (distance_QK > after)


def above_diagonal(Q: int, K: int, corner: Corner) -> Tensor:
    """bool `[Q, K]`, the causal mask of mode 2 (`"top-left"`) or 3 (`"bottom-right"`)."""
    return outside_band(Q, K, Q + K, 0, corner)


def outside_prefix(Q: int, K: int, prefix: int) -> Tensor:
    """bool `[Q, K]`, modes 5 and 6: causal from the bottom-right, and the first `prefix` keys for every query (T:777)."""
    return above_diagonal(Q, K, "bottom-right") & (torch.arange(K) >= prefix)
