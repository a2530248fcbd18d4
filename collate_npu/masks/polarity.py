"""Polarity: what the numbers of a mask can mean, whatever their dtype: True = attends, or a refusal.

One pass over the values. Three polarities are in use: keep (True attends), masked (True is blocked) and bias (additive).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import AmbiguousMaskError, CollateError, PolarityError, explain, explain_rows, shape_of
from collate_npu.masks.forms import Polarity

Bools = npt.NDArray[np.bool_]

KEY = "attention_mask"
BLOCKED_BELOW = -9984.0
"""A bias at or below this blocks: Megatron-core fills -1e4 (transformer/utils.py:54), which is -9984 in bfloat16."""
DECLARE = "Pass polarity='keep' (True attends), 'masked' (True is blocked) or 'bias' (additive)."


class MaskValues:
    """A mask of any dtype as numbers; `read` gives it as True = attends under one polarity.

    `declared` is the polarity the caller named, or "bias" where the numbers themselves say so. Raises for NaN, infinities
    upwards, additive ints, values that neither block nor attend for certain, and a polarity the numbers contradict.
    """

    def __init__(self, full: Tensor, declared: Polarity | None) -> None:
        self.full = full
        if full.is_floating_point():
            _refuse_nan(full)
            full = full.to(torch.float32) if full.dtype in (torch.bfloat16, torch.float16) else full
        array = full.numpy()
        self.array = array
        self.low: float = array.min() if array.size else 0
        self.high: float = array.max() if array.size else 0
        self.binary = array.dtype == bool or bool(((array == 0) | (array == 1)).all())
        self.additive = array.dtype.kind == "f" and self.low <= BLOCKED_BELOW
        self._refuse_values(declared)
        self.declared: Polarity | None = "bias" if self.additive else declared

    def read(self, polarity: Polarity) -> Bools:
        """True = attends, in the shape of the mask."""
        if polarity == "bias":
            attends: Bools = self.array > self._threshold()
            return attends
        equal: Bools = np.equal(self.array, polarity == "keep")
        return equal

    def _threshold(self) -> float:
        """Half-way to the fill value where it is a dtype's minimum, so that a bias added to it changes nothing."""
        return BLOCKED_BELOW if self.low > -6e4 else max(float(self.low) / 2, -1e9)

    def _refuse_values(self, declared: Polarity | None) -> None:
        got = f"{shape_of(self.full)} with values from {self.low} to {self.high}"
        if self.array.dtype.kind in "iu" and self.low < 0:
            rule = "An additive mask is a float tensor; ints are 1 and 0."
            raise CollateError(explain(KEY, got, rule, "Convert it with .to(torch.float32), or pass the keep mask."))
        if self.array.dtype.kind in "iu" and self.high > 1 and self.array.ndim != 2:
            rule = "A mask of queries and keys holds 1 and 0; numbers above 1 are packing ids, which are [B, S]."
            raise CollateError(explain(KEY, got, rule, "Convert it to bool, or pass the ids as [B, S]."))
        if self.array.dtype.kind == "f" and self.high == np.inf:
            rule = "An additive mask holds finite numbers or -inf; +inf makes NaN of its row."
            raise CollateError(explain(KEY, got, rule, "Fill blocked places with torch.finfo(dtype).min."))
        if self.additive and declared in ("keep", "masked"):
            raise PolarityError(explain(KEY, got, f"It is additive, not '{declared}'.", "Pass polarity='bias'."))
        if self.array.dtype.kind == "f" and not self.additive and not self.binary:
            rule = f"No value blocks for certain: a bias blocks at {BLOCKED_BELOW:g} or below, other masks hold 0 and 1."
            raise AmbiguousMaskError(explain(KEY, got, rule, "Fill blocked places with torch.finfo(dtype).min."))
        if declared == "bias" and self.array.dtype.kind != "f":
            raise PolarityError(explain(KEY, got, "A bias is a float tensor.", "Pass 'keep' or 'masked'."))
        if declared == "bias" and self.high > 0:
            rule = "Declared additive, it blocks nothing and adds 1: it is more likely a 0/1 mask."
            raise PolarityError(explain(KEY, got, rule, "Pass polarity='keep' or 'masked'."))
        if declared not in (None, "keep", "masked", "bias"):
            raise CollateError(explain("polarity", repr(declared), "There are three polarities.", DECLARE))


def _refuse_nan(full: Tensor) -> None:
    bad = torch.isnan(full.reshape(full.shape[0], -1)).any(dim=1) if full.numel() else torch.zeros(0)
    rows = [(b, "NaN") for b in bad.nonzero().flatten().tolist()]
    if rows:
        rule = "An additive mask holds finite numbers or -inf."
        raise CollateError(explain_rows(KEY, rows, rule, "Look for inf - inf or 0 * inf where it was built."))
