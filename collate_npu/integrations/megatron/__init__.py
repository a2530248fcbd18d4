"""megatron-core 0.16.1: any batch of ours as the arguments of `GPTModel`, cut for this rank.

`GPTModel` reads a dense mask (True = blocked) on its local kernels and none on Transformer Engine's causal ones, wants
labels that are shifted already and takes the router's `padding_mask` (True = padding); it has no place for a 2D mask, and
its GatedDeltaNet reads none. Costs O(B * S), and the dense mask where a kernel reads it. Legend: B batch, S width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from collate_npu.consumers.megatron import kernel_of, refuse_unread_padding
from collate_npu.consumers.models import config_of, needs_mask_2d, unwrap
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.forms import MAX_MASK_BYTES, dense
from collate_npu.masks.polarity import Polarity
from collate_npu.outputs import shift_labels
from collate_npu.parallel import ContextParallel, query_rows, split_batch
from collate_npu.segments import Segments

PACKAGE, TESTED = "megatron-core", "0.16.1"


def gpt_batch(
    batch: Mapping[str, Any],
    model: Any,
    *,
    context_parallel: ContextParallel | None = None,
    polarity: Polarity | None = None,
    max_mask_bytes: int = MAX_MASK_BYTES,
) -> tuple[dict[str, Any], Segments]:
    """`model(**inputs)` computes every real token as when its sample is alone; beside it the Segments of the whole rows.

    `inputs` are `input_ids`, `position_ids`, `attention_mask`, with labels also `labels` (shifted, 0 where ignored) and
    `loss_mask`, on MoE models `padding_mask`; all of them this rank's. `context_parallel` is Megatron's own where
    `parallel_state` has one. Pad the width to its `multiple`. Raises `UnsupportedFormError` where this model's kernels
    have no right form for the padding. Source: megatron-core core/models/gpt/gpt_model.py:470-485.
    """
    segments = segments_from_batch(batch, polarity=polarity)
    cp, config = context_parallel or _megatron_parallel(model), config_of(model)
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "attention_mask": None}
    device = batch["input_ids"].device
    positions = batch.get("position_ids")
    inputs["position_ids"] = segments.position_ids.to(device) if positions is None else positions
    if isinstance(labels := batch.get("labels"), Tensor):
        shifted = shift_labels(labels, segments)
        inputs |= {"labels": shifted.clamp(min=0), "loss_mask": (shifted != -100).float()}
    if getattr(config, "num_moe_experts", None):
        inputs["padding_mask"] = ~segments.keep.to(device)
    if _masked_by_layers(model):
        inputs[KEEP_KEY] = segments.keep.to(device)
    if cp is not None:
        inputs = split_batch(inputs, cp, segments=segments)
    if _reads_dense(model, segments):
        rows = None if cp is None else query_rows(segments.shape[1], cp)
        inputs["attention_mask"] = dense(
            segments, polarity="masked", rows=rows, device=device, max_mask_bytes=max_mask_bytes
        )
    extras = {key: inputs.pop(key) for key in ("padding_mask", KEEP_KEY) if key in inputs}
    return mcore_bridge.pass_through_forward(type(unwrap(model)), inputs, extras), segments


def _masked_by_layers(model: Any) -> bool:
    """Is it a recurrent model of mcore-bridge, with `mcore_bridge.install()` in place?"""
    return needs_mask_2d(model) and mcore_bridge.masks_padding(getattr(config_of(model), "mcore_model_type", None))


def _megatron_parallel(model: Any) -> ContextParallel | None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized() or parallel_state.get_context_parallel_world_size() == 1:
        return None
    shared = bool(getattr(config_of(model), "sequence_parallel", False))
    return ContextParallel.from_megatron(**({} if shared else {"tensor_parallel": 1}))


def _reads_dense(model: Any, segments: Segments) -> bool:
    """Local kernels read one always: without it they ask CUDA for a triangle (core/transformer/utils.py:33-35)."""
    kernel = kernel_of(model)
    refuse_unread_padding(segments, kernel, recurrent=needs_mask_2d(model) and not _masked_by_layers(model))
    if needs_mask_2d(model):
        mcore_bridge.refuse_unmaskable(segments)
    return kernel == "megatron"
