"""Masks: from a batch or a mask to `Segments`, and from `Segments` to every form a kernel reads."""

from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.dense_mask import derive_segments
from collate_npu.masks.forms import Verdict, block_mask, dense, mask_mod, none_is_exact, varlen
from collate_npu.masks.patterns import Pattern

__all__ = [
    "Pattern", "Verdict", "block_mask", "dense", "derive_segments", "mask_mod", "none_is_exact", "segments_from_batch",
    "varlen",
]  # fmt: skip
