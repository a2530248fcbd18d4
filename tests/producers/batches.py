"""What producers are asked to mask, and what they hand on: rows in nine padding styles, their truth, and batches of them.

The truth is that of the tests' own oracle, so that nothing it is compared with has built it. A producer is some released
software that makes masks, what it is given, and the batch it hands on.
Legend: B rows, S width, Q/K query and key places, L tokens of one sequence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.metadata import version
from typing import Any

import numpy as np
import oracle
import strategies
import torch
from hypothesis import strategies as st
from torch import Tensor

from collate_npu import Pattern

PACKED = frozenset({"packed", "packed_right", "packed_gaps"})
ONE_SEQUENCE = (*strategies.ONE_SEQUENCE, "empty_row")
"""Styles with at most one sequence a row."""
STYLES, SIDED = (*ONE_SEQUENCE, *sorted(PACKED)), strategies.SIDED
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


@st.composite
def draws(draw: Any, styles: tuple[str, ...]) -> Draw:
    """Rows in one of these styles, some as wide as high, now and then wide ones."""
    drawn = strategies.Drawn(draw)
    style, B = drawn.pick(styles), 1 + drawn.below(4)
    S = B if drawn.below(7) == 6 else drawn.pick((*range(1, 10), 12, 17, 64))
    rows = [strategies.one_row(drawn, style, S) for _ in range(B)]
    if style == "empty_row":
        rows[drawn.below(B)] = [0] * S
    ids, rng = np.array(rows, np.int64), np.random.default_rng(drawn.below(1 << 32))
    return Draw(style, ids, np.where(ids > 0, rng.integers(3, 100, (B, S)), PAD), rng)


def _renumbered(row: np.ndarray) -> np.ndarray:
    order = {n: i for i, n in enumerate(dict.fromkeys(row[row > 0].tolist()), start=1)}
    return np.array([order.get(n, 0) for n in row.tolist()], np.int64)


def canonical(ids: Any) -> np.ndarray:
    """Ids renumbered 1, 2, ... in order of appearance, row by row, so that two namings of one truth are equal."""
    return np.stack([_renumbered(np.asarray(row)) for row in np.asarray(ids)])


# --- attention: bool [B, S, S], True = attends; rows of padded queries are all False


def attended(ids: np.ndarray, size: int = 0, *, pattern: str) -> np.ndarray:
    """Whom the tokens attend, by the oracle; sizes count places from the first token of the sequence."""
    return np.array(oracle.dense(ids.tolist(), pattern, size))[:, 0] & (ids > 0)[:, :, None]


together, causal = partial(attended, pattern="bidirectional"), partial(attended, pattern="causal")
sliding, prefix = partial(attended, pattern="sliding"), partial(attended, pattern="prefix")


def first_places(ids: np.ndarray) -> np.ndarray:
    """`[B, S]`: for each real token, where its sequence begins."""
    return np.array([[row.index(n) if n else 0 for n in row] for row in ids.tolist()])


def positions(ids: np.ndarray) -> np.ndarray:
    """How many tokens of its own sequence stand before each real token; 0 at padding."""
    return np.where(ids > 0, [oracle.positions(row) for row in ids.tolist()], 0)


# --- a batch


@dataclass(frozen=True)
class Case:
    """A batch as some software emits it, and what that software means by it."""

    draw: Draw
    batch: dict[str, Any]
    ids: np.ndarray
    """The truth, `[B, S]`, 0 = padding."""
    attends: np.ndarray
    """bool `[B, S, S]`, at real queries."""
    pattern: Pattern | None
    """What a user would declare; None where no pattern of ours says it."""
    polarity: Any = None
    flat: bool = False
    silent: bool | np.ndarray = False
    """The emission, or that of some rows (`[B]`), says nothing of padding: alone it means that all tokens are real."""
    richer: bool = False
    """It says more than who attends whom: values, or another thing to each head. No other mask stands for it."""
    contrary: bool = False
    """A 2D mask of the other polarity: alone, and undeclared, it is read as every stack reads one, and that is no fault."""
    labels_shifted: bool = False
    features: list[dict[str, Any]] = field(default_factory=list)
    form: Callable[[dict[str, Any]], Any] = dict
    """What holds the batch."""
    unpadded: bool = False
    """Rows of their own lengths: samples, and no batch yet."""

    @cached_property
    def keep(self) -> np.ndarray:
        return self.ids > 0

    @cached_property
    def packed(self) -> bool:
        return bool((self.ids > 1).any())

    @cached_property
    def gapped(self) -> bool:
        """Does padding stand between real tokens of a row?"""
        return any((np.diff(np.flatnonzero(row)) > 1).any() for row in self.keep)

    @property
    def mask(self) -> Any:
        return self.batch.get("attention_mask")

    @property
    def told_by_samples(self) -> bool:
        """Do the samples stand whole at one end of their rows, so that their lengths tell the padding?"""
        whole = self.draw.style in SIDED and len(self.features) == len(self.ids)
        return whole and all("input_ids" in feature for feature in self.features)

    @property
    def keys_alone(self) -> bool:
        """A 2D mask of 0 and 1 says who is real, not where a sequence ends."""
        mask = self.mask
        return isinstance(mask, Tensor) and tuple(mask.shape) == self.ids.shape and bool((mask <= 1).all())

    @cached_property
    def plain(self) -> bool:
        """Is it plain causal attention for these lengths?"""
        return bool((self.attends == causal(self.ids)).all())

    def bare(self) -> Case:
        """What the emission means alone."""
        if not np.any(self.silent):
            return self
        silent_B11 = np.broadcast_to(self.silent, len(self.ids))[:, None, None]
        ids = np.where(silent_B11[:, 0], 1, self.ids)
        return replace(self, ids=ids, attends=np.where(silent_B11, causal(ids), self.attends), silent=False)


# --- producers


@dataclass(frozen=True)
class Producer:
    """One row of the catalogue."""

    name: str
    needs: tuple[str, ...]
    """Modules without which it is skipped."""
    make: Callable[[Draw], Case | None]
    """None where this software cannot make such a batch."""
    styles: tuple[str, ...] = STYLES

    @property
    def available(self) -> bool:
        return all(map(there, self.needs))


def producer(name: str, needs: tuple[str, ...], make: Any, styles: Any = STYLES, /, **settings: Any) -> Producer:
    """A producer whose batches `make(draw, **settings)` makes."""
    return Producer(name, needs, partial(make, **settings), styles)


@cache
def there(module: str) -> bool:
    """Can it be imported here? A name with a version (`transformers>=5`) asks for that release."""
    name, _, least = module.partition(">=")
    name, _, below = name.partition("<")
    try:
        if importlib.util.find_spec(name) is None:
            return False
    except ImportError:
        return False
    major = int(version(name.partition(".")[0]).partition(".")[0]) if least or below else 0
    return (not least or major >= int(least)) and (not below or major < int(below))


def case(draw: Draw, attention_mask: Any, *, told: dict[str, Any] | None = None, **more: Any) -> Case:
    """A batch with this mask, its tokens, their labels and `more`; what is `told` of it stands in the fields of `Case`."""
    input_ids = torch.from_numpy(draw.tokens.copy())
    labels = torch.where(torch.from_numpy(draw.keep), input_ids, -100)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **more}
    return emitted(draw, batch, features=samples(draw), **(told or {}))


def emitted(
    draw: Draw, batch: dict[str, Any], *, ids: np.ndarray | None = None, attends: np.ndarray | None = None, **told: Any
) -> Case:
    """A whole batch as a collator makes it; the truth is the draw's and causal unless said."""
    ids = draw.ids if ids is None else ids
    told = {"pattern": Pattern.of("causal")} | told
    return Case(draw, dict(batch), ids, causal(ids) if attends is None else attends, **told)


def said(draw: Draw, name: str, *size: Any) -> dict[str, Any]:
    """Whom a pattern lets a token attend, and what a user would declare."""
    pattern = getattr(Pattern, name)(*size) if size else Pattern.of(name)
    return {"attends": attended(draw.ids, *size, pattern=name), "pattern": pattern}


def otherwise(draw: Draw, attends: np.ndarray) -> dict[str, Any]:
    """Attention that no pattern of ours says, unless it happens to be the causal one."""
    return {"attends": attends, "pattern": Pattern.of("causal") if (attends == causal(draw.ids)).all() else None}


def samples(draw: Draw) -> list[dict[str, Any]]:
    """What went in: one sample for each sequence of a packed row, else one for each row, holes marked."""
    if draw.packed:
        return [{"input_ids": sequence} for sequence in draw.sequences()]
    return [_sample(tokens, keep) for tokens, keep in zip(draw.tokens, draw.keep)]


def _sample(tokens: np.ndarray, keep: np.ndarray) -> dict[str, Any]:
    at = np.flatnonzero(keep)
    span = slice(at[0], at[-1] + 1) if len(at) else slice(0)
    sample = {"input_ids": tokens[span].tolist()}
    return sample if keep[span].all() else {**sample, "attention_mask": keep[span].astype(int).tolist()}


def keep_2d(draw: Draw, dtype: torch.dtype = torch.int64) -> Tensor:
    """What a tokenizer emits."""
    return torch.from_numpy(draw.keep.copy()).to(dtype)


def restarting(draw: Draw) -> Tensor:
    """`[B, S]`: positions that begin again with each sequence, as packing collators count; padding goes on counting."""
    out = np.zeros(draw.shape, np.int64)
    for b, row in enumerate(draw.ids):
        count = 0
        for s, n in enumerate(row):
            count = 0 if s and n and n != row[s - 1] else count
            out[b, s], count = count, count + 1
    return torch.from_numpy(out)


def bias_of(draw: Draw, mask: Tensor) -> dict[str, Any]:
    """What is told of an additive mask; of values beside the blocked ones no other mask stands for it."""
    attended = torch.from_numpy(causal(draw.ids))[:, None].expand(mask.shape)
    low, high = mask.masked_fill(~attended, torch.inf).amin(-1), mask.masked_fill(~attended, -torch.inf).amax(-1)
    return {"pattern": None, "polarity": "bias", "richer": bool((high > low).any())}


def plain_rows(mask: Tensor, draw: Draw) -> np.ndarray:
    """`[B]`: rows whose padding attends so that nothing tells them from a row without padding."""
    attends = mask.reshape(draw.shape[0], -1, *mask.shape[-2:])[:, 0].numpy()
    return (attends == np.tri(draw.shape[1], dtype=bool)).all(axis=(1, 2)) & ~draw.keep.all(axis=1)


def placed(lengths: list[int], width: int, side: str) -> np.ndarray:
    """Segment ids of samples padded to one side."""
    ids = np.zeros((len(lengths), width), np.int64)
    for row, length in zip(ids, lengths):
        row[slice(0, length) if side == "right" else slice(width - length, width)] = 1
    return ids


def joined(features: list[dict[str, Any]], width: int | None = None) -> np.ndarray:
    """Segment ids of one flat row; padding behind."""
    row = [n for n, feature in enumerate(features, start=1) for _ in feature["input_ids"]]
    return np.array([row + [0] * ((width or len(row)) - len(row))], np.int64)


def side_of(draw: Draw) -> str:
    return "left" if draw.style == "left" else "right"
