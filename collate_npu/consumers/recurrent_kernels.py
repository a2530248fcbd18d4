"""Recurrent kernels: whether the functions that a transformers model calls in its recurrent layers can read where a sequence
of a flat row begins.

transformers resolves such a function when the modeling file is imported: the kernel of its package, else a torch function,
which knows no sequences (5.23 integrations/hub_kernels.py:1008-1055). A convolution reads `seq_idx`, a delta rule
`cu_seqlens`, and either alone keeps half of the state apart. Where one is missing, transformers 5.20 and later raise at the
first forward, if that one is told; earlier releases train on. So the model is asked for the functions it has, not the
environment for its packages. Costs well under a millisecond for each kind of layer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from collate_npu.consumers.models import unwrap

READS: Mapping[str, str] = {
    "causal_conv1d_fn": "seq_idx",
    "chunk_gated_delta_rule": "cu_seqlens",
    "chunk_kda": "cu_seqlens",
    "mamba_chunk_scan_combined": "seq_idx",
    "mamba_split_conv1d_scan_combined": "seq_idx",
}
"""Kernel -> how it is told where a sequence begins. The others of transformers (mamba's selective scan) cannot be told, and
mamba's `cu_seqlens` is no boundary (mamba e9594ce ssd_combined.py:599-604)."""

PLAIN_TORCH = "is plain torch, without the package"
"""What a refusal says of a kernel that is not there."""
_STEP = re.compile(r"_update$|^fused_recurrent")
"""Kernels of one more token in generation: no flat row comes to them."""
_DISPATCH = {"func_name", "package", "implementation", "is_new_implementation", "applicable_params"}
"""Variables of transformers' own wrapper around such a function, 5.19 and later (5.16 did not keep the name)."""


class KernelCall(NamedTuple):
    """A function called in a layer's forward that gives way to a kernel: `chunk_gated_delta_rule` of the package `fla`,
    transformers' wrapper of it, and what `use_kernels=True` put in its place."""

    kernel: str
    package: str
    function: Callable[..., Any]
    of_hub: Callable[..., Any] | None


def why_boundaries_unread(model: Any) -> str:
    """Which functions of this transformers module's recurrent layers cannot read boundaries, and why; "" where all can."""
    if any(map(asks_by_itself, unwrap(model).modules())):
        return ""
    calls = [call for call in kernel_calls(model) if not _STEP.search(call.kernel)]
    if not calls:
        return "its layers call no function that is known to read where a sequence begins"
    return "; ".join(dict.fromkeys(filter(None, map(_why_unread, calls))))


def asks_by_itself(layer: Any) -> bool:
    """Is it VeOmni's own Gated DeltaNet? Its convolution and scan take `cu_seq_lens_q`, on an NPU too, and without a kernel
    that reads it raise (0.1.12 models/transformers/qwen3_5/generated/patched_modeling_qwen3_5_gpu.py:626-803)."""
    own = type(layer).__module__.startswith("veomni.") and hasattr(layer, "chunk_gated_delta_rule")
    return own and "cu_seq_lens_q" in inspect.signature(type(layer).forward).parameters


def _why_unread(call: KernelCall) -> str:
    found, key = variables_of(call.function), READS.get(call.kernel, "boundaries")
    if call.of_hub is not None:  # its forward takes the rest as **kwargs, and looks for the key among them
        code = inspect.unwrap(call.of_hub).__code__
        return "" if key in (*code.co_varnames, *code.co_consts) else f"{call.kernel} of the hub does not read {key}"
    if not found["is_new_implementation"]:
        return f"{call.kernel} {PLAIN_TORCH} {call.package}"
    return "" if key in found["applicable_params"] else f"{call.kernel} of this {call.package} does not take {key}"


def kernel_calls(model: Any) -> tuple[KernelCall, ...]:
    """Every such function in the layers of a transformers module, wrapped or not; none before transformers 5.19."""
    # below the wrappers of transformers, accelerate's hooks and torch.compile
    bare = [inspect.unwrap(layer.forward) for layer in unwrap(model).modules()]
    forwards = filter(inspect.isfunction, dict.fromkeys(getattr(function, "__func__", function) for function in bare))
    calls = (_call_of(forward.__globals__.get(name)) for forward in forwards for name in forward.__code__.co_names)
    return tuple(call for call in calls if call is not None)


def _call_of(found: Any) -> KernelCall | None:
    """Where the package `kernels` is installed, transformers' wrapper stands in a module made of it, and `_replace_forward`
    (kernels 0.17 layer/layer.py) binds the forward of the hub's layer to that, or its own again."""
    function, of_hub = getattr(found, "__collate_npu__", found), None  # below what watches it (proof.hooks)
    if isinstance(found, nn.Module):
        own, bound = type(found).forward, vars(found).get("forward")
        function = variables_of(own).get("func")
        of_hub = None if bound is None or bound.__func__ is own else bound.__func__
    held = variables_of(function)
    return KernelCall(held["func_name"], held["package"], function, of_hub) if held.keys() >= _DISPATCH else None


def variables_of(function: Any) -> dict[str, Any]:
    """What a function found around itself when it was made; {} for anything else."""
    if not inspect.isfunction(function):
        return {}
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}
