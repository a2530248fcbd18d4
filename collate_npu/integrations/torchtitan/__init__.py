"""torchtitan 0.3.0: what its trainer, its context parallelism and pipeline stages take, made from Segments: `masks` makes
`attention_masks` and `positions`, `batches` what a dataloader gives the trainer. Nothing is patched.
"""

from collate_npu.integrations.torchtitan.batches import TitanCollator as TitanCollator, trainer_batch as trainer_batch
from collate_npu.integrations.torchtitan.masks import (
    get_attention_masks as get_attention_masks,
    layers_of as layers_of,
    masks_in_forward as masks_in_forward,
    positions as positions,
    varlen_metadata as varlen_metadata,
)

PACKAGE, TESTED = "torchtitan", "0.3.0"
