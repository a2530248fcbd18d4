"""Delivery: proof, at the first batch, that every kernel was told what the batch says.

What a collator emits need not reach the model: another library may replace the collator, a trainer drop a key, a forward
ignore it, and nothing says so. Here the kernels are heard, in any module, and the model is asked (`proof.asked`).

A check by hand costs six forward passes without gradients, in the mode the model is in, without dropout; the guard
looks at the trainer's own. With `alone=True` two sequences of the batch are run again.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.mask_routing import Case
from collate_npu.consumers.megatron import start_problem
from collate_npu.consumers.model_traits import consumer_of, has_two_sides, is_compiled, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.keys import of_kind
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel
from collate_npu.proof.asked import Alone, Asked, ask, check_alone
from collate_npu.proof.forward import Forward, among, block, case_of, crosses, few, holds, listed
from collate_npu.proof.measure import called, in_step
from collate_npu.proof.recorder import Recorder
from collate_npu.releases import say_outside
from collate_npu.segments import Segments
from collate_npu.validation import check_model, checked, hold_against

__all__ = ["Alone", "Delivery", "check_delivery", "guard_first_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What was proved."""

    layers: Mapping[str, str]
    """What the kernels of each layer that was judged were told: `"convolution zeros [1, 3], rule zeros [1, 3]"`."""
    told: str
    """The same of all layers, as `watch` says it; "" where none was judged."""
    unseen: tuple[str, ...]
    """Layers of which nothing was judged, and what else was not."""
    asked: bool
    """Did the model answer that neither padding nor another sequence moves a real token?"""
    alone: Alone | None
    """How far two sequences are from themselves alone; None where that was not asked."""

    def __str__(self) -> str:
        unseen = f"not looked at: {few(self.unseen)}" * bool(self.unseen)
        still = "what padding and other sequences hold moves no real token" * self.asked
        said = "; ".join(filter(None, [self.told, still, unseen, "" if self.alone is None else str(self.alone)]))
        if not self.layers:
            asked = "no kernel was heard, and the model was asked"
            return f"collate_npu: {asked if self.asked else 'NOT JUDGED: no kernel was heard that could be'}: {said}"
        which = "every layer" if self.asked and not self.unseen else "these layers" if self.unseen else "every layer heard"
        return f"collate_npu: {which} got what the batch says: {said}"

    __repr__ = __str__  # as the last line of a cell


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
    """Run `model(**batch)`, and raise `CollateError` where a kernel was told something else than the batch says, where a
    real token moves by what padding or another sequence holds, or where nothing could be judged.

    `batch` is what the model, any module, is called with. `segments`, of the whole rows, default to what the batch itself
    says; give them under context parallelism (with `context_parallel`) and where `model(**batch)` is not told which tokens
    are padding. `pattern` is that of the model's attention. With `alone=True` two of its sequences are run again by
    themselves and must give the same logits, or last states. Where ranks compute a forward together (FSDP, ZeRO-3, experts)
    every rank calls it, with its own batch. `forward(**batch) -> logits [B, S, V]` stands for
    `model(**batch)` where that is not how the model is called; it must run the modules of `model`.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> batch = {"input_ids": torch.tensor([[256, 256, 7, 8], [4, 5, 6, 7]]), "attention_mask": keep}
    >>> check_delivery(model, batch).layers["model.layers.0.linear_attn"]
    'convolution zeros [2, 4], rule zeros [2, 4]'
    """
    inner = _known(model)
    if forward is None and "FullyShardedDataParallel" in type(model).__name__:
        forward = model  # what no part of it holds is whole in its own forward alone
    if forward is None and not (getattr(inner, "pre_process", True) and getattr(inner, "post_process", True)):
        rule = "A stage of a pipeline runs by its schedule alone."
        remedy = "Pass forward=, or check the model with pipeline size 1."
        raise UnsupportedFormError(explain("check_delivery", "a pipeline stage", rule, remedy))
    case = case_of(inner, batch, segments=segments, pattern=pattern)
    with torch.no_grad(), _eagerly(model), in_step(model, lambda: called(inner, batch, forward)):
        with _recorded(inner, batch, case, context_parallel) as record:
            given = called(inner, batch, forward)
        found = record.judged(measured=alone, asked=(batch, forward))
        return replace(found, alone=check_alone(inner, batch, case, given, forward)) if alone else found


@checked
def guard_first_batch(
    model: Any,
    *,
    alone: bool = False,
    report: Callable[[Delivery], object] = print,
    only: Callable[[Mapping[str, Any]], bool] | None = None,
    **settings: Any,
) -> Callable[[], None]:
    """Check the next forward of `model`, whoever calls it: what its kernels are told is judged as soon as it has run.

    Costs no forward of its own, so that any stage of a pipeline can be watched; with `alone=True` it costs five, and every
    rank must guard. `settings` are those of `check_delivery`. If they hold the Segments of one batch, `only(arguments)`
    says whether a forward is of that batch. What was proved goes to `report`, and the guard is gone. The function that is
    returned takes it off earlier.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> remove = guard_first_batch(model)
    >>> logits = model(input_ids=torch.tensor([[256, 256, 7, 8], [4, 5, 6, 7]]), attention_mask=keep).logits
    collate_npu: every layer heard got what the batch says: 2 recurrent: convolution zeros [2, 4] ✔ · rule zeros [2,
        4] ✔ · 1 attention: mask [2, 4] ✔ · positions ✔
    """
    inner = _known(model)
    refuse_compiled(model)
    _check_settings(settings)
    hold_against(check_delivery, settings.items())
    if (stack := consumer_of(model)) in ("transformers", "megatron"):
        say_outside("megatron-core" if stack == "megatron" else "transformers")
    names = list(inspect.signature(inner.forward).parameters)
    held = ExitStack()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Listen to this forward, or with `alone` check its batch now."""
        batch = {**dict(zip(names, args)), **kwargs}
        if only is not None and not only(batch):
            return
        if alone:
            held.close()
            report(check_delivery(inner, batch, alone=True, **settings))
            return
        cp, asked = settings.get("context_parallel"), {key: settings.get(key) for key in ("segments", "pattern")}
        behind.close()
        record = running.enter_context(_recorded(inner, batch, case_of(inner, batch, **asked), cp))
        behind.callback(inner.register_forward_hook(partial(judge, record), always_call=True).remove)

    def judge(record: _Record, module: nn.Module, args: Any, output: Any) -> None:
        running.close()
        if output is not None:  # None: it raised, torch walks its hooks, and the next forward is looked at
            held.close()
            report(record.judged())

    running, behind = held.enter_context(ExitStack()), held.enter_context(ExitStack())
    held.callback(inner.register_forward_pre_hook(before, with_kwargs=True).remove)
    return held.close


def refuse_compiled(model: nn.Module, *, compiled: bool = False) -> None:
    """Raise where a forward of this model is compiled code, in part at least."""
    if compiled or is_compiled(model):
        rule = "Compiled code calls no layer and no kernel that can be heard."
        remedy = "Run check_delivery(model, batch) before training: it runs the model uncompiled."
        raise UnsupportedFormError(explain("guard", f"a compiled {type(unwrap(model)).__name__}", rule, remedy))


def _check_settings(names: Collection[str]) -> None:
    known = {"segments", "pattern", "context_parallel", "forward"}
    if unknown := sorted({*names} - known):
        remedy = f"Known are {', '.join(sorted(known))}, and alone."
        raise CollateError(explain("check_delivery", f"{unknown[0]}=", "It has no such setting.", remedy))


def _known(model: Any) -> nn.Module:
    inner: nn.Module = unwrap(model)
    check_model(inner)
    if consumer_of(model) == "megatron" and (late := start_problem()):
        rule = "Ascend's patches are in place before anybody takes Megatron's functions."
        raise CollateError(explain("start", late, rule, "Mend the order of imports, and start again."))
    return inner


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


@dataclass(frozen=True, slots=True)
class _Record:
    """What was told to kernels in one forward of a model."""

    model: nn.Module
    case: Case
    forward: Forward

    def judged(self, *, measured: bool = False, asked: tuple[Mapping[str, Any], Any] | None = None) -> Delivery:
        """What was proved; or one error that lists every layer, those with the same fault together. Nothing told is one
        too, unless the numbers are `measured`, or this is a guard of a rank. `asked`: the batch, to ask the model about."""
        if faults := self.forward.faults():
            known = consumer_of(self.model) in ("transformers", "megatron")
            attends = "" if known else f"; pattern= says whom its attention attends ({self.case.pattern} here)"
            rule = f"Each layer is told which tokens are real, in the form it reads{attends}."
            remedy = "; ".join(dict.fromkeys(fault.remedy for fault in faults.values()))
            raise CollateError(explain("delivery", listed(faults.values()), rule, f"{remedy}.", more="delivery"))
        asks = asked is not None and self.forward.cp is None
        answer = ask(self.model, asked[0], self.case, asked[1]) if asked and asks else Asked(unasked="nobody asked")
        if answer.why_wrong:
            rule = "Neither padding nor another sequence moves a real token."
            remedy = "No known kernel of it was told wrong: look at its own code, and at what it does with the mask."
            raise CollateError(explain("delivery", answer.why_wrong, rule, remedy, more="delivery"))
        layers, told = self.forward.layers(), self._proved()
        if not (told or measured or not answer.unasked or self.forward.cp is not None):
            self._refuse_nothing()
        heard = [seen.layer for seen in self.forward.calls if seen.positions is None]
        unseen = [name for name in layers if not among(name, told) and (among(name, heard) or name not in answer.still)]
        unseen = [name for name in unseen if not crosses(name) or has_two_sides(self.model)]
        unseen += [name for name in answer.unheard if not among(name, unseen)]
        unseen += dict.fromkeys(f"{seen.layer} ({seen.unread})" for seen in self.forward.calls if seen.unread)
        unseen += [] if told else ["positions"]
        unseen += ["layers whose classes have no name of attention or a recurrence"] if answer.unasked and not layers else []
        said: dict[str, dict[str, None]] = {name: {} for name in sorted(told)}
        for seen in self.forward.calls:
            if seen.layer in said and self.forward.judges(seen) and seen.told:
                said[seen.layer][f"{seen.kind} {seen.told}".removeprefix("attention ")] = None
        handed, unseen = {name: ", ".join(each) for name, each in said.items()}, [*dict.fromkeys(unseen)]
        block_told = block(self.forward, {}) if told else ""
        return Delivery(layers=handed, told=block_told, unseen=tuple(unseen), asked=not answer.unasked, alone=None)

    def _proved(self) -> set[str]:
        """Layers of which every kernel was judged."""
        unruled = {name.removesuffix(" (its rule)") for name in self.forward.layers_without_kernels()}
        calls = [seen for seen in self.forward.calls if seen.positions is None]
        unread = {seen.layer for seen in calls if not self.forward.judges(seen)}
        return {seen.layer for seen in calls} - unread - unruled

    def _refuse_nothing(self) -> None:
        shapes = sorted({str(list(seen.told.shape)) for seen in self.forward.calls if seen.told is not None})
        got = f"calls of {', '.join(shapes)} tokens" if shapes else f"no known kernel in {type(self.model).__name__}"
        rule = f"Something of the batch's tokens {list(self.case.segments.shape)} is told to a kernel."
        remedy = "Pass the batch of these Segments, and the model that attends; alone=True compares the numbers."
        raise CollateError(explain("delivery", got, rule, remedy, more="delivery"))


@contextmanager
def _recorded(model: nn.Module, batch: Mapping[str, Any], case: Case, cp: ContextParallel | None) -> Iterator[_Record]:
    """Hear the kernels and the layers of one forward of this model."""
    ids = batch.get("input_ids", batch.get("tokens"))
    forward = Forward(root=model, number=0, step=0, training=False, ids=ids if isinstance(ids, Tensor) else None, cp=cp)
    forward.judge_by(case, whole=not of_kind(batch, "vision"))
    within, thread = replace(forward, calls=[]), threading.get_ident()

    def begin(module: nn.Module, *_: Any) -> Forward | None:
        if threading.get_ident() != thread or not (recorder.root_of(module) is model or holds(module, model)):
            return None
        return forward if recorder.forward is None else within  # a model within this one has other tokens

    recorder = Recorder(begin, lambda _: "")
    with recorder.on(model):
        yield _Record(model, case, forward)
