"""`swift sft` on its transformers backend: its collator's batches are right or refused; none is changed.

Two settings of ms-swift 4.6.0 say nothing to recurrent layers and train on in silence: `padding_free` and `packing`
(positions alone, which no such layer reads) and `sequence_parallel_size` (Qwen3.5 alone has a forward for a split row,
model/models/qwen.py:1312-1445). Costs O(B * S) per batch of a recurrent model, nothing for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.models import needs_mask_2d, text_config
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.masks.find import segments_from_batch

_SPLIT_BY_SWIFT = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Families whose recurrent layers ms-swift exchanges between the ranks of one row, padded right; of a flat row it makes
the offsets itself (model/models/qwen.py:1241-1249, 1396)."""


def check_batch(template: Any, batch: Mapping[str, Any]) -> None:
    """Raise `UnsupportedFormError` where the real tokens of this batch would not be computed as alone."""
    if not template.is_training or "input_ids" not in batch or not needs_mask_2d(template.config):
        return
    family, ranks, flat = text_config(template.config).model_type, template.sequence_parallel_size, template.padding_free
    if ranks > 1 and family not in _SPLIT_BY_SWIFT:
        rule = f"Each rank runs the recurrent layers of {family} on its part of a row alone, from an empty state."
        remedy = "Set sequence_parallel_size=1, or train with `megatron sft`, whose Gated DeltaNet gathers the row."
        raise UnsupportedFormError(explain("sequence_parallel_size", str(ranks), rule, remedy))
    if ranks == 1:
        read = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
        if flat:
            read["position_ids"] = batch.get("text_position_ids", batch["position_ids"])
        adapter = BatchAdapter(template.config, consumer="transformers", padding_free=flat)
        adapter.route(segments_from_batch(read, padding_free=flat))
