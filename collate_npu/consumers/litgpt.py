"""LitGPT: one dense keep mask, True attends, under `mask`."""

from __future__ import annotations

from collate_npu.consumers.consumer import PACKED_RECURRENT, Consumer, Form

LITGPT = Consumer(
    name="litgpt",
    key="mask",
    forms=(Form(form="keep", reads="bool [B, 1, S, S], True attends"),),
    refuses=(PACKED_RECURRENT,),
    source="litgpt model.py CausalSelfAttention.scaled_dot_product_attention",
)
