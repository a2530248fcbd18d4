"""Every model: `collate-npu run -- CMD` adapts each transformers model of a process when it is first called.

A model is called by its class, inside DDP, FSDP, DeepSpeed or a stack's actor: transformers' class, PEFT's wrapper and
torch.compile's get a `__call__` that adapts first. transformers' Trainer counts labels before: they are corrected first. The
first forward with gradients is judged as `check_delivery` judges, without a forward of its own: ranks stay in step.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from collate_npu.consumers.model_traits import unwrap
from collate_npu.errors import CollateError, printable
from collate_npu.integrations.accelerate import REFUSING, unless_adapted
from collate_npu.integrations.adapt import Adapted, adapt, hooks_of, learned
from collate_npu.parallel.agreement import outside_graphs
from collate_npu.proof.delivery import run_judged
from collate_npu.proof.kernel_calls import first_names

CALLED = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
CALLED |= {"torch._dynamo.eval_frame": "OptimizedModule"}
"""The class by which a model is called, by its module."""
_OUTERMOST = "_collate_npu_runs"
"""Stands on each module of these classes that was seen: True if a batch enters the model there. Copies have it too."""


class EveryModel:
    """Adapts each model of this process, and counts batches. `seen`: a file that gathers it; None: stderr, at the end."""

    def __init__(self, *, check: bool, seen: str | None = None) -> None:
        self.check, self.seen = check, seen
        self.adapted: WeakKeyDictionary[nn.Module, Adapted] = WeakKeyDictionary()
        self.forget()

    def __reduce__(self) -> Any:
        """A copy of a model counts with it."""
        return here, ()

    def forget(self) -> None:
        """Count anew, as a forked process does."""
        self.record: dict[str, Any] = {"models": {}, "checked": {}, "refused": Counter()}
        self.counts = Counter[str]()

    def start(self) -> None:
        """Adapt what is called from now on."""
        import wrapt

        for name, kind in CALLED.items():
            wrapt.register_post_import_hook(partial(_put, kind, "__call__", self.call), name)
        counter = partial(_put, "Trainer", "_get_num_items_in_batch", self.count_labels)
        wrapt.register_post_import_hook(counter, "transformers.trainer")
        for name in REFUSING:
            wrapt.register_post_import_hook(partial(_put, None, name, self.let_in), "accelerate.accelerator")
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.write, ending=True)

    def know(self, model: nn.Module) -> None:
        """Adapt a model that is called for the first time, unless its user did, or it is a copy that a probe asks."""
        inside = [each for each in model.modules() if type(each).__call__ is not nn.Module.__call__]
        asked = hasattr(model, "is_probe")
        if not asked:
            self._adapt(model, inside)
        for each in inside:
            setattr(each, _OUTERMOST, each is model and not asked)

    def _adapt(self, model: nn.Module, inside: Sequence[nn.Module]) -> None:
        for each in inside:
            if each in self.adapted:  # before a wrapper was made
                self.adapted.pop(each).remove()
        way = "as its user adapted it"
        if hooks_of(model) is None:
            self.adapted[model] = handle = adapt(model)
            way = handle.way or "left as it came"
        self.record["models"][type(unwrap(model)).__name__] = way
        if hooks_of(model) is not None:
            model.register_forward_pre_hook(self._count)

    def call(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a model that is adapted."""
        known = getattr(model, _OUTERMOST, None)
        if known is not None and (not known or torch.compiler.is_compiling()):
            return original(model, *args, **kwargs)
        with self._refusals():
            if known is None:
                outside_graphs(self.know)(model)
            return self._called(original, model, args, kwargs)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except CollateError as error:
            self.record["refused"][str(error).partition(". ")[0]] += 1
            self.write()
            raise

    def _called(self, original: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Judge the first forward with gradients of each kind of model."""
        name, checked = type(unwrap(model)).__name__, self.record["checked"]
        trains = self.check and name not in checked and model.training and torch.is_grad_enabled()
        if not trains or torch.compiler.is_compiling() or (hooks := hooks_of(model)) is None:
            return original(model, *args, **kwargs)
        if hooks.shares(model):  # `check_delivery` takes these with the ranks named
            checked[name] = "NOT JUDGED: ranks share its rows"
            return original(model, *args, **kwargs)
        checked[name] = "NOT JUDGED: its first forward did not end"
        output, checked[name] = run_judged(original, model, args, kwargs)
        return output

    def count_labels(self, original: Callable[..., Any], trainer: Any, batches: Sequence[Any], *args: Any) -> Any:
        """Correct the labels of a step before the Trainer counts them (transformers 5.23 trainer.py:2298)."""
        with self._refusals():
            if not hasattr(trainer.model, _OUTERMOST):
                self.know(trainer.model)
            for batch in batches:
                batch.update(learned(trainer.model, batch))
        return original(trainer, batches, *args)

    def let_in(self, refusing: Callable[..., Any], model: Any) -> Any:
        """Adapt a model that accelerate asks by the names of its layers whether ranks may share its rows."""
        if isinstance(model, nn.Module) and not hasattr(model, _OUTERMOST):
            self.know(model)
        return unless_adapted(refusing, model)

    def _count(self, model: nn.Module, args: Any) -> None:
        """Count a batch that was let in; write at the first, the second, the fourth ..., since a process may be killed."""
        hooks = hooks_of(model)
        segments, alone = hooks.running() if hooks is not None else (None, False)
        self.counts["batches"] += 1
        if segments is not None:
            self.counts["places"] += segments.array.size
            self.counts["saved"] += segments.num_padding * alone
        if self.counts["batches"].bit_count() == 1:
            self.write()

    def write(self, *, ending: bool = False) -> None:
        """Write what was counted so far; where nobody gathers it, say it at the end."""
        record = {**self.record, **self.counts, "pid": os.getpid(), "rank": os.environ.get("RANK", "0")}
        if not record["models"]:
            return
        if self.seen is not None:
            with open(self.seen, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        elif ending:
            print(printable(f"collate-npu run: {run_summary([record])}"), file=sys.stderr, flush=True)


def _put(kind: str | None, name: str, ours: Callable[..., Any], module: Any) -> None:
    original = getattr(owner := getattr(module, kind) if kind else module, name, None)
    if original is not None:  # a release may not have it
        setattr(owner, name, wraps(original)(lambda *args, **kwargs: ours(original, *args, **kwargs)))


def run_summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one line about the last record of each process."""
    last = {(record["pid"], record["rank"]): record for record in records}.values()
    if not last:
        return "NOTHING WAS ADAPTED: no transformers model was called. This is no pass."
    models, checked = (
        {f"{name}: {said}" for each in last for name, said in each[key].items()} for key in ("models", "checked")
    )
    refused, counts = Counter[str](), Counter[str]()
    for record in last:
        refused.update(record["refused"])
        counts.update({key: record.get(key, 0) for key in ("batches", "places", "saved")})
    share = counts["saved"] / max(counts["places"], 1)
    return " · ".join([
        f"{len(last)} process{'es' * (len(last) > 1)}, {first_names(sorted(models))}",
        f"{counts['batches']} batches, padding saved: {share:.0%} of {counts['places']} places",
        f"first step: {first_names(sorted(checked)) or 'not checked'}",
        f"refused: {first_names([f'{n} times {said}' for said, n in refused.items()]) or 'nothing'}",
    ])  # fmt: skip


@cache
def here() -> EveryModel:
    """Return that of this process, as `collate-npu run` sets it in the environment."""
    return EveryModel(**json.loads(os.environ.get("COLLATE_NPU_RUN", '{"check": false}')))


def arm(_module: Any) -> None:
    """Adapt each model of this process; torch was just imported."""
    here().start()
