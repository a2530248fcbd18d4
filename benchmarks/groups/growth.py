"""Time for each token, from 2 thousand to 4 million of them: flat within 2x, so that no size has a cliff."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import truediv
from statistics import median

from benchmarks import peers
from benchmarks.inputs import Kind, copies, lengths_of, rows_of
from benchmarks.timing import Absent, Contestant, Row, row
from collate_npu import PaddingCollator

SIZES = ((4, 512), (44, 512), (44, 4096), (42, 32768), (170, 32768))
"""About 2k, 16k, 135k, 1M and 4M tokens."""
FLAT = 2.0


@dataclass
class Growth:
    """A case whose contestants are sizes; each is compared with the cheapest, token for token."""

    kind: Kind
    sizes: tuple[tuple[int, int], ...]
    group: str = "growth"
    absent: list[Absent] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kind}: a token, at the cheapest size"

    def ready(self) -> list[Contestant]:
        collator = PaddingCollator(peers.tokenizer("right"))
        return [
            Contestant(f"{rows}x{width}", collator, partial(copies, rows_of(self.kind, rows, width)), "floor", target=FLAT)
            for rows, width in self.sizes
        ]

    def rows(self, seconds: dict[Contestant, list[float]]) -> list[Row]:
        """A line a size: seconds of a token, against the cheapest size's."""
        tokens = [sum(lengths_of(*size)) for size in self.sizes]
        each = [[took / n for took in rounds] for rounds, n in zip(seconds.values(), tokens)]
        best = min(each, key=median)
        return [
            replace(row(self.group, self.name, one, best, mine, list(map(truediv, mine, best))), name=f"{n:,} tokens")
            for one, n, mine in zip(seconds, tokens, each)
        ]


def cases(quick: bool) -> Iterator[Growth]:
    for kind in ("lists", "numpy"):
        yield Growth(kind, SIZES[: 3 if quick else 5])
