"""`COLLATE_NPU_GUARD=1`: the first batch of each model of a Megatron trainer of ms-swift is checked while it is trained on.

Its trainers prepare a batch and then run the model with it (4.6.0 megatron/trainers/base.py:1108-1113), so the guard is set
in between, with the truth of that batch and for its forward alone. See `integrations.delivery`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from collate_npu.integrations.delivery import guard_first_batch
from collate_npu.integrations.swift import masks as swift_masks
from collate_npu.integrations.swift.flat import flat_segments
from collate_npu.masks.polarity import Polarity
from collate_npu.parallel.layout import Scope

_GUARDED: WeakSet[Any] = WeakSet()


def wanted() -> bool:
    """Did the user ask for it?"""
    return os.environ.get("COLLATE_NPU_GUARD", "0").lower() not in ("0", "false", "no", "off", "")


def guarded(
    mask_2d: Scope,
    polarity: Polarity | None,
    original: Callable[..., Any],
    trainer: Any,
    data: Any,
    vp_stage: int | None = None,
) -> Any:
    """In place of a trainer's `_prepare_batch`."""
    model = trainer.unwrapped_models[vp_stage or 0]
    if model in _GUARDED:
        return original(trainer, data, vp_stage)
    _GUARDED.add(model)
    if trainer.args.padding_free:
        return _flat(model, trainer, dict(data), original(trainer, data, vp_stage))
    segments = swift_masks.segments_from_swift(trainer.args, data, polarity)
    cp = swift_masks.context_parallel(trainer.args, mask_2d)
    prepared = original(trainer, data, vp_stage)
    ids = prepared["input_ids"]  # KTO prepares two batches, and runs the second one first
    guard_first_batch(model, segments=segments, context_parallel=cp, only=lambda batch: batch.get("input_ids") is ids)
    return prepared


def _flat(model: Any, trainer: Any, data: dict[str, Any], prepared: Any) -> Any:
    """A flat row is ms-swift's own: its offsets are compared with the real lengths, and the layers are watched.

    Under context parallelism the layers are not: their parts are not told apart by a mask.
    """
    ranks = trainer.args.context_parallel_size if trainer.args.cp_partition_mode == "zigzag" else 1
    segments = flat_segments(data, prepared["packed_seq_params"], ranks)
    if trainer.args.context_parallel_size == 1:
        ids = prepared["input_ids"]
        guard_first_batch(model, segments=segments, only=lambda batch: batch.get("input_ids") is ids)
    else:
        print(f"collate_npu: the offsets of the flat row are those of its {segments.num_sequences} samples")
    return prepared
