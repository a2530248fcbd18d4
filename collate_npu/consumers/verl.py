"""verl's Megatron engine on padded rows: the 2D mask on a GPU, None or a dense mask on an NPU, the 2D beside it."""

from __future__ import annotations

import torch

from collate_npu.consumers.consumer import PACKED_RECURRENT, Case, Consumer, Form, Refusal


def _more_than_2d(case: Case) -> bool:
    return not case.padding_free and not case.plain


VERL = Consumer(
    name="verl",
    forms=(Form(form="keep_2d", reads="bool [B, S], True = real"),),
    refuses=(
        PACKED_RECURRENT,
        Refusal(
            of="several sequences in a row, and patterns other than causal",
            when=_more_than_2d,
            rule="verl's padded engine reads a [B, S] mask and causal attention.",
            remedy="Use its padding-free (thd) engine: padding_free=True.",
        ),
    ),
    keep_dtype=torch.bool,
    keeps_mask_2d="always",
    source="verl models/mcore/util.py:649-655, 775-848",
)

VERL_NPU = Consumer(
    name="verl_npu",
    forms=(
        Form(form="none", reads="None where exact", when=lambda case: bool(case.exact) and case.exact.why),
        Form(form="masked", reads="else bool [B, 1, S, S], True = blocked", when=lambda case: case.exact.why),
    ),
    refuses=(PACKED_RECURRENT,),
    keeps_mask_2d="always",
    source="verl models/mcore/util.py:768-770, 884-885",
)
