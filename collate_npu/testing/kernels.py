"""Reference kernels in a transformers model: its recurrent layers compute packed rows right on a machine without any kernel.

Legend: B rows, T tokens, D channels, W taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.model_traits import unwrap
from collate_npu.consumers.recurrent import READS, KernelCall, kernel_calls
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.kernels import refuse
from collate_npu.kernels.check import call_breaches, knows, named
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.releases import KERNELS_TOLD
from collate_npu.validation import check_model


@contextmanager
def reference_kernels(model: Any, *, without: tuple[str, ...] = ()) -> Iterator[None]:
    """The recurrent layers of this transformers model, and of all of its family, call reference kernels meanwhile.

    They stand behind transformers' own dispatch, where an installed package would: `causal_conv1d_fn` reads `seq_idx`,
    `chunk_gated_delta_rule` and `chunk_kda` `cu_seqlens`, mamba2's scan `seq_idx`, and what a kernel does not take is
    dropped. Every call is judged by its kernel's contract (`kernels.check`). `without` names packages ("fla",
    "causal_conv1d", "mamba_ssm") that are to be missing. Make collators and adapters inside: they ask the model for its
    kernels once. Slow, and meant for tests.

    Raises `UnsupportedFormError` for a model whose layers call no such function (before transformers 5.19 none does).

    >>> from collate_npu import PaddingCollator
    >>> from collate_npu.testing import tiny_model
    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> with reference_kernels(model):
    ...     flat = PaddingCollator(model=model, padding_free=True)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    ...     print(model(**flat).logits.shape)
    torch.Size([1, 5, 257])
    """
    check_model(model)
    calls = {id(call.function): call for call in kernel_calls(unwrap(model))}.values()
    if not calls:
        rule = f"transformers {KERNELS_TOLD} and later call the kernels of recurrent layers through a wrapper of their own."
        remedy = "Take a model with such layers, or upgrade transformers."
        raise UnsupportedFormError(explain("model", type(unwrap(model)).__name__, rule, remedy))
    before = [(cell, cell.cell_contents) for call in calls for cell in _cells(call).values()]
    try:
        for call in calls:
            _resolve(call, plain=call.package in without)
        yield
    finally:
        for cell, contents in before:
            cell.cell_contents = contents


def _cells(call: KernelCall) -> dict[str, Any]:
    """The variables that transformers' wrapper resolved when the modeling file was imported."""
    names = ("implementation", "is_new_implementation", "applicable_params")
    held: Any = call.function
    return {name: cell for name, cell in zip(held.__code__.co_freevars, held.__closure__) if name in names}


def _resolve(call: KernelCall, *, plain: bool) -> None:
    """Set the kernel that transformers' wrapper calls (5.23 integrations/hub_kernels.py:1008-1024)."""
    kernel = inspect.unwrap(call.function) if plain else _checked_kernel(call)
    taken = tuple(inspect.signature(kernel).parameters)
    held = {"implementation": kernel, "is_new_implementation": not plain, "applicable_params": taken}
    for name, cell in _cells(call).items():
        cell.cell_contents = held[name]


def _checked_kernel(call: KernelCall) -> Callable[..., Any]:
    """The reference, which refuses a call that breaks its kernel's contract."""
    name, kernel = f"{call.package}.{call.kernel}", _reference(call)
    return _refusing(name, kernel) if knows(name) else kernel


@cache  # one function for one kernel: a probe asks again where a layer calls another
def _refusing(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        refuse(name, call_breaches(name, named(kernel, args, kwargs)))
        return kernel(*args, **kwargs)

    return run


def _reference(call: KernelCall) -> Callable[..., Any]:
    if call.kernel == "causal_conv1d_fn":
        return causal_conv1d_fn
    if call.kernel in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        return reference_gated_delta_rule
    plain, key = inspect.unwrap(call.function), READS.get(call.kernel)
    return plain if key is None else _sequence_by_sequence(plain, key)


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """causal-conv1d 1.6.1 causal_conv1d_interface.py:10, `x` and the output `[B, D, T]`, `seq_idx` int32 `[B, T]`."""
    return reference_causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, seq_idx=seq_idx).transpose(1, 2)


@cache
def _sequence_by_sequence(plain: Callable[..., Any], key: str) -> Callable[..., Any]:
    """The model's own torch function on each sequence by itself; the boundaries come under `key`, as for the kernel."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given, T = kwargs.pop(key, None), args[0].shape[1]
        if given is None:
            return plain(*args, **kwargs)
        offsets = given.tolist() if key == "cu_seqlens" else [0, *(1 + given[0].diff().nonzero().flatten()).tolist(), T]
        parts = [
            plain(*(_cut(x, T, a, b) for x in args), **{name: _cut(x, T, a, b) for name, x in kwargs.items()})
            for a, b in pairwise(offsets)
        ]
        if parts[0] is None or isinstance(parts[0], Tensor):
            return parts[0] if parts[0] is None else torch.cat(parts, 1)
        outs, states = zip(*parts)
        return torch.cat(outs, 1), None if states[0] is None else torch.cat(states)

    own = inspect.signature(plain)
    taken = {**own.parameters, key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None)}
    taken.pop("kwargs", None)
    run.__signature__ = own.replace(parameters=list(taken.values()))  # type: ignore[attr-defined]
    return run


def _cut(x: Any, T: int, a: int, b: int) -> Any:
    """The tokens a to b of whatever is `[1, T, ...]`."""
    return x[:, a:b] if isinstance(x, Tensor) and x.ndim > 2 and x.shape[1] == T else x
