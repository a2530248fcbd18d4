"""Polarity: what the numbers of a mask can mean, whatever their dtype: True = attends, or a refusal.

Three polarities are in use: keep (True attends), masked (True is blocked) and bias (additive). Costs one or two passes
over the values.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import (
    REMEDY_DECLARE_POLARITY,
    AmbiguousMaskError,
    CollateError,
    PolarityError,
    explain,
    explain_rows,
    shape_of,
)

Polarity = Literal["keep", "masked", "bias"]
Bools = npt.NDArray[np.bool_]

BLOCKED_BELOW = -9984.0
"""A bias at or below this blocks: Megatron-core fills -1e4 (transformer/utils.py:54), which is -9984 in bfloat16."""
DECLARED_BELOW = -5000.0
"""A declared bias may have a position bias added to that fill, which lifts it: half of it is the border."""
FILLED_BELOW = -6e4
"""No bias of a position reaches so far (ALiBi's slopes are below 1): finite values beyond it are a fill."""


def check_polarity(polarity: str | None) -> None:
    """Raise for a name that is no polarity."""
    if polarity is not None and polarity not in get_args(Polarity):
        raise CollateError(explain("polarity", repr(polarity), "There are three polarities.", REMEDY_DECLARE_POLARITY))


class MaskValues:
    """A mask of any dtype as numbers; `read` gives it as True = attends under one polarity.

    `declared` is the polarity the caller named, or "bias" where the numbers themselves say so. Raises for NaN, infinities
    upwards, additive ints, values that neither block nor attend for certain, and a polarity the numbers contradict.
    """

    def __init__(self, full: Tensor, declared: Polarity | None, key: str = "attention_mask") -> None:
        check_polarity(declared)
        self.full, self.key = full, key
        if full.is_floating_point():
            _refuse_nan(key, full)
            full = full.float() if full.dtype in (torch.bfloat16, torch.float16) else full
        self.array = full.numpy()
        self.low: float = self.array.min() if self.array.size else 0
        self.high: float = self.array.max() if self.array.size else 0
        self.binary = self.array.dtype == bool or bool(((self.array == 0) | (self.array == 1)).all())
        below = DECLARED_BELOW if declared == "bias" else BLOCKED_BELOW
        self.additive = self.array.dtype.kind == "f" and self.low <= below
        self._refuse_values(declared)
        self.declared: Polarity | None = "bias" if self.additive else declared

    def read(self, polarity: Polarity) -> Bools:
        """True = attends, in the shape of the mask; of a bool keep mask it is the mask itself."""
        if polarity == "bias":
            attends: Bools = self.array > (self._threshold() if self.additive else -np.inf)
            return attends
        if polarity == "keep" and self.array.dtype == bool:
            return self.array
        equal: Bools = np.equal(self.array, polarity == "keep")
        return equal

    @property
    def valued(self) -> bool:
        """Does it add something at places that attend (ALiBi, a position bias)?"""
        return self.declared == "bias" and bool((self.array[self.read("bias")] != 0).any())

    @property
    def packing_ids(self) -> bool:
        """Whole numbers above 1: `1 1 2 2 0`."""
        return self.array.dtype.kind in "iu" and self.high > 1

    def _threshold(self) -> float:
        """Half-way to the fill value, so that a bias added to fill or to 0 changes nothing."""
        if np.isfinite(self.low):
            return float(self.low) / 2
        finite = float(self.array[np.isfinite(self.array)].min(initial=0))
        return finite / 2 if finite <= FILLED_BELOW else float(np.finfo(np.float32).min)

    def _refuse_values(self, declared: Polarity | None) -> None:
        got = f"{shape_of(self.full)} with values from {self.low} to {self.high}"
        kind = self.array.dtype.kind
        if kind in "iu" and self.low < 0:
            rule = "An additive mask is a float tensor; ints are 1 and 0."
            raise CollateError(explain(self.key, got, rule, "Convert it with .to(torch.float32), or pass the keep mask."))
        if self.packing_ids and self.array.ndim != 2:
            rule = "A mask of queries and keys holds 1 and 0; numbers above 1 are packing ids, which are [B, S]."
            raise CollateError(explain(self.key, got, rule, "Convert it to bool, or pass the ids as [B, S]."))
        if kind == "f" and self.high == np.inf:
            rule = "An additive mask holds finite numbers or -inf; +inf makes NaN of its row."
            raise CollateError(explain(self.key, got, rule, "Fill blocked places with torch.finfo(dtype).min."))
        if self.additive and declared in ("keep", "masked"):
            raise PolarityError(explain(self.key, got, f"It is additive, not '{declared}'.", "Pass polarity='bias'."))
        if kind == "f" and not self.additive and not self.binary:
            rule = f"No value blocks for certain: a bias blocks at {BLOCKED_BELOW:g} or below, other masks hold 0 and 1."
            raise AmbiguousMaskError(explain(self.key, got, rule, "Fill blocked places with torch.finfo(dtype).min."))
        if declared == "bias" and kind != "f":
            raise PolarityError(explain(self.key, got, "A bias is a float tensor.", "Pass 'keep' or 'masked'."))
        if declared == "bias" and self.high > 0 and self.binary:
            rule = "Declared additive, it blocks nothing and adds 1: it is more likely a 0/1 mask."
            raise PolarityError(explain(self.key, got, rule, "Pass polarity='keep' or 'masked'."))


def _refuse_nan(key: str, full: Tensor) -> None:
    bad = torch.isnan(full.reshape(full.shape[0], -1)).any(dim=1) if full.ndim and full.numel() else torch.zeros(0)
    rows = [(b, "NaN") for b in bad.nonzero().flatten().tolist()]
    if rows:
        rule = "An additive mask holds finite numbers or -inf."
        raise CollateError(explain_rows(key, rows, rule, "Look for inf - inf or 0 * inf where it was built."))
