"""Check a call of a recurrent kernel against its contract, before the kernel does or does not.

Most host code looks at few of its boundaries: lengths given for offsets, a tail that nothing covers, a table of another
chunk size pass, and other sequences are computed, or memory nobody wrote. Costs some passes over one number a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from collate_npu.errors import CollateError
from collate_npu.kernels import Breach, refuse
from collate_npu.kernels.gated_delta import rules
from collate_npu.kernels.gated_delta.operator_call import Call
from collate_npu.kernels.gated_delta.stacks import operator_named
from collate_npu.kernels.told import Told, by_numbers, by_offsets, places_in, row_starts, why_differs
from collate_npu.parallel.layout import ContextParallel
from collate_npu.parallel.recurrent import check_recurrent_split, same_tokens
from collate_npu.releases import FLA_ZIGZAG
from collate_npu.segments import Segments
from collate_npu.validation import checked


@checked
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
    """Raise `UnsupportedFormError`, with rules, remedies and sources, where the kernel would compute something else.

    Of what it refuses by itself, only what the boundaries cannot be read without is checked.

    `kwargs` are the arguments of the real call by the kernel's own names: boundaries, and where given tensors (shapes are
    read; device meta will do) and flags. `kernel` is one of `gated_delta_kwargs`, or an operator of `stacks.OPERATORS`.
    B and T are the sizes of its tensors, B None where they have no batch dimension, `chunk_size` is the rule's. Under
    context parallelism T and the boundaries are those of the whole row, and `check_recurrent_split` judges the layout.

    With `segments` the sequences that the kernel reads are compared with the truth at every real token, and `scale` must be
    given to operators whose own default is 1.0. What stands in the tensors is not looked at. B and T tell whether the
    tensors are the rows `[B, S]`, the same one behind the other `[1, B * S]`, or those of `unpad`, `[1, T]`. Without
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
    refuse(kernel, gated_delta_breaches(**locals()))


@checked
def gated_delta_breaches(kwargs: Mapping[str, Any], *, kernel: str, **says: Any) -> tuple[Breach, ...]:
    """Every rule that the call breaks; arguments as in `check_gated_delta_contract`."""
    call = Call(operator_named(kernel), kwargs, **says)
    found = list(rules.boundary_breaches(call))
    if any(breach.rule in rules.UNREADABLE for breach in found):
        return tuple(found)
    for each in (rules.tensor_breaches, rules.mask_breaches, _ranks, _backward, *call.operator.own):
        found += each(call)
    if not found and call.segments is not None:
        found += _against_segments(call, call.segments)
    return tuple(found)


def _ranks(call: Call) -> Iterator[Breach]:
    """What is wrong with the way ranks share the row, if they share one; `check_recurrent_split` is the judge."""
    cp = call.context_parallel
    scheme = "state_passing" if "cp_context" in call.arguments else call.operator.ranks
    if cp is None or cp.size == 1 or scheme == "never":
        return
    got = f"{cp.size} ranks, layout {cp.layout!r}"
    if scheme == "state_passing" and (asked := _asked(call)) != "contiguous":
        yield from _zigzag(call, cp, asked)
        return
    flat = bool(call.where) or scheme == "state_passing"
    segments = Segments.from_lengths([[n for n in call.lengths if n] or [call.T]] if flat else [call.T] * call.B)
    try:
        check_recurrent_split(cp, scheme, segments, padding_free=flat, offsets=call.offsets or None, conv_width=call.taps)
    except CollateError as error:
        remedy = f"parallel.check_recurrent_split(cp, {scheme!r}, segments) says when it is right."
        yield call.breach("ranks", "context_parallel", got, str(error), remedy)


def _asked(call: Call) -> str:
    """The layout of fla's context, or of the call that builds it."""
    return str(getattr(call.get("cp_context"), "layout", None) or call.word("layout", "contiguous"))


def _zigzag(call: Call, cp: ContextParallel, asked: str) -> Iterator[Breach]:
    """fla's other layout: rank r of W holds the parts r and 2 * W - 1 - r of the whole row, whatever its sequences."""
    read = asked == "zigzag" and not call.before(FLA_ZIGZAG)  # else fla raises
    if read and not same_tokens(cp, replace(cp, layout="zigzag", ulysses=1), len([n for n in call.lengths if n])):
        got = f"layout={asked!r} on ranks that hold layout {cp.layout!r}"
        says = "The context takes each rank's tokens for those of zigzag over the whole row."
        remedy = "Split the batch by ContextParallel(layout='zigzag'), or leave layout out and split it contiguously."
        yield call.breach("ranks", "layout", got, says, remedy, silent=True)


def _backward(call: Call) -> Iterator[Breach]:
    if call.training and not call.operator.backward:
        says = "The operator has no backward: it is for decoding and inference."
        remedy = "Use the chunked rule for training, or check with training=False."
        yield call.breach("backward", "training", "True", says, remedy)


def _against_segments(call: Call, segments: Segments) -> Iterator[Breach]:
    """One breach that names the first token that goes on from a wrong one; read where no other rule is broken."""
    (B, S), told = segments.shape, list(_told(call))
    if places_in(told[0], segments) is None:
        says = f"By the segments it is [{B}, {S}], [1, {B * S}], or [1, {segments.num_tokens}] without padding."
        remedy = "Pass the B and T of the tensors, and the segments of this batch."
        yield Breach("sizes-differ", "B, T", f"[{call.B}, {call.T}]", says, remedy, "Segments", silent=True)
    elif found := "; ".join(dict.fromkeys(filter(None, (why_differs(each, segments) for each in told)))):
        where = ", ".join(filter(None, (call.where, call.operator.numbers))) or "boundaries"
        remedy = f"Take the boundaries {call.operator.remedy} Or unpad() the batch and its tensors, or pass the "
        remedy += "segments that this call is for."
        yield Breach("differs-from-segments", where, found, "The segments say otherwise.", remedy, "Segments", silent=True)


def _told(call: Call) -> Iterator[Told]:
    """What the rule is told, the convolution, or both, as far as the operator has them."""
    name, shape, total = call.operator.name, (call.B, call.T), call.B * call.T
    keep_BT, numbered = rules.kept(call), bool(call.operator.numbers)
    neutral_T = np.zeros(total, bool) if keep_BT is None else ~keep_BT.reshape(-1)
    rows_T = row_starts(1, total) if call.operator.folds else row_starts(*shape)
    by_numbers_T = by_numbers(call.numbers_BT) if call.numbers_BT.size else rows_T
    mamba = call.operator.package == "mamba"
    if call.operator.offsets or not numbered or mamba:
        first_T, left_T = by_offsets(call.offsets, total) if call.where else (by_numbers_T if mamba else rows_T, neutral_T)
        yield Told(name, "rule", shape, first_T, neutral_T | left_T)
    if numbered and not mamba:
        yield Told(name, "convolution", shape, by_numbers_T, neutral_T)
