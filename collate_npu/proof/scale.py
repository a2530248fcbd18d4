"""Scale: how far apart a stack's right answers are, and how far off a wrong one is, from samples that it is asked for alone.

Right answers that must be equal: a sample again, a sample with tokens behind it, a sample beside a copy of itself. A wrong
one: a sample with a text before it, as where its boundary is lost or padding is read. Where rounding is that of float32,
what passes is six times that noise; what is larger beside it is no rounding. Elsewhere one token in a thousand is further
off by far (an expert is chosen otherwise, a chunk begins elsewhere): six times the least noise passes, and a tenth of
what is wrong. Costs five calls with one or two samples for each of the samples. Legend: L tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain
from collate_npu.proof.asking import RULE, Ask, Sample
from collate_npu.proof.measure import apart
from collate_npu.proof.noise import FLOOR, MARGIN, TIMES

_FINE, _ROUGH = 5e-6, 10
"""Noise up to which rounding is that of float32; the part of a wrong answer that passes where it is not."""
_LEAST = FLOOR * torch.finfo(torch.float32).eps
"""The noise is at least that: a lucky run shows none."""
_BEFORE = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """Relative errors over all log-probabilities of some samples, and what they say of one."""

    noise: float
    limit: float
    """What passes."""
    lost: float
    """Of a lost past: a text before each sample."""
    bound: float
    """Of one log-probability, in nats: what is further off is wrong."""


Draw = Callable[[int], Sample]
"""Another sample of a length."""


def measured(ask: Ask, samples: Sequence[Sample], own: list[Tensor], behind: list[list[Tensor]], draw: Draw) -> Scale:
    """The scale, from samples whose answers alone are `own`, float64 `[L - 1]` each, and with tokens behind them `behind`.

    Raises `CollateError` where a right answer could not be told from a wrong one, or is none.
    """
    if not all(bool(x.isfinite().all()) for x in own):
        got = "what is not a number for a sample alone"
        raise CollateError(explain("run", got, "Batches are held against it.", "Mend that first."))
    short = [n for n, ids in enumerate(samples) if len(ids) < 48]  # in a long sample the past is far away
    later = alone(ask, [draw(_BEFORE) + samples[n] for n in short])
    lost = difference([x[_BEFORE:] for x in later], [own[n] for n in short])
    again = alone(ask, samples[::-1])[::-1]
    if not difference(again, own) <= lost / (MARGIN * TIMES):
        got = f"other numbers, asked twice for the same sample alone (relative difference {difference(again, own):.1e})"
        raise CollateError(explain("run", got, "Equal questions have equal answers.", "Switch dropout off."))
    if not lost > _LEAST:
        got = "answers that do not depend on the tokens"
        raise CollateError(explain("run", got, "They are equal in any batch, and prove nothing.", "Let it run the model."))
    copied = [ask("copies", [ids, ids])[0] for ids in samples]  # the first stands behind nothing, whatever is lost
    equal = [found for found in (*behind, copied) if difference(found, own) < lost / (MARGIN * TIMES)]
    if not equal:
        got = f"noise of {difference(copied, own):.1e}, where a text before a sample makes {lost:.1e}"
        rule = f"What is wrong must be {MARGIN * TIMES} times the noise, or nothing is proved."
        raise CollateError(explain("run", got, rule, "Run it in float32, or with a trained model."))
    scale = _scale([again, *equal], own, lost)
    _check_next(ask, samples, own, draw, scale.bound)
    return scale


def _scale(equal: Sequence[list[Tensor]], own: list[Tensor], lost: float) -> Scale:
    """Answers that show no difference tell nothing."""
    errors = [error for error in (difference(found, own) for found in equal) if error > 0]
    fine = [error for error in errors if error <= _FINE]  # what is larger beside them is no rounding
    noise = max(_LEAST, max(fine) if fine else min(errors, default=0.0))
    limit = TIMES * noise if fine else max(TIMES * noise, lost / _ROUGH)
    whole = torch.cat(own)
    furthest = [float((torch.cat(found) - whole).abs().max()) for found in equal if difference(found, own) <= TIMES * noise]
    size = float(whole.square().mean().sqrt())
    return Scale(noise, limit, lost, max(limit * size, TIMES * max(furthest, default=0.0)))


def _check_next(ask: Ask, samples: Iterable[Sample], own: Iterable[Tensor], draw: Draw, bound: float) -> None:
    """Refuse numbers that are not those of the tokens from the second on: another last token changes the last one."""
    ended = alone(ask, [[*ids[:-1], *draw(1)] for ids in samples])
    if all(abs(float(x[-1] - y[-1])) <= bound for x, y in zip(ended, own)):
        got = "last log-probabilities that do not depend on the last tokens"
        raise CollateError(explain("run", got, RULE, "Take log_softmax(logits[:-1]) at ids[1:]."))


def alone(ask: Ask, samples: Iterable[Sample]) -> list[Tensor]:
    """The answer to each sample by itself."""
    return [ask("alone", [ids])[0] for ids in samples]


def difference(found: Sequence[Tensor], known: Sequence[Tensor]) -> float:
    """|found - known| / |known| over all tokens; infinite where the lengths differ."""
    same = [len(x) for x in found] == [len(y) for y in known]
    return apart(found, known) if same else math.inf
