"""Check: one call of a kernel, whoever makes it, judged by the contract that its name belongs to.

An operator is named as its package names it (`fla.chunk_gated_delta_rule`, `torch_npu.npu_fusion_attention`), or is a layer
of a stack (`transformers.gdn_layer`); sizes are read off the tensors of the call. The reference kernels of `testing` check
every call; integrations and the adapter check theirs with COLLATE_NPU_DEBUG=1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from collate_npu import errors
from collate_npu.errors import CollateError, explain
from collate_npu.kernels import Breach, refuse
from collate_npu.kernels.fusion_attention.contract import contract_breaches
from collate_npu.kernels.fusion_attention.operator_call import sizes_of
from collate_npu.kernels.gated_delta.contract import gated_delta_breaches
from collate_npu.kernels.gated_delta.operators import HOLDER, by_own_names, find_operator, operator_named, rows_and_tokens
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments
from collate_npu.validation import checked

ATTENTION = ("npu_fusion_attention", "npu_fusion_attention_v3")


def knows(name: str) -> bool:
    """True if there is a contract for this operator or layer."""
    return name.rpartition(".")[2] in ATTENTION or find_operator(name) is not None


@checked
def check_call(name: str, arguments: Mapping[str, Any], **says: Any) -> None:
    """Raise `UnsupportedFormError`, with rules, remedies and sources, unless the call is computed as it is meant.

    `arguments` are those of the real call by their names, tensors among them (`named` binds positional ones). With
    `segments` what the call computes is compared with them at every real token, for attention together with `pattern`.
    `says` are further arguments of `check_gated_delta_contract`: versions, context_parallel, sizes that no tensor tells.
    Raises `CollateError` for a name that no contract knows, and where nothing says how many tokens there are.

    >>> from collate_npu.kernels.gated_delta import gated_delta_kwargs
    >>> flat, x = Segments.from_lengths([[3, 2]]), torch.zeros(1, 5, 2, 16)
    >>> check_call("fla.chunk_gated_delta_rule", {"q": x, **gated_delta_kwargs(flat, kernel="fla")}, segments=flat)
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
        sizes = sizes_of(**{key: arguments.get(key) for key in ("query", "key", "head_num", "input_layout")})
        tail = segments is not None and sizes.get("Tq") == segments.array.size != segments.num_tokens
        return contract_breaches(arguments, **sizes, segments=segments, pattern=pattern, keep_tail=tail)
    found = rows_and_tokens(operator_named(name), by_own_names(arguments))
    if found is None and segments is not None:
        found = segments.shape
    if "T" not in says and found is None:
        rule, remedy = "The number of tokens is read off a tensor of the call.", "Pass one, or B and T, or segments."
        raise CollateError(explain(name, f"{', '.join(arguments)}", rule, remedy))
    sizes_said = dict(zip(("B", "T"), found or ())) | {"training": torch.is_grad_enabled()} | says
    return gated_delta_breaches(arguments, kernel=name, segments=segments, **sizes_said)


def named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the function that takes them."""
    signature = inspect.signature(function)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    rest = (name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD)
    others: dict[str, Any] = bound.pop(next(rest, ""), {})
    return bound | others


def log_call(name: str, arguments: Mapping[str, Any], *, segments: Segments | None = None, **says: Any) -> None:
    """Log each rule that such a call breaks, once a process (COLLATE_NPU_DEBUG=1). Never raises."""
    if errors.DEBUG and knows(name):
        try:
            found = call_breaches(name, arguments, segments=segments, **says)
        except CollateError as error:
            errors.log_once(("call", name), f"call of {name}, not judged: {error}")
            return
        for breach in found:
            errors.log_once(("call", name, breach.rule), f"call of {name}: {breach}")


def log_batch(layer: str, batch: Mapping[str, Any], segments: Segments) -> None:
    """`log_call` for a batch that is about to enter a model whose recurrent layers are of this kind: the unsplit row.

    `layer` is a consumer of that name, or a layer; of one that no contract knows nothing is logged. The layer is taken to
    read `attention_mask_2d` where the batch has one.
    """
    if errors.DEBUG and (row := find_operator(layer)) is not None:
        read = {*row.offsets, row.numbers, *row.copies, *row.reads, HOLDER}
        given = batch if batch.get(KEEP_KEY) is None else {**batch, "attention_mask": batch[KEEP_KEY]}
        log_call(layer, {name: value for name, value in given.items() if name in read}, segments=segments)
