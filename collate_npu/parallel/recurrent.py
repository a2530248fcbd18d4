"""Recurrent layers whose rows are shared out: which tokens a rank must hold, and which offsets the layer is given.

A recurrent layer needs the state of the tokens before its own. Stacks bring it in these ways, and each puts one order
of the tokens right; any other is computed without a word::

    state_passing         the end of a rank's state goes to the next rank        contiguous slices of one flat row
    head_exchange         heads for tokens, then the whole row                   contiguous slices (Ulysses)
    head_exchange_zigzag  the same, then zigzag is undone                        zigzag; in a flat row each sequence's own
    row_zigzag            the same, undone over the whole row, offsets or not    zigzag; no flat row of several sequences

Offsets are always those of the whole row, never a rank's own: each of these layers sees the row, or cuts them itself. A 2D
mask is this rank's part: all of these layers zero their input before they exchange it, or read none.
Costs O(N). Legend: S width, N sequences, W width of the convolution.

Sources: state_passing fla bc3b101 ops/cp/context.py:61-160, modules/conv/cp/ops.py:49-67 (verl 0.9.1
models/transformers/qwen3_5.py:92-130); head_exchange ms-swift 4.6.0 model/models/qwen.py:1361-1442, twinkle-kit 0.5.1
linear_attention_sp.py:211-315; head_exchange_zigzag megatron-core 0.19.2 ssm/gated_delta_net/common.py:448-602, 671-731,
mcore-bridge 1.6.5 modules/gated_delta_net.py:273-294, MindSpeed core_r0.16.0 core/ssm/gated_delta_net.py:338-381;
row_zigzag MindSpeed-LLM c77308a1 fsdp2/distributed/context_parallel/gdn_context_parallel.py:52-63, 150-151.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.masks.forms import check_cuts
from collate_npu.parallel.layout import ContextParallel, Layout, Run, token_runs
from collate_npu.segments import Segments, as_offsets
from collate_npu.validation import checked

RecurrentScheme = Literal["state_passing", "head_exchange", "head_exchange_zigzag", "row_zigzag"]
"""How the ranks of a row bring a recurrent layer the state of the tokens before its own."""
Offsets = Tensor | Sequence[int]

_SLICES: tuple[Layout, ...] = ("contiguous", "ulysses")
_TAKES: dict[RecurrentScheme, tuple[tuple[Layout, ...], tuple[Layout, ...]]] = {
    "state_passing": ((), _SLICES),  # its convolution asserts one row (conv/cp/ops.py:56)
    "head_exchange": (_SLICES, _SLICES),
    "head_exchange_zigzag": (("zigzag",), ("document_zigzag",)),
    "row_zigzag": (("zigzag",), ()),
}
"""For padded rows and for a flat row: the layouts whose tokens a scheme puts in order, the best first. () = none."""


def _in_order(cp: ContextParallel, scheme: RecurrentScheme, padding_free: bool) -> ContextParallel:
    """Return the same ranks in the layout whose tokens `scheme` puts in order. Raises where there is none."""
    takes = _TAKES[scheme][padding_free]
    if not takes:
        got, remedy = "padded rows", "Use padding_free=True: one flat row."
        if padding_free:
            got, remedy = "a flat row", "Give each sequence its own row (padding_free=False)."
        rule = f"Recurrent layers with {scheme} cannot share it out: no order of its tokens is right."
        raise UnsupportedFormError(explain("context_parallel", got, rule, remedy))
    return cp if cp.layout in takes else replace(cp, layout=takes[0])


@checked
def check_recurrent_split(
    cp: ContextParallel,
    scheme: RecurrentScheme,
    segments: Segments,
    *,
    padding_free: bool = False,
    offsets: Offsets | None = None,
    heads: Sequence[int] = (),
    conv_width: int = 4,
) -> None:
    """Raise unless recurrent layers that exchange by `scheme` compute this batch right, shared out as `cp` says.

    `segments` are of the whole, unsplit batch. `offsets` are those by which a flat row is split, and which the layer gets.
    By default they are where the sequences of `segments` begin, padding behind each. `heads` are the numbers of key and of
    value heads, `conv_width` is W. Raises `UnsupportedFormError` for a layout whose tokens the layers would take in
    another order, `CollateError` for offsets, widths, sequences or heads that the ranks cannot share out.

    >>> segments = Segments.from_lengths([6, 8], side="left")
    >>> check_recurrent_split(ContextParallel(2, 0, layout="zigzag"), "head_exchange_zigzag", segments)
    >>> check_recurrent_split(ContextParallel(2, 0, layout="contiguous"), "head_exchange_zigzag", segments)
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: layout: got 'contiguous'. Recurrent layers with
        head_exchange_zigzag put tokens in order only from the layout 'zigzag'. Use ContextParallel(layout='zigzag');
        ms-swift: cp_partition_mode='zigzag', MindSpeed: context_parallel_algo='megatron_cp_algo'.
    """
    if cp.size == 1:
        return
    right, width = _in_order(cp, scheme, padding_free), segments.shape[1]
    bounds = _checked_offsets(offsets, segments) if padding_free else (0, width)
    if not _same_tokens(cp, right, len(set(bounds)) - 1):
        rule = f"Recurrent layers with {scheme} put tokens in order only from the layout {right.layout!r}."
        stacks = "; ms-swift: cp_partition_mode='zigzag', MindSpeed: context_parallel_algo='megatron_cp_algo'"
        remedy = f"Use ContextParallel(layout={right.layout!r}){stacks if scheme == 'head_exchange_zigzag' else ''}."
        raise UnsupportedFormError(explain("layout", repr(cp.layout), rule, remedy))
    token_runs(width, right, bounds)
    ranks = cp.size * (cp.tensor_parallel if scheme == "head_exchange_zigzag" else 1)
    if scheme != "state_passing" and any(n % ranks for n in heads):
        rule = f"A recurrent layer's key heads and value heads are shared out over {ranks} ranks."
        remedy = "Use a context parallel size that divides both numbers."
        raise CollateError(explain("heads", f"{list(heads)}", rule, remedy))
    # The convolution's halo comes from the previous rank alone (fla bc3b101 modules/conv/cp/ops.py:56-66).
    if scheme == "state_passing" and width // cp.size < conv_width - 1:
        rule = f"A convolution {conv_width} wide looks back {conv_width - 1} tokens, and reads only the previous rank."
        remedy = f"Pad the row to at least {cp.size * (conv_width - 1)} tokens."
        raise CollateError(explain("width", f"{width} tokens on {cp.size} ranks", rule, remedy))


def _same_tokens(cp: ContextParallel, other: ContextParallel, sequences: int) -> bool:
    """True if the ranks hold the same tokens in both layouts: zigzag and document_zigzag do for one sequence alone."""
    held = (_held(place.size, place.layout, sequences > 1) for place in (cp, other))
    return cp == other or next(held) == next(held)


@lru_cache
def _held(size: int, layout: Layout, several: bool) -> tuple[tuple[Run, ...], ...]:
    """What each rank holds of a row that every layout can share out."""
    offsets = range(0, 2 * size**2 * (3 if several else 2), 2 * size**2)
    ranks = [ContextParallel(size, rank, layout=layout) for rank in range(size)]
    return tuple(token_runs(offsets[-1], rank, [*offsets]) for rank in ranks)


def _checked_offsets(offsets: Offsets | None, segments: Segments) -> tuple[int, ...]:
    """Offsets at which every sequence begins and none is cut, over the whole row."""
    B, S = segments.shape
    if B != 1:
        rule = "A flat row is [1, S]."
        raise CollateError(explain("segments", repr(segments), rule, "Collate padding_free, or pass padding_free=False."))
    if offsets is None:
        return tuple(sorted({0, S, *(start for _, start, _ in segments.spans)}))
    bounds = as_offsets("offsets", offsets, S, whole=True)
    check_cuts("offsets", bounds, segments)
    return tuple(bounds.tolist())
