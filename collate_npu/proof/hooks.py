"""Hooks: how calls of kernels are caught in a process, and everything is put back.

Functions are wrapped where they are defined, when their package is imported, and where somebody took them before: in modules
and on layers, by their names (`KERNELS`). A wrapper is a plain function, which torch.compile traces through as if it were
not there. `nn.Module` says in which layer a call is made.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from collate_npu.proof.kernel_calls import KERNELS

Hear = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`hear(kernel, function, args, kwargs)` calls the function and gives its result."""

DEFINED_IN = (
    *("torch.nn.functional", "torch.nn.attention.flex_attention", "torch.nn.attention.varlen"),
    *("transformers.integrations.flex_attention", "flash_attn.flash_attn_interface", "flash_attn_interface"),
    *("fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.fused_recurrent", "fla.ops.kda.chunk"),
    *("fla.ops.kda.fused_recurrent", "fla.ops.gla.chunk", "fla.ops.simple_gla.chunk", "fla.ops.delta_rule.chunk"),
    *("fla.ops.lightning_attn.chunk", "fla.modules.conv.causal_conv1d", "fla.modules.convolution"),
    *("causal_conv1d.causal_conv1d_interface", "mamba_ssm.ops.triton.ssd_combined", "torch_npu", "fla_npu.ops.ascendc"),
)
"""Modules whose functions are wrapped as soon as they are imported."""
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FUSION = (
    *("query", "key", "value", "head_num", "input_layout", "pse", "padding_mask", "atten_mask", "scale", "keep_prob"),
    *("pre_tockens", "next_tockens", "inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"),
)
_POSITIONAL: dict[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": _SDPA, "npu_fusion_attention": _FUSION, "npu_fusion_attention_v3": _FUSION,
}  # fmt: skip
"""Parameters of functions of C++, which have no signature."""


class Hooks:
    """What is wrapped now. `taken_off` puts everything back; what somebody keeps of ours goes on as the function itself."""

    def __init__(self, hear: Hear, around: Callable[..., Any]) -> None:
        self.on = True
        self.unwrapped: list[str] = []
        """Functions that could not be wrapped, and why."""
        self._hear, self._around = hear, around
        self._held: list[tuple[Any, str, Any]] = []
        self._ours: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """By the id of a function: itself, and its wrapper."""
        self._seen_modules: set[str] = set()

    def install(self) -> None:
        """Wrap what is there, and the rest when it is imported."""
        original: Callable[..., Any] = nn.Module._call_impl

        def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.on or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
                return original(module, *args, **kwargs)
            return self._around(original, module, args, kwargs)

        self.put(nn.Module, "_call_impl", _call_impl)
        for name in DEFINED_IN:
            if name in sys.modules:
                self._wrap_all(sys.modules[name])
        self._replace_taken()
        with suppress(ImportError):  # within one process it suffices to look at what is imported already
            import wrapt

            for name in set(DEFINED_IN) - set(sys.modules):
                wrapt.register_post_import_hook(self._wrap_all, name)

    def look_at(self, root: nn.Module) -> None:
        """Wrap what the layers of a model took, or their modules define, under a name that is known."""
        for module in root.modules():
            self._wrap_on(module, [name for name, each in vars(module).items() if _is_kernel(each)])
            for base in type(module).__mro__:
                if base.__module__ not in self._seen_modules and not base.__module__.startswith("torch."):
                    self._seen_modules.add(base.__module__)
                    self._wrap_all(sys.modules.get(base.__module__))

    def taken_off(self) -> None:
        self.on = False
        for holder, name, old in reversed(self._held):
            with suppress(Exception):
                _set(holder, name, old)
        self._held.clear()

    def _wrap_all(self, module: Any) -> None:
        if self.on and module is not None:
            self._wrap_on(module, [name for name, each in list(vars(module).items()) if _is_kernel(each)])

    def _wrap_on(self, holder: Any, names: Iterable[str]) -> None:
        for name in names:
            try:
                self.put(holder, name, self._wrapper(vars(holder)[name]))
            except Exception as error:  # a package that does not let itself be wrapped runs as it is
                self.unwrapped.append(f"{name}: {type(error).__name__}: {error}")

    def _wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if (known := self._ours.get(id(function))) is not None:
            return known[1]
        kernel = f"{(function.__module__ or 'torch').partition('.')[0].lstrip('_')}.{function.__name__}"

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.on or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return self._hear(kernel, function, args, kwargs)

        called.__collate_npu__ = function  # type: ignore[attr-defined]
        self._ours[id(function)] = (function, called)
        return called

    def _replace_taken(self) -> None:
        """Where other modules took a function that is wrapped now, transformers' registry of attention among them."""
        taken: list[tuple[Any, dict[str, Any]]] = []
        for module in list(sys.modules.values()):
            held = getattr(module, "__dict__", None)
            if isinstance(held, dict):
                registries = [vars(type(value)).get("_global_mapping") for value in list(held.values())]
                taken += [(module, held), *((each, each) for each in registries if isinstance(each, dict))]
        for holder, held in taken:
            for name, value in list(held.items()):
                if id(value) in self._ours and self._ours[id(value)][0] is value:
                    self.put(holder, name, self._ours[id(value)][1])

    def put(self, holder: Any, name: str, new: Any) -> None:
        """Put something in its place until everything is taken off."""
        self._held.append((holder, name, holder[name] if isinstance(holder, dict) else vars(holder)[name]))
        _set(holder, name, new)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _is_kernel(value: Any) -> bool:
    """A function under a name that is known, not wrapped yet; what else torch and Triton call stays what it is."""
    if not isinstance(value, (FunctionType, BuiltinFunctionType)) or hasattr(value, "__collate_npu__"):
        return False
    return value.__name__ in KERNELS


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, those of `**kwargs` among them."""
    if (names := _POSITIONAL.get(function.__name__)) is not None:
        return {**dict(zip(names, args)), **kwargs}
    signature = inspect.signature(function)
    bound: dict[str, Any] = dict(signature.bind_partial(*args, **kwargs).arguments)
    rest = (name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD)
    others: dict[str, Any] = bound.pop(next(rest, ""), {})
    return bound | others
