"""Recording: the kernel calls of a process, each in its layer and its forward, while the process runs as it is.

Layers call layers, and kernels call kernels: the innermost layer names a call, and of kernels that call one another for the
same tokens the innermost counts. Nothing here ends a run: what could not be read is said beside what was.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.arrays import Array
from collate_npu.consumers.mask_routing import Case
from collate_npu.errors import CollateError
from collate_npu.kernels.call_boundaries import zeros_of
from collate_npu.kernels.check import call_breaches, knows
from collate_npu.proof.forward import Fault, Forward, Seen, is_layer, short
from collate_npu.proof.hooks import WRAPS, Hooks, arguments_of
from collate_npu.proof.kernel_calls import KERNELS, MODULES, UnreadError

Begin = Callable[[nn.Module, Any, Any], "Forward | None"]
"""`begin(module, args, kwargs)` of what is called outermost: the forward that begins with it, None for none."""
End = Callable[[Forward], str]
"""`end(forward)`: what to raise behind it, "" for nothing."""
_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?)$")
"""Names of embeddings of positions."""


class Recorder:
    """Hears every kernel while it is on."""

    def __init__(self, begin: Begin, end: End) -> None:
        self.failed: set[str] = set()
        """What went wrong in recording itself; the run goes on."""
        self.models: set[str] = set()
        """Classes of the models that ran."""
        self.hooks = Hooks(self._heard, self._around)
        self.results: deque[Any] | None = None
        """What kernels gave, one after the other, where that is kept."""
        self.replays = False
        """Do kernels, and the layers in `frozen`, give that instead of what they compute?"""
        self.frozen: tuple[nn.Module, ...] = ()
        self._begin, self._end = begin, end
        self._local = threading.local()
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._roots: dict[int, tuple[weakref.ref[nn.Module] | None, bool]] = {}
        """Modules that were called outermost, and whether they are models."""

    @property
    def forward(self) -> Forward | None:
        """The one that runs now, in this thread."""
        running: Forward | None = self._here.forward
        return running

    def forget(self) -> None:
        """A forked process begins anew."""
        self._local = threading.local()

    def root_of(self, module: nn.Module) -> nn.Module | None:
        """The model that this module is a part of."""
        known = self._names.get(id(module))
        return None if known is None else known[0]()

    def knows(self, root: nn.Module) -> bool:
        """Is it a model with layers that look at other tokens? Its names are kept, and its kernels wrapped."""
        held, looks = self._roots.get(id(root), (None, False))
        if held is not None and held() is root:
            return looks
        tells = any(map(is_layer, root.modules())) or any(isinstance(each, nn.Embedding) for each in root.children())
        held, looks = weakref.ref(root), tells or any(isinstance(each, nn.ModuleList) for each in root.modules())
        self._roots[id(root)] = held, looks
        if looks:
            self.keep(root)
        return looks

    def keep(self, root: nn.Module) -> None:
        """Keep the names of its modules, and wrap its kernels."""
        held = weakref.ref(root)
        for name, module in root.named_modules():
            if id(module) not in self._names or name == "" or self.root_of(module) is None:
                self._names[id(module)] = held, short(name)
        self.models.add(type(root).__name__)
        WRAPS.look_at(root)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Listen meanwhile, to this model too if it has no layer by its name."""
        self.hooks.install()
        self.keep(model)
        try:
            yield
        finally:
            self.hooks.taken_off()

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """What is ours never ends the run."""
        try:
            yield
        except Exception as error:
            self.failed.add(f"{type(error).__name__}: {str(error)[:120]}")

    # --- modules

    def _around(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        here = self._here
        if here.stack and (kernel := MODULES.get(type(module).__name__)) and self._is_kernel(module):
            kernel_name = f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"
            values = {"self": module, **bound(module.forward, args, kwargs)}
            if type(module).__name__ == "Conv1d":
                values = {"x": args[0] if args else kwargs["input"]}
            return self._called(kernel_name, kernel, values, lambda: original(module, *args, **kwargs))
        if any(module is each for each in self.frozen):
            return self._kept(lambda: original(module, *args, **kwargs))
        forward, outer = None, here.forward
        with self.unharmed():
            if not here.stack or self._has_other_rows(kwargs):
                forward = self._begin(module, args, kwargs)
                here.forward = forward or outer
            elif outer is not None and (kind := self._counts(module)):
                self._note_positions(outer, kind, module, args, kwargs)
            elif outer is not None and is_layer(module):
                here.empty_T = _still_empty(outer.empty_T, [*args, *kwargs.values()])
        here.stack.append(module)
        try:
            result = original(module, *args, **kwargs)
        except BaseException as error:
            here.stack.pop()
            if forward is not None:
                forward.raised = type(error).__name__
            self._left(forward, outer)
            raise
        here.stack.pop()
        if isinstance(module, nn.Embedding) and outer is not None and args and args[0] is outer.ids:
            with self.unharmed():
                outer.empty_T = zeros_of(result, "BTD")
        if wrong := self._left(forward, outer):
            raise CollateError(wrong)
        return result

    def _left(self, forward: Forward | None, outer: Forward | None) -> str:
        if forward is not None:
            self._here.forward = outer
            with self.unharmed():
                return self._end(forward)
        return ""

    @property
    def _here(self) -> Any:
        """Of this thread: the modules that run, its forward, and how deep its kernels are."""
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.forward, self._local.depth, self._local.empty_T = [], None, 0, None
        return self._local

    def _has_other_rows(self, kwargs: Mapping[str, Any]) -> bool:
        """Is a model called within another one, on tokens that are not the outer one's, whole or without padding?"""
        ids, forward = kwargs.get("input_ids"), self._here.forward
        if forward is None or forward.ids is None or not isinstance(ids, Tensor) or ids is forward.ids:
            return False
        whole = forward.ids.flatten()
        real = whole if forward.truth is None else whole[forward.truth.indices.to(whole.device)]
        return not any(torch.equal(ids.flatten(), each) for each in (whole, real))

    def _is_kernel(self, module: nn.Module) -> bool:
        """A convolution is one inside a recurrent layer, one channel at a time."""
        if not isinstance(module, nn.Conv1d):
            return True
        return module.groups == module.in_channels > 1 and is_layer(self._here.stack[-1])

    def _counts(self, module: nn.Module) -> str:
        """Is it given positions: rotary ones, or those that are embedded?"""
        if re.search("rotary|rope", type(module).__name__.lower()) and not is_layer(module):
            return "rotary"
        known = self._names.get(id(module)) if isinstance(module, nn.Embedding) else None
        return "embedded" if known is not None and _POSITIONS.search(known[1]) else ""

    def _note_positions(self, forward: Forward, kind: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        plain = type(module).forward is nn.Embedding.forward
        named = bound(module.forward, args, kwargs).items()
        given = [value for key, value in named if isinstance(value, Tensor) and (plain or "position" in key)]
        given = [value for value in given if not value.is_floating_point()]
        value = next((value for value in given if value.ndim in (1, 2, 3)), None)
        if value is None or forward.truth is None:
            return
        for axis in torch.unique(value, dim=0) if value.ndim == 3 else [value]:  # mRoPE has three, of text all equal
            found, truth = axis.detach().cpu().numpy(), forward.truth
            if found.shape[-1] == truth.shape[1] and found.size in (truth.shape[1], truth.array.size):
                found = np.broadcast_to(found, truth.shape)
            where: dict[str, Any] = {"layer": self._name_of(module), "kernel": type(module).__name__}
            forward.calls.append(Seen(**where, module=module, kind=kind, told=None, positions=found))

    def _name_of(self, module: nn.Module) -> str:
        known = self._names.get(id(module))
        return known[1] if known else type(module).__name__

    # --- kernels

    def _heard(
        self,
        name: str,
        function: Callable[..., Any],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        here = self._here
        if not here.stack or here.forward is None:
            return call(*args, **kwargs)
        values: dict[str, Any] | str
        try:
            values = arguments_of(function, args, kwargs)
        except Exception as error:
            values = f"{type(error).__name__}: {error}"
        if name == "torch.conv1d" and (here.depth or not is_layer(here.stack[-1]) or not _is_depthwise(values)):
            return call(*args, **kwargs)
        return self._called(name, KERNELS[name.rpartition(".")[2]], values, lambda: call(*args, **kwargs))

    def _called(self, name: str, row: Any, values: dict[str, Any] | str, call: Callable[[], Any]) -> Any:
        """Call it; of kernels that call one another for the same tokens the innermost counts."""
        forward: Forward | None = self._here.forward
        if forward is None:
            return call()
        seen, first = self._seen(name, row, values), len(forward.calls)
        result: Any = seen
        try:
            result = self._kept(call)
            return result
        finally:
            inner = [each.told for each in forward.calls[first:] if each.told is not None]
            whole = any(seen.told is None or len(told.first_T) == len(seen.told.first_T) for told in inner)
            if result is not None and not whole:  # None: a fallback that does nothing
                forward.calls[first:] = [seen]  # what it calls for a part of its tokens says nothing of all

    def _kept(self, call: Callable[[], Any]) -> Any:
        """Call it, the outermost kernel, or give what it gave in the forward before."""
        here, keeps = self._here, self.results is not None and not self._here.depth
        if keeps and self.replays:
            assert self.results is not None
            return _copied(self.results.popleft())
        here.depth += 1
        try:
            result = call()
        finally:
            here.depth -= 1
        if keeps:
            assert self.results is not None
            self.results.append(_copied(result))
        return result

    def _seen(self, name: str, row: Any, values: dict[str, Any] | str) -> Seen:
        kind, read = row
        stack = self._here.stack
        layer = next((module for module in reversed(stack) if is_layer(module)), stack[-1])
        empty_T = self._here.empty_T
        seen = Seen(layer=self._name_of(layer), module=layer, kernel=name, kind=kind, told=None, empty_T=empty_T)
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


@contextmanager
def heard(model: nn.Module, cases: Iterable[Case]) -> Iterator[list[Fault]]:
    """The faults of this model's forwards meanwhile, which are of these batches, one after the other."""
    faults: list[Fault] = []
    coming = iter(cases)

    def begin(module: nn.Module, *_: Any) -> Forward | None:
        if module is not model or (case := next(coming, None)) is None:
            return None
        forward = Forward(root=model, number=0, step=0, training=torch.is_grad_enabled())
        forward.judge_by(case)
        return forward

    def end(forward: Forward) -> str:
        faults.extend(forward.faults().values())
        return ""

    with Recorder(begin, end).on(model):
        yield faults


def _copied(given: Any) -> Any:
    """What goes on with it may write in it."""
    if isinstance(given, tuple):
        return tuple(map(_copied, given))
    return given.clone() if isinstance(given, Tensor) else given


def _still_empty(empty_T: Array | None, given: Iterable[Any]) -> Array | None:
    """Which of these tokens are zero in what a layer is called with: the first tensor of states."""
    states = next((x for x in given if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3), None)
    if empty_T is None or not empty_T.any() or states is None or states.shape[0] * states.shape[1] != len(empty_T):
        return None
    still_T: Array = empty_T & zeros_of(states, "BTD")
    return still_T


def _is_depthwise(values: dict[str, Any] | str) -> bool:
    weight = values.get("weight") if isinstance(values, dict) else None
    return isinstance(weight, Tensor) and isinstance(values, dict) and weight.shape[0] == values.get("groups", 1) > 1


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names, those of `**kwargs` among them; what the function itself would refuse, it refuses."""
    with suppress(TypeError, ValueError):
        return arguments_of(function, args, kwargs)
    return dict(kwargs)
