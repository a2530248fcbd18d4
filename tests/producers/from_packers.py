"""Packing as LLaMA-Factory 0.9.5 and axolotl 0.19.0 emit it: numbers in a 2D mask, and the 4D mask made of them.

Both packages need more than a test environment has, so their documented forms are written here. They were compared once
with `prepare_4d_attention_mask` (llamafactory.data.collator) and `V2BatchSamplerDataCollatorForSeq2Seq`
(axolotl.utils.collators).
Legend: B rows, S width.
"""

from __future__ import annotations

from functools import partial

import torch
from drawing import PACKED, SIDED, Draw
from producing import Producer, case, keep_2d, restarting
from torch import Tensor
from verdicts import Case

STYLES = (*SIDED, *sorted(PACKED))


def numbers(draw: Draw, *, beside: str = "") -> Case:
    """neat_packing's `1 1 2 2 0`, alone or with positions that restart; axolotl's V2 collator emits the second form."""
    more = {"position_ids": _positions(draw)} if beside else {}
    return case(draw, torch.from_numpy(draw.ids.copy()), **more)


def ones(draw: Draw) -> Case:
    """axolotl's first multipack collator: `1 1 1 1 0`, and positions alone tell the sequences apart."""
    return case(draw, keep_2d(draw), position_ids=_positions(draw))


def _positions(draw: Draw) -> Tensor:
    """Padding counts 0 (LLaMA-Factory processor/supervised.py:221, transformers' pad of `position_ids`)."""
    return restarting(draw).masked_fill(torch.from_numpy(~draw.keep), 0)


def block_diagonal(draw: Draw, dtype: torch.dtype) -> Case:
    """`prepare_4d_attention_mask`: additive, rows of padding blocked throughout."""
    return case(draw, four_d(torch.from_numpy(draw.ids), dtype), polarity="bias")


def four_d(ids: Tensor, dtype: torch.dtype) -> Tensor:
    same = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, None, :]
    return torch.zeros((), dtype=dtype).where(same.tril(), torch.finfo(dtype).min)


PRODUCERS = [
    Producer("LLaMA-Factory neat packing", (), numbers, STYLES),
    Producer("LLaMA-Factory and axolotl, numbers, positions", (), partial(numbers, beside="positions"), STYLES),
    Producer("LLaMA-Factory 4D", (), partial(block_diagonal, dtype=torch.float32), STYLES),
    Producer("LLaMA-Factory 4D bf16", (), partial(block_diagonal, dtype=torch.bfloat16), STYLES),
    Producer("axolotl multipack, ones", (), ones, STYLES),
]
