"""Polarity: what the numbers of a mask can mean, whatever their dtype: True = attends, or a refusal.

Three polarities are in use: keep (True attends), masked (True is blocked) and bias (additive). Costs a pass over the
values where a dtype can hold one that means nothing, and none for bool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.arrays import Array, once
from collate_npu.errors import AmbiguousMaskError, CollateError, PolarityError, explain, explain_rows, shape_of

Polarity = Literal["keep", "masked", "bias"]
POLARITIES: tuple[Polarity, ...] = get_args(Polarity)
Bools = npt.NDArray[np.bool_]
REMEDY_DECLARE_POLARITY = "Pass polarity='keep' (True attends), 'masked' (True is blocked) or 'bias' (additive)."
REMEDY_CARRY_2D = "Carry attention_mask_2d (with segment_ids, where rows are packed) from the collator beside it."

BLOCKED_BELOW = -9984.0
"""A bias at or below this blocks: Megatron-core fills -1e4 (transformer/utils.py:54), which is -9984 in bfloat16."""
DECLARED_BELOW = -5000.0
"""A declared bias may have a position bias added to that fill, which lifts it: half of it is the border."""
FILLED_BELOW = -6e4
"""No bias of a position reaches so far (ALiBi's slopes are below 1): finite values beyond it are a fill."""


def check_polarity(polarity: str | None) -> None:
    """Raise for a name that is no polarity."""
    if polarity is not None and polarity not in POLARITIES:
        raise CollateError(explain("polarity", repr(polarity), "There are three polarities.", REMEDY_DECLARE_POLARITY))


class MaskValues:
    """A mask of any dtype as numbers; `read` gives it as True = attends under one polarity.

    `declared` is the polarity the caller named, or "bias" where the numbers themselves say so. Raises for NaN, infinities
    upwards, additive ints, values that neither block nor attend for certain, and a polarity the numbers contradict.
    bool has nothing to refuse and is not read; other dtypes are read once, in blocks that stay in cache.
    """

    def __init__(self, full: Tensor, declared: Polarity | None, key: str = "attention_mask") -> None:
        check_polarity(declared)
        self.full, self.key = full, key
        self._float = full.is_floating_point()
        below = DECLARED_BELOW if declared == "bias" else BLOCKED_BELOW
        self.additive = self._float and bool(self.range[0] <= below)
        self.packing_ids = not self._float and full.dtype != torch.bool and bool(self.range[1] > 1)
        """Whole numbers above 1: `1 1 2 2 0`."""
        self._refuse_values(declared)
        self.declared: Polarity | None = "bias" if self.additive else declared

    @property
    def got(self) -> str:
        """What arrived, as a message says it."""
        return shape_of(self.full)

    @once
    def raw(self) -> Array:
        """The values as they lie in memory; numpy has no bfloat16, whose bits are uint16."""
        return (self.full.view(torch.uint16) if self.full.dtype == torch.bfloat16 else self.full).numpy()

    def read(self, polarity: Polarity) -> Bools:
        """True = attends, in the shape of the mask; of a bool keep mask it is the mask itself."""
        return self.attending(self.raw, polarity)

    def attending(self, raw: Array, polarity: Polarity) -> Bools:
        """`read` for a part of `raw`."""
        if polarity == "keep" and raw.dtype == bool:
            return raw
        numbers = self._numbers(raw)
        attends: Bools = numbers > self._threshold if polarity == "bias" else np.equal(numbers, polarity == "keep")
        return attends

    @property
    def valued(self) -> bool:
        """Does it add something at places that attend (ALiBi, a position bias)?"""
        return self.declared == "bias" and any(bool((x[x > self._threshold] != 0).any()) for x in self._blocks())

    @once
    def range(self) -> tuple[Any, Any]:
        """The least value, NaN where there is one, and the largest; both 0 for a mask of nothing."""
        lows, highs = zip(*([(x.min(), x.max()) for x in self._blocks()] or [(0, 0)]))
        return np.min(lows), np.max(highs)

    @once
    def _threshold(self) -> float:
        """Half-way to the fill value, so that a bias added to fill or to 0 changes nothing."""
        if not self.additive:
            return -np.inf
        if np.isfinite(self.range[0]):
            return float(self.range[0]) / 2
        finite = min(float(x.min(initial=0, where=np.isfinite(x))) for x in self._blocks())
        return finite / 2 if finite <= FILLED_BELOW else float(np.finfo(np.float32).min)

    def _numbers(self, raw: Array) -> Array:
        """Half precision as float32."""
        if self.full.dtype == torch.bfloat16:
            return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
        return raw.astype(np.float32) if self.full.dtype == torch.float16 else raw

    def _blocks(self) -> Iterator[Array]:
        yield from (self._numbers(raw) for raw in blocks(self.raw))

    def _refuse_values(self, declared: Polarity | None) -> None:
        if self.full.dtype == torch.bool:
            low, high, binary = 0, 1, True
        else:
            low, high = self.range
            binary = not self._float or (not self.additive and all(((x == 0) | (x == 1)).all() for x in self._blocks()))
        if self._float and np.isnan(low) and self.full.ndim:
            rows = [(b, "NaN") for b, row in enumerate(self.full) if torch.isnan(row).any()]
            rule = "An additive mask holds finite numbers or -inf."
            raise CollateError(explain_rows(self.key, rows, rule, "Look for inf - inf or 0 * inf where it was built."))
        fill = "Fill blocked places with torch.finfo(dtype).min."
        kind: type[CollateError] = CollateError
        if not self._float and low < 0:
            rule = "An additive mask is a float tensor; ints are 1 and 0."
            remedy = "~ of a mask of integers gives -1 and -2: build it by mask == 0. Or convert it with .to(torch.float32)."
        elif self.packing_ids and self.full.ndim != 2:
            rule = "A mask of queries and keys holds 1 and 0; numbers above 1 are packing ids, which are [B, S]."
            remedy = "Convert it to bool, or pass the ids as [B, S]."
        elif self._float and high == np.inf:
            rule, remedy = "An additive mask holds finite numbers or -inf; +inf makes NaN of its row.", fill
        elif self.additive and declared in ("keep", "masked"):
            kind, rule, remedy = PolarityError, f"It is additive, not '{declared}'.", "Pass polarity='bias'."
        elif self._float and not self.additive and not binary:
            rule = f"No value blocks for certain: a bias blocks at {BLOCKED_BELOW:g} or below, other masks hold 0 and 1."
            kind, remedy = AmbiguousMaskError, fill
        elif declared == "bias" and not self._float:
            kind, rule, remedy = PolarityError, "A bias is a float tensor.", "Pass 'keep' or 'masked'."
        elif declared == "bias" and high > 0 and binary:
            rule = "Declared additive, it blocks nothing and adds 1: it is more likely a 0/1 mask."
            kind, remedy = PolarityError, "Pass polarity='keep' or 'masked'."
        else:
            return
        raise kind(explain(self.key, "{} with values from {} to {}".format(self.got, *self.range), rule, remedy))


BLOCK = 1 << 19
"""Elements that are read at once: a few arrays of so many bytes stay in a core's cache."""


def blocks(array: Array, most: int | None = None) -> Iterator[Array]:
    """All of `array` in parts of at most `BLOCK` elements, or an eighth; what only repeats (stride 0) comes once."""
    most = min(BLOCK, max(array.size // 8, 1 << 12)) if most is None else most
    if array.ndim and len(array) and array.strides[0] == 0:
        array = array[:1]
    if array.size <= most or not array.ndim:
        yield from [array] * (array.size > 0)
        return
    step = most * len(array) // array.size
    for low in range(0, len(array), max(step, 1)):
        yield from [array[low : low + step]] if step else blocks(array[low], most)
