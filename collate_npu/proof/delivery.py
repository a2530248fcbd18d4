"""Delivery: proof, at the first batch, that every kernel was told what the batch says.

What a collator emits need not reach the model: another library may replace the collator, a trainer drop a key, a forward
ignore it, and nothing says so. Here the kernels are asked, in any module; and where a layer's kernels cannot be (a shard of
a rank, a compiled layer), what a layer of transformers or Megatron was handed.

A check by hand costs one forward pass without gradients, and 0.1 s; the guard looks at the trainer's own. With `alone=True`
two sequences of the batch are run again (`proof.alone`).
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.checked import checked, hold_against
from collate_npu.consumers.consumer import Case
from collate_npu.consumers.megatron import start_problem
from collate_npu.consumers.models import consumer_of, has_two_sides, is_compiled, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.given import check_model
from collate_npu.keys import of_kind
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel
from collate_npu.proof.alone import Alone, check_alone
from collate_npu.proof.forward import Forward, crosses, short
from collate_npu.proof.measure import called
from collate_npu.proof.reading import Judge
from collate_npu.proof.received import Received, by_readers, received_calls, received_masks
from collate_npu.proof.recording import Recorder
from collate_npu.proof.said import block, few, listed
from collate_npu.proof.truth import case_of
from collate_npu.releases import say_outside
from collate_npu.segments import Segments

__all__ = ["Alone", "Delivery", "Received", "check_delivery", "guard_first_batch", "received_masks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What was proved."""

    layers: Mapping[str, str]
    """What each reading layer was handed, by module name: `"attention_mask int64 [2, 9]"`."""
    told: str
    """What kernels were told, as `watch` says it; "" where none was judged."""
    unseen: tuple[str, ...]
    """Layers of which nothing was judged."""
    alone: Alone | None
    """How far two sequences are from themselves alone; None where that was not asked."""

    def __str__(self) -> str:
        counts = Counter(self.layers.values())
        handed = "; ".join(f"{what} to {times} layer{'s' * (times > 1)}" for what, times in counts.items())
        parts = [handed, f"kernels: {self.told}" * bool(self.told), f"not looked at: {few(self.unseen)}" * bool(self.unseen)]
        said = "; ".join(filter(None, [*parts, "" if self.alone is None else str(self.alone)]))
        if not (self.layers or self.told):
            return f"collate_npu: no kernel and no layer could be judged: {said}"
        return f"collate_npu: {'these layers' if self.unseen else 'every layer'} got what the batch says: {said}"

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
    """Run `model(**batch)` once, and raise `CollateError` where a kernel or a layer was told something else than the batch
    says, or where nothing was told that could be judged.

    `batch` is what the model, any module, is called with. `segments`, of the whole rows, default to what the batch itself
    says; give them under context parallelism (with `context_parallel`) and where `model(**batch)` is not told which tokens
    are padding. `pattern` is that of the model's attention. With `alone=True` two of its sequences are run again by
    themselves and must give the same logits, or last states. `forward(**batch) -> logits [B, S, V]` stands for
    `model(**batch)` where that is not how the model is called; it must run the modules of `model`.

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
    case = case_of(inner, batch, segments=segments, pattern=pattern)
    eagerly = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    with torch.no_grad(), eagerly, _recorded(inner, batch, case, context_parallel) as record:
        given = called(inner, batch, forward)
    found = record.judged(measured=alone)
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
    """Check the next forward of `model`, whoever calls it: what its layers receive is judged as soon as it has run.

    Costs no forward of its own, so that any stage of a pipeline can be watched; with `alone=True` it costs five, and every
    rank must guard. `settings` are those of `check_delivery`. If they hold the Segments of one batch, `only(arguments)`
    says whether a forward is of that batch. What was proved goes to `report`, and the guard is gone. The function that is
    returned takes it off earlier.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> remove = guard_first_batch(model)
    >>> logits = model(input_ids=torch.tensor([[256, 256, 7, 8], [4, 5, 6, 7]]), attention_mask=keep).logits
    collate_npu: every layer got what the batch says: attention_mask int64 [2, 4] to 2 layers; attention_mask bool [2,
        1, 4, 4] to 1 layer; kernels: 2 recurrent: convolution zeros [2, 4] ✔ · rule zeros [2, 4] ✔ · 1 attention: mask
        [2, 4] ✔ · positions ✔
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


@dataclass(frozen=True, slots=True)
class _Record:
    """What was told to kernels and layers in one forward of a model."""

    model: nn.Module
    case: Case
    cp: ContextParallel | None
    forward: Forward
    received: Mapping[str, Received]

    def judged(self, *, measured: bool = False) -> Delivery:
        """What was proved; or one error that lists every layer, those with the same fault together. Nothing told is one
        too, unless the numbers are `measured`."""
        known = consumer_of(self.model) in ("transformers", "megatron")
        judge = Judge(model=self.model, case=self.case, cp=self.cp)
        layers = self.forward.layers()
        readers = {short(each.name): each for each in by_readers(self.received) if known and judge.asks(each)}
        readers = {name: each for name, each in readers.items() if not layers or _among(name, layers)}  # no block of an MLP
        calls = {n: each for n, each in self.forward.faults().items() if self.cp is None or self.forward.calls[n].breaches}
        told, astray = self._proved(), {fault.layer for fault in calls.values()}
        asked = {name: each for name, each in readers.items() if not _among(name, told - astray)}
        handed = {name: why for name, each in asked.items() if (why := judge.why_wrong(each))}
        if handed or calls:
            attends = "" if known else f"; pattern= says whom its attention attends ({self.case.pattern} here)"
            rule = f"Each layer is told which tokens are real ({self.case.segments!r}), in the form it reads{attends}."
            remedy = "Hand the model BatchAdapter(model)(batch), or gpt_batch's inputs on Megatron"
            remedy = f"{remedy if known else '; '.join(dict.fromkeys(fault.remedy for fault in calls.values()))}."
            raise CollateError(explain("delivery", listed(calls.values(), handed), rule, remedy, more="delivery"))
        if not (readers or told or measured):
            self._refuse_nothing()
        unseen = [name for name in layers if not _among(name, {*readers, *told})]
        unseen = [name for name in unseen if not crosses(name) or has_two_sides(self.model)]
        unseen += [] if layers else ["layers whose classes have no name of attention or a recurrence"]
        unseen += dict.fromkeys(f"{seen.layer} ({seen.unread})" for seen in self.forward.calls if seen.unread)
        block_told = block(self.forward, calls) if told else ""
        handed = {name: str(each) for name, each in readers.items()}
        return Delivery(layers=handed, told=block_told, unseen=tuple(unseen), alone=None)

    def _proved(self) -> set[str]:
        """Layers of which every kernel was judged."""
        unruled = {name.removesuffix(" (its rule)") for name in self.forward.layers_without_kernels()}
        calls = [seen for seen in self.forward.calls if seen.positions is None]
        unread = {seen.layer for seen in calls if not self.forward.judges(seen)}
        return {seen.layer for seen in calls} - unread - unruled

    def _refuse_nothing(self) -> None:
        shapes = sorted({str(list(seen.told.shape)) for seen in self.forward.calls if seen.told is not None})
        got = f"calls of {', '.join(shapes)} tokens" if shapes else f"no known kernel in {type(self.model).__name__}"
        rule = f"Something of the batch's tokens {list(self.case.segments.shape)} is told to a kernel or a layer."
        remedy = "Pass the batch of these Segments, and the model that attends; alone=True compares the numbers."
        raise CollateError(explain("delivery", got, rule, remedy, more="delivery"))


def _holds(module: nn.Module, model: nn.Module) -> bool:
    return any(each is model for each in module.modules())


def _among(name: str, layers: Collection[str]) -> bool:
    """Is it one of these layers, within one, or around one?"""
    return any(name == each or name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in layers)


@contextmanager
def _recorded(model: nn.Module, batch: Mapping[str, Any], case: Case, cp: ContextParallel | None) -> Iterator[_Record]:
    """Hear the kernels and the layers of one forward of this model."""
    ids = batch.get("input_ids", batch.get("tokens"))
    forward = Forward(root=model, number=0, step=0, training=False, ids=ids if isinstance(ids, Tensor) else None)
    if cp is None:  # else its kernels have the tokens of a rank, step by step
        forward.judge_by(case, whole=not of_kind(batch, "vision"))
    within, thread = replace(forward, calls=[]), threading.get_ident()

    def begin(module: nn.Module, *_: Any) -> Forward | None:
        if threading.get_ident() != thread or not (recorder.root_of(module) is model or _holds(module, model)):
            return None
        return forward if recorder.forward is None else within  # a model within this one has other tokens

    recorder = Recorder(begin, lambda _: "")
    with recorder.on(model), received_calls(model) as received:
        yield _Record(model, case, cp, forward, received)
