"""Two outputs say the same. Where a peer emits less, what it has is compared; ours may hold more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from collate_npu import Segments
from collate_npu.masks import dense

Batch = Mapping[str, Any]


def same_batch(ours: Batch, theirs: Batch) -> None:
    """Every tensor of theirs is in ours, value for value; positions where tokens are real."""
    _compare(ours, theirs, theirs.keys(), real=("position_ids",))


def same_at_real_tokens(ours: Batch, theirs: Batch) -> None:
    """For a peer whose padding holds other numbers."""
    _compare(ours, theirs, theirs.keys(), real=tuple(theirs))


def same_ids(ours: Batch, theirs: Batch) -> None:
    """For a peer that was given ids alone; labels it makes up are its own affair."""
    _compare(ours, theirs, theirs.keys() - {"labels"}, real=())


def same_tokens(ours: Batch, theirs: Batch) -> None:
    """For two batches of ours in different modes."""
    _compare(ours, theirs, {"input_ids", "labels", "position_ids"}, real=())


def same_mask(ours: Tensor, theirs: Tensor) -> None:
    """Both True = attends."""
    assert torch.equal(ours, theirs), "the masks differ"


def opposite_mask(ours: Tensor, theirs: Tensor) -> None:
    """Theirs is True = blocked."""
    assert torch.equal(ours, ~theirs), "the masks differ"


def opposite_at_real_queries(keep: Tensor) -> Callable[[Tensor, Tensor], None]:
    """The same, where a peer also blocks the rows of padding; nothing reads those."""

    def agrees(ours: Tensor, theirs: Tensor) -> None:
        assert torch.equal(ours[:, 0][keep], ~theirs[:, 0][keep]), "the masks differ"

    return agrees


def _compare(ours: Batch, theirs: Batch, keys: Any, real: tuple[str, ...]) -> None:
    keep = _keep(ours)
    assert "input_ids" in keys
    for key in keys:
        mine, other = _ours(ours, key, theirs[key]), torch.as_tensor(theirs[key])
        if key in real and keep is not None:
            mine, other = mine[keep.bool()], other[keep.bool()]
        assert torch.equal(mine.to(other.dtype), other), f"{key} differs"


def _keep(ours: Batch) -> Tensor | None:
    """The 2D mask, under its own name or, for a model of transformers, as `attention_mask`; a flat row has none."""
    keep: Tensor | None = ours.get("attention_mask_2d", ours.get("attention_mask"))
    return keep


def _ours(ours: Batch, key: str, other: Any) -> Tensor:
    if key == "attention_mask" and other.ndim == 4 and ours.get(key) is None:
        return dense(Segments.from_keep(ours["attention_mask_2d"]), polarity="masked")
    found = _keep(ours) if key == "attention_mask" and other.ndim == 2 else ours[key]
    return torch.as_tensor(found)
