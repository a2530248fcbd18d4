"""Delivery: proof, at the first batch, that every layer got its mask, and that a row gives the numbers it gives alone.

What a collator emits need not reach the model: another library may replace the collator, a trainer drop a key, a forward
ignore it, and nothing says so. Here the model itself is asked. One line before training, for transformers and Megatron
modules (ms-swift's too)::

    guard_first_batch(model)            # the first forward is checked, then the guard is gone
    check_delivery(model, batch)        # or by hand, with the arguments of model(**batch)

A check by hand costs one forward pass without gradients, with `alone=True` five; the guard looks at the trainer's own.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from collate_npu.consumers.consumer import Case, Model
from collate_npu.consumers.models import consumer_of, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations.delivery.alone import Alone, check_alone, run
from collate_npu.integrations.delivery.reading import Judge
from collate_npu.integrations.delivery.received import Received, by_readers, received_calls, received_masks
from collate_npu.integrations.mindspeed import start_problem
from collate_npu.keys import of_kind
from collate_npu.masks.find import segments_from_batch, token_shape
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel
from collate_npu.segments import Segments

__all__ = ["Alone", "Delivery", "Received", "check_delivery", "guard_first_batch", "received_masks"]


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
    _check_start(inner)
    forward = forward or _forward(inner)
    case = _case(inner, batch, {"segments": segments, "pattern": pattern})
    with received_calls(inner) as received:
        logits = run(inner, forward, batch)
    found = _judged(inner, case, received, context_parallel)
    return replace(found, alone=check_alone(inner, batch, case, logits, forward)) if alone else found


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
            _check_start(inner)
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


def _known(model: Any) -> nn.Module:
    inner: nn.Module = unwrap(model)
    if consumer_of(model) not in ("transformers", "megatron"):
        rule = "Layers are known of transformers and Megatron-core modules."
        raise CollateError(explain("check_delivery", type(inner).__name__, rule, "Pass the module itself."))
    return inner


def _check_start(model: nn.Module) -> None:
    if consumer_of(model) == "megatron" and (late := start_problem()):
        rule = "MindSpeed's patches are in place before anybody takes Megatron's functions."
        raise CollateError(explain("mindspeed", late, rule, "Mend the order of imports, and start again."))


def _judged(model: nn.Module, case: Case, received: Mapping[str, Received], cp: ContextParallel | None) -> Delivery:
    judge = Judge(model=model, case=case, cp=cp)
    readers = {name: what for name, what in by_readers(received).items() if judge.asks(what)}
    _raise_wrong(judge, readers)
    return Delivery(layers={name: str(what) for name, what in readers.items()}, alone=None)


def _case(model: nn.Module, batch: Mapping[str, Any], settings: Mapping[str, Any]) -> Case:
    about, truth, pattern = Model.of(model), settings.get("segments"), settings.get("pattern")
    declared = pattern or ("bidirectional" if about.pattern == "bidirectional" else None)
    rows = token_shape(batch)[0] if truth is None else len(truth.ids)
    flat = rows == 1 and any(batch.get(key) is not None for key in of_kind(batch, "offsets"))
    if truth is None:
        truth = segments_from_batch(batch, pattern=declared, padding_free=flat)
    return Case(segments=truth, model=about, pattern=Pattern.of(declared or "causal"), padding_free=flat)


def _forward(model: nn.Module) -> Callable[..., Any]:
    if consumer_of(model) == "transformers":
        return lambda **batch: model(**batch).logits
    if not (getattr(model, "pre_process", True) and getattr(model, "post_process", True)):
        rule = "A stage of a pipeline runs by its schedule alone."
        remedy = "Pass forward=, or check the model with pipeline size 1."
        raise UnsupportedFormError(explain("check_delivery", "a pipeline stage", rule, remedy))
    return model


def _raise_wrong(judge: Judge, received: Mapping[str, Received]) -> None:
    """One error that lists every layer, those with the same fault together."""
    faults: dict[str, list[str]] = {}
    for name, what in received.items():
        if why := judge.why_wrong(name, what):
            faults.setdefault(why, []).append(name)
    if not received and (judge.case.inside or judge.case.segments.packed):
        faults["no layer of these tokens takes attention_mask"] = [type(judge.model).__name__]
    if faults:
        listed = "; ".join(f"{_few(names)}: {why}" for why, names in faults.items())
        rule = f"Each layer is told which tokens are real ({judge.case.segments!r}), in the form it reads."
        remedy = f"Hand the model BatchAdapter(model)(batch), or gpt_batch's inputs on Megatron. Reader: {judge.reader}."
        raise CollateError(explain("delivery", listed, rule, remedy))


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
