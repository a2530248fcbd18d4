"""Known batches: the Segments of what adapters of this process handed over, for proof.

A mask may be left out where None is exact, so that a batch at the model does not tell its own padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from collate_npu.segments import Segments


class KnownBatches:
    """Holds the Segments of the batch that an adapted model runs in each thread, and of the last eight batches, by their
    tokens, while somebody watches."""

    def __init__(self) -> None:
        self.running: dict[int, Segments] = {}
        """By thread."""
        self.watchers = 0
        """How many watch: without one nothing is kept."""
        self._last: deque[tuple[Tensor, Segments]] = deque(maxlen=8)

    def watch(self, change: Literal[1, -1]) -> None:
        """Count one watcher more or less."""
        self.watchers += change
        if not self.watchers:
            self._last.clear()

    def keep(self, batch: Mapping[str, Any], segments: Segments) -> None:
        """Keep the Segments of a batch."""
        if isinstance(ids := batch.get("input_ids"), Tensor):
            self._last.append((ids.detach().cpu().clone(), segments))

    def find(self, ids: Tensor) -> Segments | None:
        """Return the Segments of the last batch that has these tokens; None for tokens of no batch."""
        return next(
            (segments for held, segments in reversed(self._last) if held.shape == ids.shape and (held == ids.cpu()).all()),
            None,
        )


KNOWN_BATCHES = KnownBatches()
