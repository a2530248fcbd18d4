"""torchtitan 0.3.0: what its trainer, its context parallelism and pipeline stages take, made from Segments.

`masks` makes `attention_masks` and `positions`, `batches` what a dataloader gives the trainer, `stages` the masks inside
a model part, where a schedule has already cut the batch. Nothing is patched.
"""

from collate_npu.integrations.torchtitan.batches import TitanCollator, trainer_batch
from collate_npu.integrations.torchtitan.masks import documents, get_attention_masks, layers_of, positions, varlen_metadata
from collate_npu.integrations.torchtitan.stages import masks_in_forward

PACKAGE, TESTED = "torchtitan", "0.3.0"

__all__ = [
    "TitanCollator",
    "documents",
    "get_attention_masks",
    "layers_of",
    "masks_in_forward",
    "positions",
    "trainer_batch",
    "varlen_metadata",
]
