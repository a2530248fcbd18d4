"""Check a call of a recurrent kernel against its contract, before the kernel does or does not.

Most host code looks at few of its boundaries: lengths given for offsets, a tail that nothing covers, a table of another
chunk size pass, and other sequences are computed, or memory nobody wrote. Costs some passes over one number a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta import (
    against_segments,
    padding_rules,
    parallel_rules,
    sequence_rules,
    stack_rules,
    tensor_rules,
)
from collate_npu.kernels.gated_delta.operator_call import Call, known_context
from collate_npu.kernels.gated_delta.operator_names import operator_named
from collate_npu.parallel.layout import ContextParallel
from collate_npu.segments import Segments


def check_gated_delta_contract(
    kwargs: Mapping[str, Any],
    *,
    kernel: str,
    B: int | None,
    T: int,
    chunk_size: int = 64,
    training: bool = True,
    segments: Segments | None = None,
    versions: Mapping[str, str] | None = None,
    context_parallel: ContextParallel | None = None,
) -> None:
    """Raise `UnsupportedFormError`, with rules, remedies and sources, unless the call is computed as it is meant.

    `kwargs` are the arguments of the real call by the kernel's own names: boundaries, and where given tensors (shapes are
    read; device meta will do) and flags. `kernel` is one of `gated_delta_kwargs`, or an operator of `operator_names.py`.
    B and T are the sizes of its tensors, B None where they have no batch dimension, `chunk_size` is the rule's. Under
    context parallelism T and the boundaries are those of the whole row; in packed rows zigzag is of each sequence.

    With `segments` the sequences that the kernel reads are compared with the truth at every real token: no wrong call
    passes. B and T tell whether the tensors are the rows, the rows one behind the other, or those of `unpad`. Without
    `segments` the boundaries are believed, and those of another batch pass.

    `versions` names releases, `{"transformers": "5.19.0", "fla": "0.5.0"}`; `""` is a package that is not there. Default:
    what is installed, else the newest release that was read. Boundaries that lie on a device cost one sync each.
    Raises `CollateError` for kernels that are not known and for sizes that are no numbers.

    >>> import torch
    >>> flat = Segments.from_lengths([[3, 2]])
    >>> check_gated_delta_contract({"cu_seqlens": torch.tensor([3, 2])}, kernel="fla", B=1, T=5, segments=flat)
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: fla:
    [first] cu_seqlens: got [3, 2]. Offsets begin with 0. They look like lengths. Take it from
        gated_delta_kwargs(segments, kernel='fla'). (fla 0.5.2 ops/gated_delta_rule/chunk.py:505-560,
        ops/utils/index.py:156)
    [falling] cu_seqlens: got [3, 2]. No sequence ends before it begins. Take it from gated_delta_kwargs(segments,
        kernel='fla'). (fla 0.5.2 ops/gated_delta_rule/chunk.py:505-560, ops/utils/index.py:156)
    """
    found = gated_delta_breaches(
        kwargs,
        kernel=kernel,
        B=B,
        T=T,
        chunk_size=chunk_size,
        training=training,
        segments=segments,
        versions=versions,
        context_parallel=context_parallel,
    )
    if found:
        raise UnsupportedFormError(f"{kernel}:\n" + "\n".join(map(str, found)))


def gated_delta_breaches(
    kwargs: Mapping[str, Any],
    *,
    kernel: str,
    B: int | None,
    T: int,
    chunk_size: int = 64,
    training: bool = True,
    segments: Segments | None = None,
    versions: Mapping[str, str] | None = None,
    context_parallel: ContextParallel | None = None,
) -> tuple[Breach, ...]:
    """Every rule that the call breaks; arguments as in `check_gated_delta_contract`.

    >>> found = gated_delta_breaches({}, kernel="fla", B=1, T=5, segments=Segments.from_lengths([[3, 2]]))
    >>> [breach.rule for breach in found]
    ['differs-from-segments']
    """
    if not isinstance(kwargs, Mapping):
        rule, remedy = "Arguments are a dict by name.", "Pass the keyword arguments of the call."
        raise CollateError(explain("kwargs", type(kwargs).__name__, rule, remedy))
    call = Call.read(
        kwargs,
        operator_named(kernel),
        B=B,
        T=T,
        chunk_size=chunk_size,
        training=training,
        versions=versions,
        context_parallel=known_context(context_parallel),
        trusted=segments is not None,
    )
    unread = tuple(sequence_rules.breaches(call))
    if any(breach.rule in sequence_rules.UNREADABLE for breach in unread):
        return unread
    found = list(unread)
    for rules in (tensor_rules, padding_rules, parallel_rules, stack_rules):
        found += rules.breaches(call)
    if found or segments is None:
        return tuple(found)
    return tuple(against_segments.breaches(call, segments))
