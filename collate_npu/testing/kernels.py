"""Reference kernels in a transformers model: its recurrent layers compute packed rows right on a machine without any kernel.

Legend: B rows, T tokens, D channels, W taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

from torch import Tensor

from collate_npu.consumers.model_traits import unwrap
from collate_npu.consumers.recurrent import READS, KernelCall, by_sequence, kernel_calls, resolved
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
    with resolved(calls, lambda call: inspect.unwrap(call.function) if call.package in without else _checked_kernel(call)):
        yield


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
    return plain if key is None else by_sequence(plain, key)


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """causal-conv1d 1.6.1 causal_conv1d_interface.py:10, `x` and the output `[B, D, T]`, `seq_idx` int32 `[B, T]`."""
    return reference_causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, seq_idx=seq_idx).transpose(1, 2)
