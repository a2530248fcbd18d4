"""Meetings: what ranks of one group tell each other, call by call, through the store that `init_process_group` met by.

No device and no collective takes part. Calls of the main thread are one stream, in their order. Those of other threads
(one that splits ahead, a device's backward) are one stream for each kind of call, so that they disturb nobody. A rank
writes to two places in turn: whoever is at the next call has read this one. So nothing grows, however long the run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock, RLock
from time import monotonic, sleep
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch.distributed as dist

from collate_npu.errors import CollateError, explain

_PLACES = 2


class RanksApartError(CollateError):
    """What every rank of a group hears of: ranks that differ, one that raised, one that did not come."""


Heard = dict[int, dict[str, Any]]
"""By rank, what it says of one call: its facts, or {"raised": why it does not go on}."""


@dataclass(slots=True)
class Meeting:
    """The talk of the ranks of one group, one of which is this process, for as long as the group exists."""

    ranks: tuple[int, ...]
    name: str
    """torch's of this group: another group of the same ranks has another, and meets by itself."""
    session: str = ""
    turn: Lock = field(default_factory=Lock)
    streams: dict[str, Stream] = field(default_factory=dict)
    open: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By thread, what it is about to say."""
    data: RLock = field(default_factory=RLock)
    """Held from what is said of a collective to its end: those of one group have one order on all ranks."""

    def greet(self, stream: str, timeout: timedelta) -> None:
        """Agree on a name that no earlier meeting in the same store had: ranks and groups that begin again count from 1
        together. Waits for the others, once in a world; a call given up here is told as soon as there is a name."""
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
        store.set(self._place("here", dist.get_rank()), uuid4().hex)
        for last in _tries(timeout):
            here = _found(store, [self._place("here", rank) for rank in self.ranks])
            session = f"{zlib.crc32(b'-'.join(here)):08x}"
            store.set(self._place("met", dist.get_rank()), session)
            met = _found(store, [self._place("met", rank) for rank in self.ranks])
            if all(here) and set(met) == {session.encode()}:
                self.session = session
                return
            if last:
                raise _silent([rank for rank, seen in zip(self.ranks, met) if seen != session.encode()], timeout)

    def say(self, stream: str, message: Mapping[str, Any]) -> None:
        """Tell the others the next thing in a stream, and wait for nobody."""
        with self._stream(stream).turn, _store() as store:
            self._say(store, stream, message)

    def exchange(self, stream: str, message: Mapping[str, Any], timeout: timedelta) -> tuple[int, Heard]:
        """Say it, and hear what each rank says at the same call; the call's number in its stream, and that. Where a rank
        does not come in time it raises `CollateError`, and tells those who come late."""
        with self._stream(stream).turn, _store() as store:
            number = self._say(store, stream, message)
            for last in _tries(timeout):
                heard = self._heard(store, stream, number)
                if len(heard) == len(self.ranks):
                    break
                if last:
                    error = _silent([rank for rank in self.ranks if rank not in heard], timeout)
                    self._set(store, stream, number, {"raised": str(error)})
                    raise error
        return number, heard

    def _say(self, store: Any, stream: str, message: Mapping[str, Any]) -> int:
        held = self._stream(stream)
        held.count += 1
        self._set(store, stream, held.count, message)
        return held.count

    def _set(self, store: Any, stream: str, number: int, message: Mapping[str, Any]) -> None:
        store.set(self._key(stream, number, dist.get_rank()), f"{number} {json.dumps(message)}")

    def _heard(self, store: Any, stream: str, number: int) -> Heard:
        """What those say who have come to this call; one that went past it without hearing the others had raised."""
        keys, heard = [self._key(stream, number, rank) for rank in self.ranks], {}
        texts = _found(store, keys) if number <= _PLACES else store.multi_get(keys)  # later every place exists
        for rank, text in zip(self.ranks, texts):
            at, _, message = text.decode().partition(" ")
            if int(at or 0) >= number:
                heard[rank] = json.loads(message) if int(at) == number else {"raised": "an error, and went on"}
        return heard

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
    turn: Lock = field(default_factory=Lock)
    missed: str = ""
    """Why this rank gave up its last call, where that was before the meeting had a name."""


_MEETINGS: WeakKeyDictionary[Any, Meeting] = WeakKeyDictionary()
"""By their group: one that is made again begins afresh."""


def meeting_of(group: Any) -> Meeting:
    """The meeting of this group: two threads with a group each, of the same ranks, do not wait for each other."""
    return _MEETINGS.setdefault(group, Meeting(tuple(dist.get_process_group_ranks(group)), group.group_name))


@contextmanager
def _store() -> Iterator[Any]:
    from torch.distributed.distributed_c10d import _get_default_store  # torch has no public name for it, 2.6 to 2.13

    try:
        yield _get_default_store()
    except RuntimeError as error:
        rule = "Ranks compare what they hold through the store of init_process_group, and it does not answer."
        remedy = "The process that keeps it (rank 0, or torchrun) has ended: look at what that one printed."
        raise CollateError(explain("context parallel", str(error).split("\n")[0], rule, remedy)) from error


def _tries(timeout: timedelta) -> Iterator[bool]:
    """Until the time is over, and once more; True at that last one. Whoever waits asks again and again: the store's own
    wait would hold the one connection that all threads of a process share."""
    start = monotonic()
    while (waited := monotonic() - start) < timeout.total_seconds():
        yield False
        sleep(min(waited / 4, 0.02))
    yield True


def _found(store: Any, keys: list[str]) -> list[bytes]:
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def _silent(ranks: list[int], timeout: timedelta) -> RanksApartError:
    rule = f"Every rank says what it holds before data is exchanged, and these did not in {timeout}."
    remedy = "Look at what they printed: they raised, did not come to this step, or another thread of theirs gathers now."
    return RanksApartError(explain("context parallel", f"no word of ranks {ranks}", rule, remedy, more="ranks-apart"))
