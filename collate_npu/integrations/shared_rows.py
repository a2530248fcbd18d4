"""Rows that a stack has shared out over its ranks before its model is called: a rank has some places of each row.

No hook sees the whole row, so nothing is changed there: its batch passes as it is, or is refused. Attention that its stack
exchanges inside flash attention is right; recurrent layers run on the places of their rank alone, but for VeOmni's own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.models import windows
from collate_npu.consumers.recurrent_kernels import asks_by_itself
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.masks.sources import Sources

_SIZES: dict[str, Any] = {
    "openrlhf.models.ring_attn_utils": lambda of: 1 if of.RING_ATTN_GROUP is None else of.RING_ATTN_GROUP.size(),
    "skyrl.backends.skyrl_train.distributed.ulysses.utils": lambda of: of.get_ulysses_sequence_parallel_world_size(),
    # its getter builds a state where there is none, which raises on more than one rank
    "veomni.distributed.parallel_state": lambda of: getattr(of._PARALLEL_STATE, "ulysses_size", 1),
}
"""Where a stack keeps how many ranks share a row: OpenRLHF 0.11.2, SkyRL 0.3.0, VeOmni 0.1.12."""


def sharing_ranks() -> int:
    """How many ranks share each row in this process, by the stacks that are imported."""
    return max((size(sys.modules[name]) for name, size in _SIZES.items() if name in sys.modules), default=1)


def check_share(adapter: BatchAdapter, model: Any, batch: Sources, ranks: int) -> None:
    """Raise unless this rank's places of a row are computed as the whole row would be.

    VeOmni's attention and its own Gated DeltaNet exchange heads for places, and read the offsets of the whole row, which
    each rank has (0.1.12 ops/kernels/attention/flash.py:190-199, data/data_collator.py:401-417).
    """
    offsets = {key: batch[key] for key in (*batch.named["offsets"], *batch.named["tail"])}
    exchanged = not adapter.model.needs_mask_2d or (offsets and any(map(asks_by_itself, model.modules())))
    width, why = batch.shape()[1] * ranks, ""
    if not exchanged or "flash" not in adapter.model.attn_implementation:
        why = "some of its layers see the places of their rank alone"
    elif not offsets and (sizes := [size for size in windows(adapter.model.config) if size < width]):
        why = f"ring_flash_attn makes other windows of those of {sizes[0]} (0.1.8 adapters/hf_adapter.py:119-125)"
    if why:
        rule = f"{ranks} ranks share each row of this {adapter.model.said}, and {why}."
        remedy = "Set ulysses_size, sequence_parallel_size or ring_attn_size to 1; plain attention: use flash_attention_2."
        raise UnsupportedFormError(explain("input_ids", str(list(batch.shape())), rule, remedy))
    if offsets:
        adapter.mended(Sources({"input_ids": torch.zeros(1, width, dtype=torch.long), **offsets}), padding_free=True)
