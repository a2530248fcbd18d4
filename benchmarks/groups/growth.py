"""How the cost of every public function that takes a batch grows with rows, width, tokens and texts: four decades, and the
exponents over the last two.

Time and peak memory of n rows, n places a row, n tokens in one flat row: 1 is linear, and a dense form grows by 2 in width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import log10
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.public import CALLS
from benchmarks.timing import Absent, Contestant, Row
from collate_npu import Segments

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from live_bytes import peak_bytes

AXES: dict[str, Callable[[int], Segments]] = {
    "rows": lambda n: Segments.from_lengths([9 + b % 8 for b in range(n)], 16),
    "width": lambda n: Segments.from_lengths([n, n // 2]),
    "tokens": lambda n: Segments.from_lengths([[16] * (n // 16)]),
}
SIZES = {axis: [first * 10**k for k in range(5)] for axis, first in (("rows", 1), ("width", 16), ("tokens", 160))}
SLACK = 0.2
"""What an exponent may be above its own: 2.5 times over two decades, as memory is slower than a cache."""


LEAST = 1 << 16
"""Bytes of an input and an output below which what a call takes is its own."""


def size_of(value: Any) -> int:
    """Bytes of an input, or of an output; a list holds eight a number."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, (list, tuple)):
        return 8 * len(value) if value and isinstance(value[0], int) else sum(map(size_of, value))
    if isinstance(value, str):
        return sys.getsizeof(value)
    return value.array.nbytes if isinstance(value, Segments) else getattr(value, "nbytes", 0)


def unasked(given: dict[str, Any]) -> list[Any]:
    """The same, with Segments that nobody has asked anything."""
    return [copy(value) if name == "segments" else value for name, value in given.items()]


@dataclass
class Growth:
    """A case whose contestants are the sizes of one axis."""

    what: str
    axis: str
    decades: int = 5
    group: str = "growth"
    absent: list[Absent] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Of each size: bytes at the peak, and of the input and the output."""

    @property
    def name(self) -> str:
        return f"{self.what}: {self.axis}"

    def ready(self) -> list[Contestant]:
        call, self.memory, made = CALLS[self.what], [], []
        for n in SIZES[self.axis][: self.decades]:
            if n <= call.most:
                given = call.made(AXES[self.axis](n))
                fresh = partial(unasked, given)
                peak = peak_bytes(lambda fresh=fresh: call.work(*fresh()))
                self.memory.append((peak, max(size_of(given) + size_of(call.work(*fresh())), LEAST)))
                made.append(Contestant(f"{n:,}", lambda given: call.work(*given), fresh))
        return made

    def rows(self, seconds: dict[Contestant, list[float]]) -> list[Row]:
        """The exponents of time and of memory over the last two decades."""
        first, _, last = [*seconds][-3:]
        power = CALLS[self.what].width if self.axis == "width" else 1
        pairs = [*zip(seconds[first], seconds[last])]
        used, held = self.memory[-1]
        points = [[n, median(took), peak] for n, took, (peak, _) in zip(SIZES[self.axis], seconds.values(), self.memory)]
        facts = {"power": power, "times": used / held, "size": points[-1][0], "points": points}
        early, late = (median(side) for side in zip(*pairs))
        make = partial(Row, self.group, self.name, against="floor", ours=early, target=power + SLACK, unit="")
        make = partial(make, rounds=len(pairs), facts=(facts, {}))
        slower, larger = (log10(grown) / 2 for grown in (late / early, used / self.memory[-3][0]))
        return [
            make(f"time, {first.name} to {last.name}", theirs=late, ratio=slower),
            make(f"memory, {used / held:.1f} times what goes in and out", theirs=None, ratio=larger),
        ]


def cases(quick: bool) -> Iterator[Growth]:
    for what, call in CALLS.items():
        yield from (Growth(what, axis, 3 if quick else 5) for axis in call.axes.split())
