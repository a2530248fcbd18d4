"""verl's Megatron engine on padded rows: the 2D mask on a GPU, None on an NPU, the 2D beside it."""

from __future__ import annotations

from dataclasses import replace

from collate_npu.consumers.mask_choice import HOLES_RECURRENT, PACKED_RECURRENT, Consumer, Form, Refusal
from collate_npu.consumers.mindspeed import NOT_EXACT

VERL = Consumer(
    name="verl",
    forms=(Form(form="keep_2d", reads="bool [B, S], True = real"),),
    refuses=(
        PACKED_RECURRENT,
        HOLES_RECURRENT,
        Refusal(
            of="packed rows, and attention that is not plain causal",
            when=lambda case: not case.padding_free and not case.plain,
            rule="verl's padded engine reads a [B, S] mask and causal attention.",
            remedy="Use its padding-free (thd) engine: padding_free=True.",
        ),
    ),
    keeps_mask_2d="always",
    shares_recurrent=True,
    source="verl models/mcore/util.py:649-655, 775-848",
)

VERL_NPU = replace(
    VERL,
    name="verl_npu",
    forms=(Form(form="none", reads="None, which MindSpeed turns into a compressed causal triangle"),),
    refuses=(PACKED_RECURRENT, NOT_EXACT),
    source="verl 0.9.1 models/mcore/util.py:649-655, 768-770, 884-885; workers/engine/mindspeed/transformer_impl.py:40-54",
)
