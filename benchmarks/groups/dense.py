"""A 2D mask [B, S] to a dense causal one [B, 1, S, S], as a model of transformers, verl or a Megatron script makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import agreement, peers
from benchmarks.inputs import lengths_of
from benchmarks.peers import rival
from benchmarks.timing import Case, Contestant
from collate_npu import Segments, dense

SIZES = ((4, 512), (8, 2048), (4, 4096))
FASTER = dict(zip(SIZES, (8, 5.5, 7)))
OVER_FULL = dict(zip(SIZES, (4.5, 1.15, 1.15)))


def cases(quick: bool) -> Iterator[Case]:
    for side in ("right", "left"):
        for size in SIZES[: 1 if quick else 3]:
            yield case(*size, side)


def case(B: int, S: int, side: Any) -> Case:
    lengths = lengths_of(B, S)
    keep = Segments.from_lengths(lengths, S, side).keep
    rows = [torch.ones(n, dtype=torch.int64) for n in lengths]
    shape = (B, 1, S, S)
    targets = (FASTER[B, S], OVER_FULL[B, S]) if side == "right" else (None, None)

    def given() -> Tensor:
        return keep

    real = agreement.opposite_at_real_queries(keep)
    rivals = [
        rival("transformers, sdpa", peers.transformers_mask, fresh=given, agrees=agreement.same_mask, target=targets[0]),
        rival("verl", peers.verl_mask, fresh=given, agrees=real),
        Contestant("template arithmetic", arithmetic, given, agrees=agreement.opposite_mask),
        Contestant("np.full", lambda _: np.full(shape, True), against="floor", target=targets[1]),
        Contestant("torch.zeros, then fill_", lambda _: torch.zeros(shape, dtype=torch.bool).fill_(True), against="floor"),
    ]
    if side == "right":  # it counts its rows' tokens from the left
        rivals.insert(2, rival("twinkle", peers.twinkle_mask, fresh=lambda: rows, agrees=agreement.opposite_mask))
    ours = Contestant("ours", lambda keep: dense(Segments.from_keep(keep)), given)
    return Case("dense", f"{B}x{S}, {side}", ours, rivals)


def arithmetic(keep: Tensor) -> Tensor:
    """Ones, tril, multiply, compare, as Megatron-style scripts write it: True is blocked."""
    B, S = keep.shape
    return (torch.tril(torch.ones(B, 1, S, S)) * keep[:, None, None, :]) < 0.5
