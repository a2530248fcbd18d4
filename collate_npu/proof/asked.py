"""Asked: what must not matter is changed, and no real token may move; and two sequences are run alone.

Kernels say what they were told; a layer with code of its own says nothing, so that the model is asked. What padding and the
other sequences embed is replaced: a sequence that moves reads them, whatever is between. Then half of all tokens are, while
each known kernel gives what it gave before: what moves other tokens is a layer in which nothing was heard. Costs five
forward passes without gradients. Alone are those with most before them in their row, and again in another width with tokens
after them that no causal model may notice. Legend: B rows, S width, T = B * S tokens, L tokens of one sequence.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.mask_routing import Case, consumer_named
from collate_npu.consumers.megatron import kernel_of
from collate_npu.consumers.model_traits import consumer_of, has_two_sides, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import KEYS, of_kind
from collate_npu.masks.forms import dense
from collate_npu.masks.patterns import Pattern
from collate_npu.proof.forward import Forward, holds, short
from collate_npu.proof.measure import (
    OF_THE_LOSS,
    TIMES,
    apart,
    called,
    check_noise,
    least_noise,
    like,
    run,
    scores_of,
    widened,
)
from collate_npu.proof.recorder import Recorder
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
        for same in (again, once) if model.training else (again,):  # what trains may draw
            noise = max(noise, apart([run(model, same, forward)[0, :L]], [own]))
    check_noise(model, noise)
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


_ROUNDS = 4
"""Kinds of layers in which nothing was heard that are looked for, at most."""
_Sketches = dict[tuple[str, int], tuple[nn.Module, Tensor, Tensor]]
"""By the name of a part and the number of its call: itself, and what it was called with and gave, in short."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the model answered."""

    why_wrong: str = ""
    """Which layer moves a real token by what is not its sequence's."""
    unheard: tuple[str, ...] = ()
    """Layers that look at other tokens by what is no known kernel."""
    still: frozenset[str] = frozenset()
    """Parts that do not: called with other tokens, they give the rest what they gave."""
    unasked: str = ""
    """Why it could not be asked."""


def ask(model: nn.Module, batch: Mapping[str, Any], case: Case, forward: Callable[..., Any] | None) -> Asked:
    """Ask a model about one batch."""
    if has_two_sides(model):
        return Asked(unasked="an encoder-decoder has two sequences")
    try:
        return _Asking(model, batch, case, forward).answer()
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:  # it ran once: what we changed it is
        return Asked(unasked=f"{type(error).__name__}: {str(error)[:80]}")


@dataclass
class _Asking:
    model: nn.Module
    batch: Mapping[str, Any]
    case: Case
    forward: Callable[..., Any] | None
    pools: bool = False
    """Does it give one answer a row?"""
    changed: int = 0
    """Embeddings that were replaced in this pass."""
    calls: Counter[str] = field(default_factory=Counter)
    sketches: _Sketches = field(default_factory=dict)

    def answer(self) -> Asked:
        """Leaks first; then what no kernel tells of."""
        base, asked, ids = self._pass(), False, self.case.segments.ids
        turn_T = torch.where(ids > 0, (ids + torch.arange(len(ids))[:, None]) % 2, -1).flatten()  # sequences take turns
        if not bool(base[turn_T >= 0].isfinite().all()):
            return Asked(unasked="its numbers are not finite")
        limit = TIMES * least_noise(self.model, 0.0)
        for mine_T in (turn_T == 0, turn_T == 1):
            if not mine_T.any() or mine_T.all():
                continue
            asked, moved = True, self._pass(~mine_T)
            if not self.changed:
                return Asked(unasked="no embedding of its tokens was found")
            if not (error := apart([moved[mine_T]], [base[mine_T]])) <= limit:
                size = f"a relative error of {error:.2g}, where up to {limit:.1g} is rounding"
                return Asked(f"{self._blamed(mine_T, turn_T < 0, limit)}: real tokens move when that is replaced ({size})")
        unheard, still = self._unheard(turn_T >= 0, limit)
        return Asked("", unheard, still, "" if asked else "the batch has one sequence and no padding")

    def _pass(self, others_T: Tensor | None = None, recorder: Recorder | None = None, sketched: bool = False) -> Tensor:
        """`[T, 4]`: what it gives for each token, in short, with those others replaced."""
        self.changed, self.sketches, self.calls = 0, {}, Counter()
        kind, batch = like(self.model).device.type, dict(self.batch)
        with ExitStack() as held, torch.no_grad():
            held.enter_context(torch.random.fork_rng(device_type=kind) if kind != "cpu" else torch.random.fork_rng([]))
            torch.manual_seed(0)
            for name, module in self.model.named_modules():
                if others_T is not None and module is not self.model:
                    held.callback(module.register_forward_hook(self._replacing(others_T), with_kwargs=True).remove)
                if sketched:
                    held.callback(module.register_forward_hook(self._sketching(short(name)), with_kwargs=True).remove)
            if recorder is not None:
                held.enter_context(recorder.on(self.model))
            for key, x in self.batch.items():  # states in the place of tokens
                states = getattr(x, "ndim", 0) == 3 and x.shape[:2] == self.case.segments.shape and x.is_floating_point()
                if states and others_T is not None:
                    batch[key] = self._with_others(x, others_T)
            return self._given(called(self.model, batch, self.forward))

    def _given(self, given: Any) -> Tensor:
        parts = [getattr(given, name, None) for name in ("logits", "last_hidden_state")] + [given]
        parts += [*given.values()] if isinstance(given, Mapping) else [*given] if isinstance(given, (tuple, list)) else []
        for part in parts:
            if (found := self._by_token(part)) is not None:
                return found
            (B, S), packed = self.case.segments.shape, self.case.segments.packed
            if isinstance(part, Tensor) and part.ndim == 2 and len(part) == B and not packed:
                self.pools = True
                return _in_short(part).repeat_interleave(S, 0)
        raise CollateError("what it gives is not logits of these tokens")

    def _by_token(self, x: Any) -> Tensor | None:
        """States of tokens in short, zero where there are none; None for what is no states of these tokens."""
        (B, S), n = self.case.segments.shape, self.case.segments.num_tokens
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            return None
        if x.ndim > 2 and x.shape[:2] in ((B, S), (S, B)):
            return _in_short((x if x.shape[:2] == (B, S) else x.transpose(0, 1)).flatten(0, 1))
        flat = x[0] if x.ndim > 2 and len(x) == 1 else x
        if flat.ndim < 2 or len(flat) not in (B * S, n):
            return None
        places = slice(None) if len(flat) == B * S else self.case.segments.indices
        whole = torch.zeros(B * S, 4)
        whole[places] = _in_short(flat)
        return whole

    def _with_others(self, x: Tensor, others_T: Tensor) -> Tensor:
        self.changed += 1
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        drawn *= x.float().square().mean().sqrt().to(x)
        return torch.where(others_T.reshape(*x.shape[:-1], 1).to(x.device), drawn, x)

    def _replacing(self, others_T: Tensor) -> Callable[..., Any]:
        """What a part gives that is called with the tokens of the batch, all or those that are real: an embedding."""
        ids = next((x for key in ("input_ids", "tokens") if isinstance(x := self.batch.get(key), Tensor)), torch.zeros(0))
        at = self.case.segments.indices

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

    # --- which layer it was

    def _sketching(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = next((x for each in (*args, *kwargs.values()) if (x := self._by_token(each)) is not None), None)
            gave = self._by_token(out[0] if isinstance(out, (tuple, list)) and out else out)
            if given is not None and gave is not None:
                self.calls[name] += 1
                self.sketches[name, self.calls[name]] = module, given, gave

        return look

    def _first_apart(self, before: _Sketches, mine_T: Tensor, limit: float) -> tuple[str, nn.Module | None]:
        """The innermost part that gives these tokens something else, called with the same."""
        for key, (module, was_given, gave) in before.items():
            _, given, gives = self.sketches.get(key, (module, was_given, gave))  # else it stands still
            if apart([given[mine_T]], [was_given[mine_T]]) <= limit < apart([gives[mine_T]], [gave[mine_T]]):
                return key[0], module
        return "(model)", None

    def _blamed(self, mine_T: Tensor, padding_T: Tensor, limit: float) -> str:
        base, before = self._pass(sketched=True), self.sketches
        by_padding = bool(padding_T.any()) and not apart([self._pass(padding_T)[mine_T]], [base[mine_T]]) <= limit
        self._pass(padding_T if by_padding else ~mine_T, sketched=True)
        name, module = self._first_apart(before, mine_T, limit)
        named = name if module is None else f"{name} ({type(module).__name__})"
        return f"{named}: it reads {'padding' if by_padding else 'another sequence'}"

    def _unheard(self, real_T: Tensor, limit: float) -> tuple[tuple[str, ...], frozenset[str]]:
        """Layers that move other tokens than those that are replaced, though every known kernel stands still; and parts
        that do not."""
        some_T = torch.rand(len(real_T), generator=torch.Generator().manual_seed(2)) < 0.5
        begun = Forward(root=self.model, number=0, step=0, training=False)
        rest_T, still, found = ~some_T & real_T, frozenset[str](), dict[str, nn.Module]()
        for _ in range(_ROUNDS if rest_T.any() and some_T.any() else 0):
            recorder = Recorder(lambda module, *_: begun if holds(module, self.model) else None, lambda _: "")
            recorder.results, recorder.frozen = deque(), tuple(found.values())
            base, before = self._pass(None, recorder, sketched=True), self.sketches
            recorder.replays = True
            moved = self._pass(some_T, recorder, sketched=True)
            pairs = [(key[0], before[key], each) for key, each in self.sketches.items() if key in before]
            still = frozenset(
                name for name, (_, was, gave), (_, now, gives) in pairs
                if not _near(was[some_T], now[some_T]) and _near(gave[rest_T], gives[rest_T])
            )  # fmt: skip
            first, module = self._first_apart(before, rest_T, limit)
            if module is None:
                same = self.pools or apart([moved[rest_T]], [base[rest_T]]) <= limit
                return (*found, *[first] * (not same)), still
            found |= {name: each for (name, _), (each, *_) in before.items() if type(each) is type(module)}
        return tuple(found), still


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _in_short(states: Tensor) -> Tensor:
    """`[T, 4]`: the states of each token, projected."""
    x = states.flatten(1)
    drawn = torch.randn(x.shape[1], 4, generator=torch.Generator().manual_seed(3)).to(x.device)
    return torch.cat([part.float() @ drawn for part in torch.split(x, 1024)]).cpu()
