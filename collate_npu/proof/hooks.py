"""Hooks on kernels and modules: they record each kernel call of a process, in its layer and its forward, while the process
runs as it is.

Layers call layers, and kernels call kernels: the innermost layer names a call, and of kernels that call one another for the
same tokens the innermost counts. Nothing here ends a run: what could not be read is reported beside what was.

Functions are wrapped by their names (`KERNELS`) wherever they stand: in modules, in classes, on layers; what is imported
while a forward runs, from the next one on. A wrapper is a plain function, which torch.compile traces through as if it were
not there. `nn.Module` gives the layer a call is made.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.arrays import Array
from collate_npu.consumers.by_sequence import is_heard, running
from collate_npu.errors import CollateError
from collate_npu.proof.boundaries import zeros_of
from collate_npu.proof.kernel_calls import Forward, RecordedCall, is_layer, plain_name
from collate_npu.proof.known_kernels import KERNELS, MODULES, OF_TORCH, POSITIONAL, MisusedError, UnreadError

_FUNCTIONS = (FunctionType, BuiltinFunctionType, staticmethod)


class _Wraps:
    """The functions that are wrapped in this process, once for all recorders. When the last recorder leaves, they are put
    back, and a wrapper that somebody keeps calls its function alone."""

    def __init__(self) -> None:
        self.unwrapped: list[str] = []
        self._held: list[tuple[Any, str, Any, Any]] = []
        self._wrapped: dict[int, Callable[..., Any]] = {}
        """By the id of a function: its wrapper."""
        self._wrappers: dict[int, Callable[..., Any]] = {}
        """By the id of a wrapper: what it wraps."""
        self._seen_modules: set[str] = set()
        self._swept = 0
        """Modules of the process when they were looked through."""
        self.lock = threading.RLock()
        """One thread at a time wraps, or puts back."""

    def install(self) -> None:
        """Wrap what is there; `sweep` wraps what is imported later."""
        original: Callable[..., Any] = nn.Module._call_impl

        def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
                return original(module, *args, **kwargs)
            call = original
            for recorder in tuple(_LISTENING):
                call = partial(recorder.run_module, call)
            return call(module, *args, **kwargs)

        self._put(nn.Module, "_call_impl", _call_impl)
        self.sweep()

    def sweep(self) -> None:
        """Wrap each kernel by its name, in every module of this process and in transformers' registry of attention."""
        if (modules := len(sys.modules)) == self._swept:
            return
        with self.lock:
            for name, module in list(sys.modules.items()):
                held = getattr(module, "__dict__", None)
                if not isinstance(held, dict) or (name.startswith("torch.") and name not in OF_TORCH):
                    continue  # what else torch calls stays what it is
                self._wrap_in(held)
                for kind in {*map(type, list(held.values()))}:
                    if isinstance(registry := vars(kind).get("_global_mapping"), dict):
                        self._wrap_in(registry)
            self._swept = modules  # at last: another thread does not count on what is half done

    def wrap_model(self, root: nn.Module) -> None:
        """Wrap what the layers of a model hold, their classes, and functions of their modules."""
        self.sweep()
        for base in {base for module in root.modules() for base in type(module).__mro__}:
            if base.__module__.startswith("torch.") or base.__module__ == "builtins":
                continue
            self._wrap_in(base)
            if base.__module__ not in self._seen_modules:
                self._seen_modules.add(base.__module__)
                for each in list(vars(sys.modules.get(base.__module__, base)).values()):
                    self._wrap_kept(each)
        for module in root.modules():
            self._wrap_in(module)

    def take_off(self) -> None:
        """Put every function back, unless the run itself has replaced it meanwhile."""
        for holder, name, old, new in reversed(self._held):
            with suppress(Exception):
                if _of(holder, name) is new:
                    _set(holder, name, old)
        with suppress(Exception):
            for wrapper in self._wrappers:
                _SCRIPT._get_builtin_table().pop(wrapper, None)
        if (dynamo := sys.modules.get("torch._dynamo.trace_rules")) is not None:  # what it noted of our wrappers
            with suppress(Exception):
                dynamo.clear_lru_cache()
        for each in (self._held, self.unwrapped, self._wrapped, self._wrappers, self._seen_modules):
            each.clear()
        self._swept = 0

    def _wrap_in(self, holder: Any) -> None:
        for name, held in list((holder if isinstance(holder, dict) else vars(holder)).items()):
            if type(held) not in _FUNCTIONS or not self._is_kernel(held):
                continue
            try:
                fixed = isinstance(held, staticmethod)
                self._put(holder, name, staticmethod(self._wrapper(held.__func__)) if fixed else self._wrapper(held))
            except Exception as error:  # a package that does not let itself be wrapped runs as it is
                self.unwrapped.append(f"{name}: {type(error).__name__}: {error}")

    def _is_kernel(self, value: Any) -> bool:
        """Return True for a function with the name of a known kernel that is not our wrapper."""
        value = value.__func__ if type(value) is staticmethod else value  # isinstance would wake what loads itself late
        return type(value) in _FUNCTIONS and value.__name__ in KERNELS and id(value) not in self._wrappers

    def _wrap_kept(self, function: Any, depth: int = 3) -> None:
        """Wrap kernels in the closure of a function, where transformers' own functions keep them."""
        function = self._wrappers.get(id(function), function)
        if not isinstance(function, FunctionType):
            return
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                if depth:
                    self._wrap_kept(cell.cell_contents, depth - 1)
                if self._is_kernel(cell.cell_contents):
                    self._put(cell, "cell_contents", self._wrapper(cell.cell_contents))

    def _wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if (known := self._wrapped.get(id(function))) is not None:
            return known
        kernel = f"{(function.__module__ or 'torch').partition('.')[0].strip('_')}.{function.__name__}"

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            call = function
            for recorder in tuple(_LISTENING):
                call = partial(recorder.run_kernel, kernel, function, call)
            return call(*args, **kwargs)

        called.__collate_npu__ = function  # type: ignore[attr-defined]
        with suppress(Exception):  # scripted code means the function itself
            if (op := _SCRIPT._find_builtin(function)) is not None:
                _SCRIPT._register_builtin(called, op)
        self._wrapped[id(function)], self._wrappers[id(called)] = called, function
        return called

    def _put(self, holder: Any, name: str, new: Any) -> None:
        """Set a new value, and remember the old one until the last recorder leaves."""
        self._held.append((holder, name, _of(holder, name), new))
        _set(holder, name, new)


_SCRIPT: Any = getattr(torch.jit, "_builtins", None)
_LISTENING: list[Recorder] = []
WRAPS = _Wraps()


def _of(holder: Any, name: str) -> Any:
    if isinstance(holder, CellType):
        return holder.cell_contents
    return holder[name] if isinstance(holder, dict) else vars(holder)[name]


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, with those of `**kwargs`; without them for transformers' own functions,
    which drop boundaries there (5.23 modeling_lfm3.py:319): only wrappers pass them on."""
    if (names := POSITIONAL.get(function.__name__)) is not None:
        return {**dict(zip(names, args)), **kwargs}
    signature = inspect.signature(function)
    found = dict(signature.bind(*args, **kwargs).arguments)
    rest = (name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD)
    found |= found.pop(next(rest, ""), {})
    own = inspect.isfunction(function) and (function.__module__ or "").startswith("transformers.")
    dropped = own and not hasattr(function, "__wrapped__")
    return {name: each for name, each in found.items() if name in signature.parameters or not dropped}


Begin = Callable[[nn.Module, Any, Any], "Forward | None"]
"""`begin(module, args, kwargs)` of what is called outermost: the forward that begins with it, None for none."""
End = Callable[[Forward], str]
"""`end(forward)`: what to raise behind it, "" for nothing."""
_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?)$")
"""Names of embeddings of positions."""


class _Thread(threading.local):
    """What runs in this thread: modules, a forward, how deep kernels are nested, and which tokens are still zero."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.forward: Forward | None = None
        self.depth = 0
        self.empty_T: Array | None = None


class Recorder:
    """Records every kernel while it is on."""

    def __init__(self, begin: Begin, end: End) -> None:
        self.failed: set[str] = set()
        """Return the errors of the recording itself; the run goes on after them."""
        self.models: set[str] = set()
        """Classes of the models that ran."""
        self.unwrapped: list[str] = []
        """Functions that could not be wrapped, and why; known once nobody records."""
        self._begin, self._end, self._here = begin, end, _Thread()
        self._names = weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]]()
        self._roots = weakref.WeakKeyDictionary[nn.Module, bool]()
        """Modules that were called outermost, and whether they are models."""

    @property
    def forward(self) -> Forward | None:
        """Return the forward that runs in this thread."""
        return self._here.forward

    def forget(self) -> None:
        """Start again in a forked process."""
        self._here, WRAPS.lock = _Thread(), threading.RLock()  # another thread may have held it

    def root_of(self, module: nn.Module) -> nn.Module | None:
        """Return the model that this module is a part of."""
        return self._names[module][0]() if module in self._names else None

    def knows(self, root: nn.Module) -> bool:
        """Return True for a model with layers that look at other tokens, and wrap its kernels."""
        if root not in self._roots:
            looks = any(is_layer(each) or isinstance(each, nn.ModuleList) for each in root.modules())
            self._roots[root] = looks or any(isinstance(each, nn.Embedding) for each in root.children())
            if self._roots[root]:
                self.keep(root)
        return self._roots[root]

    def keep(self, root: nn.Module) -> None:
        """Keep the names of its modules, and wrap its kernels."""
        held = weakref.ref(root)
        for name, module in root.named_modules():
            if name == "" or self.root_of(module) is None:
                self._names[module] = held, plain_name(name)
        self.models.add(type(root).__name__)
        with WRAPS.lock:
            WRAPS.wrap_model(root)

    @property
    def listens(self) -> bool:
        """Return True between `install` and `take_off`."""
        return self in _LISTENING

    def install(self) -> None:
        """Record every kernel and module of this process."""
        with WRAPS.lock:
            _LISTENING.append(self)
            if len(_LISTENING) == 1:
                WRAPS.install()

    def take_off(self) -> None:
        """Stop recording."""
        with WRAPS.lock:
            if self.listens:
                _LISTENING.remove(self)
                self.unwrapped = [*WRAPS.unwrapped]
                if not _LISTENING:
                    WRAPS.take_off()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Catch errors of the recording itself: they never end the run."""
        try:
            yield
        except Exception as error:
            self.failed.add(f"{type(error).__name__}: {str(error)[:120]}")

    # --- modules

    def run_module(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, `original(module, ...)`; a forward may begin with it."""
        here = self._here
        if here.stack and (kernel := MODULES.get(type(module).__name__)):
            kernel_name = f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"
            values = {"self": module, **bound(module.forward, args, kwargs)}
            return self._called(kernel_name, kernel, values, lambda: original(module, *args, **kwargs))
        forward, outer = None, here.forward
        with self.guarded():
            if not here.stack:
                WRAPS.sweep()
            if hasattr(module, "is_probe"):  # a tiny copy that this library runs: no forward of the user's
                pass
            elif not here.stack or self._has_other_rows(kwargs):
                forward = self._begin(module, args, kwargs)
                here.forward = forward or outer
            elif outer is not None and (kind := self._position_kind(module)):
                self._note_positions(outer, kind, module, args, kwargs)
            elif outer is not None and is_layer(module):
                here.empty_T = _still_empty(outer.empty_T, [*args, *kwargs.values()])
        here.stack.append(module)
        try:
            result = original(module, *args, **kwargs)
        except BaseException as error:
            if forward is not None:
                forward.raised = type(error).__name__
            self._end_forward(forward, outer)
            raise
        finally:
            here.stack.pop()
        if isinstance(module, nn.Embedding) and outer is not None and args and args[0] is outer.ids:
            with self.guarded():
                outer.empty_T = zeros_of(result, "BTD")
        if wrong := self._end_forward(forward, outer):
            raise CollateError(wrong)
        return result

    def _end_forward(self, forward: Forward | None, outer: Forward | None) -> str:
        if forward is not None:
            self._here.forward = outer
            with self.guarded():
                return self._end(forward)
        return ""

    def _has_other_rows(self, kwargs: Mapping[str, Any]) -> bool:
        """Return True if a model is called inside another one, on other tokens."""
        ids, forward = kwargs.get("input_ids"), self._here.forward
        if forward is None or forward.ids is None or not isinstance(ids, Tensor) or ids is forward.ids:
            return False
        if (plan := running()[0]) is not None and ids.shape == (1, plan.total):
            return False
        whole = forward.ids.flatten()
        real = whole if forward.truth is None else whole[forward.truth.indices.to(whole.device)]
        return not any(torch.equal(ids.flatten(), each) for each in (whole, real))

    def _position_kind(self, module: nn.Module) -> str:
        """Return "rotary" or "embedded" for a module that is given positions, "" for any other."""
        if re.search("rotary|rope", type(module).__name__.lower()) and not is_layer(module):
            return "rotary"
        return "embedded" if isinstance(module, nn.Embedding) and _POSITIONS.search(self._name_of(module)) else ""

    def _note_positions(self, forward: Forward, kind: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        plain = type(module).forward is nn.Embedding.forward
        named = bound(module.forward, args, kwargs).items()
        given = [value for key, value in named if isinstance(value, Tensor) and (plain or "position" in key)]
        value = next((value for value in given if not value.is_floating_point() and value.ndim in (1, 2, 3)), None)
        if value is None or forward.truth is None:
            return
        rows = forward.rows_here()
        for axis in torch.unique(value, dim=0) if value.ndim == 3 else [value]:  # mRoPE has three, of text all equal
            found, truth = axis.detach().cpu().numpy(), rows or forward.truth
            if found.shape[-1] == truth.shape[1] and found.size in (truth.shape[1], truth.array.size):
                found = np.broadcast_to(found, truth.shape)
            where: dict[str, Any] = {"layer": self._name_of(module), "module": module, "rows": rows, "positions": found}
            forward.calls.append(RecordedCall(**where, kernel=type(module).__name__, kind=kind, boundaries=None))

    def _name_of(self, module: nn.Module) -> str:
        return self._names[module][1] if module in self._names else type(module).__name__

    # --- kernels

    def run_kernel(
        self, name: str, function: Callable[..., Any], call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a kernel, `call(...)`, the function as other recorders wrap it."""
        here = self._here
        if not here.stack or here.forward is None or not is_heard():
            return call(*args, **kwargs)
        values: dict[str, Any] | str
        try:
            values = arguments_of(function, args, kwargs)
        except Exception as error:
            values = f"{type(error).__name__}: {error}"
        if name == "torch.conv1d":  # a depthwise one that a layer makes itself, or by its own convolution
            owners = (module for module in reversed(here.stack) if not isinstance(module, nn.Conv1d))
            weight, groups = (values.get("weight"), values.get("groups", 1)) if isinstance(values, dict) else (None, 1)
            depthwise = isinstance(weight, Tensor) and weight.shape[0] == groups > 1
            if here.depth or not depthwise or not is_layer(next(owners, here.stack[-1])):
                return call(*args, **kwargs)
        return self._called(name, KERNELS[name.rpartition(".")[2]], values, lambda: call(*args, **kwargs))

    def _called(self, name: str, row: Any, values: dict[str, Any] | str, call: Callable[[], Any]) -> Any:
        """Make the call and record it. If kernels call one another for the same tokens, the innermost is kept."""
        if (forward := self._here.forward) is None:
            return call()
        outer, first = self._read_call(name, row, values), len(forward.calls)
        result: Any = outer
        self._here.depth += 1
        try:
            result = call()
            return result
        finally:
            self._here.depth -= 1
            sizes = [len(each.boundaries.first_T) for each in forward.calls[first:] if each.boundaries is not None]
            whole = any(outer.boundaries is None or size == len(outer.boundaries.first_T) for size in sizes)
            if result is not None and not whole:  # None: a fallback that does nothing
                forward.calls[first:] = [outer]  # what it calls for a part of its tokens says nothing of all

    def _read_call(self, name: str, row: Any, values: dict[str, Any] | str) -> RecordedCall:
        (kind, read), stack = row, self._here.stack
        layer = next((module for module in reversed(stack) if is_layer(module)), stack[-1])
        rows = None if self._here.forward is None else self._here.forward.rows_here()
        where: dict[str, Any] = {"layer": self._name_of(layer), "module": layer, "empty_T": self._here.empty_T, "rows": rows}
        found = RecordedCall(**where, kernel=name, kind=kind, boundaries=None)
        try:
            if isinstance(values, str):
                raise UnreadError(values)
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise UnreadError("a graph is being captured")
            with torch.no_grad():
                return replace(found, boundaries=read(name, values))
        except MisusedError as error:
            return replace(found, unread_reason=str(error), remedy=error.remedy)
        except UnreadError as error:
            return replace(found, unread_reason=str(error))
        except Exception as error:  # the run goes on, whatever its arguments are
            return replace(found, unread_reason=f"{type(error).__name__}: {str(error)[:80]}")


def _still_empty(empty_T: Array | None, given: Iterable[Any]) -> Array | None:
    """Return which of these tokens are still zero in the states that a layer is called with."""
    states = next((x for x in given if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3), None)
    if empty_T is None or not empty_T.any() or states is None or states.shape[0] * states.shape[1] != len(empty_T):
        return None
    still_T: Array = empty_T & zeros_of(states, "BTD")
    return still_T


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by their names. If they do not fit, the function itself raises when it is called."""
    with suppress(TypeError, ValueError):
        return arguments_of(function, args, kwargs)
    return dict(kwargs)
