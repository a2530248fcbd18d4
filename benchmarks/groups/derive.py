"""A dense mask [B, 1, S, S] back to a 2D one, proved to be causal and padding: against a column sum that proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.inputs import lengths_of
from benchmarks.timing import Case, Contestant
from collate_npu import Segments, derive_segments
from collate_npu.masks import dense

SIZES = ((4, 512), (8, 2048), (4, 4096))
DECLARED = dict(zip(SIZES, (3, 40, 50)))
PROVED = dict(zip(SIZES, (2, 20, 25)))


def cases(quick: bool) -> Iterator[Case]:
    for side in ("right", "left"):
        for size in SIZES[: 1 if quick else 3]:
            masked = dense(Segments.from_lengths(lengths_of(*size), size[1], side), polarity="masked")
            targets = (DECLARED[size], PROVED[size]) if side == "right" else (None, None)
            for polarity, target in zip(("masked", None), targets):
                yield case(masked, polarity, side, target)
            if side == "right":
                yield case(masked, "masked", "right", None, anew=True)


def case(masked: Tensor, polarity: Any, side: str, target: float | None, *, anew: bool = False) -> Case:
    """`anew`: a mask of its own for each call, as from a loader, in memory that was just written."""

    def given() -> Tensor:
        return masked.clone() if anew else masked

    bytes_ = masked.numpy().reshape(-1).view(np.uint64)
    rivals = [
        Contestant("(~m).sum((1, 2)) > 0", column_sum, given, agrees=_same, target=target),
        Contestant("reading the bytes once", lambda _: bytes_.sum(), against="floor"),
    ]
    ours = Contestant("ours", lambda mask: derive_segments(mask, polarity=polarity).keep, given)
    how = "declared" if polarity else "polarity proved"
    name = f"{masked.shape[0]}x{masked.shape[-1]}, {how}, {side}{', a mask of its own' * anew}"
    return Case("derive", name, ours, rivals[: 1 if anew else 2])


def column_sum(masked: Tensor) -> Tensor:
    return (~masked).sum((1, 2)) > 0


def _same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), "the 2D masks differ"
