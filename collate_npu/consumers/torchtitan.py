"""torchtitan: a BlockMask for FlexAttention; its recurrent layers read offsets alone."""

from __future__ import annotations

from collate_npu.consumers.mask_choice import PACKED_RECURRENT, Consumer, Form, Refusal
from collate_npu.segments import PADS_BEFORE

TORCHTITAN = Consumer(
    name="torchtitan",
    key="attention_masks",
    forms=(Form(form="block_mask", reads="a BlockMask; no query sees a padded key"),),
    refuses=(
        PACKED_RECURRENT,
        Refusal(
            of="padding before a real token, in a hybrid model",
            when=lambda case: not case.padding_free and case.recurrent and case.segments.padding_side in PADS_BEFORE,
            rule="torchtitan's recurrent layers read cu_seqlens, and padding before a token reaches their state.",
            remedy="Pad right, or pack the rows: integrations.torchtitan.get_attention_masks makes their offsets.",
        ),
    ),
    keeps_mask_2d="never",
    not_shared="torchtitan 0.3 has no context parallelism for GatedDeltaNet (models/qwen3_5/parallelize.py:61-66)",
    source="torchtitan models/common/attention.py:85-87, 468-508",
)
