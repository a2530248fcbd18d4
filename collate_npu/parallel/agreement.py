"""Agreement: ranks that share a row compare what they hold, at every call, before any of them hands data to the others.

A rank with other tokens, truth or layout, or one that skipped a call, makes wrong data on every rank, or a collective that
never ends, without an error. So at each call every rank says what it holds and hears the others: where two differ, all
raise, before any data moves. A rank that raises, or gives up waiting, says so, and takes along those who wait for it.
Costs a wait for the slowest rank, three round trips to the store (`meeting`), and a checksum of the batch: 0.14 ms for
int64 `[8, 4096]`. A batch on a device is read to the host for it.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial, wraps
from threading import get_ident, main_thread
from typing import Any, Literal, ParamSpec, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from collate_npu.arrays import host_array
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.keys import KEYS, SAMPLE, TOKENS, Key
from collate_npu.parallel.groups import mesh_group, timeout_of
from collate_npu.parallel.layout import ContextParallel
from collate_npu.parallel.meeting import Heard, meeting_of
from collate_npu.segments import Segments

P = ParamSpec("P")
T = TypeVar("T")
Call = Literal["block", "split", "gather", "backward"]
Facts = dict[str, str | Callable[[], str]]
"""What one rank holds, by name. A function is a digest: it is called where there is somebody to tell."""


@contextmanager
def ranks_agree(cp: ContextParallel | None, *, timeout: timedelta | None = None, call: Call = "block") -> Iterator[Facts]:
    """Run the block on every rank of `cp.group`, then compare the facts it has put into what this yields.

    Raises `CollateError` on every rank where two ranks differ, where one raised inside the block, and where one does not
    come in `timeout` (by default the group's own, of `init_process_group`). Inside another such block of the same thread
    and ranks it adds to that one. `call` says what is done here: ranks do the same things in the same order. Does nothing
    without a group, on a group of torch's fake backend, and in a dataloader worker, which is no rank.
    """
    if cp is None or cp.group is None or cp.size == 1 or get_worker_info() is not None:
        yield {}
        return
    group, here = mesh_group(cp.group), get_ident()
    if dist.get_backend(group) == "fake":
        yield {}
        return
    meeting, timeout = meeting_of(group), timeout or timeout_of(group)
    if here in meeting.open:
        yield meeting.open[here]
        return
    layout = f"{cp.layout}, size {cp.size}, tp {cp.tensor_parallel}, block {cp.block}, ulysses {cp.ulysses}, 2D {cp.mask_2d}"
    facts: Facts = {"call": call, "layout": layout}
    stream = "main" if here == main_thread().ident and call != "backward" else call
    meeting.greet(timeout)
    meeting.open[here] = facts
    try:
        yield facts
        said = {name: value if isinstance(value, str) else value() for name, value in facts.items()}
    except Exception as error:
        meeting.say(stream, {"raised": f"{type(error).__name__}: {error}"})
        raise
    finally:
        del meeting.open[here]
    number, heard = meeting.exchange(stream, said, timeout)
    _check(heard)
    facts["number"] = f"{stream} {number}"


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, for which torch.compile breaks its graph where it is given a `cp` with a group: ranks talk on the host.
    Where nothing has loaded its compiler, nothing does now (seconds)."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        for given in (*args[1:3], kwargs.get("cp")):
            if isinstance(given, ContextParallel) and given.group is not None and "torch._dynamo" in sys.modules:
                return cast(T, _eager(function)(*args, **kwargs))
        return function(*args, **kwargs)

    return called


@cache
def _eager(function: Callable[..., Any]) -> Any:
    return cast(Any, torch.compiler).disable(function)


def batch_facts(batch: Mapping[str, Any], segments: Segments | None, *, keys: Mapping[str, Key] = KEYS) -> Facts:
    """What a whole batch is: the shape of each key, a digest of its truth, and one of each key of whole numbers a token."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    facts: Facts = {key: _kind(value) for key, value in tensors.items()}
    facts.update({key: "None" for key, value in batch.items() if value is None})
    if segments is not None:
        facts |= {"segments": str(list(segments.shape)), "truth": partial(digest, segments.array)}
    for key, value in tensors.items():
        if _is_compared(value, keys.get(key, TOKENS if value.ndim > 1 else SAMPLE), segments):
            facts[f"the values of {key}"] = partial(digest, value)
    return facts


def digest(value: Any) -> str:
    """CRC-32 of the numbers, and of where rows end where they are jagged. A change inside 4 bytes shows for certain."""
    if isinstance(value, Tensor) and value.is_nested:
        return " ".join(map(digest, (value.values(), cast(Any, value).offsets())))
    try:
        return f"{zlib.crc32(np.ascontiguousarray(host_array('facts', value)).data):08x}"
    except CollateError:  # meta, fake: no numbers to compare
        return "not read"


def _kind(value: Tensor) -> str:
    return f"jagged {shape_of(value.values())}" if value.is_nested else shape_of(value)


def _is_compared(value: Tensor, key: Key, segments: Segments | None) -> bool:
    """Whole numbers that belong to tokens. Vectors may differ in their last bits; `segments` say what a dense mask says."""
    dense = key.role == "mask" and value.ndim > 2 and segments is not None
    return not (value.is_floating_point() or dense) and key.kind in ("tokens", "positions", "truth", "offsets")


def _check(heard: Heard) -> None:
    raised = {rank: message["raised"] for rank, message in heard.items() if "raised" in message}
    if raised:
        listed = "; ".join(f"rank {rank} raised {text}" for rank, text in raised.items())
        rule = "Ranks that share a row go on together or not at all."
        raise CollateError(explain("context parallel", listed, rule, "Mend what that rank says."))
    if apart := list(_apart(heard)):
        listed = apart[0] if apart[0].startswith("call ") else "; ".join(apart)
        rule = "Ranks that share a row make the same calls and hold one batch: keys, shapes, tokens, truth and layout."
        remedy = "Give these ranks the same samples (a sampler by data-parallel rank), settings and order of calls."
        raise CollateError(explain("context parallel", listed, rule, remedy))


def _apart(said: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    """What differs: `labels int64 [2, 8] on ranks [0, 1], int64 [2, 12] on ranks [2]`."""
    for name in dict.fromkeys(name for facts in said.values() for name in facts):
        held: dict[str, list[int]] = {}
        for rank, facts in said.items():
            held.setdefault(facts.get(name, "absent"), []).append(rank)
        if len(held) > 1:
            yield f"{name} {', '.join(f'{value} on ranks {ranks}' for value, ranks in held.items())}"
