"""Stand-ins for transformer_engine and triton that import and never compute: Megatron's trainers then import on a CPU.

Import this module before megatron, mcore_bridge, swift.megatron or verl. torch and megatron-core must first find out
that triton is missing, so that they keep their own fallbacks; only then does the name exist for the others.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from typing import Any

import torch._dynamo
import torch._inductor.runtime.triton_compat
import torch.utils._triton

TE_VERSION = "2.9.0"
_PACKAGES = frozenset(
    [
        "pytorch",
        "common",
        "attention",
        "module",
        "ops",
        "rope",
        "utils",
        "float8_tensor",
        "distributed",
        "cpu_offload",
        "fp8",
        "recipe",
        "language",
        "runtime",
        "compiler",
        "testing",
    ]
)
_roots = {"transformer_engine", "transformer_engine_torch"}
_real_version = importlib.metadata.version


class _Module(types.ModuleType):
    """A package in which every class is an empty `nn.Module` and every function raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._stand_in(name, f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def _stand_in(self, name: str, full: str) -> Any:
        if name.lstrip("_")[:1].isupper():
            base = (torch.nn.Module,) if self.__name__.startswith("transformer_engine") else ()
            return type(name, base, {"__module__": self.__name__})
        if self.__name__ == "triton" and name in ("jit", "autotune", "heuristics"):
            return _decorator
        if self.__name__ == "triton.language" and name == "constexpr":
            return lambda value=None: value
        if name in _PACKAGES:
            return importlib.import_module(full)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{full} is a stand-in and computes nothing")

        return refuse


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in _roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "3.6.0" if spec.name.startswith("triton") else TE_VERSION
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def _decorator(*args: Any, **kwargs: Any) -> Any:
    bare = len(args) == 1 and callable(args[0]) and not kwargs
    return args[0] if bare else lambda function: function


def _version(name: str) -> str:
    return TE_VERSION if name.replace("_", "-").lower() == "transformer-engine" else _real_version(name)


torch.utils._triton.has_triton_package()
torch.utils._triton.has_triton()
importlib.metadata.version = _version
sys.meta_path.insert(0, _Finder())
for _name in ("megatron.core", "megatron.core.transformer", "megatron.core.ssm.gated_delta_net"):
    importlib.import_module(_name)
_roots.add("triton")
