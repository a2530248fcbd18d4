"""What ranks do in test_distributed_agreement.py: one of them holds something else than the others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments
from collate_npu.parallel import ContextParallel, agreement, gather_sequence, ranks_agree, split_batch

ROWS = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6, 7]}]


def step(odd: str, by: str) -> str:
    """One step of every rank; the last rank is odd in one way. What it says, and "" where all went well."""
    last = dist.get_rank() == dist.get_world_size() - 1
    layout = "contiguous" if last and odd == "layout" else "zigzag"
    cp = ContextParallel.from_group(dist.group.WORLD, layout=layout)
    rows, side = ROWS, "right"
    if last and odd == "tokens":
        rows = [{"input_ids": [1, 2, 3, 4, 9]}, {"input_ids": [6, 7]}]
    if last and odd == "truth":
        rows = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6, 7, 0]}]
    width = cp.multiple * (4 if last and odd == "width" else 3)
    collator = PaddingCollator(pad_token_id=0, padding_side=side, pad_to_multiple_of=width, attention_mask="2d")
    batch = collator(rows)
    if last and odd == "dtype":
        batch["attention_mask_2d"] = batch["attention_mask_2d"].int()
    if last and odd == "key":
        batch["loss_mask"] = torch.ones_like(batch["input_ids"])
    if last and odd == "raises":
        batch["attention_mask_2d"] = batch["attention_mask_2d"][:, 1:]
    try:
        entry(by, batch, cp)
    except CollateError as error:
        return str(error)
    return ""


def entry(by: str, batch: dict[str, Any], cp: ContextParallel) -> None:
    if by == "adapter":
        BatchAdapter(needs_mask_2d=False, consumer="megatron", context_parallel=cp)(batch)
    elif by == "split":
        split_batch(batch, cp, segments=Segments.from_keep(batch["attention_mask_2d"]))
    else:
        segments = Segments.from_keep(batch["attention_mask_2d"])
        gather_sequence(torch.zeros(len(segments.ids), segments.shape[1] // cp.size), cp, segments)


def silent(seconds: float) -> str:
    """The first rank comes alone. What it says, in words of the timeout."""
    if dist.get_rank():
        return ""
    cp = ContextParallel.from_group(dist.group.WORLD)
    try:
        with ranks_agree(cp, timeout=timedelta(seconds=seconds)) as facts:
            facts["width"] = "8"
    except CollateError as error:
        return str(error)
    return "went on alone"


def waits(times: int) -> int:
    """How often this rank waits for the others in so many steps of one shape, after the first."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    entry("adapter", PaddingCollator(pad_token_id=0, pad_to_multiple_of=cp.multiple)(ROWS), cp)
    heard, waited = agreement._Meeting._heard, []
    agreement._Meeting._heard = lambda *given: waited.append(1) or heard(*given)
    try:
        for row in range(times):
            rows = [{"input_ids": [row, 2, 3, 4, 5]}, {"input_ids": [6, row]}]
            entry("adapter", PaddingCollator(pad_token_id=0, pad_to_multiple_of=cp.multiple)(rows), cp)
    finally:
        agreement._Meeting._heard = heard
    return len(waited)


def new_to_one() -> str:
    """A shape that all have seen; then the last rank comes with another one, alone. What it says."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    entry("adapter", PaddingCollator(pad_token_id=0, pad_to_multiple_of=5 * cp.multiple)(ROWS), cp)
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        entry("adapter", PaddingCollator(pad_token_id=0, pad_to_multiple_of=(6 if last else 5) * cp.multiple)(ROWS), cp)
    except CollateError as error:
        return str(error)
    return ""


def kept(calls: int, most: int) -> int:
    """How many messages of this rank are in the store after so many calls, where `most` are kept."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    before, agreement._KEPT = agreement._KEPT, most
    try:
        for times in range(20, 20 + calls):
            entry("adapter", PaddingCollator(pad_token_id=0, pad_to_multiple_of=times * cp.multiple)(ROWS), cp)
    finally:
        agreement._KEPT = before
    meeting = agreement._meeting(dist.group.WORLD)
    keys = [meeting._key(count, dist.get_rank()) for count in range(meeting.count - calls + 1, meeting.count + 1)]
    dist.barrier()
    return sum(agreement._store().check([key]) for key in keys)
