"""A producer: some released software that makes masks, what it is given, and the batch it hands on.

Legend: B rows, S width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from drawing import STYLES, Draw, causal
from torch import Tensor
from verdicts import Case

from collate_npu import Pattern

CAUSAL = Pattern.of("causal")
BIDIRECTIONAL = Pattern.of("bidirectional")


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
    """Names from `honest.REASONS`: where a refusal of the bare emission is honest, beside those that hold for all."""
    note: str = ""

    @property
    def available(self) -> bool:
        return all(map(there, self.needs))


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
    from importlib.metadata import version

    major = int(version(name.partition(".")[0]).partition(".")[0]) if least or below else 0
    return (not least or major >= int(least)) and (not below or major < int(below))


def case(
    draw: Draw,
    attention_mask: Any,
    *,
    ids: np.ndarray | None = None,
    attends: np.ndarray | None = None,
    pattern: Pattern | None = CAUSAL,
    polarity: Any = None,
    silent: bool | np.ndarray = False,
    richer: bool = False,
    contrary: bool = False,
    tokens: Any = None,
    features: list[dict[str, Any]] | None = None,
    **more: Any,
) -> Case:
    """A batch with this mask, its tokens and their labels; the truth is the draw's and causal unless said."""
    ids = draw.ids if ids is None else ids
    input_ids = torch.from_numpy(draw.tokens.copy()) if tokens is None else tokens
    labels = torch.where(torch.from_numpy(ids > 0), input_ids, -100)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **more}
    features = samples(draw) if features is None else features
    attends = causal(ids) if attends is None else attends
    flags = {"silent": silent, "richer": richer, "contrary": contrary}
    return Case(draw, batch, ids, attends, pattern, polarity, features=features, **flags)


def emitted(draw: Draw, batch: dict[str, Any], *, ids: np.ndarray, features: list[dict[str, Any]], **more: Any) -> Case:
    """A whole batch as a collator makes it."""
    attends = more.pop("attends", None)
    attends = causal(ids) if attends is None else attends
    return Case(draw, dict(batch), ids, attends, more.pop("pattern", CAUSAL), features=features, **more)


def samples(draw: Draw) -> list[dict[str, Any]]:
    """What went in: one sample for each sequence of a packed row, else one for each row, holes marked."""
    if draw.packed:
        return [{"input_ids": sequence} for row in draw.sequences() for sequence in row]
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


def varies(bias: Tensor, draw: Draw) -> bool:
    """Does the additive mask say more of the attended places than that they are attended?"""
    attended = torch.from_numpy(causal(draw.ids))[:, None].expand(bias.shape)
    low = bias.masked_fill(~attended, torch.inf).amin(-1)
    high = bias.masked_fill(~attended, -torch.inf).amax(-1)
    return bool((high > low).any())


def plain_rows(mask: Tensor, draw: Draw) -> np.ndarray:
    """`[B]`: rows whose padding attends so that nothing tells them from a row without padding."""
    attends = mask.reshape(draw.shape[0], -1, *mask.shape[-2:])[:, 0].numpy()
    return (attends == np.tri(draw.shape[1], dtype=bool)).all(axis=(1, 2)) & ~draw.keep.all(axis=1)
