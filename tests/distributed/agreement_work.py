"""What ranks do in test_distributed_agreement.py: one of them holds something else than the others."""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments
from collate_npu.keys import KEYS, SAMPLE, TOKENS
from collate_npu.parallel import ContextParallel, gather_sequence, ranks_agree, split_batch

ROWS = [1, 2, 3, 4, 5], [6, 7]


def step(odd: str, by: str) -> str:
    """Two steps of every rank, of one shape; at the second the last rank is odd in one way. What it says, "" if nothing."""
    assert one_step("", by) == ""
    return one_step(odd if is_last() else "", by)


def one_step(odd: str, by: str) -> str:
    cp = ContextParallel.from_group(dist.group.WORLD, layout="contiguous" if odd == "layout" else "zigzag")
    first, second = [1, 2, 3, 4, 9 if odd == "tokens" else 5], [6, 7, 0] if odd == "truth" else [6, 7]
    if odd == "rows":
        first, second = second, first
    width = cp.multiple * (4 if odd == "width" else 3)
    batch = batch_of(width, first, second, attention_mask="2d")
    keep = batch["attention_mask_2d"]
    batch["labels"] = batch["input_ids"].masked_fill(~keep, -100)
    if odd == "labels":
        batch["labels"][0, 1] = -100
    if odd == "dtype":
        batch["attention_mask_2d"] = keep.int()
    if odd == "key":
        batch["loss_mask"] = torch.ones_like(batch["input_ids"])
    if odd == "raises":
        batch["attention_mask_2d"] = keep[:, 1:]
    return refusal(entry, by, batch, cp)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def batch_of(width: int, *rows: list[int], **settings: Any) -> dict[str, Any]:
    collator = PaddingCollator(pad_token_id=0, pad_to_multiple_of=width, **settings)
    return collator([{"input_ids": row} for row in rows or ROWS])


def refusal(call: Callable[..., Any], *given: Any, **settings: Any) -> str:
    """What a call says where it is refused; "" where it is not."""
    try:
        call(*given, **settings)
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
    return refusal(agreed, ContextParallel.from_group(dist.group.WORLD), timeout=timedelta(seconds=seconds))


def agreed(cp: ContextParallel, **settings: Any) -> None:
    with ranks_agree(cp, **settings) as facts:
        facts["width"] = "8"


def turns(usual: list[str], odd: list[str]) -> str:
    """Two rounds of the usual calls, then one of which the last rank makes the odd ones. What it says."""
    cp, keep = ContextParallel.from_group(dist.group.WORLD), torch.ones(2, 8 * dist.get_world_size(), dtype=torch.bool)
    batch = {"input_ids": keep.long(), "attention_mask_2d": keep}

    def calls() -> None:
        for name in (*usual, *usual, *(odd if is_last() else usual), "split"):  # the last is one call later
            entry(name, batch, cp)

    return refusal(calls)


def backwards(order: list[int]) -> str:
    """Gradients of two gathers, which the last rank asks for in another order. What it says, or the gradients."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    shards = [torch.zeros(1, 2, requires_grad=True) for _ in range(2)]
    wholes = [gather_sequence(shard, cp, loss="local") for shard in shards]
    try:
        for n in order if is_last() else [0, 1]:
            (wholes[n] * (n + 1)).sum().backward()
    except CollateError as error:
        return str(error)
    return str([shard.grad.unique().tolist() for shard in shards])


def ahead(steps: int) -> list[float]:
    """A thread splits all steps as fast as it can, while the main thread gathers; ranks are late at other steps, and each
    step has another width."""
    cp, shards, rank = ContextParallel.from_group(dist.group.WORLD), queue.Queue(), dist.get_rank()

    def split() -> None:
        for n in range(steps):
            sleep(0.01 * ((n + rank) % 3))
            shards.put(split_batch({"input_ids": torch.full((1, cp.multiple * (n + 1)), n)}, cp)["input_ids"])

    worker = threading.Thread(target=split)
    worker.start()
    means = []
    for n in range(steps):
        sleep(0.01 * ((n + 2 * rank) % 3))
        means.append(float(gather_sequence(shards.get(timeout=20).float(), cp).mean()))
    worker.join()
    return means


def made_again(path: str, times: int) -> list[str]:
    """Worlds made again, whose store keeps what earlier ones said; now and then a rank begins late. What each step says."""
    said, rank, size = [], dist.get_rank(), dist.get_world_size()
    kept = dist.FileStore(path, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_get_default_store", lambda: dist.PrefixStore("ours", kept))
        for n in range(times):
            dist.destroy_process_group()
            store = dist.PrefixStore(f"torch's {n}", kept)  # its own Gloo does not start twice with the same keys
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            sleep(0.1 if n % size == rank else 0)
            said += [one_step("", "split") for _ in range(1 + n % 3)]
            said += [one_step("tokens" if is_last() else "", "split")]
    return said


def gives_up(seconds: float, late: float) -> str:
    """The last rank comes late to a group that waits so many seconds. What it says."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    cp = ContextParallel.from_group(group)
    agreed(cp, timeout=timedelta(seconds=20))
    sleep(late if is_last() else 0)
    return refusal(agreed, cp)


def misspelt() -> str:
    """The last rank asks for a loss that does not exist. What it says."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    return refusal(gather_sequence, torch.zeros(1, 2), cp, loss="mean" if is_last() else "same")


def kinds_of_truth() -> dict[str, str]:
    """Masks, lists and settings, of which the last rank holds others. What each step says."""
    cp, last = ContextParallel.from_group(dist.group.WORLD), is_last()
    ids = torch.arange(2 * cp.multiple).view(2, -1)
    S = ids.shape[1]
    keep = torch.ones(2, S, dtype=torch.bool)
    keep[1, S // 2 :] = last
    square = torch.ones(S, S).tril().bool() & keep[:, None, None]
    odd = {
        "float 4D": {"attention_mask": torch.zeros(2, 1, S, S).masked_fill(~square, torch.finfo(torch.float32).min)},
        "bfloat16 2D": {"attention_mask_2d": keep.bfloat16()},
        "float 2D": {"attention_mask": keep.float()},
        "by layer": {"attention_mask": {"full_attention": square, "linear_attention": keep}},
        "absent": {"attention_mask": {"full_attention": square}} if last else {},
        "loss mask": {"loss_mask": keep.float()},
        "a list": {"labels": [list(range(S))] * (1 + last) + [[0] * S] * (1 - last)},
        "a number": {"max_length_q": S - last},
        "positions": {"position_ids": ids + last},
        "offsets": {"cu_seqlens": torch.tensor([0, S - last, 2 * S])},
        "a key of my own": {"mine": keep.long()},
        "vectors": {
            "inputs_embeds": torch.arange(2.0 * S).view(2, S, 1).flip(0) if last else torch.arange(2.0 * S).view(2, S, 1)
        },
    }
    said = {name: refusal(split_batch, {"input_ids": ids, **keys}, cp) for name, keys in odd.items()}
    table = {**KEYS, "w": SAMPLE if last else TOKENS}
    adapter = BatchAdapter(needs_mask_2d=False, consumer="megatron", context_parallel=cp, keys=table)
    said["a table"] = refusal(adapter, {"input_ids": ids, "attention_mask_2d": torch.ones(2, S).bool(), "w": ids})
    offsets = torch.tensor([0, S]).int().numpy() if last else [0, S]
    return said | {"same numbers": refusal(split_batch, {"input_ids": ids[:1]}, cp.for_documents(), cu_seqlens=offsets)}


def gives_up_first(seconds: float) -> list[Any]:
    """The last rank comes late to the first gather of a world; the others gave it up, and go on. What each call gives."""
    cp, found = ContextParallel.from_group(dist.new_group(timeout=timedelta(seconds=seconds))), []
    sleep(1.5 * seconds if is_last() else 0)
    for step in range(2):
        try:
            found.append(gather_sequence(torch.full((1, 2), float(step)), cp).unique().tolist())
        except CollateError as error:
            found.append(str(error))
    return found


def two_threads(seconds: float, steps: int, groups: int) -> list[Any]:
    """Two threads gather, on one group or on one each, in one order of calls a thread; ranks are late in the other thread
    first. What is not their own, and what they say."""
    cps = [ContextParallel.from_group(dist.new_group(timeout=timedelta(seconds=seconds))) for _ in range(groups)]
    found: list[Any] = []

    def gather(thread: int) -> None:
        sleep(0.2 * (groups > 1 and (thread + dist.get_rank()) % 2))
        try:
            for n in range(1000 * thread, 1000 * thread + steps):
                sleep(0.002 * ((n + dist.get_rank()) % 2))
                held = gather_sequence(torch.full((1, 2), float(n)), cps[thread % groups]).unique().tolist()
                if held != [float(n)]:
                    found.append(held)
        except CollateError as error:
            found.append(str(error))

    worker = threading.Thread(target=gather, args=(1,))
    worker.start()
    gather(0)
    worker.join()
    return found


def inside_a_block(how: str) -> str:
    """A gather inside `ranks_agree`: shards that differ in shape, or a last rank that raises before it. What it says."""
    cp = ContextParallel.from_group(dist.group.WORLD)
    try:
        with ranks_agree(cp):
            if how == "raises" and is_last():
                raise ValueError("mine")
            gather_sequence(torch.zeros((2, 2) if how == "shapes" and is_last() else (1, 4)), cp)
    except (CollateError, ValueError) as error:
        return str(error)
    return ""
