"""Noise: how far apart two right results are on this model, dtype and device, and how far off a wrong one is.

Right results differ: by 1e-6 in float32, 1e-2 in bfloat16, and anything between on a card whose matrix units round their
inputs. So it is measured, from the same samples with other tokens appended and no mask, which no causal model may notice (an
encoder, and a model that pools: each sample beside copies of itself); and the wrong, from left padding whose mask does not
reach the layers. Noise that no rounding makes is refused: there nothing can be proved. One logit is no measure: one expert
chosen otherwise moves it by a tenth of what a wrong mask does. The relative error over all tokens stays within 4 times the
noise (20 families, bfloat16, three seeds each); a wrong mask is 15 to 230 times it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.errors import CollateError, explain
from collate_npu.proof.measure import IGNORED, Batch, Compared, Errors, Numbers, alone, measure, predicts_next

TIMES = 6
"""What passes is up to so many times the noise."""
FLOOR = 4
"""The noise is at least so many times what one matrix product loses here: a lucky run shows none."""
MARGIN = 2
"""What is wrong must be so many times what passes, or the audit proves nothing."""
REMEDY = "Find what it reads beside its tokens (their number, their place in the batch, chance), or run it in a wider dtype"


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
    check_noise(model, noise.logits)
    logits = least_noise(model, noise.logits)
    # the loss is one number, so its noise can be zero by luck; it averages that of hundreds of tokens, in float32
    loss = max(noise.loss, logits / 16, 4 * torch.finfo(torch.float32).eps)
    return Errors(noise.largest, logits, loss, least_noise(model, noise.gradient) if gradients else 0.0)


def least_noise(model: nn.Module, found: float) -> float:
    """The noise that was found, and at least what this model's dtype and device lose; NaN stays."""
    return max(found, FLOOR * product_error(like(model)))  # the first: NaN is not replaced


def like(model: nn.Module) -> Tensor:
    """A tensor of the dtype and device of a model."""
    return next((each for each in model.parameters() if each.is_floating_point()), torch.zeros(()))


def check_noise(model: nn.Module, noise: float) -> None:
    """Raise `CollateError` where right results of a model are further apart than its dtype can round: by half of its digits.
    A limit that is measured on a model that is wrong by itself passes what is wrong."""
    x = like(model)
    if noise > (most := max(torch.finfo(x.dtype).eps, product_error(x)) ** 0.5):
        dtype = str(x.dtype).removeprefix("torch.")
        got = f"the same tokens in another width, or beside copies, give numbers {noise:.2g} apart"
        rule = f"That is more than {dtype} can round ({most:.1g}), so nothing can be proved."
        raise CollateError(explain("noise", got, rule, f"{REMEDY}."))


def product_error(x: Tensor) -> float:
    """The relative error of one matrix product, in the dtype of this tensor and on its device, against float64."""
    drawn = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    one, other = drawn.to(x.device)
    exact = drawn[0].double() @ drawn[1].double()
    return float(((one @ other).cpu().double() - exact).norm() / exact.norm())


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
