"""Watch: what each kernel of a process was told, in any stack, while it runs as it is.

    with watch() as seen:
        trainer.train()
    seen.faults

The first steps are looked at, each forward on its own, and then everything is taken off. A step ends with an optimizer's, or
with a forward without gradients. Costs one copy of boundaries to the host a call, and of masks one look at each score.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.consumer import Model
from collate_npu.consumers.models import config_of, is_transformers, unwrap
from collate_npu.errors import CollateError, printable
from collate_npu.kernels.check import call_breaches, knows
from collate_npu.keys import of_kind
from collate_npu.masks.find import agreed
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.sources import Sources
from collate_npu.proof.forward import Fault, Forward, Seen, block, counts, is_layer, short
from collate_npu.proof.hooks import Hooks, arguments_of
from collate_npu.proof.kernel_calls import KERNELS, MODULES, UnreadError
from collate_npu.segments import Segments

STEPS = 2
_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?)$")
"""Names of embeddings of positions."""
_STATE = re.compile(r"delta|mamba|ssm|kda|lightning")
"""Classes of layers that have a rule or a scan behind their convolution."""
_MOST_PASSES = 64
"""Forwards a step, and those behind the watched ones until all is taken off where no optimizer tells its steps."""
_REMEMBERED = 8
"""Batches of our adapter that are still known."""


class Watch:
    """What was seen in this process. Made by `watch`."""

    def __init__(
        self,
        *,
        steps: int = STEPS,
        stop: bool = False,
        out: Sequence[Path] = (),
        screen: TextIO | None = None,
        keeps: bool = True,
    ) -> None:
        self.forwards: list[Forward] = []
        self.faults: list[Fault] = []
        self.steps = 0
        """Steps that have ended."""
        self.kernels: Counter[str] = Counter()
        """Calls, by kernel."""
        self.silent: set[str] = set()
        """Layers in which no known kernel ran."""
        self.failed: set[str] = set()
        """What went wrong in watching itself; the run goes on."""
        self._most, self._stop, self._out, self._screen, self._keeps = steps, stop, [*out], screen, keeps
        self._number = self._judged = self._idle = 0
        self._local = threading.local()
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._roots: dict[int, tuple[weakref.ref[nn.Module] | None, bool]] = {}
        """Modules that were called outermost, and whether they are models."""
        self._told: set[str] = set()
        self._passes: Counter[tuple[int, bool]] = Counter()
        """Forwards of a root, with gradients and without."""
        self._made: deque[tuple[Tensor, Segments]] = deque(maxlen=_REMEMBERED)
        self._models: set[str] = set()
        self._hooks = Hooks(self._heard, self._around)

    # --- on and off

    def start(self) -> None:
        """Wrap everything."""
        self._hooks.install()
        self._optimizers = register_optimizer_step_post_hook(lambda *_: self._step_ends())
        rendered = BatchAdapter._rendered

        def remembered(adapter: BatchAdapter, batch: Mapping[str, Any]) -> Any:
            made = rendered(adapter, batch)
            self._remember(*made)
            return made

        self._hooks.put(BatchAdapter, "_rendered", remembered)

    def end(self) -> None:
        """Take everything off; the process is as it was."""
        if self._hooks.on:
            self._hooks.taken_off()
            self._optimizers.remove()
            if not self._keeps:  # they hold the models
                self.forwards = []

    def _remember(self, batch: Mapping[str, Any], segments: Segments) -> None:
        """A batch that our adapter made: what it says is known, whatever form it has."""
        if isinstance(ids := batch.get("input_ids"), Tensor):
            self._made.append((ids.detach().cpu().clone(), segments))

    # --- modules

    def _around(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack = self._stack
        if stack and (kernel := MODULES.get(type(module).__name__)) and self._is_kernel(module):
            kernel_name = f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"
            values = {"self": module, **_bound(module.forward, args, kwargs)}
            if type(module).__name__ == "Conv1d":
                values = {"x": args[0] if args else kwargs["input"]}
            return self._called(kernel_name, kernel, values, lambda: original(module, *args, **kwargs))
        forward, outer = None, self._local.forward
        with self._unharmed():
            if not stack or self._has_other_rows(kwargs):
                forward = self._begun(module, args, kwargs)
            elif self._local.forward is not None and (kind := self._counts(module)):
                self._note_positions(kind, module, args, kwargs)
        stack.append(module)
        try:
            result = original(module, *args, **kwargs)
        except BaseException as error:
            stack.pop()
            if forward is not None:
                forward.raised = type(error).__name__
            self._left(forward, outer)
            raise
        stack.pop()
        if (found := self._left(forward, outer)) and self._stop:
            self.end()
            raise CollateError("\n".join(dict.fromkeys(map(str, found))))
        return result

    def _has_other_rows(self, kwargs: Mapping[str, Any]) -> bool:
        """Is a model called within another one, on tokens that are not the outer one's, whole or without padding?"""
        ids, forward = kwargs.get("input_ids"), self._local.forward
        if forward is None or forward.ids is None or not isinstance(ids, Tensor) or ids is forward.ids:
            return False
        whole = forward.ids.flatten()
        real = whole if forward.truth is None else whole[forward.truth.indices.to(whole.device)]
        return not any(torch.equal(ids.flatten(), each) for each in (whole, real))

    def _left(self, forward: Forward | None, outer: Forward | None) -> list[Fault]:
        if forward is not None:
            self._local.forward = outer
            with self._unharmed():
                return self._ended(forward)
        return []

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        """What is ours never ends the run."""
        try:
            yield
        except Exception as error:
            self.failed.add(f"{type(error).__name__}: {str(error)[:120]}")

    @property
    def _stack(self) -> list[nn.Module]:
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.forward, self._local.depth = [], None, 0
        stack: list[nn.Module] = self._local.stack
        return stack

    def _is_kernel(self, module: nn.Module) -> bool:
        """A convolution is one inside a recurrent layer, one channel at a time."""
        if not isinstance(module, nn.Conv1d):
            return True
        return module.groups == module.in_channels > 1 and is_layer(self._stack[-1])

    def _counts(self, module: nn.Module) -> str:
        """Is it given positions: rotary ones, or those that are embedded?"""
        if "rotary" in type(module).__name__.lower():
            return "rotary"
        known = self._names.get(id(module)) if isinstance(module, nn.Embedding) else None
        return "embedded" if known is not None and _POSITIONS.search(known[1]) else ""

    def _note_positions(self, kind: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        forward: Forward = self._local.forward
        given = [value for value in (kwargs.get("position_ids"), *args) if isinstance(value, Tensor)]
        whole = [value for value in given if not value.is_floating_point() and value.ndim in (1, 2)]
        if whole and forward.truth is not None:
            found = whole[0].detach().cpu().numpy()
            S = forward.truth.shape[1]
            if found.shape[-1] == S and found.size in (S, forward.truth.array.size):
                found = np.broadcast_to(found, forward.truth.shape)
            known = self._names.get(id(module))
            name = known[1] if known else type(module).__name__
            forward.calls.append(
                Seen(layer=name, module=module, kernel=type(module).__name__, kind=kind, told=None, positions=found)
            )

    def _begun(self, module: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        """The forward that begins here, if this is a model that is still watched, or a layer that is computed again."""
        again = torch._C._current_graph_task_id() != -1
        known = self._names.get(id(module))
        if again and known is not None and known[0]() is not None:
            root = known[0]()
        elif self._knows(module):
            root = module
        else:
            return None
        assert root is not None
        training = torch.is_grad_enabled() or again
        self._passes[id(root), training] += not again
        if self._passes[id(root), training] > (_MOST_PASSES if training else 1) * self._most:
            if training or not self._passes.keys() & {(key, True) for key in self._roots}:
                self._idle += 1  # nobody steps: it is not trained, or by an optimizer that tells nobody
            if self._idle > _MOST_PASSES:
                self.end()
            return None
        forward = Forward(root=root, number=self._number, step=self.steps, training=training, again=again)
        if again:
            same = [each for each in self.forwards if each.root is root and each.step == self.steps and not each.again]
            forward.before = [seen for each in same for seen in each.calls]
        self._number += 1
        if not again:
            self._told_by_batch(forward, root, args, kwargs)
        self._local.forward = forward
        return forward

    def _knows(self, root: nn.Module) -> bool:
        """Is it a model with layers that look at other tokens? Its names are kept."""
        held, looks = self._roots.get(id(root), (None, False))
        if held is not None and held() is root:
            return looks
        held, looks = weakref.ref(root), any(map(is_layer, root.modules()))
        self._roots[id(root)] = held, looks
        if not looks:
            return False
        for name, module in root.named_modules():
            if id(module) not in self._names or name == "" or self._names[id(module)][0]() is None:
                self._names[id(module)] = held, short(name)
        self._models.add(type(root).__name__)
        self._hooks.look_at(root)
        return True

    def _told_by_batch(self, forward: Forward, root: nn.Module, args: Any, kwargs: Any) -> None:
        """What the inputs of the outermost module say: our adapter's Segments, or what the door finds."""
        try:
            inner = unwrap(root)
            given = _bound(inner.forward, args, kwargs)
            model = Model.of(inner) if is_transformers(inner) else Model()
            both = getattr(config_of(inner), "is_encoder_decoder", False)
            declared = "bidirectional" if both or model.pattern == "bidirectional" else None
            forward.first_position = model.first_position
            forward.compiled = any(getattr(each, "_compiled_call_impl", None) is not None for each in root.modules())
            forward.compiled |= hasattr(root, "_orig_mod")
            forward.pattern = None if of_kind(given, "vision") else Pattern.of(declared or "causal")
            ids = given.get("input_ids", given.get("tokens"))
            if isinstance(ids, Tensor):
                forward.ids = ids
                if ids.shape[-1] == 1:
                    raise UnreadError("one token a row: decoding is not judged")
                same = (
                    segments for made, segments in self._made if made.shape == ids.shape and bool((made == ids.cpu()).all())
                )
                forward.truth = next(same, None)
            if forward.truth is None:
                sources = Sources.of({("input_ids" if key == "tokens" else key): value for key, value in given.items()})
                flat = sources.shape()[0] == 1 and bool(sources.offsets or sources.lengths or sources.named["positions"])
                forward.truth = agreed(sources, polarity=None, pattern=declared, padding_free=flat)
        except (CollateError, UnreadError) as error:
            forward.unsaid = str(error)
        except Exception as error:  # whatever stands in a stranger's arguments
            forward.unsaid = f"{type(error).__name__}: {str(error)[:80]}"

    # --- kernels

    def _heard(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._stack or self._local.forward is None:
            return function(*args, **kwargs)
        values: dict[str, Any] | str
        try:
            values = arguments_of(function, args, kwargs)
        except Exception as error:
            values = f"{type(error).__name__}: {error}"
        if name == "torch.conv1d" and (self._local.depth or not is_layer(self._stack[-1]) or not _is_depthwise(values)):
            return function(*args, **kwargs)
        return self._called(name, KERNELS[name.rpartition(".")[2]], values, lambda: function(*args, **kwargs))

    def _called(self, name: str, row: Any, values: dict[str, Any] | str, call: Callable[[], Any]) -> Any:
        """Call it; of kernels that call one another for the same tokens the innermost counts."""
        forward: Forward | None = self._local.forward
        if forward is None:
            return call()
        seen, first = self._seen(name, row, values), len(forward.calls)
        result: Any = seen
        self._local.depth += 1
        try:
            result = call()
            return result
        finally:
            self._local.depth -= 1
            inner = [each.told for each in forward.calls[first:] if each.told is not None]
            whole = any(seen.told is None or len(told.first_T) == len(seen.told.first_T) for told in inner)
            if result is not None and not whole:  # None: a fallback that does nothing
                forward.calls[first:] = [seen]  # what it calls for a part of its tokens says nothing of all

    def _seen(self, name: str, row: Any, values: dict[str, Any] | str) -> Seen:
        kind, read = row
        layers = [module for module in self._stack if is_layer(module)]
        layer = layers[-1] if layers else self._stack[-1]
        known = self._names.get(id(layer))
        seen = Seen(layer=known[1] if known else type(layer).__name__, module=layer, kernel=name, kind=kind, told=None)
        try:
            if isinstance(values, str):
                raise UnreadError(values)
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise UnreadError("a graph is being captured")
            with torch.no_grad():
                told = read(name, values)
            found = call_breaches(name, values) if knows(name) else ()
            return replace(seen, told=told, breaches=tuple(found))
        except UnreadError as error:
            return replace(seen, unread=str(error))
        except Exception as error:  # the run goes on, whatever its arguments are
            return replace(seen, unread=f"{type(error).__name__}: {str(error)[:80]}")

    # --- forwards and steps

    def _ended(self, forward: Forward) -> list[Fault]:
        if forward.again and not forward.calls:
            return []
        if not forward.again:
            forward.silent = _silent(forward)
            self.silent.update(forward.silent)
        self.kernels.update(counts(forward.calls))
        self._judged += forward.truth is not None
        found = forward.faults()
        self.faults += found.values()
        self.forwards.append(forward)
        if found or not forward.again:
            self._say(forward, found)
        forward.let_go()
        return list(found.values())

    def _step_ends(self) -> None:
        if self.forwards and any(each.step == self.steps and each.training for each in self.forwards):
            self.steps += 1
            if not self._keeps:
                self.forwards = []
        if self.steps >= self._most:
            self.end()

    def _say(self, forward: Forward, faults: Mapping[int, Fault]) -> None:
        where = f"step {forward.step} rank {_rank()}"
        how = " · computed again" if forward.again else "" if forward.training else " · without gradients"
        how += f" · it raised {forward.raised}" * bool(forward.raised)
        lines = [f"{where}{how} · {block(forward, faults) or 'no known kernel ran'}"]
        if forward.unsaid and forward.unsaid not in self._told:
            self._told.add(forward.unsaid)
            lines.append(f"  not judged by its batch: {forward.unsaid}")
        for text in dict.fromkeys(map(str, faults.values())):
            lines.append(f"  ✘ {text}")
        if forward.compiled:
            lines.append("  compiled modules are not seen: set TORCH_COMPILE_DISABLE=1 to watch them")
        record = {
            "rank": _rank(), "pid": os.getpid(), "step": forward.step, "forward": forward.number, "again": forward.again,
            "training": forward.training, "model": type(forward.root).__name__, "said": lines[0],
            "kernels": dict(counts(forward.calls)), "silent": forward.silent,
            "faults": [asdict(each) for each in faults.values()],
        }  # fmt: skip
        self._write("\n".join(lines), record)

    def summary(self) -> str:
        """Steps, calls, kernels seen, and what was not looked at. Nothing seen is no pass."""
        if not self.kernels:
            models = ", ".join(sorted(self._models))
            seen = f"no known kernel ran in {models}" if models else "no model with attention or recurrent layers ran"
            return f"NOTHING WAS SEEN: {seen}. This is not a pass."
        calls = ", ".join(f"{name} {n}" for name, n in self.kernels.most_common())
        silent = sorted(self.silent)
        lines = [
            f"{self.steps} steps, {self._number} forwards ({self._judged} beside what their batch says), calls: {calls}"
        ]
        if silent:
            lines.append(f"no known kernel ran in: {', '.join(silent[:8])}{', ...' * (len(silent) > 8)}")
        if self.failed:
            lines.append(f"could not be watched: {'; '.join(sorted(self.failed)[:4])}")
        if self._hooks.unwrapped:
            lines.append(f"could not be wrapped: {'; '.join(self._hooks.unwrapped[:4])}")
        lines.append(f"{len(self.faults)} faults" if self.faults else "no fault in what was looked at")
        return " · ".join(lines)

    def summed_up(self) -> None:
        """Say it at the end of a process in which a model ran."""
        self.end()
        if self._number or self.failed:
            self._write(f"rank {_rank()}: {self.summary()}", {})

    def forget(self) -> None:
        """A forked process begins anew."""
        self.forwards, self.faults, self.kernels = [], [], Counter()
        self.steps = self._number = self._judged = self._idle = 0
        self._local = threading.local()

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


@contextmanager
def watch(*, steps: int = STEPS, stop: bool = False, out: str | Path | None = None, say: bool = True) -> Iterator[Watch]:
    """Look at what each kernel of this process is told, for so many steps, and judge each forward.

    With `stop` the first fault raises `CollateError` behind its forward. `out` gets a line of JSON for each forward, the
    screen (stderr) a block, unless `say` is off. Afterwards the process is as it was.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, ids = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[256, 256, 7], [4, 5, 6]])
    >>> with watch(say=False) as seen:
    ...     out = model(input_ids=ids, attention_mask=torch.tensor([[0, 0, 1], [1, 1, 1]]))
    >>> seen.faults, seen.kernels["transformers.torch_chunk_gated_delta_rule"]
    ([], 2)
    """
    seen = Watch(steps=steps, stop=stop, out=[Path(out)] if out else [], screen=sys.stderr if say else None)
    seen.start()
    try:
        yield seen
    finally:
        seen.end()
        seen._write(seen.summary(), {})


def arm(_torch: Any) -> None:
    """Watch this process to its end, as `collate-npu watch` says in the environment; torch was just imported."""
    told = json.loads(os.environ["COLLATE_NPU_WATCH"])
    out = [Path(path) for path in (told["seen"], told["out"]) if path]
    seen = Watch(steps=told["steps"], out=out, screen=sys.stderr, keeps=False)
    seen.start()
    os.register_at_fork(after_in_child=seen.forget)
    atexit.register(seen.summed_up)


def _is_depthwise(values: dict[str, Any] | str) -> bool:
    weight = values.get("weight") if isinstance(values, dict) else None
    return isinstance(weight, Tensor) and isinstance(values, dict) and weight.shape[0] == values.get("groups", 1) > 1


def _silent(forward: Forward) -> list[str]:
    """The innermost layers in which no kernel ran."""
    ran = {id(seen.module) for seen in forward.calls}
    layers = {
        id(module): (name, module)
        for name, module in forward.root.named_modules()
        if is_layer(module) and type(module).__name__ not in MODULES
    }
    inner = [
        (name, module)
        for name, module in layers.values()
        if not any(id(each) in layers and each is not module for each in module.modules())
    ]
    silent = [short(name) for name, module in inner if id(module) not in ran]
    ruled = {id(seen.module) for seen in forward.calls if seen.kind == "rule"}
    stateful = [(name, module) for name, module in inner if _STATE.search(type(module).__name__.lower())]
    return silent + [f"{short(name)} (its rule)" for name, module in stateful if id(module) in ran - ruled]


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names, those of `**kwargs` among them; what the function itself would refuse, it refuses."""
    with suppress(TypeError, ValueError):
        return arguments_of(function, args, kwargs)
    return dict(kwargs)


def _rank() -> str:
    return os.environ.get("RANK", "0")
