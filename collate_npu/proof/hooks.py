"""Hooks: how calls of kernels are caught in a process, and everything is put back.

Functions are wrapped where they are defined, when their package is imported, and where somebody took them before: in modules
and on layers, by their names (`KERNELS`). A wrapper is a plain function, which torch.compile traces through as if it were
not there. `nn.Module` says in which layer a call is made.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial, wraps
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

import torch
from torch import nn

from collate_npu.kernels.check import named
from collate_npu.proof.kernel_calls import KERNELS

Hear = Callable[[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`hear(kernel, function, call, args, kwargs)` calls `call`, the function as others hear it, and gives its result."""

DEFINED_IN = (
    *("torch.nn.functional", "torch.nn.attention.flex_attention", "torch.nn.attention.varlen"),
    *("transformers.integrations.flex_attention", "flash_attn.flash_attn_interface", "flash_attn_interface"),
    *("fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.fused_recurrent", "fla.ops.kda.chunk"),
    *("fla.ops.kda.fused_recurrent", "fla.ops.gla.chunk", "fla.ops.simple_gla.chunk", "fla.ops.delta_rule.chunk"),
    *("fla.ops.lightning_attn.chunk", "fla.modules.conv.causal_conv1d", "fla.modules.convolution"),
    "fla.modules.causal_conv1d.ops",  # fla 0.6
    *("causal_conv1d.causal_conv1d_interface", "mamba_ssm.ops.triton.ssd_combined", "torch_npu", "fla_npu.ops.ascendc"),
)
"""Modules whose functions are wrapped as soon as they are imported."""
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FUSION = (
    *("query", "key", "value", "head_num", "input_layout", "pse", "padding_mask", "atten_mask", "scale", "keep_prob"),
    *("pre_tockens", "next_tockens", "inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"),
)
_POSITIONAL: dict[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": _SDPA, "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "npu_fusion_attention": _FUSION, "npu_fusion_attention_v3": _FUSION,
}  # fmt: skip
"""Parameters of functions of C++, which have no signature."""


class Hooks:
    """Who listens. What is wrapped is wrapped once for all who do; when the last one leaves, everything is put back, and
    what somebody keeps of ours goes on as the function itself."""

    def __init__(self, hear: Hear, around: Callable[..., Any]) -> None:
        self.hear, self.around = hear, around
        self.unwrapped: list[str] = []
        """Functions that could not be wrapped, and why; known once it was taken off."""

    @property
    def on(self) -> bool:
        """Does it listen?"""
        return self in _LISTENING

    def install(self) -> None:
        """Listen."""
        _LISTENING.append(self)
        if len(_LISTENING) == 1:
            WRAPS.install()

    def taken_off(self) -> None:
        """Listen no longer."""
        if self.on:
            _LISTENING.remove(self)
            self.unwrapped = [*WRAPS.unwrapped]
            if not _LISTENING:
                WRAPS.taken_off()


class _Wraps:
    """What is wrapped in this process."""

    def __init__(self) -> None:
        self.unwrapped: list[str] = []
        self._held: list[tuple[Any, str, Any, Any]] = []
        self._ours: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """By the id of a function: itself, and its wrapper."""
        self._wrappers: set[int] = set()
        self._seen_modules: set[str] = set()

    def install(self) -> None:
        """Wrap what is there, and the rest when it is imported."""
        original: Callable[..., Any] = nn.Module._call_impl

        def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
                return original(module, *args, **kwargs)
            call = original
            for hooks in tuple(_LISTENING):
                call = partial(_around, hooks, call)
            return call(module, *args, **kwargs)

        self.put(nn.Module, "_call_impl", _call_impl)
        for name in DEFINED_IN:
            if name in sys.modules:
                self.wrap_all(sys.modules[name])
        self._replace_taken()
        with suppress(ImportError):  # within one process it suffices to look at what is imported already
            import wrapt

            for name in set(DEFINED_IN) - set(sys.modules) - _AWAITED:
                _AWAITED.add(name)
                wrapt.register_post_import_hook(_imported, name)

    def look_at(self, root: nn.Module) -> None:
        """Wrap what the layers of a model took, or their modules define, under a name that is known."""
        for base in {base for module in root.modules() for base in type(module).__mro__}:
            if base.__module__.startswith("torch.") or base.__module__ == "builtins":
                continue
            self.wrap_all(base)
            if base.__module__ not in self._seen_modules:
                self._seen_modules.add(base.__module__)
                defined_in = sys.modules.get(base.__module__)
                for each in list(vars(defined_in).values()) if defined_in is not None else ():
                    self._wrap_kept(each)
                self.wrap_all(defined_in)
        for module in root.modules():
            taken = [name for name, each in vars(module).items() if self._is_kernel(each) or id(each) in self._ours]
            self._wrap_on(module, taken)

    def taken_off(self) -> None:
        """Put everything back but what the run itself put there."""
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
        for each in (self._held, self.unwrapped, self._ours, self._wrappers, self._seen_modules):
            each.clear()

    def wrap_all(self, module: Any) -> None:
        if module is not None:
            self._wrap_on(module, [name for name, each in list(vars(module).items()) if self._is_kernel(each)])

    def _wrap_on(self, holder: Any, names: Iterable[str]) -> None:
        for name in names:
            try:
                held = vars(holder)[name]
                plain = held.__func__ if isinstance(held, staticmethod) else held
                self.put(holder, name, staticmethod(self._wrapper(plain)) if plain is not held else self._wrapper(held))
            except Exception as error:  # a package that does not let itself be wrapped runs as it is
                self.unwrapped.append(f"{name}: {type(error).__name__}: {error}")

    def _is_kernel(self, value: Any) -> bool:
        """A function under a name that is known, not one of ours; what else torch and Triton call stays what it is."""
        value = value.__func__ if isinstance(value, staticmethod) else value
        return (
            isinstance(value, (FunctionType, BuiltinFunctionType)) and value.__name__ in KERNELS and not self._is_own(value)
        )

    def _is_own(self, function: Any) -> bool:
        return id(function) in self._wrappers

    def _wrap_kept(self, function: Any, depth: int = 3) -> None:
        """Kernels that a function around them keeps for itself, as transformers' own do."""
        if not isinstance(function, FunctionType) or self._is_own(function):
            return
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                if depth:
                    self._wrap_kept(cell.cell_contents, depth - 1)
                if self._is_kernel(cell.cell_contents):
                    self.put(cell, "cell_contents", self._wrapper(cell.cell_contents))

    def _wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if (known := self._ours.get(id(function))) is not None:
            return known[1]
        kernel = f"{(function.__module__ or 'torch').partition('.')[0].strip('_')}.{function.__name__}"

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            call = function
            for hooks in tuple(_LISTENING):
                call = partial(_heard, hooks, kernel, function, call)
            return call(*args, **kwargs)

        called.__collate_npu__ = function  # type: ignore[attr-defined]
        with suppress(Exception):  # scripted code means the function itself
            if (op := _SCRIPT._find_builtin(function)) is not None:
                _SCRIPT._register_builtin(called, op)
        self._ours[id(function)] = (function, called)
        self._wrappers.add(id(called))
        return called

    def _replace_taken(self) -> None:
        """Where other modules took a function that is wrapped now, transformers' registry of attention among them."""
        taken: list[tuple[Any, dict[str, Any]]] = []
        for name, module in list(sys.modules.items()):
            held = getattr(module, "__dict__", None)
            if isinstance(held, dict) and not name.startswith("torch._C"):  # there torch finds what it tells a function mode
                registries = [vars(type(value)).get("_global_mapping") for value in list(held.values())]
                taken += [(module, held), *((each, each) for each in registries if isinstance(each, dict))]
        for holder, held in taken:
            for name, value in list(held.items()):
                if id(value) in self._ours and self._ours[id(value)][0] is value:
                    self.put(holder, name, self._ours[id(value)][1])

    def put(self, holder: Any, name: str, new: Any) -> None:
        """Put something in its place until nobody listens."""
        self._held.append((holder, name, _of(holder, name), new))
        _set(holder, name, new)


_SCRIPT: Any = getattr(torch.jit, "_builtins", None)
_LISTENING: list[Hooks] = []
_AWAITED: set[str] = set()
"""Modules whose import is awaited; wrapt forgets no hook, so each has one."""
WRAPS = _Wraps()


def _around(hooks: Hooks, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return hooks.around(call, module, args, kwargs)


def _heard(hooks: Hooks, kernel: str, function: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return hooks.hear(kernel, function, call, args, kwargs)


def _imported(module: Any) -> None:
    if _LISTENING:
        WRAPS.wrap_all(module)


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
    """The arguments of a call by their names, those of `**kwargs` among them; but not of transformers' own functions, which
    swallow boundaries there (5.23 modeling_lfm3.py:319): wrappers alone hand them on."""
    if (names := _POSITIONAL.get(function.__name__)) is not None:
        return {**dict(zip(names, args)), **kwargs}
    found = named(function, args, kwargs)
    own = inspect.isfunction(function) and (function.__module__ or "").startswith("transformers.")
    if own and not hasattr(function, "__wrapped__"):
        found = {name: each for name, each in found.items() if name in inspect.signature(function).parameters}
    return found
