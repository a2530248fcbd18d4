"""Recurrent kernels: whether the recurrent layers of a transformers model are told where a sequence of a flat row begins, and
whether the functions they call here can read it.

transformers resolves such a function when the modeling file is imported: the kernel of its package, else a torch function,
which knows no sequences (5.23 integrations/hub_kernels.py:1008-1055). A convolution reads `seq_idx`, a delta rule
`cu_seqlens`, and either alone keeps half of the state apart. Where one is missing, transformers 5.20 and later raise at the
first forward, if that one is told; earlier releases train on. So a module is asked for the functions it has, not the
environment for its packages; a config tells only what its layers ask. Costs a few milliseconds for each kind of layer.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from collate_npu.consumers import models
from collate_npu.consumers.forwards import model_classes
from collate_npu.consumers.models import config_of, is_transformers, text_config, unwrap

READS: Mapping[str, str] = {
    "causal_conv1d_fn": "seq_idx",
    "chunk_gated_delta_rule": "cu_seqlens",
    "chunk_kda": "cu_seqlens",
    "mamba_chunk_scan_combined": "seq_idx",
    "mamba_split_conv1d_scan_combined": "seq_idx",
}
"""Kernel -> how it is told where a sequence begins. The others of transformers (mamba's selective scan) cannot be told."""

_STEP = re.compile(r"_update$|^fused_recurrent")
"""Kernels of one more token in generation: no flat row comes to them."""
_DISPATCH = {"func_name", "package", "implementation", "is_new_implementation", "applicable_params"}
"""Variables of transformers' own wrapper around such a function, 5.19 and later; 5.16 did not keep the name."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call in a layer's forward of a function that gives way to a kernel."""

    kernel: str
    """Its name in its package: `chunk_gated_delta_rule`."""
    told: frozenset[str]
    """Boundaries among its arguments."""
    function: Callable[..., Any]
    """transformers' wrapper; `variables_of` tells what it resolved."""
    of_hub: Callable[..., Any] | None
    """What `use_kernels=True` put in its place."""


def why_state_runs_on(model: Any) -> str:
    """Why the state of a recurrent layer runs from one sequence of a flat row into the next; "" where it does not.

    `model` is a module, whose functions are looked at as they stand, or a config, of which only the code of its layers is.
    """
    calls = [call for call in kernel_calls(model) if not _STEP.search(call.kernel)]
    family = getattr(text_config(config_of(model)), "model_type", type(model).__name__)
    deaf = [call.kernel for call in calls if READS.get(call.kernel) not in call.told]
    if not calls or deaf:
        return f"the recurrent layers of {family} do not ask where a sequence begins{_beside(deaf)}"
    if is_transformers(unwrap(model)):
        return "; ".join(dict.fromkeys(filter(None, map(_why_unread, calls))))
    if models.transformers_version() < (5, 20):
        return "before transformers 5.20 a missing kernel is not noticed, and a config does not say which are here"
    return ""


def _beside(deaf: Iterable[str]) -> str:
    return f" ({', '.join(deaf)} is not told)" if deaf else ""


def _why_unread(call: KernelCall) -> str:
    found, key = variables_of(call.function), READS[call.kernel]
    if call.of_hub is not None:
        code = inspect.unwrap(call.of_hub).__code__
        return "" if key in (*code.co_varnames, *code.co_consts) else f"the hub's {call.kernel} does not read {key}"
    if not found["is_new_implementation"]:
        return f"{call.kernel} has no kernel here ({found['package']} is not installed)"
    return "" if key in found["applicable_params"] else f"{call.kernel} of this {found['package']} does not take {key}"


def kernel_calls(model: Any) -> tuple[KernelCall, ...]:
    """The calls of such functions in the layers of a transformers module, or of a config's classes."""
    whole = unwrap(model)
    if is_transformers(whole):
        forwards = [_plain(layer.forward) for layer in whole.modules()]
    else:
        names = {cls.__module__: None for cls in model_classes(whole)}
        held = [value for name in names for value in vars(sys.modules[name]).values()]
        forwards = [_plain(cls.forward) for cls in held if isinstance(cls, type) and issubclass(cls, nn.Module)]
    return tuple(call for forward in dict.fromkeys(forwards) for call in _calls(forward))


def _plain(forward: Any) -> Any:
    """The function below the wrappers of accelerate's hooks and torch.compile."""
    bare = inspect.unwrap(forward)
    return getattr(bare, "__func__", bare)


def _calls(forward: Any) -> list[KernelCall]:
    scope = getattr(forward, "__globals__", {})
    named = {name: scope[name] for name in getattr(forward, "__code__", _NO_CODE).co_names if _dispatcher(scope.get(name))}
    told = _told(forward) if named else {}
    return [
        KernelCall(variables_of(function)["func_name"], told[name], function, _of_hub(found))
        for name, found in named.items()
        if name in told and (function := _dispatcher(found)) is not None
    ]


_NO_CODE = compile("", "", "exec")


def _dispatcher(found: Any) -> Callable[..., Any] | None:
    """transformers' wrapper itself. Where the package `kernels` is installed it stands in a module of its own."""
    if isinstance(found, nn.Module):
        found = variables_of(type(found).forward).get("func")
    return found if variables_of(found).keys() >= _DISPATCH else None


def variables_of(function: Any) -> dict[str, Any]:
    """What a function found around itself when it was made; {} for anything else than such a function."""
    names = function.__code__.co_freevars if inspect.isfunction(function) else ()
    return {name: cell.cell_contents for name, cell in zip(names, getattr(function, "__closure__", None) or ())}


def _of_hub(found: Any) -> Callable[..., Any] | None:
    """kernels layer/layer.py `_replace_forward` binds a method of the hub's layer to the module."""
    return getattr(vars(found).get("forward"), "__func__", None) if isinstance(found, nn.Module) else None


@cache
def _told(forward: Any) -> dict[str, frozenset[str]]:
    """Boundaries among the arguments of each call by name. What a layer passes on as `**kwargs` has the keys of the batch."""
    told: dict[str, frozenset[str]] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(forward)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = {each.arg or "seq_idx" for each in node.keywords if ast.unparse(each.value) != "None"}
            told[node.func.id] = told.get(node.func.id, _BOUNDARIES) & given
    return told


_BOUNDARIES = frozenset(READS.values())
