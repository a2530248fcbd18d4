"""torchtitan 0.3.0: what its trainer, its context parallelism and pipeline stages take, made from Segments: `masks` makes
`attention_masks` and `positions`, and what a dataloader gives the trainer. Nothing is patched.
"""

from collate_npu.integrations.torchtitan.masks import (
    TitanCollator as TitanCollator,
    get_attention_masks as get_attention_masks,
    layers_of as layers_of,
    masks_in_forward as masks_in_forward,
    positions as positions,
    trainer_batch as trainer_batch,
    varlen_metadata as varlen_metadata,
)

PACKAGE, TESTED = "torchtitan", "0.3.0"
