"""Delivery: which boundaries and padding each kernel gets, beside what the batch says. One class listens to forwards and
judges each of them; `watch`, `guard_first_batch` and `check_delivery` are its three entrances.

What a collator emits need not reach the model: another library may replace the collator, a trainer drop a key, a forward
ignore it, and nothing says so. So the kernels are recorded, in any module. `watch` looks at every forward of a process for
some steps, the guard at the next one of a model, and `check_delivery` at one that it runs itself; it runs three more without
gradients, in the mode the model is in, without dropout, to see whether tokens leak (leaks.py), and with `alone` four or six
of one row, as many on every rank. A step ends with an optimizer's, or with a forward without gradients. Costs one copy of
boundaries to the host a call, and of masks one look at each score.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from collate_npu.consumers.adapter import KNOWN_BATCHES
from collate_npu.consumers.by_sequence import runs_by_sequence
from collate_npu.consumers.model_traits import consumer_of, is_compiled, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain, printable
from collate_npu.masks.patterns import Pattern
from collate_npu.parallel import ContextParallel
from collate_npu.parallel.agreement import outside_graphs
from collate_npu.proof.hooks import Recorder, bound
from collate_npu.proof.kernel_calls import CROSS, Fault, Forward, among, first_names
from collate_npu.proof.known_kernels import UnreadError
from collate_npu.proof.leaks import Alone, check_alone, check_alone_of_ranks, find_leak, run_seeded
from collate_npu.releases import say_outside
from collate_npu.segments import Segments
from collate_npu.validation import check_model, checked

__all__ = ["Alone", "Delivery", "Watch", "check_delivery", "guard_first_batch", "watch"]
STEPS = 2
_MOST_PASSES = 64
"""Forwards a step, and those behind the watched ones until all is taken off where no optimizer ends a step."""


class Watch:
    """Listens to the kernel calls of forwards and compares each call with its batch: in a process, or in one forward.

    `with Watch(forward=...)` listens to that forward alone, in this thread; the forward judges itself.
    """

    def __init__(
        self,
        *,
        steps: int = STEPS,
        stop: bool = False,
        out: Sequence[Path] = (),
        screen: TextIO | None = None,
        keeps: bool = True,
        forward: Forward | None = None,
    ) -> None:
        self.forwards: list[Forward] = []
        self.faults: list[Fault] = []
        self.records: list[dict[str, Any]] = []
        """What is written of each forward."""
        self.steps = 0
        """Steps that have ended."""
        self._most, self._stop, self._out, self._screen, self._keeps = steps, stop, [*out], screen, keeps
        self._one, self._thread = forward, get_ident()
        self._number = self._idle = 0
        self._logged: set[str] = set()
        self._passes: Counter[tuple[int, bool]] = Counter()
        """Forwards of a root, with gradients and without."""
        self._recorder = Recorder(self._begin_forward, self._end_forward)
        self.failed = self._recorder.failed
        """Errors of the watching itself; the run goes on after them."""

    @property
    def kernels(self) -> Counter[str]:
        """Calls, by kernel."""
        return sum((Counter(record["kernels"]) for record in self.records), Counter[str]())

    # --- on and off

    def start(self) -> None:
        """Wrap the kernels, and begin to watch."""
        self._recorder.install()
        if self._one is not None:
            self._recorder.keep(self._one.root)
            return
        self._optimizers = register_optimizer_step_post_hook(lambda *_: self._end_step())
        KNOWN_BATCHES.watch(1)

    def end(self) -> None:
        """Unwrap the kernels; the process is as before."""
        if not self._recorder.listens:
            return
        self._recorder.take_off()
        if self._one is None:
            self._optimizers.remove()
            KNOWN_BATCHES.watch(-1)
        if not self._keeps:  # they hold the models
            self.forwards = []

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    # --- a forward begins

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        """Return the forward that begins here, for a model that is still watched or a layer that is computed again."""
        if (one := self._one) is not None:
            ours = self._recorder.root_of(module) is one.root or any(each is one.root for each in module.modules())
            if get_ident() != self._thread or not ours:
                return None
            return one if self._recorder.forward is None else Forward(root=one.root)  # within it other tokens run
        again = torch._C._current_graph_task_id() != -1
        root = self._recorder.root_of(module) if again else None
        if root is None:
            if not self._recorder.knows(module):
                return None
            root = module
        training = torch.is_grad_enabled() or again
        if self._is_enough(root, training, again):
            return None
        forward = Forward(root=root, number=self._number, step=self.steps, training=training, again=again)
        if again:
            same = [each for each in self.forwards if each.root is root and each.step == self.steps and not each.again]
            forward.before = [call for each in same for call in each.calls]
        else:
            self._number += 1
            self._read_batch(forward, root, args, kwargs)
        return forward

    def _is_enough(self, root: nn.Module, training: bool, again: bool) -> bool:
        """Return True if enough forwards of this model were watched. Ends the watch if no optimizer steps."""
        self._passes[id(root), training] += not again
        if self._passes[id(root), training] <= (_MOST_PASSES if training else 1) * self._most:
            return False
        if training or not any(trained for _, trained in self._passes):
            self._idle += 1  # nobody steps: it is not trained, or by an optimizer without hooks
        if self._idle > _MOST_PASSES:
            self.end()
        return True

    def _read_batch(self, forward: Forward, root: nn.Module, args: Any, kwargs: Any) -> None:
        """Judge the forward by the inputs of the outermost module, if they say which tokens are real."""
        try:
            given = bound(unwrap(root).forward, args, kwargs)
            forward.compiled = is_compiled(root)
            ids = given.get("input_ids", given.get("tokens"))
            if isinstance(ids, Tensor) and ids.shape[-1] == 1:
                forward.ids = ids
                raise UnreadError("one token a row: decoding is not judged")
            forward.judge_by(given)
        except (CollateError, UnreadError) as error:
            forward.skip_reason = str(error)
        except Exception as error:  # whatever stands in a stranger's arguments
            forward.skip_reason = f"{type(error).__name__}: {str(error)[:80]}"

    # --- forwards and steps end

    def _end_forward(self, forward: Forward) -> str:
        if self._one is not None or (forward.again and not forward.calls):
            return ""
        found = forward.faults()
        self.faults += found.values()
        self.forwards.append(forward)
        self._log_forward(forward, found)
        forward.release()
        if not (found and self._stop):
            return ""
        self.end()
        return str(forward.error(found.values()))

    def _end_step(self) -> None:
        if self.forwards and any(each.step == self.steps and each.training for each in self.forwards):
            self.steps += 1
            if not self._keeps:
                self.forwards = []
        if self.steps >= self._most:
            self.end()

    def _log_forward(self, forward: Forward, faults: Mapping[int, Fault]) -> None:
        rank = os.environ.get("RANK", "0")
        how = " · computed again" if forward.again else "" if forward.training else " · without gradients"
        how += f" · it raised {forward.raised}" * bool(forward.raised)
        lines = [f"step {forward.step} rank {rank}{how} · {forward.report(faults) or 'no known kernel ran'}"]
        self.records.append({"rank": rank, "pid": os.getpid(), "line": lines[0], **forward.as_json(faults)})
        if forward.skip_reason and -1 not in faults and forward.skip_reason not in self._logged:
            self._logged.add(forward.skip_reason)
            lines.append(f"  not judged by its batch: {forward.skip_reason}")
        lines += [f"  ✘ {text}" for text in dict.fromkeys(map(str, faults.values()))]
        if forward.compiled:
            lines.append("  compiled modules are not seen: set TORCH_COMPILE_DISABLE=1 to watch them")
        if faults or not forward.again:
            self._write("\n".join(lines), self.records[-1])

    def summary(self) -> str:
        """Return the numbers of forwards, faults and kernels seen, and what was not checked. Nothing seen is no pass."""
        lines = [summarize(self.records)]
        if not self.records and self._recorder.models:
            lines.append(f"these models ran: {', '.join(sorted(self._recorder.models))}")
        if self.failed:
            lines.append(f"could not be watched: {'; '.join(sorted(self.failed)[:4])}")
        if self._recorder.unwrapped:
            lines.append(f"could not be wrapped: {'; '.join(self._recorder.unwrapped[:4])}")
        return " · ".join(lines)

    def log_summary(self) -> None:
        """Log the summary at the end of a process in which a model ran."""
        self.end()
        if self._number or self.failed:
            self._write(f"rank {os.environ.get('RANK', '0')}: {self.summary()}", {})

    def forget(self) -> None:
        """Drop what was seen: a forked process begins anew."""
        self.forwards, self.faults, self.records = [], [], []
        self.steps = self._number = self._idle = 0
        self._recorder.forget()

    def _write(self, text: str, record: Mapping[str, Any]) -> None:
        if self._screen is not None:
            with suppress(OSError, ValueError):
                print(printable(f"collate_npu watch: {text}"), file=self._screen, flush=True)
        for path in [*self._out] if record else ():
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:  # a full disk does not end a run
                self._out.remove(path)
                self._write(f"{error}: nothing more is written there", {})


_MOST = 6
"""Layers with a fault that a summary names."""
_NO_PASS = "This is not a pass."


def summarize(records: Sequence[Mapping[str, Any]]) -> str:
    """Return one line about the recorded forwards of one process or many. Nothing seen is no pass."""
    kernels = sum((Counter(record["kernels"]) for record in records), Counter[str]())
    wrong = [record for record in records if record["faults"]]
    if not kernels and not wrong:
        return f"NOTHING WAS SEEN: no known kernel ran. {_NO_PASS}"
    own = [record["judged"] for record in records if not record["again"]]
    if not wrong and not any(record["judged"] for record in records):
        reasons = (record["skip_reason"] for record in records if record["skip_reason"])
        why = next(reasons, "no kernel had the tokens of its batch").splitlines()[0]
        return f"NOT JUDGED: {len(own)} forwards, none compared with its batch: {why} {_NO_PASS}"
    faults = f"no fault in {sum(own)} of {len(own)} forwards"
    if wrong:
        places = [*dict.fromkeys(f"{each['layer']}, {each['kernel']}" for record in wrong for each in record["faults"])]
        more = "; ..." if len(places) > _MOST else ""
        faults = f"{len(wrong)} of {len(own)} forwards with a fault ({'; '.join(places[:_MOST])}{more})"
    counted = ", ".join(f"{name} {n}" for name, n in kernels.most_common())
    processes = len({record["pid"] for record in records})
    text = f"{processes} process{'es' * (processes > 1)}, {faults}; kernels: {counted}"
    silent = sorted({name for record in records for name in record["silent"]})
    return f"{text} · no known kernel ran in: {first_names(silent)}" if silent else text


# --- a process


@contextmanager
def watch(*, steps: int = STEPS, stop: bool = False, out: str | Path | None = None, say: bool = True) -> Iterator[Watch]:
    """Check, for so many steps, the boundaries that each kernel of this process gets, forward by forward.

    With `stop` the first fault raises `CollateError` after its forward. Each forward writes a line of JSON to `out`, and a
    block to the screen (stderr) unless `say` is False. Afterwards nothing is wrapped any more.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, ids = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[256, 256, 7], [4, 5, 6]])
    >>> with watch(say=False) as seen:
    ...     out = model(input_ids=ids, attention_mask=torch.tensor([[0, 0, 1], [1, 1, 1]]))
    >>> seen.faults, seen.kernels["transformers.torch_chunk_gated_delta_rule"]
    ([], 2)
    """
    with Watch(steps=steps, stop=stop, out=[Path(out)] if out else [], screen=sys.stderr if say else None) as seen:
        try:
            yield seen
        finally:
            seen.end()
            seen._write(seen.summary(), {})


def arm(_torch: Any) -> None:
    """Watch this process to its end, as `collate-npu watch` sets it in the environment; torch was just imported."""
    settings = json.loads(os.environ["COLLATE_NPU_WATCH"])
    out = [Path(path) for path in (settings["seen"], settings["out"]) if path]
    seen = Watch(steps=settings["steps"], out=out, screen=sys.stderr, keeps=False)
    seen.start()
    os.register_at_fork(after_in_child=seen.forget)
    atexit.register(seen.log_summary)


# --- a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The result of `check_delivery`."""

    layers: Mapping[str, str]
    """What the kernels of each judged layer got: `"convolution zeros [1, 3], rule zeros [1, 3]"`."""
    report: str
    """The same of all layers, as `watch` prints it; "" if none was judged."""
    unchecked: tuple[str, ...]
    """Layers of which nothing was judged, and what else was not."""
    leak_free: bool
    """True if padding and other sequences were replaced, and no real token moved."""
    alone: Alone | None
    """How far two sequences are from the same sequences alone; None without `alone=True`."""

    @property
    def verdict(self) -> str:
        """Return what was proved, in one sentence."""
        if not self.layers:
            return "no known kernel ran, and no tokens leak" if self.leak_free else "NOT JUDGED: no kernel was compared"
        every = "every layer" if self.leak_free else "every layer with a known kernel"
        return f"{'these layers' if self.unchecked else every} got what the batch says"

    def __str__(self) -> str:
        unchecked = f"not checked: {first_names(self.unchecked)}" * bool(self.unchecked)
        still = "what padding and other sequences hold moves no real token, without gradients" * self.leak_free
        parts = filter(None, [self.report, still, unchecked, "" if self.alone is None else str(self.alone)])
        return f"collate_npu: {self.verdict}: {'; '.join(parts)}"

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
    """Run `model(**batch)` and check that each kernel gets the padding and the boundaries of the batch.

    Raises `CollateError` where a kernel gets others, where padding or another sequence moves a real token, or nothing
    was checked. It runs without gradients (`guard_first_batch` sees a step that trains), and looks at positions where the
    model gets them, not inside a rotary. `batch` is what the model, any module, is called with. `segments`, of whole rows,
    default to what the batch says; give them under context parallelism (with `context_parallel`) and where nothing in it
    marks padding. `pattern` is that of the model's attention. With `alone=True` two sequences of a model of transformers
    or Megatron run again alone and must give the same logits, or last states. Where ranks compute a forward together (FSDP,
    ZeRO-3, experts) every rank calls it, with its own batch. `forward(**batch) -> logits [B, S, V]` stands for
    `model(**batch)` where the model is called otherwise; it must run the modules of `model`.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> batch = {"input_ids": torch.tensor([[256, 256, 7, 8], [4, 5, 6, 7]]), "attention_mask": keep}
    >>> check_delivery(model, batch).layers["model.layers.0.linear_attn"]
    'convolution zeros [2, 4], rule zeros [2, 4]'
    """
    check_model(inner := unwrap(model))
    if forward is None and "FullyShardedDataParallel" in type(model).__name__:
        forward = model  # what no part of it holds is whole in its own forward alone
    if forward is None and not (getattr(inner, "pre_process", True) and getattr(inner, "post_process", True)):
        rule = "A stage of a pipeline runs only in its schedule."
        remedy = "Pass forward=, or check the model with pipeline size 1."
        raise UnsupportedFormError(explain("check_delivery", "a pipeline stage", rule, remedy))
    judged = Forward(root=inner, cp=context_parallel)
    case = judged.judge_by(batch, segments=segments, pattern=pattern)
    eager: Any = torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
    with torch.no_grad(), eager:
        with Watch(forward=judged):
            given = run_seeded(inner, batch, forward)
        _check_faults(judged)
        leak, untested = ("", "a rank") if context_parallel else find_leak(inner, batch, case.segments, given, forward)
        if leak:
            rule = "Neither padding nor another sequence moves a real token."
            suspects = first_names(judged.layers_without_kernels()) or "its layers"
            remedy = f"Every known kernel got the right masks: check what the code of {suspects} does with the mask."
            raise CollateError(explain("delivery", f"real tokens move when {leak}", rule, remedy, more="delivery"))
        found = _proof(judged, measured=alone, untested=untested)
        if not alone:
            return found
        if context_parallel and forward is None and runs_by_sequence(inner, shared=True):
            return replace(found, alone=check_alone_of_ranks(inner, batch, case, given, context_parallel))
        return replace(found, alone=check_alone(inner, batch, case, given, forward))


@checked
def guard_first_batch(
    model: Any,
    *,
    alone: bool = False,
    segments: Segments | None = None,
    pattern: str | Pattern | None = None,
    context_parallel: ContextParallel | None = None,
    forward: Callable[..., Any] | None = None,
) -> Callable[[], None]:
    """Check the next forward of `model`, whoever calls it, as soon as it has run, and print the result.

    Costs no forward of its own, so that any stage of a pipeline can be watched; with `alone=True` it costs five, and
    every rank must guard. The other settings are those of `check_delivery`. Then the guard is removed; the returned
    function removes it earlier.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, keep = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    >>> remove = guard_first_batch(model)
    >>> logits = model(input_ids=torch.tensor([[256, 256, 7, 8], [4, 5, 6, 7]]), attention_mask=keep).logits
    collate_npu: every layer with a known kernel got what the batch says: 2 recurrent: convolution zeros [2, 4] ✔ ·
        rule zeros [2, 4] ✔ · 1 attention: mask [2, 4] ✔ · positions ✔
    """
    settings: dict[str, Any] = {"segments": segments, "pattern": pattern, "context_parallel": context_parallel}
    return guard_forward(model, lambda batch: True, alone=alone, forward=forward, **settings)


def guard_forward(
    model: Any,
    wanted: Callable[[Mapping[str, Any]], bool],
    *,
    alone: bool = False,
    forward: Callable[..., Any] | None = None,
    context_parallel: ContextParallel | None = None,
    **truth: Any,
) -> Callable[[], None]:
    """`guard_first_batch` for the first forward whose arguments are `wanted`."""
    check_model(inner := unwrap(model))
    refuse_compiled(model)
    if (stack := consumer_of(model)) in ("transformers", "megatron"):
        say_outside("megatron-core" if stack == "megatron" else "transformers")
    held = ExitStack()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Listen to this forward, or with `alone` check its batch now."""
        if torch.compiler.is_compiling():
            outside_graphs(refuse_compiled)(inner, compiled=True)
        batch = {**dict(zip(inspect.signature(inner.forward).parameters, args)), **kwargs}
        if not wanted(batch):
            return
        if alone:
            held.close()
            print(check_delivery(inner, batch, alone=True, forward=forward, context_parallel=context_parallel, **truth))
            return
        judged = Forward(root=inner, cp=context_parallel)
        judged.judge_by(batch, **truth)
        behind.close()
        running.enter_context(Watch(forward=judged))
        behind.callback(inner.register_forward_hook(partial(judge, judged), always_call=True).remove)

    def judge(judged: Forward, module: nn.Module, args: Any, output: Any) -> None:
        running.close()
        if output is not None:  # None: it raised, torch walks its hooks, and the next forward is looked at
            held.close()
            _check_faults(judged)
            print(_proof(judged))

    running, behind = held.enter_context(ExitStack()), held.enter_context(ExitStack())
    held.callback(inner.register_forward_pre_hook(before, with_kwargs=True).remove)
    return held.close


def run_judged(call: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, str]:
    """Return what `call(model, *args, **kwargs)` returns, and what was proved of that forward of a transformers model, which
    costs no other. Raises `CollateError` for a fault."""
    judged = Forward(root=(inner := unwrap(model)))
    try:
        refuse_compiled(inner)
        judged.judge_by(bound(inner.forward, args, kwargs))
    except (CollateError, UnreadError) as error:
        return call(model, *args, **kwargs), f"NOT JUDGED: {str(error).splitlines()[0]}"
    with Watch(forward=judged):
        output = call(model, *args, **kwargs)
    _check_faults(judged)
    try:
        return output, _proof(judged).verdict
    except CollateError as error:
        return output, f"NOT JUDGED: {str(error).splitlines()[0]}"


def refuse_compiled(model: nn.Module, *, compiled: bool = False) -> None:
    """Raise where a forward of this model is compiled code, in part at least."""
    if compiled or is_compiled(model):
        rule = "The layers and kernels of compiled code cannot be recorded."
        remedy = "Run check_delivery(model, batch) before training: it runs the model uncompiled."
        raise UnsupportedFormError(explain("guard", f"a compiled {type(unwrap(model)).__name__}", rule, remedy))


def _check_faults(judged: Forward) -> None:
    if faults := judged.faults().values():
        raise judged.error(faults)


def _proof(judged: Forward, *, measured: bool = False, untested: str = "a guard") -> Delivery:
    """Return what a forward without faults proves. Raises where nothing was judged, unless the numbers are `measured`, or
    ranks share the row. `untested`: why leaks were not looked for."""
    layers, complete = judged.layers(), judged.judged_layers()
    if not (complete or measured or not untested or judged.cp):
        raise judged.unseen_error()
    unchecked = [name for name in layers if not among(name, complete) and not CROSS.search(name.lower())]
    unchecked += [f"{call.layer} ({call.unread_reason})" for call in judged.calls if call.unread_reason]
    unchecked += [] if complete else ["positions"]
    unchecked += ["layers whose classes have no name of attention or a recurrence"] if untested and not layers else []
    got_by: dict[str, dict[str, None]] = {name: {} for name in sorted(complete)}
    for call in judged.calls:
        if call.layer in got_by and judged.judges(call) and call.boundaries:
            got_by[call.layer][f"{call.kind} {call.boundaries}".removeprefix("attention ")] = None
    return Delivery(
        layers={name: ", ".join(each) for name, each in got_by.items()}, report=judged.report({}) if complete else "",
        unchecked=tuple(dict.fromkeys(unchecked)), leak_free=not untested, alone=None,
    )  # fmt: skip
