"""A producer: some released software that makes masks, what it is given, and the batch it hands on.

Legend: B rows, S width.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from drawing import STYLES, Draw, causal, chunked, prefix, sliding, together
from torch import Tensor
from verdicts import Case

from collate_npu import Pattern

ATTENDS = {"sliding": sliding, "chunked": chunked, "prefix": prefix, "bidirectional": together}


@dataclass(frozen=True)
class Producer:
    """One row of the catalogue."""

    name: str
    needs: tuple[str, ...]
    """Modules without which it is skipped."""
    make: Callable[[Draw], Case | None]
    """None where this software cannot make such a batch."""
    styles: tuple[str, ...] = STYLES
    ambiguous: tuple[str, ...] = ()
    """Names from `honest.BY_NAME`: where a refusal of the bare emission is honest, beside what holds for all."""

    @property
    def available(self) -> bool:
        return all(map(there, self.needs))


def producer(
    name: str, needs: tuple[str, ...], make: Any, styles: Any = STYLES, /, *ambiguous: str, **settings: Any
) -> Producer:
    """A producer whose batches `make(draw, **settings)` makes."""
    return Producer(name, needs, partial(make, **settings), styles, ambiguous)


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
    return {
        "attends": ATTENDS[name](draw.ids, *size),
        "pattern": getattr(Pattern, name)(*size) if size else Pattern.of(name),
    }


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
