"""The yardstick: how far apart two right results are on this model, dtype and device, and how far off a wrong one is.

Right results differ, because another width or another batch rounds differently: by 1e-6 in float32, 1e-2 in bfloat16,
and anything between on a card whose matrix units round their inputs (TF32, HF32). So an absolute tolerance is either too
strict or passes a layer that ignores its mask. Measured instead: the noise, from the same samples with other tokens
appended and no mask, which no causal model may notice; and the wrong, from left padding whose mask does not reach the
layers. Costs four batches, and two to four more where the audit has not run them anyway. An encoder looks ahead, and a
model that pools reads the last token: there each sample is repeated, in batches of two and of four equal rows.

A single logit is no measure of noise: one expert chosen otherwise moves it by a tenth of what a wrong mask does. The
relative error over all tokens stays within 4 times the noise (20 families, bfloat16, three seeds each), and a wrong mask
is 15 to 230 times the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from collate_npu.integrations.delivery.alone import FLOOR, TIMES, product_error
from collate_npu.testing.measure import IGNORED, Batch, Errors, Numbers, alone, errors, predicts_next, run, worst

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        errors = zip(("logits", "loss", "gradient"), _relative(found), _relative(self.noise))
        return tuple(name for name, mine, right in errors if not mine <= TIMES * right)

    def tells(self, tolerance: float | None = None) -> bool:
        """Would a layer that ignores its mask be seen? By its logits or gradient; what is not finite is seen."""
        if self.wrong is None:
            return False
        if tolerance is not None:
            return not (self.wrong.largest <= tolerance and self.wrong.gradient <= tolerance)
        pairs = ((self.wrong.logits, self.noise.logits), (self.wrong.gradient, self.noise.gradient))
        return any(not wrong < MARGIN * TIMES * right for wrong, right in pairs if right > 0)


def _relative(found: Errors) -> tuple[float, float, float]:
    return found.logits, found.loss, found.gradient


def measure_noise(
    model: PreTrainedModel, batches: Sequence[Sequence[Batch]], references: Sequence[Numbers], *, gradients: bool
) -> Errors:
    """The errors of right results: the samples again in two other batches, other tokens appended, no mask.

    Of an encoder or a headless model: each sample beside copies of itself.
    """
    again: list[Callable[[Sequence[Batch]], Numbers]]
    if predicts_next(model):  # the width of the batch, and one more chunk of 32 in a recurrent layer
        again = [partial(_widened, model, extra=extra, gradients=gradients) for extra in (0, 33)]
    else:
        again = [partial(alone, model, gradients=gradients, copies=copies) for copies in (2, 4)]
    found = [errors(way(batch), reference) for way in again for batch, reference in zip(batches, references)]
    noise, floor = worst(found), FLOOR * product_error(model)
    logits = _at_least(noise.logits, floor)
    # the loss is one number, so its noise can be zero by luck; it averages that of hundreds of tokens, in float32
    loss = _at_least(noise.loss, max(logits / 16, 4 * torch.finfo(torch.float32).eps))
    return Errors(noise.largest, logits, loss, _at_least(noise.gradient, floor) if gradients else 0.0)


def _at_least(found: float, floor: float) -> float:
    """Unlike `max`, keeps NaN."""
    return found if not found < floor else floor


def _widened(model: PreTrainedModel, features: Sequence[Batch], *, extra: int, gradients: bool) -> Numbers:
    generator = torch.Generator().manual_seed(extra)
    lengths = [len(feature["input_ids"]) for feature in features]
    drawn = [token for feature in features for token in feature["input_ids"]]
    places = torch.randint(len(drawn), (len(features), max(lengths) + extra), generator=generator)
    ids = torch.tensor(drawn)[places]
    labels = torch.full_like(ids, IGNORED)
    for row, feature in enumerate(features):
        ids[row, : lengths[row]] = torch.tensor(feature["input_ids"])
        labels[row, : lengths[row]] = torch.tensor(feature["labels"])
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    return run(model, batch, lambda logits: [row[:n] for row, n in zip(logits, lengths)], gradients)
