"""Stand-ins for packages of a card, which import and never compute: Megatron and its users then import on a CPU.

torch and Megatron must first find out that triton is missing, so that they keep their own fallbacks; only then does the name
exist for the others.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from itertools import pairwise
from typing import Any

import torch._dynamo
import torch._inductor.runtime.triton_compat
import torch.utils._triton
from torch.overrides import TorchFunctionMode

VERSIONS: dict[str, str] = {}
"""What stands in, and the version it says."""
_PACKAGES = frozenset((
    "pytorch", "common", "attention", "module", "ops", "rope", "utils", "float8_tensor", "distributed", "cpu_offload", "fp8",
    "recipe", "language", "runtime", "compiler", "testing", "tools", "experimental",
))  # fmt: skip


class _Module(types.ModuleType):
    """Decorators give the function back, classes are empty, and everything else refuses to be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._stand_in(name, f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def _stand_in(self, name: str, full: str) -> Any:
        if name in ("jit", "autotune", "heuristics"):
            return lambda *args, **kwargs: args[0] if args and callable(args[0]) and not kwargs else lambda made: made
        if name in _PACKAGES:
            return importlib.import_module(full)
        if self.__name__.startswith("transformer_engine") and name.lstrip("_")[:1].isupper():
            return type(name, (torch.nn.Module,), {"__module__": self.__name__})
        if name.lstrip("_")[:1].isupper() or name == "constexpr":
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{full} is a stand-in and computes nothing")

        return refuse


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in VERSIONS else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = VERSIONS[spec.name.partition(".")[0]]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def stand_in(**versions: str) -> None:
    """For these packages, from now on."""
    torch.utils._triton.has_triton_package()
    torch.utils._triton.has_triton()
    if not VERSIONS:
        sys.meta_path.insert(0, _Finder())
    VERSIONS.update(versions)


def triton() -> None:
    """megatron-core from 0.18 on imports it unguarded, on a CPU too. Call it before Megatron is imported."""
    if importlib.util.find_spec("triton") is None:
        stand_in(triton="3.6.0")


def module(name: str, make: Any = None, **held: Any) -> types.ModuleType:
    """A module of this name that holds these; `make()` gives every other name that is looked for."""

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return make()

    made = types.ModuleType(name)
    made.__spec__, made.__path__ = importlib.machinery.ModuleSpec(name, None), []
    vars(made).update(held | ({"__getattr__": missing} if make else {}))
    return made


def put_module(name: str, make: Any = None, **held: Any) -> None:
    """Put such a module where imports find it."""
    sys.modules[name] = module(name, make, **held)


# --- CUDA's devices, which are the CPU


class OnCpu(TorchFunctionMode):
    """A device of CUDA is the CPU, in every call of torch; where a call takes a device, its number is one too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbered = getattr(func, "__name__", "") in ("to", "_parse_to")
        kwargs = {key: _on_cpu(value, key == "device") for key, value in (kwargs or {}).items()}
        return func(*(_on_cpu(arg, numbered) for arg in args), **kwargs)


def _on_cpu(value: Any, numbered: bool) -> Any:
    named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return "cpu" if named or (numbered and type(value) is int) else value


def answer(module: Any, **values: Any) -> None:
    """Let functions of a module that ask for a card's state return these."""
    for name, value in values.items():
        setattr(module, name, lambda *_, value=value, **__: value)


# --- flash_attn 2.8 in torch: its kernel, and bert_padding.py


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets_q: Any, offsets_k: Any, scale: Any = None, window: Any = -1
) -> torch.Tensor:
    """`[T, heads, size]`, causal, sequence by sequence; the last query sees the last key."""
    outs, k, v = [], *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for (start, end), (first, last) in zip(pairwise(offsets_q.tolist()), pairwise(offsets_k.tolist())):
        behind = last - first - (end - start)
        near = torch.ones(end - start, last - first, dtype=torch.bool).tril(behind)
        if window is not None and window >= 0:
            near = near.triu(behind - window)
        parts = (x.transpose(0, 1) for x in (q[start:end], k[first:last], v[first:last]))
        outs.append(torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=near, scale=scale))
    return torch.cat(outs, 1).transpose(0, 1)


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """`(tokens of all rows, where they stood, offsets, longest, lengths)`."""
    lengths = attention_mask.sum(1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    empty = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return empty.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])
