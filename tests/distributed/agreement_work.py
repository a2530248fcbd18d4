"""What ranks do in test_distributed_agreement.py: one of them holds something else than the others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments
from collate_npu.parallel import ContextParallel, agreement, gather_sequence, ranks_agree, split_batch

ROWS = [1, 2, 3, 4, 5], [6, 7]


def step(odd: str, by: str) -> str:
    """One step of every rank; the last rank is odd in one way. What it says, and "" where all went well."""
    odd = odd if dist.get_rank() == dist.get_world_size() - 1 else ""
    cp = ContextParallel.from_group(dist.group.WORLD, layout="contiguous" if odd == "layout" else "zigzag")
    first, second = [1, 2, 3, 4, 9 if odd == "tokens" else 5], [6, 7, 0] if odd == "truth" else [6, 7]
    width = cp.multiple * (4 if odd == "width" else 3)
    batch = batch_of(width, first, second, attention_mask="2d")
    keep = batch["attention_mask_2d"]
    if odd == "dtype":
        batch["attention_mask_2d"] = keep.int()
    if odd == "key":
        batch["loss_mask"] = torch.ones_like(batch["input_ids"])
    if odd == "raises":
        batch["attention_mask_2d"] = keep[:, 1:]
    return said(by, batch, cp)


def batch_of(width: int, *rows: list[int], **settings: Any) -> dict[str, Any]:
    collator = PaddingCollator(pad_token_id=0, pad_to_multiple_of=width, **settings)
    return collator([{"input_ids": row} for row in rows or ROWS])


def said(by: str, batch: dict[str, Any], cp: ContextParallel) -> str:
    try:
        entry(by, batch, cp)
    except CollateError as error:
        return str(error)
    return ""


def entry(by: str, batch: dict[str, Any], cp: ContextParallel) -> None:
    if by == "adapter":
        BatchAdapter(needs_mask_2d=False, consumer="megatron", context_parallel=cp)(batch)
        return
    segments = Segments.from_keep(batch["attention_mask_2d"])
    if by == "split":
        split_batch(batch, cp, segments=segments)
    else:
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
    cp, waited = ContextParallel.from_group(dist.group.WORLD), []
    entry("adapter", batch_of(cp.multiple), cp)
    heard = agreement._Meeting._heard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement._Meeting, "_heard", lambda *given: waited.append(1) or heard(*given))
        for n in range(times):
            entry("adapter", batch_of(cp.multiple, [n, 2, 3, 4, 5], [6, n]), cp)
    return len(waited)


def new_to_one() -> str:
    """A shape that all have seen; then the last rank comes with another one, alone. What it says."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    entry("adapter", batch_of(5 * cp.multiple), cp)
    last = dist.get_rank() == dist.get_world_size() - 1
    return said("adapter", batch_of((6 if last else 5) * cp.multiple), cp)


def kept(calls: int, most: int) -> int:
    """How many messages of this rank are in the store after so many calls, where `most` are kept."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_KEPT", most)
        for times in range(20, 20 + calls):
            entry("adapter", batch_of(times * cp.multiple), cp)
    meeting = agreement._MEETINGS[tuple(dist.get_process_group_ranks(dist.group.WORLD))]
    keys = [meeting._key(count, dist.get_rank()) for count in range(meeting.count - calls + 1, meeting.count + 1)]
    dist.barrier()
    return sum(agreement._store().check([key]) for key in keys)
