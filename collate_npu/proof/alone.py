"""Alone: two sequences of a batch, run again by themselves, give what they give in the batch.

Those with most before them in their row, and again in another width with tokens after them that no causal model may
notice: what passes is up to so many times that noise. Legend: B rows, S width, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Case, consumer_named
from collate_npu.consumers.megatron import kernel_of
from collate_npu.consumers.models import consumer_of, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import KEYS, of_kind
from collate_npu.masks.forms import dense
from collate_npu.masks.patterns import Pattern
from collate_npu.proof.measure import OF_THE_LOSS, apart, run, scores_of
from collate_npu.proof.noise import TIMES, least_noise, widened
from collate_npu.segments import Segments


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


@torch.no_grad()
def check_alone(
    model: nn.Module, batch: Mapping[str, Any], case: Case, given: Any, forward: Callable[..., Any] | None
) -> Alone:
    """Raise `CollateError` unless two sequences of the batch have the logits, or last states, that they have alone."""
    if vision := of_kind(batch, "vision"):
        rule = "The images of one row cannot be told from those of the others."
        raise UnsupportedFormError(explain("alone", ", ".join(vision), rule, "Check a batch of text, or without alone=."))
    logits, below = scores_of(given), getattr(model, "base_model", None)
    if logits.ndim < 3 and forward is None and isinstance(below, nn.Module):  # a model that pools: its states
        model, logits = below, run(below, batch)
    if logits.ndim < 3 or tuple(logits.shape[:2]) != case.segments.shape:
        rule = f"The batch is {list(case.segments.shape)} (rows, width), and each of its tokens has logits."
        raise CollateError(explain("logits", shape_of(logits), rule, "Pass forward= that gathers the whole rows."))
    errors, noise = {}, least_noise(model, 0.0)
    for n, places_L in _most_at_risk(case.segments).items():
        L = len(places_L)
        width = max(case.segments.shape[1], L + 1) if case.pattern.causal else L
        once, again = (_sequence(model, batch, places_L[widened(L, each)], case.pattern) for each in (L, width))
        own = run(model, once, forward)[0]
        errors[n] = apart([logits.flatten(0, 1)[places_L.to(logits.device)]], [own])
        noise = max(noise, apart([run(model, again, forward)[0, :L]], [own]))
    found = Alone(errors, TIMES * noise)
    if any(not error <= found.limit for error in errors.values()):  # NaN is wrong
        rule = "A sequence gives the same logits in a batch as alone."
        remedy = "Look at what the layers received (check_delivery without alone=), then at `collate-npu audit --model`."
        raise CollateError(explain("alone", str(found), rule, remedy))
    return found


def _most_at_risk(segments: Segments) -> dict[int, Tensor]:
    """The two sequences with most before them in their row, as places in the flat batch `[B * S]`."""
    S, places = segments.shape[1], torch.split(segments.indices, list(segments.sequence_lengths))
    first = sorted(range(len(places)), key=lambda n: (int(places[n][0]) % S, len(places[n])), reverse=True)
    return {n: places[n] for n in sorted(first[:2])}


def _sequence(model: nn.Module, batch: Mapping[str, Any], places_L: Tensor, pattern: Pattern) -> dict[str, Any]:
    """A batch of one row without padding, as this model takes it."""
    tokens = {
        key: value.flatten(0, 1)[places_L.to(value.device)][None]
        for key in of_kind(batch, "tokens")
        if isinstance(value := batch[key], Tensor) and key not in OF_THE_LOSS
    }
    segments = Segments.from_lengths([len(places_L)])
    if consumer_of(model) is None:
        return _as_it_was(batch, places_L, segments)
    if consumer_of(model) != "megatron":
        return BatchAdapter(model, pattern=pattern).render(tokens, segments, padding_free=False)
    device = tokens["input_ids"].device
    # GPTModel counts no positions; its local kernels always read a dense mask (megatron-core core/transformer/utils.py:33)
    reads_dense = any(form.form == "masked" for form in consumer_named(kernel_of(unwrap(model))).forms)
    mask = dense(segments, polarity="masked", device=device) if reads_dense else None
    return {**tokens, "position_ids": segments.position_ids.to(device), "attention_mask": mask}


def _as_it_was(batch: Mapping[str, Any], places_L: Tensor, segments: Segments) -> dict[str, Any]:
    """For a stack that nobody knows: what its batch says, said of one sequence."""
    L, one = len(places_L), dict[str, Any]()
    said = {"positions": segments.position_ids, "mask": segments.keep, "keep": segments.keep, "longest": L}
    said |= dict.fromkeys(("offsets", "padded_offsets"), torch.tensor([0, L]))
    for name, value in batch.items():
        key = KEYS.get(name)
        role = "" if key is None else "positions" if key.kind == "positions" else key.role
        if value is None or name in OF_THE_LOSS or (isinstance(value, Tensor) and role == "mask" and value.ndim != 2):
            continue
        if role in said:
            one[name] = torch.as_tensor(said[role]).to(value) if isinstance(value, Tensor) else said[role]
        elif isinstance(value, Tensor) and value.ndim > 1 and (key is None or key.kind == "tokens"):
            one[name] = value.flatten(0, 1)[places_L.to(value.device)][None]
        else:
            rule, remedy = "What it would be for one sequence is not known.", "Check without alone=."
            raise UnsupportedFormError(explain(name, shape_of(value), rule, remedy))
    return one
