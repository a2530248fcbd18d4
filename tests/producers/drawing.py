"""What producers are asked to mask: rows in nine padding styles, drawn from the seed of the run, and their truth.

The truth is written here once more, in plain numpy, so that nothing it is compared with has built it.
Legend: B rows, S width, Q/K query and key places, L tokens of one sequence.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rotation import SEED

STYLES = ("none", "right", "left", "holes", "mixed", "empty_row", "packed", "packed_right", "packed_gaps")
PACKED = frozenset({"packed", "packed_right", "packed_gaps"})
ONE_SEQUENCE = tuple(style for style in STYLES if style not in PACKED)
"""Styles with at most one sequence a row."""
SIDED = ("none", "right", "left")
"""What a collator that pads samples can make."""
PAD = 0


@dataclass(frozen=True)
class Draw:
    """Rows to be masked: `ids` int64 `[B, S]`, 0 = padding, n = the row's n-th sequence; `tokens` stand beside them."""

    style: str
    ids: np.ndarray
    tokens: np.ndarray
    rng: np.random.Generator

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.shape

    @property
    def keep(self) -> np.ndarray:
        return self.ids > 0

    @property
    def lengths(self) -> list[int]:
        """Real tokens a row."""
        return self.keep.sum(axis=1).tolist()

    @property
    def packed(self) -> bool:
        return bool((self.ids > 1).any())

    def rows(self) -> list[list[int]]:
        """The tokens of each row without its padding."""
        return [row[keep].tolist() for row, keep in zip(self.tokens, self.keep)]

    def sequences(self) -> list[list[int]]:
        """The tokens of each sequence."""
        rows = zip(self.tokens, self.ids)
        return [row[ids == n].tolist() for row, ids in rows for n in range(1, ids.max(initial=0) + 1)]

    def number(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))


def draw(style: str, index: int) -> Draw:
    """The index-th batch of a style: the same each time with one seed."""
    rng = np.random.default_rng([SEED, STYLES.index(style), index])
    B, S = _shape(rng, index)
    rows = np.stack([_row(style, S, rng) for _ in range(B)])
    if style == "empty_row":
        rows[rng.integers(B)] = 0
    tokens = np.where(rows > 0, rng.integers(3, 100, (B, S)), PAD)
    return Draw(style, rows, tokens, rng)


def _shape(rng: np.random.Generator, index: int) -> tuple[int, int]:
    """Small widths mostly, one in seven as wide as high; in turn 1, 2, 3 and 64."""
    if index % 7 == 6:
        return (int(rng.integers(1, 5)),) * 2
    widths = (1, 2, 3, 64)[index // 5 % 4 :][:1] if index % 5 == 4 else (4, 5, 6, 7, 8, 9, 12, 17)
    return int(rng.integers(1, 5)), int(rng.choice(widths))


def _row(style: str, S: int, rng: np.random.Generator) -> np.ndarray:
    length = S if style in ("none", "packed", "packed_gaps") else int(rng.integers(1, S + 1))
    if style == "holes":
        keep = rng.random(S) < 0.7
        keep[rng.integers(S)] = True
        return keep.astype(np.int64)
    part = _sequences(length, rng) if style in PACKED else np.ones(length, np.int64)
    if style == "packed_gaps":
        gone = rng.random(int(part.max())) < 0.35
        part = _renumbered(np.where(gone[part - 1], 0, part)) if not gone.all() else part
    start = 0 if style in ("right", "packed_right") else S - length
    if style == "mixed":
        start = int(rng.choice([0, S - length, rng.integers(0, S - length + 1)]))
    row = np.zeros(S, np.int64)
    row[start : start + length] = part
    return row


def _sequences(length: int, rng: np.random.Generator) -> np.ndarray:
    """`1 1 2 3 3 3`: sequences that fill the length, some of one token."""
    starts = rng.random(length) < float(rng.choice([0.15, 0.3, 0.6]))
    starts[0] = True
    return np.cumsum(starts)


def _renumbered(row: np.ndarray) -> np.ndarray:
    order = {n: i for i, n in enumerate(dict.fromkeys(row[row > 0].tolist()), start=1)}
    return np.array([order.get(n, 0) for n in row.tolist()], np.int64)


def canonical(ids: Any) -> np.ndarray:
    """Ids renumbered 1, 2, ... in order of appearance, row by row, so that two namings of one truth are equal."""
    return np.stack([_renumbered(np.asarray(row)) for row in np.asarray(ids)])


# --- attention: bool [B, S, S], True = attends; rows of padded queries are all False


def together(ids: np.ndarray) -> np.ndarray:
    """Both places are real and of one sequence: full bidirectional attention."""
    return (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]


def causal(ids: np.ndarray) -> np.ndarray:
    S = ids.shape[1]
    return together(ids) & np.tri(S, dtype=bool)


def sliding(ids: np.ndarray, window: int) -> np.ndarray:
    at = np.arange(ids.shape[1])
    return causal(ids) & (at[:, None] - at[None, :] < window)


def first_places(ids: np.ndarray) -> np.ndarray:
    """`[B, S]`: for each real token, where its sequence begins."""
    first = np.zeros_like(ids)
    for b, row in enumerate(ids):
        for n in range(1, row.max(initial=0) + 1):
            first[b, row == n] = np.flatnonzero(row == n)[0]
    return first


def chunked(ids: np.ndarray, size: int) -> np.ndarray:
    """Chunks counted in places from the first token of the sequence."""
    chunk = (np.arange(ids.shape[1]) - first_places(ids)) // size
    return causal(ids) & (chunk[:, :, None] == chunk[:, None, :])


def prefix(ids: np.ndarray, length: int) -> np.ndarray:
    """Causal, and every token of a sequence sees its first `length` places."""
    place = np.arange(ids.shape[1]) - first_places(ids)
    return causal(ids) | (together(ids) & (place < length)[:, None, :])


def positions(ids: np.ndarray) -> np.ndarray:
    """How many tokens of its own sequence stand before each real token; 0 at padding."""
    before = causal(ids).sum(axis=2) - 1
    return np.where(ids > 0, before, 0)
