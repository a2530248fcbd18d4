"""Delivery: proof, at the first batch, that every layer got its mask, and that a row gives the numbers it gives alone.

What a collator emits need not reach the model: another library may replace the collator, a trainer drop a key, a forward
ignore it, and nothing says so. Here the model itself is asked: modules of transformers and of Megatron (ms-swift's too).

A check by hand costs one forward pass without gradients; the guard looks at the trainer's own. With `alone=True` two
sequences of the batch are run again by themselves, and in another width with tokens after them that no causal model may
notice: what passes is up to so many times that noise. Legend: B rows, S width, L tokens of one sequence.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.checked import checked, hold_against
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Case, Model, consumer_named
from collate_npu.consumers.megatron import kernel_of
from collate_npu.consumers.mindspeed import start_problem
from collate_npu.consumers.models import consumer_of, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import of_kind
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.forms import dense
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources
from collate_npu.parallel import ContextParallel
from collate_npu.proof.measure import OF_THE_LOSS, apart, run
from collate_npu.proof.noise import TIMES, least_noise, widened
from collate_npu.proof.reading import Judge
from collate_npu.proof.received import Received, by_readers, received_calls, received_masks
from collate_npu.releases import say_outside
from collate_npu.segments import Segments

__all__ = ["Alone", "Delivery", "Received", "check_delivery", "guard_first_batch", "received_masks"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What was proved."""

    layers: Mapping[str, str]
    """What each reading layer received, by module name: `"attention_mask int64 [2, 9]"`."""
    alone: Alone | None
    """How far two sequences are from themselves alone; None where that was not asked."""

    def __str__(self) -> str:
        counts = Counter(self.layers.values())
        told = "; ".join(f"{what} to {times} layer{'s' * (times > 1)}" for what, times in counts.items())
        return f"collate_npu: every layer got what the batch says: {told}{'' if self.alone is None else f'; {self.alone}'}"


@checked
def check_delivery(
    model: Any,
    batch: Mapping[str, Any],
    *,
    alone: bool = False,
    segments: Segments | None = None,
    pattern: str | Pattern | None = None,
    context_parallel: ContextParallel | None = None,
    forward: Callable[..., Any] | None = None,
) -> Delivery:
    """Run `model(**batch)` once, and raise `CollateError` where a layer received something else than the batch says.

    `batch` is what the model is called with. `segments`, of the whole rows, default to what the batch itself says; give
    them under context parallelism (with `context_parallel`) and where `model(**batch)` is not told which tokens are
    padding. `pattern` is that of the model's attention. With `alone=True` two of its sequences are run again by
    themselves and must give the same logits. `forward(**batch) -> logits [B, S, V]` stands for `model(**batch)` where
    that is not how the model is called; it must run the modules of `model`.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1], [1, 1, 1]])
    >>> found = check_delivery(model, {"input_ids": torch.tensor([[256, 256, 7], [4, 5, 6]]), "attention_mask": keep})
    >>> found.layers["model.layers.0.linear_attn"]
    'attention_mask int64 [2, 3]'
    """
    inner = _known(model)
    if forward is None and not (getattr(inner, "pre_process", True) and getattr(inner, "post_process", True)):
        rule = "A stage of a pipeline runs by its schedule alone."
        remedy = "Pass forward=, or check the model with pipeline size 1."
        raise UnsupportedFormError(explain("check_delivery", "a pipeline stage", rule, remedy))
    case = _case(inner, batch, {"segments": segments, "pattern": pattern})
    with torch.no_grad(), received_calls(inner) as received:
        logits = run(inner, batch, forward)
    found = _judged(inner, case, received, context_parallel)
    return replace(found, alone=_check_alone(inner, batch, case, logits, forward)) if alone else found


@checked
def guard_first_batch(
    model: Any,
    *,
    alone: bool = False,
    report: Callable[[Delivery], object] = print,
    only: Callable[[Mapping[str, Any]], bool] = lambda batch: True,
    **settings: Any,
) -> Callable[[], None]:
    """Check the next forward of `model`, whoever calls it: what its layers receive is judged as soon as it has run.

    Costs no forward of its own, so that any stage of a pipeline can be watched; with `alone=True` it costs five, and every
    rank must guard. `settings` are those of `check_delivery`. If they hold the Segments of one batch, `only(arguments)`
    says whether a forward is of that batch. What was proved goes to `report`, and the guard is gone. The function that is
    returned takes it off earlier.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1], [1, 1, 1]])
    >>> remove = guard_first_batch(model)
    >>> logits = model(input_ids=torch.tensor([[256, 256, 7], [4, 5, 6]]), attention_mask=keep).logits
    collate_npu: every layer got what the batch says: attention_mask int64 [2, 3] to 2 layers; attention_mask bool [2,
        1, 3, 3] to 1 layer
    """
    inner = _known(model)
    _check_settings(settings)
    hold_against(check_delivery, settings.items())
    say_outside("megatron-core" if consumer_of(model) == "megatron" else "transformers")
    names = list(inspect.signature(inner.forward).parameters)
    held = ExitStack()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = {**dict(zip(names, args)), **kwargs}
        if not only(batch):
            return
        if alone:
            held.close()
            report(check_delivery(inner, batch, alone=True, **settings))
        else:
            received = held.enter_context(received_calls(inner))
            after = inner.register_forward_hook(lambda *_: judge(batch, received))
            held.callback(after.remove)
            first.remove()

    def judge(batch: dict[str, Any], received: dict[str, Received]) -> None:
        held.close()
        report(_judged(inner, _case(inner, batch, settings), received, settings.get("context_parallel")))

    first = inner.register_forward_pre_hook(before, with_kwargs=True)
    held.callback(first.remove)
    return held.close


def _check_settings(names: Collection[str]) -> None:
    known = {"segments", "pattern", "context_parallel", "forward"}
    if unknown := sorted({*names} - known):
        remedy = f"Known are {', '.join(sorted(known))}, and alone."
        raise CollateError(explain("check_delivery", f"{unknown[0]}=", "It has no such setting.", remedy))


def _known(model: Any) -> nn.Module:
    inner: nn.Module = unwrap(model)
    if consumer_of(model) not in ("transformers", "megatron"):
        rule = "Layers are known of transformers and Megatron-core modules."
        raise CollateError(explain("check_delivery", type(inner).__name__, rule, "Pass the module itself."))
    if consumer_of(model) == "megatron" and (late := start_problem()):
        rule = "MindSpeed's patches are in place before anybody takes Megatron's functions."
        raise CollateError(explain("mindspeed", late, rule, "Mend the order of imports, and start again."))
    return inner


def _case(model: nn.Module, batch: Mapping[str, Any], settings: Mapping[str, Any]) -> Case:
    batch, about = Sources.of(batch), Model.of(model)
    truth, pattern = settings.get("segments"), settings.get("pattern")
    declared = pattern or ("bidirectional" if about.pattern == "bidirectional" else None)
    rows = batch.shape()[0] if truth is None else len(truth.ids)
    flat = rows == 1 and any(batch.get(key) is not None for key in of_kind(batch, "offsets"))
    if truth is None:
        truth = segments_from_batch(batch, pattern=declared, padding_free=flat)
    return Case(segments=truth, model=about, pattern=Pattern.of(declared or "causal"), padding_free=flat)


def _judged(model: nn.Module, case: Case, received: Mapping[str, Received], cp: ContextParallel | None) -> Delivery:
    """What was proved; or one error that lists every layer, those with the same fault together."""
    judge = Judge(model=model, case=case, cp=cp)
    readers = [each for each in by_readers(received) if judge.asks(each)]
    faults: dict[str, list[str]] = {}
    for each in readers:
        if why := judge.why_wrong(each):
            faults.setdefault(why, []).append(each.name)
    if not readers and (case.inside or case.segments.packed):
        faults["no layer of these tokens takes attention_mask"] = [type(model).__name__]
    if faults:
        few = {why: ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8) for why, names in faults.items()}
        listed = "; ".join(f"{names}: {why}" for why, names in few.items())
        rule = f"Each layer is told which tokens are real ({case.segments!r}), in the form it reads."
        remedy = f"Hand the model BatchAdapter(model)(batch), or gpt_batch's inputs on Megatron. Reader: {judge.reader}."
        raise CollateError(explain("delivery", listed, rule, remedy))
    return Delivery(layers={each.name: str(each) for each in readers}, alone=None)


@torch.no_grad()
def _check_alone(
    model: nn.Module, batch: Mapping[str, Any], case: Case, logits: Tensor, forward: Callable[..., Any] | None
) -> Alone:
    """Raise `CollateError` unless two sequences of the batch have the logits they have alone."""
    if vision := of_kind(batch, "vision"):
        rule = "The images of one row cannot be told from those of the others."
        raise UnsupportedFormError(explain("alone", ", ".join(vision), rule, "Check a batch of text, or without alone=."))
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
    if consumer_of(model) != "megatron":
        return BatchAdapter(model, pattern=pattern).render(tokens, segments, padding_free=False)
    device = tokens["input_ids"].device
    # GPTModel counts no positions; its local kernels always read a dense mask (megatron-core core/transformer/utils.py:33)
    reads_dense = any(form.form == "masked" for form in consumer_named(kernel_of(unwrap(model))).forms)
    mask = dense(segments, polarity="masked", device=device) if reads_dense else None
    return {**tokens, "position_ids": segments.position_ids.to(device), "attention_mask": mask}
