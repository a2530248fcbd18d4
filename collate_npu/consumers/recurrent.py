"""Recurrent layers of a transformers model: which functions they call, and how each learns where a sequence begins.

transformers chooses the functions when it imports the modeling file: the kernel of a package, else a torch function, which
reads no boundaries (5.23 integrations/hub_kernels.py:1008-1055). A convolution reads `seq_idx`, a delta rule `cu_seqlens`; a
model needs both arguments.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from collate_npu.consumers.model_traits import unwrap

READS: Mapping[str, str] = {
    "causal_conv1d_fn": "seq_idx",
    "chunk_gated_delta_rule": "cu_seqlens",
    "chunk_kda": "cu_seqlens",
    "mamba_chunk_scan_combined": "seq_idx",
    "mamba_split_conv1d_scan_combined": "seq_idx",
}
"""Kernel -> the argument that says where a sequence begins. Other kernels (mamba's selective scan) have none;
mamba's `cu_seqlens` means something else (mamba e9594ce ssd_combined.py:599-604)."""

_STEP = re.compile(r"_update$|^fused_recurrent")
"""Kernels that generate one more token: they never get a flat row."""
_DISPATCH = {"implementation", "is_new_implementation", "applicable_params"}
"""What transformers' wrapper of such a function closes over, from 5.16 on; early releases lack `func_name` and `package`."""


class KernelCall(NamedTuple):
    """A function in a layer's forward that a kernel can replace: its name (`chunk_gated_delta_rule`), its package (`fla`),
    transformers' wrapper of it, and the hub's forward that `use_kernels=True` put in its place."""

    kernel: str
    package: str
    function: Callable[..., Any]
    of_hub: Callable[..., Any] | None


def boundaries_unread_reason(model: Any) -> str:
    """Return which functions of its recurrent layers read no boundaries, and why; "" if all read them."""
    if any(map(reads_boundaries_itself, unwrap(model).modules())):
        return ""
    calls = [call for call in kernel_calls(model) if not _STEP.search(call.kernel)]
    return "; ".join(dict.fromkeys(filter(None, map(_why_unread, calls))))


def _named(call: KernelCall) -> str:
    return f"{call.kernel} of {call.package}" if call.package else call.kernel


def can_read_boundaries(model: Any) -> bool:
    """Return True if kernels for all its recurrent functions take boundaries, installed here or not."""
    kernels = [call.kernel for call in kernel_calls(model) if not _STEP.search(call.kernel)]
    return bool(kernels) and READS.keys() >= {*kernels}


def reads_boundaries_itself(layer: Any) -> bool:
    """Return True for VeOmni's own Gated DeltaNet. Its convolution and scan read `cu_seq_lens_q`, on an NPU too, and raise
    if no kernel reads it (0.1.12 models/transformers/qwen3_5/generated/patched_modeling_qwen3_5_gpu.py:626-803)."""
    own = type(layer).__module__.startswith("veomni.") and hasattr(layer, "chunk_gated_delta_rule")
    return own and "cu_seq_lens_q" in inspect.signature(type(layer).forward).parameters


def _why_unread(call: KernelCall) -> str:
    found, key = variables_of(call.function), READS.get(call.kernel, "boundaries")
    if call.of_hub is not None:  # its forward takes the rest as **kwargs, and looks for the key among them
        code = inspect.unwrap(call.of_hub).__code__
        return "" if key in (*code.co_varnames, *code.co_consts) else f"{call.kernel} of the hub does not read {key}"
    if not found["is_new_implementation"]:
        return f"{call.kernel} is plain torch, without the package {call.package or 'of its kernel'}"
    return "" if key in found["applicable_params"] else f"{_named(call)} does not take {key} in this release"


def kernel_calls(model: Any) -> tuple[KernelCall, ...]:
    """Return every KernelCall in a transformers module, below our wrappers too; none before transformers 5.16."""
    return tuple(call for _, _, call in _sites(model))


def code_of(model: Any) -> tuple[Any, ...]:
    """Return what its layers run: the forwards of their classes, and the functions that these call."""
    forwards = dict.fromkeys(type(module).forward for module in unwrap(model).modules())
    return (*forwards, *(variables_of(call.function).get("implementation") for call in kernel_calls(model)))


def _sites(model: Any) -> Iterator[tuple[dict[str, Any], str, KernelCall]]:
    """Yield the globals of a forward, the name of a function in them, and its KernelCall."""
    # below the wrappers of transformers, accelerate's hooks and torch.compile
    bare = [inspect.unwrap(layer.forward) for layer in unwrap(model).modules()]
    forwards = filter(inspect.isfunction, dict.fromkeys(getattr(function, "__func__", function) for function in bare))
    for forward in forwards:
        for name in forward.__code__.co_names:
            call = _call_of(forward.__globals__.get(name))
            if call is not None:
                yield forward.__globals__, name, call


def _call_of(found: Any) -> KernelCall | None:
    """Return the KernelCall of a function that has one, else None. The package `kernels` holds transformers' wrapper
    in a module, whose forward it sets to that of the hub's layer, or back to its own (kernels 0.17 layer/layer.py)."""
    while hasattr(found, "__collate_npu__"):  # below the wrappers of proof.hooks
        found = found.__collate_npu__
    function, of_hub = found, None
    if isinstance(found, nn.Module):
        own, bound = type(found).forward, vars(found).get("forward")
        function = variables_of(own).get("func")
        of_hub = None if bound is None or bound.__func__ is own else bound.__func__
    held = variables_of(function)
    name = held.get("func_name", getattr(function, "__name__", "").removeprefix("torch_"))
    known = held.keys() >= _DISPATCH and ("func_name" in held or name in READS)
    return KernelCall(name, held.get("package", ""), function, of_hub) if known else None


def variables_of(function: Any) -> dict[str, Any]:
    """Return the variables that a function closes over; {} for anything else."""
    if not inspect.isfunction(function):
        return {}
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}


# --- functions replaced for a while


@contextmanager
def resolved(calls: Iterable[KernelCall], to: Callable[[KernelCall], Callable[..., Any]]) -> Iterator[None]:
    """Inside the block, make transformers' wrappers call what `to` returns (5.23 integrations/hub_kernels.py:1008-1024)."""
    before: list[tuple[Any, Any]] = []
    try:
        for call, function in [(call, to(call)) for call in calls]:
            wrapper: Any = call.function
            held = {"implementation": function, "is_new_implementation": function is not inspect.unwrap(wrapper)}
            held["applicable_params"] = tuple(inspect.signature(function).parameters)
            for name, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__):
                if name in held:
                    before.append((cell, cell.cell_contents))
                    cell.cell_contents = held[name]
        yield
    finally:
        for cell, contents in before:
            cell.cell_contents = contents


@contextmanager
def cpu_kernels(model: Any) -> Iterator[None]:
    """Inside the block, if the model is on a CPU, replace kernels that need a card by torch functions."""
    calls = {id(call.function): call for call in kernel_calls(model) if next(model.parameters()).is_cpu and _of_card(call)}
    with _ONE_AT_A_TIME, resolved(calls.values(), _by_torch):
        yield


_ONE_AT_A_TIME = RLock()
"""Other threads wait: else one would save the replacements as originals, and restore those."""


def _of_card(call: KernelCall) -> bool:
    package = (getattr(variables_of(call.function)["implementation"], "__module__", None) or "").partition(".")[0]
    return package in ("fla", "causal_conv1d", "mamba_ssm") and os.environ.get("TRITON_INTERPRET") != "1"


def _by_torch(call: KernelCall) -> Callable[..., Any]:
    plain, at = inspect.unwrap(call.function), 2 if call.kernel == "causal_conv1d_fn" else 1
    return plain if _why_unread(call) or call.kernel not in READS else by_sequence(plain, READS[call.kernel], at)


@cache  # one object for one kernel: the probe asks again where it sees another function
def by_sequence(plain: Callable[..., Any], key: str, at: int = 1) -> Callable[..., Any]:
    """Return a function that runs `plain` on each sequence; keyword `key` holds the boundaries, dimension `at` is tokens."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given, T = kwargs.pop(key, None), args[0].shape[at]
        if given is None:
            return plain(*args, **kwargs)
        offsets = given.tolist() if key == "cu_seqlens" else [0, *(1 + given[0].diff().nonzero().flatten()).tolist(), T]
        parts = [
            plain(*(_cut(x, T, at, a, b) for x in args), **{name: _cut(x, T, at, a, b) for name, x in kwargs.items()})
            for a, b in pairwise(offsets)
        ]
        if parts[0] is None or isinstance(parts[0], Tensor):
            return parts[0] if parts[0] is None else torch.cat(parts, at)
        outs, states = zip(*parts)
        return torch.cat(outs, at), None if states[0] is None else torch.cat(states)

    own = inspect.signature(plain)
    taken = {**own.parameters, key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None)}
    taken.pop("kwargs", None)
    run.__signature__ = own.replace(parameters=list(taken.values()))  # type: ignore[attr-defined]
    return run


def _cut(x: Any, T: int, at: int, a: int, b: int) -> Any:
    """Return tokens a to b - 1 of a tensor `[1, T, ...]` or `[1, D, T]` of three dimensions or more; else `x` as it is."""
    return x.narrow(at, a, b - a) if isinstance(x, Tensor) and x.ndim > 2 and x.shape[at] == T else x
