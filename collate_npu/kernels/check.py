"""Check: one call of a kernel, whoever makes it, judged by the contract that its name belongs to.

An operator is named as its package names it (`fla.chunk_gated_delta_rule`, `torch_npu.npu_fusion_attention`), is a `kernel`
of `gated_delta_kwargs`, or a layer of a stack (`transformers.gdn_layer`). The reference kernels of `testing` check every
call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from collate_npu.errors import CollateError, explain
from collate_npu.kernels import Breach, refuse
from collate_npu.kernels.fusion_attention.contract import contract_breaches, sizes_of
from collate_npu.kernels.gated_delta.contract import gated_delta_breaches
from collate_npu.kernels.gated_delta.operators import by_own_names, find_operator, operator_named, rows_and_tokens
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments
from collate_npu.validation import checked

ATTENTION = ("npu_fusion_attention", "npu_fusion_attention_v3")


def knows(name: str) -> bool:
    """Return True if there is a contract for this operator or layer."""
    return name.rpartition(".")[2] in ATTENTION or find_operator(name) is not None


@checked
def check_call(name: str, arguments: Mapping[str, Any], **says: Any) -> None:
    """Raise `UnsupportedFormError` if the kernel would compute something else, with rules, remedies and sources.

    Of what the kernel refuses by itself, only what the call cannot be read without is checked. `arguments` are those of the
    real call by their names (`named` binds positional ones); of tensors the shapes are read, and device meta will do; a mask
    has contents. Boundaries that lie on a device cost one sync each. With `segments` what the call computes is compared
    with them at every real token, for attention together with `pattern`; `scale` must then be given, and nothing dropped.
    Without them a legal call is believed: boundaries of another batch pass, and `~keep` for `keep`.

    `says` are sizes that no tensor of the call shows, and what else is known of the call:

    * attention, without query, key and head_num: N query and Nkv key heads of size D; B rows, Sq and Skv of padded layouts,
      Tq and Tkv of packed ones. With segments these follow, for packed tensors as `unpad` makes them; pass Tq and Tkv where
      the tail of a flat row is among them.
    * recurrent kernels: B and T, of the rows `[B, S]`, of those one behind the other `[1, B * S]`, or of what `unpad` makes
      `[1, T]`; B None without a batch dimension; the rule's `chunk_size`; `training`, by default whether gradients are on;
      `versions`, `{"fla": "0.5.0"}` (`""`: not there), by default the installed ones. Where ranks share a row, T and
      boundaries are those of the whole row, and `parallel.check_recurrent_split` says who may share it.

    Raises `CollateError` for a name that no contract knows, for sizes that nothing tells, and for values of a wrong type.

    >>> from collate_npu.kernels.gated_delta import gated_delta_kwargs
    >>> flat, x = Segments.from_lengths([[3, 2]]), torch.zeros(1, 5, 2, 16)
    >>> check_call("fla.chunk_gated_delta_rule", {"q": x, **gated_delta_kwargs(flat, kernel="fla")}, segments=flat)
    >>> check_call("fla", {"cu_seqlens": torch.tensor([3, 5])}, B=1, T=5, segments=flat)
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: fla:
    [first] cu_seqlens: got [3, 5]. Offsets begin with 0. Take the boundaries from
        gated_delta_kwargs(segments, kernel='fla'). (fla 0.5.2 ops/gated_delta_rule/chunk.py:505-560, ops/utils/index.py:156)
    >>> left, call = Segments.from_lengths([3, 5], side="left"), {"input_layout": "BSND", "sparse_mode": 3, "scale": 0.125}
    >>> check_call("npu_fusion_attention", call, N=4, Nkv=2, D=64, segments=left)
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: npu_fusion_attention:
    [none-is-full] atten_mask: got None with sparse_mode 3, pre 2147483647, next 2147483647. Without a mask the operator
        ignores modes and tokens: every query attends all keys. Pass the compressed mask fusion_attention.triangle(), or
        sparse_mode 0 if full attention is meant. (T:799, T:4121, PD:176, MS:102)
    """
    refuse(name, call_breaches(name, arguments, **says))


@checked
def call_breaches(
    name: str,
    arguments: Mapping[str, Any],
    *,
    segments: Segments | None = None,
    pattern: str | Pattern = "causal",
    **says: Any,
) -> tuple[Breach, ...]:
    """Return every rule that the call breaks; arguments as in `check_call`."""
    if name.rpartition(".")[2] in ATTENTION:
        if not {"N", "Nkv", "D"} <= says.keys():
            says |= sizes_of(**{key: arguments.get(key) for key in ("query", "key", "head_num", "input_layout")})
        return contract_breaches(arguments, segments=segments, pattern=pattern, **says)
    found = rows_and_tokens(operator_named(name), by_own_names(arguments))
    if found is None and segments is not None:
        found = segments.shape
    if "T" not in says and found is None:
        rule, remedy = "The number of tokens is read from a tensor of the call.", "Pass one, or B and T, or segments."
        raise CollateError(explain(name, f"{', '.join(map(str, arguments))}", rule, remedy))
    sizes_said = dict(zip(("B", "T"), found or ())) | {"training": torch.is_grad_enabled()} | says
    return gated_delta_breaches(arguments, kernel=name, segments=segments, **sizes_said)


def named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the function that takes them."""
    signature = inspect.signature(function)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    rest = (name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD)
    others: dict[str, Any] = bound.pop(next(rest, ""), {})
    return bound | others
