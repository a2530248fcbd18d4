"""Agreement: ranks that share a row compare what they hold, at every call, before they exchange data.

If one rank holds other tokens, padding or another layout, or skips a call, then every rank gets wrong data, or a collective
never ends, without an error. A comparison waits for the slowest rank, takes three round trips to the store, and copies the
batch to the host for a checksum: 0.14 ms for int64 `[8, 4096]`. Ranks may round floating values differently, so these are
added up on their device: 9 ms for float32 `[8, 4096, 256]` on a CPU.

Ranks exchange messages through the store of `init_process_group`; no device and no collective takes part. The calls of the
main thread are one stream, in their order. The calls of other threads (one that splits ahead, a device's backward) are one
stream for each kind of call, so that streams do not wait for each other. A rank writes to two places in turn: a rank that
is at the next call has read this one. So the store does not grow.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial, wraps
from threading import Lock, RLock, get_ident, main_thread
from time import monotonic, sleep
from typing import Any, Literal, ParamSpec, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from collate_npu.arrays import host_array
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.keys import KEYS, SAMPLE, TOKENS, Key
from collate_npu.parallel.layout import ContextParallel, mesh_group, timeout_of
from collate_npu.segments import Segments

_PLACES = 2


class RanksApartError(CollateError):
    """Ranks of a group differ, one of them raised, or one did not come: every rank of the group raises this."""


Messages = dict[int, dict[str, Any]]
"""Facts of one call by rank, or {"raised": the reason} for a rank that stops."""


@dataclass(slots=True)
class Meeting:
    """Exchanges facts between the ranks of one group for as long as the group exists."""

    ranks: tuple[int, ...]
    name: str
    """torch's name of this group: two groups of the same ranks have two names, and meet apart."""
    session: str = ""
    turn: Lock = field(default_factory=Lock)
    streams: dict[str, Stream] = field(default_factory=dict)
    open: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The facts that each thread is about to send."""
    data: RLock = field(default_factory=RLock)
    """Held from the exchange before a collective to its end, so that all ranks run a group's collectives in one order."""

    def greet(self, stream: str, timeout: timedelta) -> None:
        """Agree on a name that no earlier meeting in this store has, so that ranks that start again count from 1 together.

        Waits for the others, once in a world. If this rank gives up a call here, it reports that once there is a name.
        """
        with self.turn, _store() as store:
            if self.session:
                return
            try:
                self._meet(store, timeout)
            except CollateError as error:
                self._stream(stream).count += 1
                self._stream(stream).missed = str(error)
                raise
            for name, held in self.streams.items():
                for number in range(max(1, held.count - _PLACES + 1), held.count + 1):
                    self._set(store, name, number, {"raised": held.missed})

    def _meet(self, store: Any, timeout: timedelta) -> None:
        store.set(self._place("came", dist.get_rank()), uuid4().hex)
        for last in _tries(timeout):
            came = _read(store, [self._place("came", rank) for rank in self.ranks])
            session = f"{zlib.crc32(b'-'.join(came)):08x}"
            store.set(self._place("met", dist.get_rank()), session)
            met = _read(store, [self._place("met", rank) for rank in self.ranks])
            if all(came) and set(met) == {session.encode()}:
                self.session = session
                return
            if last:
                raise _silent([rank for rank, seen in zip(self.ranks, met) if seen != session.encode()], timeout)

    def say(self, stream: str, message: Mapping[str, Any]) -> int:
        """Send the next message of a stream to the other ranks, without waiting, and return its number in the stream."""
        with (held := self._stream(stream)).turn, _store() as store:
            held.count += 1
            self._set(store, stream, held.count, message)
            return held.count

    def exchange(self, stream: str, message: Mapping[str, Any], timeout: timedelta) -> tuple[int, Messages]:
        """Send a message, and return the call's number in its stream and what each rank sent at the same call. Raises
        `CollateError` where a rank is late, and tells that rank when it comes."""
        with self._stream(stream).turn, _store() as store:
            number = self.say(stream, message)
            for last in _tries(timeout):
                messages = self._messages(store, stream, number)
                if len(messages) == len(self.ranks):
                    break
                if last:
                    error = _silent([rank for rank in self.ranks if rank not in messages], timeout)
                    self._set(store, stream, number, {"raised": str(error)})
                    raise error
        return number, messages

    def _set(self, store: Any, stream: str, number: int, message: Mapping[str, Any]) -> None:
        store.set(self._key(stream, number, dist.get_rank()), f"{number} {json.dumps(message)}")

    def _messages(self, store: Any, stream: str, number: int) -> Messages:
        """Return the messages of the ranks that came to this call. A rank that is past it without an exchange raised."""
        keys, messages = [self._key(stream, number, rank) for rank in self.ranks], {}
        texts = _read(store, keys) if number <= _PLACES else store.multi_get(keys)  # later every place exists
        for rank, text in zip(self.ranks, texts):
            at, _, message = text.decode().partition(" ")
            if int(at or 0) >= number:
                messages[rank] = json.loads(message) if int(at) == number else {"raised": "an error, and went on"}
        return messages

    def _stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream())

    def _key(self, stream: str, number: int, rank: int) -> str:
        return f"collate_npu/{self.session}/{stream}/{number % _PLACES}/{rank}"

    def _place(self, what: str, rank: int) -> str:
        return f"collate_npu/{self.name}/{'-'.join(map(str, self.ranks))}/{what}/{rank}"


@dataclass(slots=True)
class Stream:
    """Calls that every rank makes in one order."""

    count: int = 0
    turn: RLock = field(default_factory=RLock)
    missed: str = ""
    """Why this rank gave up its last call, if the meeting had no name yet."""


_MEETINGS: WeakKeyDictionary[Any, Meeting] = WeakKeyDictionary()
"""The meeting of each group: a group that is made again has a new one."""


def meeting_of(group: Any) -> Meeting:
    """Return the meeting of this group: two threads with one group each, of the same ranks, do not wait for each other."""
    return _MEETINGS.setdefault(group, Meeting(tuple(dist.get_process_group_ranks(group)), group.group_name))


@contextmanager
def _store() -> Iterator[Any]:
    from torch.distributed.distributed_c10d import _get_default_store  # torch has no public name for it, 2.6 to 2.13

    try:
        yield _get_default_store()
    except RuntimeError as error:
        rule = "Ranks compare their batches through the store of init_process_group, and the store does not answer."
        remedy = "Its process (rank 0, or torchrun) has ended: look at what that process printed."
        raise CollateError(explain("context parallel", str(error).split("\n")[0], rule, remedy)) from error


def _tries(timeout: timedelta) -> Iterator[bool]:
    """Yield False until the time is over, then True once.

    Ranks poll: the store's own wait would hold the one connection that all threads of a process share.
    """
    start = monotonic()
    while (waited := monotonic() - start) < timeout.total_seconds():
        yield False
        sleep(min(waited / 4, 0.02))
    yield True


def _read(store: Any, keys: list[str]) -> list[bytes]:
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def _silent(ranks: list[int], timeout: timedelta) -> RanksApartError:
    rule = f"Ranks compare their batches before they exchange data, and these ranks sent nothing in {timeout}."
    remedy = "Look at what they printed: an error, another step, or a second thread that gathers now."
    return RanksApartError(explain("context parallel", f"no message from ranks {ranks}", rule, remedy, more="ranks-apart"))


P = ParamSpec("P")
T = TypeVar("T")
Call = Literal["block", "split", "gather", "backward"]
Facts = dict[str, str | Callable[[], str]]
"""Facts of one rank by name. A function computes a digest, and is called only where there are other ranks."""


@contextmanager
def ranks_agree(cp: ContextParallel | None, *, timeout: timedelta | None = None, call: Call = "block") -> Iterator[Facts]:
    """Run the block on every rank of `cp.group`, then compare the facts it has put into what this yields.

    Raises `CollateError` on every rank where two ranks differ, where one raised inside the block, and where one does not
    come in `timeout` (by default the group's own, of `init_process_group`). Inside another such block of the same thread
    and ranks it adds to that one, unless a collective follows it. `call` names the block: ranks do the same things
    in the same order. Does nothing without a group, on a group of torch's fake backend, and in a dataloader worker, which
    is no rank.
    """
    if cp is None or cp.group is None or cp.size == 1 or get_worker_info() is not None:
        yield {}
        return
    group, thread = mesh_group(cp.group), get_ident()
    if dist.get_backend(group) == "fake":
        yield {}
        return
    meeting, timeout = meeting_of(group), timeout or timeout_of(group)
    outer = meeting.open.get(thread)
    if outer is not None and call in ("block", "split"):
        yield outer
        return
    layout = f"{cp.layout}, size {cp.size}, tp {cp.tensor_parallel}"
    facts: Facts = {"call": call, "layout": layout}
    stream = "main" if thread == main_thread().ident and call != "backward" else call
    meeting.greet(stream, timeout)
    meeting.open[thread] = facts
    try:
        yield facts
        own = {name: value if isinstance(value, str) else value() for name, value in facts.items()}
    except Exception as error:
        if not isinstance(error, RanksApartError):  # from a gather in this block: all ranks have it
            meeting.say(stream, {"raised": f"{type(error).__name__}: {error}"})
        raise
    finally:
        meeting.open.pop(thread)
        if outer is not None:
            meeting.open[thread] = outer
    number, messages = meeting.exchange(stream, own, timeout)
    _check(messages)
    facts["number"] = f"{stream} {number}"


def turn_of(cp: ContextParallel) -> AbstractContextManager[Any]:
    """Return a lock for one thread at a time, which agrees on a collective of this group and runs it. In another order on
    each rank, threads would wait for each other."""
    return nullcontext() if cp.group is None or cp.size == 1 else meeting_of(mesh_group(cp.group)).data


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, which runs outside of torch.compile's graphs if it gets a `cp` with a group: ranks exchange
    messages on the host."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        for given in (*args[1:3], kwargs.get("cp")):
            if isinstance(given, ContextParallel) and given.group is not None:
                return outside_graphs(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return called


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function as torch.compile leaves it out of its graphs. Does not load the compiler, which takes seconds."""
    return _disabled(function) if "torch._dynamo" in sys.modules else function


@cache
def _disabled(function: Callable[..., Any]) -> Any:
    return cast(Any, torch.compiler).disable(function)


def batch_facts(batch: Mapping[str, Any], segments: Segments | None, *, keys: Mapping[str, Key] = KEYS) -> Facts:
    """Return what ranks compare of a batch: each key's shape or number, digests of the segments, of masks and of whole
    numbers a token, and sums of floating values a token or a sample."""
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
                key_rule = rule or (TOKENS if part.ndim > 1 else SAMPLE)
                known = key_rule.role == "mask" and part.ndim > 2 and segments is not None  # a dense one, by its segments
                if key_rule.kind in ("tokens", "positions", "truth", "offsets") and not known:
                    rounded = part.is_floating_point() and "mask" not in name
                    facts[f"{'a sum' if rounded else 'the values'} of {name}"] = partial(
                        weighted_sum if rounded else digest, part
                    )
            elif part is None or (rule is not None and isinstance(part, (int, float, list, tuple, np.ndarray))):
                facts[name] = repr(part) if part is None or isinstance(part, (int, float)) else partial(digest, part)
    return facts


def digest(value: Any) -> str:
    """Return a CRC-32 of the numbers, and of the row ends of a jagged tensor. It always shows a change within 4 bytes."""
    if isinstance(value, Tensor) and value.is_nested:
        return " ".join(map(digest, (value.values(), cast(Any, value).offsets())))
    try:
        return f"{zlib.crc32(np.ascontiguousarray(host_array('facts', value)).data):08x}"
    except CollateError:  # meta, fake: no numbers to compare
        return "not read"


_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""How far sums of two ranks may differ, as a share of the norm of all values: in bfloat16 five deviations of a last bit."""


def weighted_sum(value: Tensor) -> str:
    """Return a sum of the values, each weighed by its row, token and place in the vector, and how far it may differ."""
    value = (value.values() if value.is_nested else value).detach()
    if value.layout is not torch.strided or value.device.type == "meta":
        return "not read"
    x_NH = value.reshape(-1, value.shape[-1] if value.ndim > 2 else 1)
    x_NH = x_NH.float() if x_NH.element_size() < 4 else x_NH
    weights_N, weights_H = (torch.arange(1, n + 1, dtype=torch.float64).mul_(2.3999632).cos_() for n in x_NH.shape)
    sums_N = (x_NH @ weights_H.to(x_NH)).cpu().double()
    tolerance = _ROUNDING.get(value.dtype, 2e-2) * float(torch.linalg.vector_norm(x_NH))
    return f"{float(sums_N @ weights_N):.9g} within {tolerance:.3g}"


def _same(one: str, other: str) -> bool:
    """True for equal texts, or for two sums that differ by rounding."""
    if one == other or " within " not in one or " within " not in other:
        return one == other
    (a, near), (b, _) = (map(float, text.split(" within ")) for text in (one, other))
    return abs(a - b) <= near


def digest_offsets(offsets: Tensor | Sequence[int] | None) -> str:
    """Return an equal digest for equal numbers, whatever type holds them."""
    return "none" if offsets is None else digest(host_array("cu_seqlens", offsets).astype(np.int64))


def _check(messages: Messages) -> None:
    raised = {rank: message["raised"] for rank, message in messages.items() if "raised" in message}
    if raised:
        listed = "; ".join(f"rank {rank} raised {text}" for rank, text in raised.items())
        rule = "If one rank raises, all ranks that share its row stop."
        raise RanksApartError(explain("context parallel", listed, rule, "Fix the error of that rank.", more="ranks-apart"))
    if apart := list(_apart(messages)):
        listed = apart[0] if apart[0].startswith("call ") else "; ".join(apart)
        rule = "Ranks that share a row make the same calls and hold one batch: keys, shapes, tokens, truth and layout."
        remedy = "Give these ranks the same samples (a sampler by data-parallel rank), settings and order of calls."
        raise RanksApartError(explain("context parallel", listed, rule, remedy, more="ranks-apart"))


def _apart(messages: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    """Yield each fact that differs: `labels int64 [2, 8] on ranks [0, 1], int64 [2, 12] on ranks [2]`."""
    for name in dict.fromkeys(name for facts in messages.values() for name in facts):
        held: dict[str, list[int]] = {}
        for rank, facts in messages.items():
            value = facts.get(name, "absent")
            held.setdefault(next((other for other in held if _same(other, value)), value), []).append(rank)
        if len(held) > 1:
            yield f"{name} {', '.join(f'{value} on ranks {ranks}' for value, ranks in held.items())}"
