"""Noise: how far apart two right results are on this model, dtype and device, and how far off a wrong one is.

Right results differ, because another width or another batch rounds differently: by 1e-6 in float32, 1e-2 in bfloat16,
and anything between on a card whose matrix units round their inputs (TF32, HF32). So an absolute tolerance is either too
strict or passes a layer that ignores its mask. Measured instead: the noise, from the same samples with other tokens
appended and no mask, which no causal model may notice; and the wrong, from left padding whose mask does not reach the
layers. Costs four batches, and two to four more where the audit has not run them anyway. An encoder looks ahead, and a
model that pools reads the last token: there each sample is repeated, in batches of two and of four equal rows.
One logit is no measure: one expert chosen otherwise moves it by a tenth of what a wrong mask does. The relative error over
all tokens stays within 4 times the noise (20 families, bfloat16, three seeds each); a wrong mask is 15 to 230 times it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.proof.measure import IGNORED, Batch, Compared, Errors, Numbers, alone, measure, predicts_next

TIMES = 6
"""What passes is up to so many times the noise."""
FLOOR = 4
"""The noise is at least so many times what one matrix product loses here: a lucky run shows none."""
MARGIN = 2
"""What is wrong must be so many times what passes, or the audit proves nothing."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What passes, and whether that could be told from what is wrong."""

    noise: Errors
    wrong: Errors | None = None
    """The smallest error that must not pass; None where nothing wrong could be run."""

    def passes(self, found: Errors) -> bool:
        """Is each relative error at most `TIMES` the noise? NaN is not."""
        return not self.astray(found)

    def astray(self, found: Errors) -> tuple[str, ...]:
        """Which of logits, loss and gradient do not pass."""
        names = ("logits", "loss", "gradient")
        return tuple(name for name in names if not getattr(found, name) <= TIMES * getattr(self.noise, name))

    def tells(self, tolerance: float | None = None) -> bool:
        """Would a layer that ignores its mask be seen? By its logits or gradient; what is not finite is seen."""
        if self.wrong is None:
            return False
        if tolerance is not None:
            return not (self.wrong.largest <= tolerance and self.wrong.gradient <= tolerance)
        pairs = ((self.wrong.logits, self.noise.logits), (self.wrong.gradient, self.noise.gradient))
        return any(not wrong < MARGIN * TIMES * right for wrong, right in pairs if right > 0)


def measure_noise(
    model: Any, batches: Sequence[Sequence[Batch]], references: Sequence[Numbers], *, gradients: bool
) -> Errors:
    """The errors of right results: the samples again in two other batches, other tokens appended, no mask; of an encoder or
    a headless model each beside copies of itself."""
    again: list[Callable[[Sequence[Batch]], Numbers]]
    if predicts_next(model):  # the width of the batch, and one more chunk of 32 in a recurrent layer
        again = [partial(_widened, model, extra=extra, gradients=gradients) for extra in (0, 33)]
    else:
        again = [partial(alone, model, gradients=gradients, copies=copies) for copies in (2, 4)]
    noise = Compared.of((way(batch), known) for way in again for batch, known in zip(batches, references)).worst
    logits = least_noise(model, noise.logits)
    # the loss is one number, so its noise can be zero by luck; it averages that of hundreds of tokens, in float32
    loss = max(noise.loss, logits / 16, 4 * torch.finfo(torch.float32).eps)
    return Errors(noise.largest, logits, loss, least_noise(model, noise.gradient) if gradients else 0.0)


def least_noise(model: nn.Module, found: float) -> float:
    """The noise that was found, and at least what this model's dtype and device lose; NaN stays."""
    return max(found, FLOOR * product_error(next(model.parameters())))  # the first: NaN is not replaced


def product_error(like: Tensor) -> float:
    """The relative error of one matrix product, in the dtype of this tensor and on its device, against float64."""
    drawn = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).to(like.dtype)
    x, y = drawn.to(like.device)
    exact = drawn[0].double() @ drawn[1].double()
    return float(((x @ y).cpu().double() - exact).norm() / exact.norm())


def widened(length: int, width: int) -> Tensor:
    """Places of the tokens of a sequence, and of the same tokens again after it, up to this width."""
    return torch.arange(max(length, width)) % length


def _widened(model: Any, features: Sequence[Batch], *, extra: int, gradients: bool) -> Numbers:
    """All samples in one batch, as wide as the longest of them and so many tokens more."""
    lengths = [len(feature["input_ids"]) for feature in features]
    width = max(lengths) + extra
    ids = torch.stack([torch.tensor(feature["input_ids"])[widened(n, width)] for feature, n in zip(features, lengths)])
    unread = [IGNORED] * width
    labels = torch.tensor([(feature["labels"] + unread)[:width] for feature in features])
    return measure(model, {"input_ids": ids, "labels": labels}, lambda x: [row[:n] for row, n in zip(x, lengths)], gradients)
