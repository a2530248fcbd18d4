"""Agreement: ranks that share a row compare what they hold, before any of them hands data to the others.

A rank with another layout, width or truth makes wrong data on every rank, or a collective that never ends, without an
error. So each rank says at every call what it holds, and one that holds a new shape waits to hear the others: where two
differ, it raises before any data moves. Where the shape is new to all, all of them raise. A rank that raises says that
too, and takes those who wait for it along. Costs one small message through the store that `init_process_group` met by (no
device, no collective of any backend), and the wait once for each new shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from collate_npu.arrays import host_array
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.keys import KEYS, with_role
from collate_npu.parallel.groups import mesh_group
from collate_npu.parallel.layout import ContextParallel
from collate_npu.segments import Segments

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others to say what they hold: as long as NCCL's collectives wait by default."""

Facts = dict[str, str | Callable[[], str]]
"""What one rank holds, by name. A function is a digest: it is called for a new shape alone, and does not make one."""


@contextmanager
def ranks_agree(cp: ContextParallel | None, *, timeout: timedelta | None = None) -> Iterator[Facts]:
    """Run the block on every rank of `cp.group`, then compare the facts it has put into what this yields.

    Raises `CollateError` on every rank where two ranks differ, where one raised inside the block, and where one does not
    come in `timeout` (`TIMEOUT`). Inside another such block of the same ranks it adds to that one. Does nothing
    without a group, and in a dataloader worker, which is no rank.
    """
    if cp is None or cp.group is None or cp.size == 1 or get_worker_info() is not None:
        yield {}
        return
    ranks = tuple(dist.get_process_group_ranks(mesh_group(cp.group)))
    meeting = _MEETINGS.setdefault(ranks, _Meeting(ranks))
    if meeting.open is not None:
        yield meeting.open
        return
    layout = f"{cp.layout}, size {cp.size}, tp {cp.tensor_parallel}, block {cp.block}, ulysses {cp.ulysses}, 2D {cp.mask_2d}"
    facts: Facts = {"layout": layout}
    meeting.open = facts
    try:
        yield facts
    except Exception as error:
        meeting.say({"raised": f"{type(error).__name__}: {error}"})
        raise
    finally:
        meeting.open = None
    meeting.compare(facts, timeout or TIMEOUT)


def batch_facts(batch: Mapping[str, Any], segments: Segments | None) -> Facts:
    """What a whole batch is: the shape of each key, and digests of its truth and of its tokens."""
    facts: Facts = {key: shape_of(value) for key, value in batch.items() if isinstance(value, Tensor)}
    facts.update({key: "None" for key, value in batch.items() if value is None})
    if segments is not None:
        facts |= {"segments": str(list(segments.shape)), "truth": partial(_digest, "segments", segments.array)}
    for key in with_role(batch, "tokens"):
        if KEYS[key].whole and isinstance(batch[key], Tensor):  # vectors may differ in their last bits
            facts[f"the values of {key}"] = partial(_digest, key, batch[key])
    return facts


@dataclass(slots=True)
class _Meeting:
    """What the same ranks have said to each other so far."""

    ranks: tuple[int, ...]
    count: int = 0
    seen: set[str] = field(default_factory=set)
    open: Facts | None = None

    def say(self, message: Mapping[str, Any]) -> int:
        """Leave the `count`-th message of this rank for the others, and take away one that nobody waits for any more."""
        store, rank = _store(), dist.get_rank()
        self.count += 1
        store.set(self._key(self.count, rank), json.dumps(message))
        if self.count > _KEPT:
            store.delete_key(self._key(self.count - _KEPT, rank))
        return self.count

    def compare(self, facts: Facts, timeout: timedelta) -> None:
        """Say what this rank holds, and hear the others where its shape is new."""
        plain = {name: value for name, value in facts.items() if isinstance(value, str)}
        shape = json.dumps(plain)
        if shape in self.seen:
            self.say({"facts": plain})
            return
        digests = {name: value() for name, value in facts.items() if not isinstance(value, str)}
        self._check(self._heard(self.say({"facts": plain, "digests": digests}), timeout))
        self.seen.add(shape)

    def _heard(self, count: int, timeout: timedelta) -> dict[int, dict[str, Any]]:
        store, heard = _store(), {}
        silent: list[int] = []
        for rank in self.ranks:
            key = self._key(count, rank)
            try:
                store.wait([key], timedelta(milliseconds=1) if silent else timeout)
            except RuntimeError:  # torch's DistStoreError among them
                silent.append(rank)
                continue
            heard[rank] = json.loads(store.get(key))
        if silent:
            rule = f"Every rank says what it holds before data is exchanged, and these did not in {timeout}."
            remedy = "Look at what they printed: they raised, or did not come to this step."
            raise CollateError(explain("context parallel", f"no word of ranks {silent}", rule, remedy))
        return heard

    def _check(self, heard: Mapping[int, Mapping[str, Any]]) -> None:
        raised = {rank: message["raised"] for rank, message in heard.items() if "raised" in message}
        if raised:
            listed = "; ".join(f"rank {rank} raised {text}" for rank, text in raised.items())
            rule = "Ranks that share a row go on together or not at all."
            raise CollateError(explain("context parallel", listed, rule, "Mend what that rank says."))
        said = {rank: message["facts"] for rank, message in heard.items()}
        digests = {rank: message["digests"] for rank, message in heard.items() if "digests" in message}
        if apart := [*_apart(said), *_apart(digests)]:
            rule = "Ranks that share a row hold one batch: the same keys, shapes, tokens, truth and layout."
            remedy = "Give these ranks the same samples (a sampler by data-parallel rank) and settings, and pad alike."
            raise CollateError(explain("context parallel", "; ".join(apart), rule, remedy))

    def _key(self, count: int, rank: int) -> str:
        return f"collate_npu/agreement/{'-'.join(map(str, self.ranks))}/{count}/{rank}"


def _apart(said: Mapping[int, Mapping[str, str]]) -> Iterator[str]:
    """What differs: `labels int64 [2, 8] on ranks [0, 1], int64 [2, 12] on ranks [2]`."""
    for name in dict.fromkeys(name for facts in said.values() for name in facts):
        held: dict[str, list[int]] = {}
        for rank, facts in said.items():
            held.setdefault(facts.get(name, "absent"), []).append(rank)
        if len(held) > 1:
            yield f"{name} {', '.join(f'{value} on ranks {ranks}' for value, ranks in held.items())}"


_KEPT = 1024
"""Messages of a rank that stay in the store: how many calls it may be ahead of one that waits."""

_MEETINGS: dict[tuple[int, ...], _Meeting] = {}


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store  # torch has no public name for it, 2.6 to 2.13

    return _get_default_store()


def _digest(key: str, value: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(host_array(key, value)).tobytes()).hexdigest()[:16]
