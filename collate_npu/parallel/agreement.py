"""Agreement: ranks that share a row compare what they hold, at every call, before any of them hands data to the others.

A rank with other tokens, truth or layout, or one that skipped a call, makes wrong data on every rank, or a collective that
never ends, without an error. Costs a wait for the slowest rank, three round trips to the store (`meeting`), and a checksum
of the batch: 0.14 ms for int64 `[8, 4096]`. A batch on a device is read to the host for it, but for vectors, whose sums are
made there: 9 ms for float32 `[8, 4096, 256]` on a CPU. Those of two ranks may differ by rounding.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from collate_npu.parallel.meeting import Heard, RanksApartError, meeting_of
from collate_npu.segments import Segments

P = ParamSpec("P")
T = TypeVar("T")
Call = Literal["block", "split", "gather", "backward", "objects"]
Facts = dict[str, str | Callable[[], str]]
"""What one rank holds, by name. A function is a digest: it is called where there is somebody to tell."""


@contextmanager
def ranks_agree(cp: ContextParallel | None, *, timeout: timedelta | None = None, call: Call = "block") -> Iterator[Facts]:
    """Run the block on every rank of `cp.group`, then compare the facts it has put into what this yields.

    Raises `CollateError` on every rank where two ranks differ, where one raised inside the block, and where one does not
    come in `timeout` (by default the group's own, of `init_process_group`). Inside another such block of the same thread
    and ranks it adds to that one, unless a collective follows it. `call` says what is done here: ranks do the same things
    in the same order. Does nothing without a group, on a group of torch's fake backend, and in a dataloader worker, which
    is no rank.
    """
    if cp is None or cp.group is None or cp.size == 1 or get_worker_info() is not None:
        yield {}
        return
    group, here = mesh_group(cp.group), get_ident()
    if dist.get_backend(group) == "fake":
        yield {}
        return
    meeting, timeout = meeting_of(group), timeout or timeout_of(group)
    outer = meeting.open.get(here)
    if outer is not None and call in ("block", "split"):
        yield outer
        return
    layout = f"{cp.layout}, size {cp.size}, tp {cp.tensor_parallel}, block {cp.block}, ulysses {cp.ulysses}, 2D {cp.mask_2d}"
    facts: Facts = {"call": call, "layout": layout}
    stream = "main" if here == main_thread().ident and call != "backward" else call
    meeting.greet(stream, timeout)
    meeting.open[here] = facts
    try:
        yield facts
        said = {name: value if isinstance(value, str) else value() for name, value in facts.items()}
    except Exception as error:
        if not isinstance(error, RanksApartError):  # of a gather in this block: all have heard of it
            meeting.say(stream, {"raised": f"{type(error).__name__}: {error}"})
        raise
    finally:
        meeting.open.pop(here)
        if outer is not None:
            meeting.open[here] = outer
    number, heard = meeting.exchange(stream, said, timeout)
    _check(heard)
    facts["number"] = f"{stream} {number}"


def turn_of(cp: ContextParallel) -> AbstractContextManager[Any]:
    """One thread at a time agrees on a collective of this group and runs it: in another order on each rank, they would wait
    for each other."""
    return nullcontext() if cp.group is None or cp.size == 1 else meeting_of(mesh_group(cp.group)).data


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
    """What a whole batch is: each key's shape or number, digests of its truth, masks and whole numbers a token, and sums of
    floating values a token or a sample."""
    facts: Facts = {}
    if segments is not None:
        facts |= {"segments": str(list(segments.shape)), "truth": partial(digest, segments.array)}
    for key, value in batch.items():
        rule = keys.get(key)
        by_layer = isinstance(value, Mapping) and rule is not None and rule.role == "mask"
        parts = {f"{key}[{kind!r}]": part for kind, part in value.items()} if by_layer else {key: value}
        for name, part in parts.items():
            if isinstance(part, Tensor):
                kind = f"jagged {shape_of(part.values())}" if part.is_nested else shape_of(part)
                facts[name] = kind if rule == KEYS.get(key) else f"{kind} as {rule}"
                if _is_compared(name, part, rule or (TOKENS if part.ndim > 1 else SAMPLE), segments):
                    rounded = part.is_floating_point() and "mask" not in name
                    facts[f"{'a sum' if rounded else 'the values'} of {name}"] = partial(
                        weighed if rounded else digest, part
                    )
            elif part is None or (rule is not None and isinstance(part, (int, float, list, tuple, np.ndarray))):
                facts[name] = repr(part) if part is None or isinstance(part, (int, float)) else partial(digest, part)
    return facts


def digest(value: Any) -> str:
    """CRC-32 of the numbers, and of where rows end where they are jagged. A change inside 4 bytes shows for certain."""
    if isinstance(value, Tensor) and value.is_nested:
        return " ".join(map(digest, (value.values(), cast(Any, value).offsets())))
    try:
        return f"{zlib.crc32(np.ascontiguousarray(host_array('facts', value)).data):08x}"
    except CollateError:  # meta, fake: no numbers to compare
        return "not read"


_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""What two ranks may differ by, of the length of the vector of all values; 1e-2 in half precision."""


def weighed(value: Tensor) -> str:
    """A sum of the values, each weighed by its row, its token and its place in the vector, and what it may differ by."""
    value = (value.values() if value.is_nested else value).detach()
    if value.layout is not torch.strided or value.device.type == "meta":
        return "not read"
    x_NH = value.reshape(-1, value.shape[-1] if value.ndim > 2 else 1)
    x_NH = x_NH.float() if x_NH.element_size() < 4 else x_NH
    weights_N, weights_H = (torch.arange(1, n + 1, dtype=torch.float64).mul_(2.3999632).cos_() for n in x_NH.shape)
    sums_N = (x_NH @ weights_H.to(x_NH)).cpu().double()
    tolerance = _ROUNDING.get(value.dtype, 1e-2) * float(torch.linalg.vector_norm(x_NH))
    return f"{float(sums_N @ weights_N):.9g} within {tolerance:.3g}"


def _same(one: str, other: str) -> bool:
    """The same text, or two sums that rounding may part."""
    sums = [text.split(" within ") for text in (one, other)]
    if one == other or not all(len(parts) == 2 for parts in sums):
        return one == other
    (a, near), (b, _) = (tuple(map(float, parts)) for parts in sums)
    return abs(a - b) <= near


def digest_offsets(offsets: Tensor | Sequence[int] | None) -> str:
    """The same for the same numbers, in whatever they stand."""
    return "none" if offsets is None else digest(host_array("cu_seqlens", offsets).astype(np.int64))


def _is_compared(name: str, value: Tensor, key: Key, segments: Segments | None) -> bool:
    """Masks, and what is of tokens; of a dense mask the `segments` tell."""
    if key.role == "mask" and value.ndim > 2 and segments is not None:
        return False
    return key.kind in ("tokens", "positions", "truth", "offsets")


def _check(heard: Heard) -> None:
    raised = {rank: message["raised"] for rank, message in heard.items() if "raised" in message}
    if raised:
        listed = "; ".join(f"rank {rank} raised {text}" for rank, text in raised.items())
        rule = "Ranks that share a row go on together or not at all."
        raise RanksApartError(explain("context parallel", listed, rule, "Mend what that rank says.", more="ranks-apart"))
    if apart := list(_apart(heard)):
        listed = apart[0] if apart[0].startswith("call ") else "; ".join(apart)
        rule = "Ranks that share a row make the same calls and hold one batch: keys, shapes, tokens, truth and layout."
        remedy = "Give these ranks the same samples (a sampler by data-parallel rank), settings and order of calls."
        raise RanksApartError(explain("context parallel", listed, rule, remedy, more="ranks-apart"))


def _apart(said: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    """What differs: `labels int64 [2, 8] on ranks [0, 1], int64 [2, 12] on ranks [2]`."""
    for name in dict.fromkeys(name for facts in said.values() for name in facts):
        held: dict[str, list[int]] = {}
        for rank, facts in said.items():
            told = facts.get(name, "absent")
            held.setdefault(next((other for other in held if _same(other, told)), told), []).append(rank)
        if len(held) > 1:
            yield f"{name} {', '.join(f'{value} on ranks {ranks}' for value, ranks in held.items())}"
