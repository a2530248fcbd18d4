"""Epochs of real loaders with workers, and in some a fault whose true outcome is known. The epoch after it is right, and at
the end no process, no shared memory and no more descriptors than of torch are left: `python -m soak loaders`."""

import gc
import os
import random
import resource
import signal
from collections import Counter
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from laws.compared import bits
from torch.utils.data import BatchSampler, DataLoader, Dataset, get_worker_info

from collate_npu import CollateError, PaddingCollator, wrap_collator
from collate_npu.collate import BalancedBatchSampler, transport

WIDTH, INLINE = 16, transport.INLINE_BYTES
OURS = PaddingCollator(pad_token_id=0, attention_mask="2d")
COLLATORS = {
    "padded": OURS,
    "left": PaddingCollator(pad_token_id=0, padding_side="left", consumer="transformers"),
    "wrapped": wrap_collator(OURS, consumer="transformers"),
    "packed": PaddingCollator(pad_token_id=0, packing=True, max_length=WIDTH, attention_mask="2d"),
    "flat": PaddingCollator(padding_free=True),
}
ENDS = {"bad": CollateError, "raises": KeyError, "killed": RuntimeError}
"""How an epoch with this fault ends; with a slow worker, or without shared memory, it is right."""
FAULTS = (*ENDS, "slow", "no room")


class Rows(Dataset):
    """Ragged samples, one of which has the fault, in a worker."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.fault, self.at = lengths, "", 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, n: int) -> dict[str, Any]:
        fault = self.fault if n == self.at and get_worker_info() else ""
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            raise KeyError(f"no sample {n}")
        if fault == "slow":
            sleep(0.1)
        ids = [n**8 + place for place in range(1, self.lengths[n] + 1)]
        return {"input_ids": ids, "labels": [*ids, 1] if fault == "bad" else ids, "weight": n / 2}


def no_room(_: int) -> None:
    """As a full /dev/shm: a file may be 64 bytes long."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


class Soak:
    def __init__(self, seed: int) -> None:
        self.draw, self.counts, self.problems = random.Random(seed), Counter[str](), list[str]()

    def run(self, epochs: int) -> None:
        self.epoch()  # torch starts what it keeps
        before = left()
        for _ in range(epochs):
            self.epoch()
        before["descriptors"] += self.counts["epochs: killed"] // 20  # 1 in 100 stays where torch's handler interrupts torch
        until = monotonic() + 20
        while max((more := {name: there - before[name] for name, there in left().items()}).values()) > 0:
            if monotonic() > until:
                self.problems.append(f"left behind: {more}")
                return
            sleep(0.2)

    def epoch(self) -> None:
        draw = self.draw
        data = Rows([draw.randint(1, 12) for _ in range(draw.randint(6, 20))])
        name, planned, fault = draw.choice([*COLLATORS]), draw.random() < 0.5, draw.choice(("", draw.choice(FAULTS)))
        how: dict[str, Any] = {"batch_size": draw.randint(1, 5)}
        if planned:
            rows = {"pack": name in ("packed", "flat"), "width": WIDTH if name == "packed" else None}
            how = {"batch_sampler": BalancedBatchSampler(data.lengths, max_tokens=40, seed=draw.randrange(99), **rows)}
        order = list(how.get("batch_sampler") or BatchSampler(range(len(data)), how["batch_size"], drop_last=False))
        how["collate_fn"] = COLLATORS[name]
        right = [bits(batch) for batch in DataLoader(data, **how)]
        data.fault, data.at, transport.INLINE_BYTES = fault, draw.randrange(len(data)), draw.choice((INLINE, 200))
        how |= {"num_workers": draw.choice((1, 1, 2)), "prefetch_factor": draw.randint(1, 4), "timeout": 60}
        how |= {"persistent_workers": not fault and draw.random() < 0.5}
        loader = DataLoader(data, **how, worker_init_fn=no_room if fault == "no room" else None)
        found, error = arrived(loader)
        what = f"{name}, {'planned' if planned else 'in order'}, {fault or 'healthy'}, {how['num_workers']} workers"
        self.judge(what, fault, found, error, right, order, data.at)
        data.fault, loader.worker_init_fn = "", None
        if (again := arrived(loader)) != (right, None):
            self.problems.append(f"the epoch after it: {what}: {again[1]!r}, {len(again[0])} of {len(right)} batches")
        self.counts["epochs after it"] += 1
        self.counts["batches"] += len(found) + len(again[0])
        self.counts[f"epochs: {fault or 'healthy'}"] += 1
        self.counts[f"epochs of rows {name}{', planned' * planned}"] += 1

    def judge(self, what: str, fault: str, found: list, error: Any, right: list, order: list, at: int) -> None:
        place = next(n for n, batch in enumerate(order) if at in batch)
        if fault not in ENDS:
            ok = error is None and found == right
        else:
            ok = type(error) is ENDS[fault] and found == right[: len(found)] and len(found) <= place
            row = list(order[place]).index(at)
            said = {"bad": f"row {row}: got", "raises": f"no sample {at}", "killed": "worker"}[fault]
            ok = ok and said in str(error)
        if not ok:
            self.problems.append(f"{what}: {error!r:.500}, {len(found)} of {len(right)} batches, sample {at} in {place}")


def arrived(loader: DataLoader) -> tuple[list[Any], Exception | None]:
    """What arrived, and the error that ended it, without what its frames hold."""
    found = []
    try:
        try:
            for batch in loader:
                found.append(bits(batch))
        except (ConnectionError, EOFError):  # a worker's socket ends a moment before torch hears that it was killed,
            sleep(1)  # and raises here
            raise
    except Exception as error:
        error = error.with_traceback(None)
        gc.collect()  # what its frames held would end in a forked worker, with noise
        return found, error
    return found, None


def left() -> dict[str, int]:
    """How much this process holds open, has in shared memory, and has running."""
    gc.collect()
    own = [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return {"descriptors": len(os.listdir("/proc/self/fd")), "shared memory": len(own), "processes": len(children)}
