"""Alone: two sequences of a batch run again by themselves, and what they give compared with what the batch gave.

Right results differ too, by rounding: so the same sequence is run in another width as well, with tokens after it that no
causal model may notice, and what passes is up to so many times that noise. Costs two forward passes a sequence.

Legend: B rows, S width, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Case
from collate_npu.consumers.models import consumer_of
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.keys import KEEP_KEY, KEYS, of_kind
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

TIMES = 6
"""What passes is up to so many times the noise."""
FLOOR = 4
"""The noise is at least so many times what one matrix product loses here: a lucky run shows none."""

_NOT_READ = frozenset({"labels", "shift_labels", "loss_mask", "num_items_in_batch"})


@dataclass(frozen=True, slots=True)
class Alone:
    """Relative errors of the logits of some sequences, in a batch against alone."""

    errors: Mapping[int, float]
    """By number of the sequence in the batch."""
    limit: float
    """What passes: `TIMES` the noise of this model, dtype and device."""

    def __str__(self) -> str:
        each = ", ".join(f"sequence {n}: {error:.2g}" for n, error in self.errors.items())
        return f"relative error of the logits against alone (up to {self.limit:.2g} is rounding): {each}"


def run(model: nn.Module, forward: Callable[..., Any], batch: Mapping[str, Any]) -> Tensor:
    """The logits of a batch, without labels, gradients and dropout."""
    with torch.no_grad(), evaluating(model):
        logits = forward(**{key: value for key, value in batch.items() if key not in _NOT_READ})
    if not isinstance(logits, Tensor) or logits.ndim < 3:
        rule = "The model, or forward=, gives logits [B, S, V] where no labels are given."
        raise CollateError(explain("logits", shape_of(logits), rule, "Pass forward= that returns them."))
    return logits


def check_alone(
    model: nn.Module, batch: Mapping[str, Any], case: Case, logits: Tensor, forward: Callable[..., Any]
) -> Alone:
    """Raise `CollateError` unless two sequences of the batch have the logits they have alone."""
    segments = case.segments
    if vision := of_kind(batch, "vision"):
        rule = "The images of one row cannot be told from those of the others."
        raise UnsupportedFormError(
            explain("alone", ", ".join(vision), rule, "Check a batch of text, or one layer by layer.")
        )
    if tuple(logits.shape[:2]) != segments.shape:
        rule = f"The batch is {list(segments.shape)} (rows, width)."
        raise CollateError(explain("logits", shape_of(logits), rule, "Pass forward= that gathers the whole rows."))
    adapter = _adapter(model, case.pattern)
    flat = logits.flatten(0, 1).float()
    errors, noise = {}, FLOOR * product_error(model)
    for n, places_L in _most_at_risk(segments).items():
        wider_L = _widened(places_L, segments) if case.pattern.causal else places_L
        own, wide = (run(model, forward, _sequence(batch, each, adapter))[0].float() for each in (places_L, wider_L))
        errors[n] = _apart(flat[places_L.to(flat.device)], own)
        noise = max(noise, _apart(wide[: len(own)], own))
    found = Alone(errors, TIMES * noise)
    if any(not error <= found.limit for error in errors.values()):  # NaN is wrong
        rule = "A sequence gives the same logits in a batch as alone."
        remedy = "Look at what the layers received (check_delivery without alone=), then at `collate-npu audit --model`."
        raise CollateError(explain("alone", str(found), rule, remedy))
    return found


def product_error(model: nn.Module) -> float:
    """The relative error of one matrix product, in the model's dtype and on its device, against float64."""
    like = next(model.parameters())
    drawn = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).to(like.dtype)
    x, y = drawn.to(like.device)
    exact = drawn[0].double() @ drawn[1].double()
    return float(((x @ y).cpu().double() - exact).norm() / exact.norm())


def _most_at_risk(segments: Segments) -> dict[int, Tensor]:
    """The two sequences with most before them in their row, as places in the flat batch `[B * S]`."""
    S = segments.shape[1]
    ends = segments.cu_seqlens.tolist()
    places = [segments.indices[start:stop] for start, stop in pairwise(ends)]
    first = sorted(range(len(places)), key=lambda n: (int(places[n][0]) % S, len(places[n])), reverse=True)
    return {n: places[n] for n in sorted(first[:2])}


def _widened(places_L: Tensor, segments: Segments) -> Tensor:
    """The same sequence, and more of its own tokens after it, up to the width of the batch and at least one."""
    extra = max(segments.shape[1] - len(places_L), 1)
    return torch.cat([places_L, places_L.repeat(-(-extra // len(places_L)))[:extra]])


Adapter = Callable[[dict[str, Any], Segments], dict[str, Any]]


def _adapter(model: nn.Module, pattern: Pattern) -> Adapter:
    """What makes of a row's tokens the arguments of this model."""
    if consumer_of(model) == "megatron":
        return lambda tokens, segments: gpt_batch({**tokens, KEEP_KEY: segments.keep}, model)[0]
    return partial(BatchAdapter(model, pattern=pattern).render, padding_free=False)


def _sequence(batch: Mapping[str, Any], places_L: Tensor, adapter: Adapter) -> dict[str, Any]:
    """A batch of one row without padding, as this model takes it."""
    tokens = {
        key: value.flatten(0, 1)[places_L.to(value.device)][None]
        for key in of_kind(batch, "tokens", keys=KEYS)
        if isinstance(value := batch[key], Tensor) and key not in _NOT_READ
    }
    return adapter(tokens, Segments.from_lengths([len(places_L)]))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; each module goes back to the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _apart(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())
