"""A 2D mask [B, S] to a dense causal one [B, 1, S, S], as a model of transformers, verl or a Megatron script makes it.

Memory of each mask comes fresh from the system, page by page, as in a loader whose masks are above glibc's 32 MiB; cases
with `reused` in their names write to memory that the mask before gave back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks import agreement, peers
from benchmarks.inputs import lengths_of
from benchmarks.peers import rival
from benchmarks.timing import Absent, Case, Contestant
from collate_npu import Segments
from collate_npu.masks import dense

SIZES = ((4, 512), (8, 2048), (4, 4096))
FASTER = dict(zip(SIZES, (8, 5.5, 7)))
OVER_FULL = dict(zip(SIZES, (4.5, 1.15, 1.15)))


def cases(quick: bool) -> Iterator[Case]:
    take("fresh")
    for side in ("right", "left"):
        for size in SIZES[: 1 if quick else 3]:
            yield of_lengths(*size, side)
            yield of_2d(*size, side)
    take("reused")
    for size in SIZES[: 1 if quick else 3]:
        yield of_lengths(*size, "right", ", reused")


def take(memory: Literal["fresh", "reused"]) -> None:
    """From now on (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD; nothing where there is no glibc)."""
    most, trim, mapped = (65536, 1 << 17, 1 << 16) if memory == "fresh" else (0, (1 << 31) - 1, 1 << 25)
    if tune := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, value in ((-4, most), (-1, trim), (-3, mapped)):
            tune(option, value)


def of_lengths(B: int, S: int, side: Any, memory: str = "") -> Case:
    """Ours from lengths, which is what a collator has; the peers from a 2D mask, which they ask for."""
    lengths = lengths_of(B, S)
    shape, judged = (B, 1, S, S), side == "right"
    full, faster = (OVER_FULL[B, S], FASTER[B, S]) if judged else (None, None)
    floors = [
        Contestant("np.full", lambda _: np.full(shape, True), against="floor", target=full),
        Contestant("torch.zeros, then fill_", lambda _: torch.zeros(shape, dtype=torch.bool).fill_(True), against="floor"),
    ]
    ours = Contestant("ours", dense, lambda: Segments.from_lengths(lengths, S, side))
    rivals = [*builders(lengths, S, side, None if memory else faster), *floors]
    return Case("dense", f"{B}x{S}, {side}, from lengths{memory}", ours, rivals)


def of_2d(B: int, S: int, side: Any) -> Case:
    """All from the same 2D mask."""
    lengths = lengths_of(B, S)
    keep = Segments.from_lengths(lengths, S, side).keep
    ours = Contestant("ours", lambda keep: dense(Segments.from_keep(keep)), lambda: keep)
    return Case("dense", f"{B}x{S}, {side}, from a 2D mask", ours, builders(lengths, S, side, None)[:2])


def builders(lengths: list[int], S: int, side: Any, target: float | None) -> list[Contestant | Absent]:
    keep = Segments.from_lengths(lengths, S, side).keep
    given: dict[str, Any] = {"fresh": lambda: keep}
    rivals = [
        rival("transformers, sdpa", peers.transformers_mask, **given, agrees=agreement.same_mask, target=target),
        rival("verl", peers.verl_mask, **given, agrees=agreement.opposite_at_real_queries(keep)),
        Contestant("template arithmetic", arithmetic, **given, agrees=agreement.opposite_mask),
    ]
    if side == "right":  # it counts its rows' tokens from the left
        rows = [torch.ones(n, dtype=torch.int64) for n in lengths]
        rivals.append(rival("twinkle", peers.twinkle_mask, fresh=lambda: rows, agrees=agreement.opposite_mask))
    return rivals


def arithmetic(keep: Tensor) -> Tensor:
    """Ones, tril, multiply, compare, as Megatron-style scripts write it: True is blocked."""
    B, S = keep.shape
    return (torch.tril(torch.ones(B, 1, S, S)) * keep[:, None, None, :]) < 0.5
