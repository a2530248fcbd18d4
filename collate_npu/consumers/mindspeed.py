"""MindSpeed: Ascend's flash kernel under Megatron, whose None becomes a compressed causal triangle (sparse_mode 2)."""

from __future__ import annotations

from collate_npu.consumers.consumer import PACKED_RECURRENT, Consumer, Form, Refusal, not_exact

MINDSPEED = Consumer(
    name="mindspeed",
    forms=(Form(form="none", reads="None, which its kernel turns into a compressed causal triangle"),),
    refuses=(
        PACKED_RECURRENT,
        Refusal(
            of="every batch where None is not exact",
            when=not_exact,
            rule="MindSpeed's flash kernel runs a compressed causal triangle, and here {why}.",
            remedy="Pad right with one sequence a row, or use padding_free=True.",
        ),
    ),
    source="MindSpeed core/transformer/dot_product_attention.py:613-630, core/transformer/flash_attention/generate_mask",
)
