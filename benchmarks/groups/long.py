"""Long runs: random batches one after the other, and what the process holds more of behind them than after a warm-up."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Absent, Contestant, Row
from collate_npu import (
    BatchAdapter,
    ContextParallel,
    PaddingCollator,
    Segments,
    check_delivery,
    describe,
    guard_first_batch,
    split_batch,
)
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.masks import dense, derive_segments
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.proof import watch
from collate_npu.testing import tiny_model

BATCHES, PROVED = 200_000, 400
"""How many, and of how many one goes through a model that is watched and guarded."""
MOST_MIB = 5.0
CONTAINERS: tuple[Callable[[list[int]], Any], ...] = (list, tuple, np.array, torch.tensor)
READERS = ("megatron", "verl", "mindspeed_dense")
LAYOUTS = ("zigzag", "contiguous")


class Batches:
    """Batches of other lengths, sides and containers each, through the rooms of the library; the same for a seed."""

    def __init__(self, model: Any = None, seed: int = 0) -> None:
        self.draw, self.model, self.done = Random(seed), model, 0

    def step(self, _: Any = None) -> None:
        """One batch: collated, adapted, split, described; kernels' arguments made and checked; now and then a proof."""
        draw, self.done = self.draw, self.done + 1
        often, wide = self.done % 20 == 0, draw.random() < 0.5 and self.done % 20 > 0
        side, hold = draw.choice(("left", "right")), draw.choice(CONTAINERS)
        width = 4 * draw.randint(1, 1000 if wide else 40)
        rows = [list(range(1, draw.randint(2, width + 1))) for _ in range(draw.randint(1, 6))]
        shape: dict[str, Any] = {"padding": "max_length", "max_length": width, "padding_side": side}
        batch = PaddingCollator(pad_token_id=0, attention_mask="2d", **shape)([{"input_ids": hold(row)} for row in rows])
        adapter = BatchAdapter(needs_mask_2d=True, consumer="verl" if wide else draw.choice(READERS))
        _, segments = adapter.with_segments(dict(batch))
        cp = ContextParallel(2, draw.randint(0, 1), layout=draw.choice(LAYOUTS))
        split_batch(batch, cp, segments=segments)
        if often:
            describe(batch)
            self._kernels(segments)
            assert derive_segments(dense(segments, polarity="masked"), keep=segments.keep) == segments
            flat = PaddingCollator(pad_token_id=0, padding_free=True)([{"input_ids": row} for row in rows])
            assert segments_from_batch(flat).sequence_lengths == segments.sequence_lengths
        if self.model is not None and self.done % PROVED == 0:
            self._proved({"input_ids": batch["input_ids"], "attention_mask": segments.keep.long()})

    def _kernels(self, segments: Segments) -> None:
        gated_delta_kwargs(segments, kernel="fla")
        fusion_attention_kwargs(segments)

    def _proved(self, batch: dict[str, Any]) -> None:
        check_delivery(self.model, batch)
        with torch.no_grad(), redirect_stdout(None), watch(steps=1, say=False) as seen:
            remove = guard_first_batch(self.model)
            self.model(**batch)
            remove()
        assert seen.kernels
        assert not seen.faults


def held() -> dict[str, tuple[int, int | None]]:
    """Every cache and every container that the package's modules and classes hold: how much is in it, and the most there
    may be; None where nothing says so."""
    found: dict[str, tuple[int, int | None]] = {}
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "collate_npu"}
    for name, module in [*modules.items()]:
        classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
        for holder in (module, *classes):
            owner = name if holder is module else f"{name}.{holder.__qualname__}"
            for key, value in vars(holder).items():
                if isinstance(value, Sized) and hasattr(value, "clear") and key != "__builtins__":
                    inner = value.values() if hasattr(value, "values") else ()
                    nested = sum(len(x) for x in inner if isinstance(x, (dict, list, set)))
                    found[f"{owner}.{key}"] = len(value) + nested, None
    for each in gc.get_objects():
        if type(each) is _lru_cache_wrapper and str(each.__module__).partition(".")[0] == "collate_npu":
            info = each.cache_info()
            found[f"{each.__module__}.{each.__qualname__}"] = info.currsize, info.maxsize
    return found


def grown(before: dict[str, tuple[int, int | None]]) -> dict[str, tuple[int, int | None]]:
    """What holds more than before though nothing bounds it, or more than its bound."""
    return {
        name: (now, most)
        for name, (now, most) in held().items()
        if (now > before.get(name, (0,))[0] if most is None else now > most)
    }


def resident() -> float:
    """MiB of this process in memory, without what glibc keeps of what was freed."""
    gc.collect()
    with suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass
class Long:
    """A case whose run is its first batch; the clock then takes the time of the next ones."""

    count: int
    group: str = "long"
    seed: int = 0
    absent: list[Absent] = field(default_factory=list)
    found: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What was measured, and its target."""

    @property
    def name(self) -> str:
        return f"{self.count:,} random batches"

    def ready(self) -> list[Contestant]:
        model = tiny_model("qwen3_next", vocab_size=257)
        for rows, width in product(range(1, 7), range(4, 161, 4)):  # torch keeps 60 KiB of each shape it has computed
            model(input_ids=torch.ones(rows, width, dtype=torch.int64))
        batches = Batches(model, self.seed)
        for _ in range(max(self.count // 10, 2 * PROVED)):
            batches.step()
        start, before, objects = resident(), held(), len(gc.get_objects())
        for _ in range(self.count):
            batches.step()
        left, full = grown(before), [now for now, most in held().values() if most]
        self.found = {
            "resident memory more than after a warm-up, MiB": (resident() - start, MOST_MIB),
            "live Python objects more": (len(gc.get_objects()) - objects, 200.0),
            f"caches and containers, of {len(before)}, that grew without a bound": (len(left), 0.0),
            f"entries of the fullest cache, of {len(full)} with a bound": (max(full), 256.0),
        }
        self.absent += [Absent(name, f"holds {now}, and nothing bounds it") for name, (now, _) in left.items()]
        return [Contestant("a batch behind them", batches.step)]

    def rows(self, seconds: dict[Contestant, list[float]]) -> list[Row]:
        (took,) = seconds.values()
        make = partial(Row, self.group, self.name, against="floor", ours=sorted(took)[len(took) // 2], theirs=None)
        return [make(name, ratio=found, target=most, unit="") for name, (found, most) in self.found.items()]


def cases(quick: bool) -> Iterator[Long]:
    yield Long(2_000 if quick else BATCHES)
