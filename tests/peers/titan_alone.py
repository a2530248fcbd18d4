"""Every sample by itself on torchtitan's own model, without anything of ours: what a batch is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import cross_entropy
from torchtitan.models.common.attention import VarlenMetadata

TEXT_ALONE = {"special_tokens": {"image_id": -1, "video_id": -1}}
"""What Qwen3.5 asks of a batch without images."""


def alone(config: Any, weights: dict[str, Tensor], batch: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of every sample by itself, on the same model built plainly."""
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    model.load_state_dict(weights, strict=False)
    total, count = torch.zeros(()), 0
    for row in batch:
        ids, segments = (torch.tensor(row[key]) for key in ("input_ids", "attention_mask"))
        for number in range(1, int(segments.max()) + 1):
            sample = ids[segments == number]
            logits = model(sample[None], **arguments_of_one(config, len(sample)))
            follows = (segments == number).nonzero()[:, 0].diff() == 1  # across a hole nothing is predicted
            total = total + cross_entropy(logits[0, :-1][follows], sample[1:][follows], reduction="sum")
            count += int(follows.sum())
    (total / count).backward()
    told = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return float(total.detach() / count), told


def arguments_of_one(config: Any, length: int) -> dict[str, Any]:
    causal: Any = create_block_mask(lambda b, h, q, k: q >= k, 1, None, length, length, device="cpu")
    if not hasattr(config, "vision_encoder"):
        return {"positions": torch.arange(length)[None], "attention_masks": causal}
    offsets = torch.tensor([0, length], dtype=torch.int32)
    masks = {"quadratic_attention": causal, "deltanet": VarlenMetadata(offsets, offsets, length, length, (0, length))}
    return {"positions": torch.arange(length)[None], "attention_masks": masks, **TEXT_ALONE}
