"""`COLLATE_NPU_GUARD=1`: the first batch of each model of a Megatron trainer of ms-swift is checked while it is trained on.

The offsets of a flat row are ms-swift's own, from positions: a sequence begins at every 0, so that padding stands in
sequences of its own (4.6.0 megatron/utils/utils.py:252-281). Positions are padded beside the tokens (template/base.py:
2131-2168), and not everywhere to the same width: do they fit the row and its samples? Costs O(N).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import numpy as np

from collate_npu.arrays import host_array
from collate_npu.errors import CollateError, explain
from collate_npu.integrations.swift.masks import TrainerMasks, segments_from_swift
from collate_npu.proof.delivery import guard_first_batch
from collate_npu.segments import Segments

_GUARDED: WeakSet[Any] = WeakSet()
_REMEDY = "Set padding_free=False, or a tensor_model_parallel_size that makes padding_to a multiple of 2 * cp."


def guarded(
    masks_of: Callable[[Any], TrainerMasks], original: Any, trainer: Any, data: Any, vp_stage: int | None = None
) -> Any:
    """In place of a trainer's `_prepare_batch`; `masks_of` its arguments knows its batches."""
    model = trainer.unwrapped_models[vp_stage or 0]
    if model in _GUARDED:
        return original(trainer, data, vp_stage)
    _GUARDED.add(model)
    args, cp, given = trainer.args, None, dict(data)
    prepared = original(trainer, data, vp_stage)
    if args.padding_free:
        ranks = args.context_parallel_size if args.cp_partition_mode == "zigzag" else 1
        segments = flat_segments(given, prepared["packed_seq_params"], ranks)
        if args.context_parallel_size > 1:  # no mask tells the parts of its layers apart
            print(f"collate_npu: the offsets of the flat row are those of its {segments.num_sequences} samples")
            return prepared
    else:
        masks = masks_of(args)
        segments, cp = segments_from_swift(args, given, masks.polarity), masks.cp
    ids = prepared["input_ids"]  # KTO prepares two batches, and runs the second one first
    guard_first_batch(model, segments=segments, only=lambda batch: batch.get("input_ids") is ids, context_parallel=cp)
    return prepared


def flat_segments(data: Mapping[str, Any], params: Any, ranks: int = 1) -> Segments:
    """The Segments of a flat row: each real length at the start of its sequence. `data` is what the template sent. The
    zigzag `ranks` must be able to share it out, and queries and keys have the same offsets, padded and not."""
    offsets = host_array("cu_seqlens_q", params.cu_seqlens_q).astype(np.int64)
    others = (getattr(params, name, None) for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"))
    differ = any(each is not None and not np.array_equal(host_array("offsets", each), offsets) for each in others)
    tokens = data.get("input_ids")
    width = (data["position_ids"] if tokens is None else tokens).shape[-1]
    places_N, parts, lengths = np.diff(offsets), 2 * ranks if ranks > 1 else 1, list(data["seq_lens"])
    covers = bool(len(places_N)) and offsets[0] == 0 and offsets[-1] == width and bool((places_N > 0).all())
    fits = len(lengths) <= len(places_N) and all(n <= place for n, place in zip(lengths, places_N))
    if differ or not fits or not covers or bool((places_N % parts).any()):
        rule = f"They rise from 0 to the {width} tokens of the row, and leave room for {lengths[:8]}"
        rule += f", in multiples of {parts}." if parts > 1 else "."
        raise CollateError(explain("packed_seq_params", str(offsets.tolist())[:80], rule, _REMEDY))
    ids_S = np.zeros(width, np.int32)
    for n, (start, length) in enumerate(zip(offsets.tolist(), lengths), start=1):
        ids_S[start : start + length] = n
    return Segments(ids_S[None])
