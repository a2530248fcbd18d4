"""Small loaders over and over: each way to start workers; a worker that is killed; a loader that is resumed; pages
pinned by a stand-in. Every batch is compared with the one that the process itself collates.
"""

import os
import random
import signal
import traceback
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils.data import DataLoader

from collate_npu import PaddingCollator

STARTS = ("fork", "fork", "fork", "fork", "forkserver", "spawn")
WAYS = ("whole", "whole", "pinned", "killed", "resumed")
SECONDS, NOTICED = 120, 10
"""A loader that hangs: a loaded machine takes tens of them to start a process. And until torch looks whether its workers
live, where they are not its own children: below a fork server no signal tells it."""


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of random lengths; a few are longer than a message through the pipe."""

    def __init__(self, seed: int, count: int) -> None:
        draw = random.Random(seed)
        self.lengths = [draw.choice((1, 7, 300, 40_000 if n % 5 == 0 else 20)) for n in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, n: int) -> dict[str, Any]:
        ids = (torch.arange(self.lengths[n]) * (n + 3)) % 50_000 + 1
        return {"input_ids": ids if n % 2 else ids.tolist(), "labels": ids}


class Soak:
    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.counts, self.problems = Counter[str](), list[str]()

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            how, start = self.draw.choice(WAYS), self.draw.choice(STARTS)
            if how == "resumed" and find_spec("torchdata") is None:
                how = "whole"
            self.counts[f"epochs: {how}, {start}"] += 1
            if problem := self._one(how, start, self.draw.randrange(1 << 30)):
                self.problems.append(f"{how}, {start}, seed {self.seed}: {problem}")

    def _one(self, how: str, start: str, seed: int) -> str:
        """What is wrong with an epoch; where it raises, the others still run."""
        try:
            return str(getattr(self, f"_{how}")(start, seed))
        except Exception:
            return traceback.format_exc()

    def _loader(self, start: str, seed: int, kind: Any = DataLoader, timeout: int = SECONDS) -> tuple[Any, list[Any]]:
        side = random.Random(seed).choice(("left", "right"))
        rows, collate = Rows(seed, 24), PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")
        wanted = [collate([rows[n] for n in range(at, at + 4)]) for at in range(0, 24, 4)]
        context = get_context(start)
        loader = kind(
            rows, 4, num_workers=2, collate_fn=collate, multiprocessing_context=context, timeout=timeout, prefetch_factor=2
        )
        return loader, wanted

    def _whole(self, start: str, seed: int) -> str:
        loader, wanted = self._loader(start, seed)
        return self._differ(list(loader), wanted)

    def _pinned(self, start: str, seed: int) -> str:
        """Without a card torch leaves pages as they are; what it walks through to pin them is what it walks with one."""
        loader, wanted = self._loader(start, seed)
        pinned = torch.utils.data._utils.pin_memory.pin_memory
        tensor_pin, torch.Tensor.pin_memory = torch.Tensor.pin_memory, lambda tensor, *_: tensor.clone()
        try:
            return self._differ([pinned(batch) for batch in loader], wanted)
        finally:
            torch.Tensor.pin_memory = tensor_pin

    def _killed(self, start: str, seed: int) -> str:
        """What comes before the loader notices is right, and it raises."""
        loader, wanted = self._loader(start, seed, timeout=NOTICED)
        batches, found = iter(loader), []
        try:
            found.append(next(batches))
            os.kill(random.Random(seed).choice(batches._workers).pid, signal.SIGKILL)
            found += batches
        except (RuntimeError, OSError, EOFError):  # also where torch asks a dead worker for a file it shared
            return self._differ(found, wanted[: len(found)])
        finally:
            with suppress(RuntimeError, OSError):  # torch forgets an iterator by its id, and the next may have the same
                batches._shutdown_workers()
        return self._differ(found, wanted)  # all was in the pipe already

    def _resumed(self, start: str, seed: int) -> str:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader, wanted = self._loader(start, seed, StatefulDataLoader)
        batches, taken = iter(loader), random.Random(seed).randrange(1, len(wanted))
        found = [next(batches) for _ in range(taken)]
        state = loader.state_dict()
        again, _ = self._loader(start, seed, StatefulDataLoader)
        again.load_state_dict(state)
        return self._differ(found + list(again), wanted)

    def _differ(self, found: list[Any], wanted: list[Any]) -> str:
        self.counts["batches"] += len(found)
        if len(found) != len(wanted):
            return f"{len(found)} batches of {len(wanted)}"
        same = [
            list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
            for mine, theirs in zip(found, wanted)
        ]
        return "" if all(same) else f"batch {same.index(False)} is another"
