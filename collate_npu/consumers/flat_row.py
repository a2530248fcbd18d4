"""Flat row: a call of a model on rows becomes a call on one flat row of their real tokens, and what it returns rows again.

Every value with a place for each token comes along: embeddings, token types, positions of three axes, places of images.
Legend: B rows, S width, T tokens of the flat row, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.consumers.by_sequence import MixerPlan, Way, from_places, plan_of, to_places
from collate_npu.consumers.labels_and_positions import IGNORED
from collate_npu.consumers.model_traits import takes
from collate_npu.consumers.tiny_models import offsets_asked
from collate_npu.segments import Segments

CACHES = ("past_key_values", "cache", "cache_params", "state")  # 5.24: cache


def flat_keys(model: Any, way: Way, plan: MixerPlan, positions: str) -> dict[str, Any]:
    """Return the mask of a flat row, and its positions if the model takes any (`position_rule`)."""
    ones = torch.ones(1, plan.total, dtype=torch.long, device=plan.place_T.device)
    keys: dict[str, Any] = {"attention_mask": ones if way.mask == "ones" else ones.new_ones(1, 1, 1, 1).bool()}
    keys |= offsets_asked(model, plan.lengths, ones.device)
    if positions != "none":
        positions_T = np.arange(plan.total) - np.repeat(plan.starts, plan.lengths)
        keys["position_ids"] = torch.from_numpy(positions_T)[None].to(ones.device, non_blocking=True)
    return keys


class FlatCall:
    """The flat row of one batch, in the order of its rows."""

    def __init__(self, segments: Segments, way: Way, device: torch.device) -> None:
        self.segments, self.way = segments, way
        self.at_T: Tensor = torch.from_numpy(np.flatnonzero(segments.array)).to(device, non_blocking=True)
        self.plan: MixerPlan = replace(plan_of(segments.sequence_lengths, device, way.buckets), at_T=self.at_T)

    def flattened(self, call: Mapping[str, Any], model: nn.Module, positions: str, *, shifts: bool) -> dict[str, Any]:
        """Return the call on the flat row. If the model `shifts` labels, the first of each sequence is ignored."""
        out = {name: self._flat(value) for name, value in call.items() if name not in (*CACHES, "cache_position")}
        made = flat_keys(model, self.way, self.plan, positions)
        given = out.get("position_ids")
        out |= {name: value for name, value in made.items() if name != "position_ids" or given is None}
        if shifts and isinstance(labels := out.get("labels"), Tensor):
            out["labels"] = labels.index_fill(1, torch.from_numpy(self.plan.starts).to(labels.device), IGNORED)
        return out | ({"use_cache": False} if takes(model, "use_cache") else {})

    def restored(self, output: Any) -> Any:
        """Return what the model gave for the flat row as rows `[B, S, ...]`, with zeros at padding."""
        if isinstance(output, Tensor):
            return self._as_rows(output)
        if isinstance(output, Mapping):  # of transformers: its attributes follow
            for name in list(output):
                output[name] = self.restored(output[name])  # type: ignore[index]
            return output
        return type(output)(map(self.restored, output)) if type(output) in (tuple, list) else output

    def _flat(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if tuple(value.shape[:2]) == self.segments.shape:
            return from_places(value.flatten(0, 1), self.at_T)[None]
        if tuple(value.shape[1:3]) == self.segments.shape:
            return torch.stack([from_places(axis.flatten(0, 1), self.at_T)[None] for axis in value])
        return value

    def _as_rows(self, value: Tensor) -> Tensor:
        B, S = self.segments.shape
        T = self.plan.total
        if value.ndim > 1 and tuple(value.shape[:2]) == (1, T):
            return to_places(value[0], self.at_T, B * S).view(B, S, *value.shape[2:])
        if value.ndim == 2 and len(value) == T:  # of a router
            return to_places(value, self.at_T, B * S)
        return value
