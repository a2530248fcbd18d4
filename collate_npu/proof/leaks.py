"""Leaks: whether padding or another sequence moves a real token of a model's own batch, whatever code is between.

A layer with code of its own calls no kernel that is known. So what padding and the other sequences embed is replaced, and no
real token may move. With `alone=True` the longest sequence and the one with most before it in its row are run by themselves,
and in another width with tokens after them. Legend: B rows, S width, T = B * S tokens, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_choice import Case, consumer_named
from collate_npu.consumers.megatron import kernel_of
from collate_npu.consumers.model_traits import consumer_of, unwrap
from collate_npu.consumers.tiny_models import unshared
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import of_kind
from collate_npu.masks.forms import dense
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel, gather_sequence
from collate_npu.proof.measure import OF_THE_LOSS, apart, called, check_noise, like, noise_limit, scores_of, widened
from collate_npu.segments import Segments


def find_leak(
    model: nn.Module, batch: Mapping[str, Any], segments: Segments, given: Any, forward: Callable[..., Any] | None
) -> tuple[str, str]:
    """Return which tokens move real tokens of other sequences ("" if none), and why that could not be tested.

    `given` is what it gave for the batch. Three forwards on every rank, whatever its rows hold: ranks may compute together.
    """
    ids = segments.ids
    turn_T = torch.where(ids > 0, (ids + torch.arange(len(ids))[:, None]) % 2, -1).flatten()  # sequences take turns
    real_T = turn_T >= 0
    first_T, second_T = turn_T == 0, turn_T == 1
    others = [("another sequence", first_T, second_T), ("another sequence", second_T, first_T)]
    replacements = [("padding", real_T, ~real_T), *others]
    replacing = _Replacing(model, batch, segments, forward)
    try:
        base = replacing.by_token(given)
        moved = [replacing.run(others_T) for _, _, others_T in replacements]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:  # it ran once: what we changed it is
        return "", f"{type(error).__name__}: {str(error)[:80]}"
    if not bool(base[real_T].isfinite().all()):
        return "", "its numbers are not finite"
    if not replacing.replaced:
        return "", "no embedding of its tokens was found"
    limit = noise_limit(0.0, like(model))
    for (whose, mine_T, _), found in zip(replacements, moved):
        if not (size := apart([found[mine_T]], [base[mine_T]])) <= limit:
            return f"{whose} is replaced (a relative error of {size:.2g}, where up to {limit:.1g} is rounding)", ""
    something = any(mine_T.any() and others_T.any() for _, mine_T, others_T in replacements)
    return "", "" if something else "the batch has one sequence and no padding"


@dataclass
class _Replacing:
    """Runs a batch with the embeddings of some of its tokens replaced."""

    model: nn.Module
    batch: Mapping[str, Any]
    segments: Segments
    forward: Callable[..., Any] | None
    replaced: int = 0
    """Embeddings that were replaced."""

    def run(self, others_T: Tensor) -> Tensor:
        """Return `[T, 4]`: what the model gives for each token, projected, with these tokens replaced."""
        batch, hook = dict(self.batch), self._hook(others_T)
        for key, x in self.batch.items():  # states in the place of tokens
            if getattr(x, "ndim", 0) == 3 and x.shape[:2] == self.segments.shape and x.is_floating_point():
                batch[key] = self._with_others(x, others_T)
        with ExitStack() as held:
            for module in self.model.modules():
                if module is not self.model:
                    held.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            return self.by_token(run_seeded(self.model, batch, self.forward))

    def by_token(self, given: Any) -> Tensor:
        """Return `[T, 4]`: what the model gave for each token, projected; zero where it gave nothing."""
        (B, S), n = self.segments.shape, self.segments.num_tokens
        parts = [getattr(given, name, None) for name in ("logits", "last_hidden_state")] + [given]
        parts += [*given.values()] if isinstance(given, Mapping) else [*given] if isinstance(given, (tuple, list)) else []
        for x in parts:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
                continue
            if x.ndim > 2 and x.shape[:2] in ((B, S), (S, B)):
                return _in_short((x if x.shape[:2] == (B, S) else x.transpose(0, 1)).flatten(0, 1))
            flat = x[0] if x.ndim > 2 and len(x) == 1 else x
            if flat.ndim > 1 and len(flat) in (B * S, n):
                places = slice(None) if len(flat) == B * S else self.segments.indices
                found = torch.zeros(B * S, 4)
                found[places] = _in_short(flat)
                return found
            if x.ndim == 2 and len(x) == B and not self.segments.packed:
                return _in_short(x).repeat_interleave(S, 0)
        raise CollateError("its output is not logits of these tokens")

    def _with_others(self, x: Tensor, others_T: Tensor) -> Tensor:
        self.replaced += 1
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        drawn *= x.float().square().mean().sqrt().to(x)
        return torch.where(others_T.reshape(*x.shape[:-1], 1).to(x.device), drawn, x)

    def _hook(self, others_T: Tensor) -> Callable[..., Any]:
        """Return a hook that replaces the output of embeddings: modules called with the tokens of the batch."""
        ids = next((x for key in ("input_ids", "tokens") if isinstance(x := self.batch.get(key), Tensor)), torch.zeros(0))
        at = self.segments.indices

        def look(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            whole = any(isinstance(each, (nn.ModuleList, nn.Sequential)) for each in module.modules())
            if whole or not isinstance(out, Tensor) or not out.is_floating_point():
                return None
            for x in (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and out.shape[:-1] == x.shape):
                if x.shape == ids.shape and torch.equal(x, ids):
                    return self._with_others(out, others_T)
                if x.numel() == len(at) < ids.numel() and torch.equal(x.flatten(), ids.flatten()[at.to(ids.device)]):
                    return self._with_others(out, others_T[at])
            return None

        return look


def run_seeded(model: nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any] | None) -> Any:
    """Return what the model gives for a batch, with the same random numbers each time."""
    kind = like(model).device.type
    with torch.random.fork_rng(device_type=kind) if kind != "cpu" else torch.random.fork_rng([]):
        torch.manual_seed(0)
        return called(model, batch, forward)


def _in_short(states: Tensor) -> Tensor:
    """Return `[T, 4]`: the states of each token, projected."""
    x = states.flatten(1)
    drawn = torch.randn(x.shape[1], 4, generator=torch.Generator().manual_seed(3)).to(x.device)
    return torch.cat([part.float() @ drawn for part in torch.split(x, 1024)]).cpu()


# --- two sequences by themselves


@dataclass(frozen=True, slots=True)
class Alone:
    """Relative errors of the logits of some sequences in the batch, against each sequence alone."""

    errors: Mapping[int, float]
    """By number of the sequence in the batch."""
    limit: float
    """What passes: `TIMES` the noise of this model, dtype and device."""

    def __str__(self) -> str:
        each = ", ".join(f"sequence {n}: {error:.2g}" for n, error in self.errors.items())
        return f"relative error of the logits against alone (up to {self.limit:.2g} is rounding): {each}"


def check_alone_of_ranks(model: nn.Module, shard: Mapping[str, Any], case: Case, given: Any, cp: ContextParallel) -> Alone:
    """The same as `check_alone` where `adapt` runs rows that ranks share: each rank runs the sequences alone whole."""
    tokens = [key for key in of_kind(shard, "tokens") if isinstance(shard[key], Tensor) and key not in OF_THE_LOSS]
    batch, logits = ({key: gather_sequence(shard[key], cp) for key in tokens}, gather_sequence(scores_of(given), cp))
    with unshared(model):
        return check_alone(model, batch, case, logits, None)


@torch.no_grad()
def check_alone(
    model: nn.Module, batch: Mapping[str, Any], case: Case, given: Any, forward: Callable[..., Any] | None
) -> Alone:
    """Raise `CollateError` unless two sequences of the batch have the logits, or last states, that they have alone."""
    if consumer_of(model) is None:
        rule = "alone=True can run only models of transformers and Megatron."
        remedy = "Leave alone= out, and compare the numbers with collate_npu.testing.conformance."
        raise UnsupportedFormError(explain("alone", type(model).__name__, rule, remedy))
    if vision := of_kind(batch, "vision"):
        rule = "The images of a batch cannot be divided by row."
        raise UnsupportedFormError(explain("alone", ", ".join(vision), rule, "Check a batch of text, or leave alone= out."))
    logits, below = scores_of(given), getattr(model, "base_model", None)
    if logits.ndim < 3 and forward is None and isinstance(below, nn.Module):  # a model that pools: its states
        model, logits = below, scores_of(called(below, batch))
    if logits.ndim < 3 or tuple(logits.shape[:2]) != case.segments.shape:
        rule = f"The batch is {list(case.segments.shape)} (rows, width), and each of its tokens has logits."
        raise CollateError(explain("logits", shape_of(logits), rule, "Pass forward= that gathers the whole rows."))
    errors, noise = {}, 0.0
    for n, places_L in _most_at_risk(case.segments):
        L = len(places_L)
        width = max(case.segments.shape[1], L + 1) if case.pattern.causal else L
        once, again = (_sequence(model, batch, places_L[widened(L, each)], case.pattern) for each in (L, width))
        own = scores_of(called(model, once, forward))[0]
        errors[n] = apart([logits.flatten(0, 1)[places_L.to(logits.device)]], [own])
        for same in (again, once) if model.training else (again,):  # what trains may draw
            noise = max(noise, apart([scores_of(called(model, same, forward))[0, :L]], [own]))
    check_noise(model, noise)
    found = Alone(errors, noise_limit(noise, like(model)))
    if any(not error <= found.limit for error in errors.values()):  # NaN is wrong
        rule = "A sequence gives the same logits in a batch as alone."
        remedy = "Look at what the layers received (check_delivery without alone=), then at `collate-npu audit --model`."
        raise CollateError(explain("alone", str(found), rule, remedy))
    return found


def _most_at_risk(segments: Segments) -> list[tuple[int, Tensor]]:
    """Return the longest sequence and the one with most tokens before it in its row, as places in the flat batch `[B * S]`.
    There are always two: ranks that compute together must run as many forwards."""
    S, places = segments.shape[1], torch.split(segments.indices, list(segments.sequence_lengths))
    order = sorted(range(len(places)), key=lambda n: (int(places[n][0]) % S, len(places[n])), reverse=True)
    longest = sorted(order[1:] or order, key=lambda n: -len(places[n]))[:1]
    return [(n, places[n]) for n in sorted(order[:1] + longest)]


def _sequence(model: nn.Module, batch: Mapping[str, Any], places_L: Tensor, pattern: Pattern) -> dict[str, Any]:
    """Return a batch of one row without padding, in the form that this model takes."""
    tokens = {
        key: value.flatten(0, 1)[places_L.to(value.device)][None]
        for key in of_kind(batch, "tokens")
        if isinstance(value := batch[key], Tensor) and key not in OF_THE_LOSS
    }
    segments = Segments.from_lengths([len(places_L)])
    if consumer_of(model) != "megatron":
        return BatchAdapter(model, pattern=pattern).write(tokens, segments, padding_free=False)
    device = tokens["input_ids"].device
    # GPTModel counts no positions; its local kernels always read a dense mask (megatron-core core/transformer/utils.py:33)
    reads_dense = any(form.form == "masked" for form in consumer_named(kernel_of(unwrap(model))).forms)
    mask = dense(segments, polarity="masked", device=device) if reads_dense else None
    return {**tokens, "position_ids": segments.position_ids.to(device), "attention_mask": mask}
