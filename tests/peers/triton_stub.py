"""A stand-in for triton that imports and never computes: megatron-core from 0.18 on imports it unguarded, on a CPU too.

Import this module before megatron. torch first finds out that triton is missing, so that it keeps its own fallbacks.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch._dynamo
import torch._inductor.runtime.triton_compat
import torch.utils._triton

_PACKAGES = ("language", "runtime", "compiler", "testing", "tools", "experimental")


class _Module(types.ModuleType):
    """Decorators give the function back, classes are empty, and everything else refuses to be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("jit", "autotune", "heuristics"):
            return lambda *args, **kwargs: args[0] if args and callable(args[0]) and not kwargs else lambda made: made
        if name in _PACKAGES:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name == "Config":  # of an autotuned kernel, made while its module is imported
            return lambda *args, **kwargs: None
        if name[:1].isupper() or name == "constexpr":
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is a stand-in and computes nothing")

        return refuse


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "triton" else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "3.6.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


if importlib.util.find_spec("triton") is None:
    torch.utils._triton.has_triton_package()
    torch.utils._triton.has_triton()
    sys.meta_path.insert(0, _Finder())
