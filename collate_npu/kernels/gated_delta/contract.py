"""Check a call of a recurrent kernel against its contract, before the kernel does or does not.

Most host code looks at few of its boundaries: lengths given for offsets, a tail that nothing covers, a table of another
chunk size pass, and other sequences are computed, or memory nobody wrote. Costs some passes over one number a token.
A mask beside or instead of boundaries is exact where `zero_padding` is.

Legend: B rows, T tokens, and those of `operator_call` for shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf, prod
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, host_tensor
from collate_npu.errors import CollateError, shape_of
from collate_npu.kernels import Breach, refuse
from collate_npu.kernels.call_boundaries import CallBoundaries, by_numbers, by_offsets, places_in, row_starts, why_differs
from collate_npu.kernels.gated_delta.boundaries import CONV_BLOCK, chunk_indices, cumsum_block
from collate_npu.kernels.gated_delta.operator_call import HOLDER, Call, Operator, is_whole_tensor
from collate_npu.kernels.gated_delta.operators import operator_named
from collate_npu.masks.derive import derive_segments
from collate_npu.parallel.layout import ContextParallel
from collate_npu.parallel.recurrent import check_recurrent_split, same_tokens
from collate_npu.releases import FLA_COUNTS_EMPTY, FLA_ZIGZAG, SINGLE_ROW_MASKED
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
    read; device meta will do) and flags. `kernel` is one of `gated_delta_kwargs`, or an operator of `operators.OPERATORS`.
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
    found = list(boundary_breaches(call))
    if any(breach.rule in UNREADABLE for breach in found):
        return tuple(found)
    for each in (tensor_breaches, mask_breaches, _ranks, _backward, *call.operator.own):
        found += each(call)
    if not found and call.segments is not None:
        found += _against_segments(call, call.segments)
    return tuple(found)


def _ranks(call: Call) -> Iterator[Breach]:
    """What is wrong with the way ranks share the row, if they share one; `check_recurrent_split` is the judge."""
    cp = call.context_parallel
    scheme = "state_passing" if "cp_context" in call.arguments else call.operator.ranks
    if cp is None or cp.size == 1:
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
    (B, S), given = segments.shape, list(_call_boundaries(call))
    if places_in(given[0], segments) is None:
        says = f"By the segments it is [{B}, {S}], [1, {B * S}], or [1, {segments.num_tokens}] without padding."
        remedy = "Pass the B and T of the tensors, and the segments of this batch."
        yield Breach("sizes-differ", "B, T", f"[{call.B}, {call.T}]", says, remedy, "Segments", silent=True)
    elif found := "; ".join(dict.fromkeys(filter(None, (why_differs(each, segments) for each in given)))):
        where = ", ".join(filter(None, (call.where, call.operator.numbers))) or "boundaries"
        remedy = f"Take the boundaries {call.operator.remedy} Or unpad() the batch and its tensors, or pass the "
        remedy += "segments that this call is for."
        yield Breach("differs-from-segments", where, found, "The segments say otherwise.", remedy, "Segments", silent=True)


def _call_boundaries(call: Call) -> Iterator[CallBoundaries]:
    """The boundaries that the rule reads, the convolution, or both, as far as the operator has them."""
    name, shape, total = call.operator.name, (call.B, call.T), call.B * call.T
    keep_BT, numbered = kept(call), bool(call.operator.numbers)
    neutral_T = np.zeros(total, bool) if keep_BT is None else ~keep_BT.reshape(-1)
    rows_T = row_starts(*shape)
    by_numbers_T = by_numbers(call.numbers_BT) if call.numbers_BT.size else rows_T
    mamba = call.operator.package == "mamba"
    if call.operator.offsets or not numbered or mamba:
        first_T, left_T = by_offsets(call.offsets, total) if call.where else (by_numbers_T if mamba else rows_T, neutral_T)
        yield CallBoundaries(name, "rule", shape, first_T, neutral_T | left_T)
    if numbered and not mamba:
        yield CallBoundaries(name, "convolution", shape, by_numbers_T, neutral_T)


# --- rules of tensors, by their shapes (device meta will do), and of a padding mask, by its values; legend: operator_call

UNPAD = "unpad() the batch and take the boundaries from gated_delta_kwargs(segments, kernel=..., keep_padding=False)."
RIGHT = "Pad on the right, where a causal layer needs no mask; or " + UNPAD
TOKENS_FIRST = "Put the dimensions in that order (transpose, then contiguous)."
V_FIRST = ("state_v_first", "transpose_state_layout")
"""The second is the old name of the first (fla 0.5.2 ops/gated_delta_rule/chunk.py:506-514)."""


def tensor_breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the shapes and dtypes of the tensors of a call."""
    sizes: dict[str, int] = {"B": call.B, "T": call.T, "C": call.chunk_size}
    given = orders(call.operator, call.arguments).items()
    yield from (breach for name, order in given for breach in _shape(call, name, order, sizes))
    yield from _states(call)
    yield from _scale(call)


def orders(row: Operator, arguments: Mapping[str, Any]) -> Mapping[str, str]:
    """The order of dimensions of each tensor, as the call says it: for one of Ascend it follows from the call."""
    found, x = row.shapes, arguments.get("x")
    if row.name == "fla_npu.causal_conv1d":
        found = {"x": "TD" if isinstance(x, Tensor) and x.ndim == 2 else "BTD", "weight": "WD", "bias": "D"}
    if "initial_state" in found and any(arguments.get(name) is True for name in V_FIRST):
        return {**found, "initial_state": "SNVK"}
    return found


def rows_and_tokens(row: Operator, arguments: Mapping[str, Any]) -> tuple[int | None, int] | None:
    """B and T of the first tensor that tells them; B is None where it has no rows."""
    for name, order in orders(row, arguments).items():
        x = arguments.get(name)
        if isinstance(x, Tensor) and "T" in order and x.ndim == len(order):
            return x.shape[order.index("B")] if "B" in order else None, x.shape[order.index("T")]
    return None


def _shape(call: Call, name: str, order: str, sizes: dict[str, int]) -> Iterator[Breach]:
    """Each dimension has one size throughout the call; B and T are those of the call."""
    x = call.get(name)
    if not isinstance(x, Tensor):
        return
    shape, listed = tuple(x.shape), "[" + ", ".join(order) + "]"
    if name == "x" and order == "BTD" and len(shape) > 3:
        shape = (*shape[:2], prod(shape[2:]))  # fla flattens what stands behind the tokens
    remedy = "Build it with these sizes, in that order." if "S" in order else TOKENS_FIRST
    if len(shape) != len(order):
        yield call.breach("shape", name, shape_of(x), f"It is {listed}.", remedy)
        return
    wrong = [f"{axis} is {sizes[axis]}" for axis, size in zip(order, shape) if sizes.setdefault(axis, size) != size]
    if wrong:
        yield call.breach("shape", name, shape_of(x), f"It is {listed}, and {', '.join(wrong)}.", remedy)


def _states(call: Call) -> Iterator[Breach]:
    """One state a sequence; a row has one where there are no boundaries."""
    state = call.get("initial_state")
    if not isinstance(state, Tensor) or "cp_context" in call.arguments:
        return
    count = len(call.lengths) if call.where else call.B
    if state.ndim and state.shape[0] != count:
        says, remedy = f"There is one state for each of {count} sequences.", "Build one for each sequence, in their order."
        yield call.breach("states", "initial_state", shape_of(state), says, remedy)


def _scale(call: Call) -> Iterator[Breach]:
    """Of the rule, which has queries: the decoding rule alone refuses what is not finite (_aclnn_ctypes.py:825)."""
    scale = call.get("scale")
    number = isinstance(scale, (int, float, np.integer, np.floating))
    if scale is not None and "q" in orders(call.operator, call.arguments) and not (number and 0 < scale < inf):
        says, remedy = "It is a number above 0, and finite.", "Pass scale=K**-0.5, or the model's own."
        yield call.breach("scale", "scale", repr(scale)[:40], says, remedy, silent=number)


def kept(call: Call) -> Array | None:
    """bool `[B, T]` where a mask of two dimensions is read by the layer; None where the rows count as they are."""
    value = call.get("attention_mask")
    read = call.operator.masks == "multiplied" and not _dropped_by_release(call)
    if not read or not isinstance(value, Tensor) or tuple(value.shape) != (call.B, call.T):
        return None
    return np.equal(_values(value), 1)


def mask_breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the 2D mask of a call, if it has one."""
    if call.operator.masks == "none" or (value := call.get("attention_mask")) is None:
        return
    if call.operator.masks == "ignored":
        yield from _ignored(call, value)
    elif form := list(_form(call, value)):
        yield from form
    elif call.where:
        yield from _with_boundaries(call, _values(value) == 1)
    else:
        yield from _alone(call, _values(value) == 1)


def _values(value: Tensor) -> Array:
    array: Array = host_tensor("the mask", value).float().numpy()
    return array


def _form(call: Call, value: object) -> Iterator[Breach]:
    """`[B, T]` of zeros and ones."""
    if not isinstance(value, Tensor) or value.is_meta:
        got = "no values" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        says = "It is a tensor [B, T], 1 = real."
        yield call.breach("mask-form", "attention_mask", got, says, "Pass segments.keep.long().")
    elif value.ndim != 2:
        says = "The layer reads padding from a [B, T] mask alone; of one with another rank it makes none."
        yield call.breach("mask-rank", "attention_mask", shape_of(value), says, "Pass segments.keep.long(), [B, T].")
    elif tuple(value.shape) != (call.B, call.T):
        says, remedy = f"The call has [{call.B}, {call.T}] tokens.", "Pass the mask of this very batch."
        yield call.breach("mask-shape", "attention_mask", shape_of(value), says, remedy)
    elif not np.isin(_values(value), (0, 1)).all():
        seen = ", ".join(f"{n:g}" for n in np.unique(_values(value))[:6])
        says = "It holds 1 for real and 0 for padding; numbered or additive masks are multiplied in, or counted wrong."
        got, remedy = f"{shape_of(value)} with values {seen}", "Pass (ids > 0).long(), and boundaries for packed rows."
        yield call.breach("mask-values", "attention_mask", got, says, remedy, silent=True)


def _alone(call: Call, keep_BT: Array) -> Iterator[Breach]:
    begins_BT = keep_BT & ~np.pad(keep_BT, ((0, 0), (1, 0)))[:, :-1]
    holes, left = _rows(begins_BT.sum(1) > 1), _rows(~keep_BT[:, 0] & keep_BT.any(1))
    if holes:
        says = "Padding inside a sequence is not undone by a mask: the state decays and the convolution reads it."
        yield call.breach("hole", "attention_mask", holes, says, UNPAD, silent=True)
    if left and (call.is_set("bias") or call.is_set("conv_bias")):
        says = "With a bias, zeroed padding on the left is no longer zero behind the convolution."
        yield call.breach("bias", "attention_mask", left, says, RIGHT, silent=True)
    elif left and (why := _dropped_by_release(call)):
        yield call.breach("mask-dropped", "attention_mask", left, why, RIGHT, silent=True)


def _with_boundaries(call: Call, keep_BT: Array) -> Iterator[Breach]:
    """Both at once: padding must lie behind the real tokens of a sequence, or fill sequences of its own."""
    flat_T = keep_BT.reshape(-1)
    pieces = [flat_T[start:end] for start, end in pairwise(call.offsets)]
    if bad := [n for n, piece in enumerate(pieces) if (piece[1:] > piece[:-1]).any()]:
        says = f"It is multiplied in as well, and in sequence {bad[0]} padding stands before or between real tokens."
        remedy = "Make padding a sequence of its own, and leave the mask out: " + UNPAD
        yield call.breach("mask-and-offsets", "attention_mask", f"padding in sequences {bad[:8]}", says, remedy, silent=True)


def _ignored(call: Call, value: Any) -> Iterator[Breach]:
    """Nobody reads it: harmless only where every row is padded on the right, or not at all."""
    if call.segments is not None or call.where:
        return
    says = "The layer never reads a mask: padding before or inside a sequence runs through its state."
    try:
        two_d = isinstance(value, Tensor) and value.ndim == 2
        truth = Segments.from_ids(value.long()) if two_d else derive_segments(value)
    except CollateError as error:
        says += f" Which padding this one means cannot be told ({str(error).splitlines()[0][:120]})."
        remedy = "Pass segments=..., which say it; or " + RIGHT
        yield call.breach("mask-unread", "attention_mask", shape_of(value), says, remedy, silent=True)
        return
    if truth.padding_side not in ("none", "right") or truth.packed:
        got = f"{shape_of(value)}, padding {truth.padding_side}" + (", several sequences a row" if truth.packed else "")
        yield call.breach("mask-unread", "attention_mask", got, says, RIGHT, silent=True)


def _dropped_by_release(call: Call) -> str:
    """Why a mask of one row has no effect, `""` where it has."""
    if call.operator.package == "transformers" and call.B == 1 and call.before(SINGLE_ROW_MASKED):
        read = f"more than one row alone ({SINGLE_ROW_MASKED} reads all)"
        return f"transformers {call.release('transformers')} reads a mask of {read}."
    return ""


def _rows(bad_B: Any) -> str:
    rows = np.flatnonzero(bad_B).tolist()
    return f"row {', '.join(map(str, rows[:8]))}" if rows else ""


# --- rules of the boundaries themselves: groups build on one another, and the first that is broken ends the reading

_BOUNDARY = re.compile(
    r"seq_?lens?|cu_|seq_idx|mask|chunk_ind|start_loc|seq_length|segment_id|position_id|total_tokens|qkv_format"
)
"""Argument names that look like boundaries, tables or masks."""
UNREADABLE = frozenset({"container", "count", "falling"})
"""Rules without which no other can read the boundaries."""


def boundary_breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the boundaries of a call."""
    yield from _arguments(call)
    for group in (_containers, _sequences, _tables):
        found = list(group(call))
        yield from found
        if found:
            return


def _arguments(call: Call) -> Iterator[Breach]:
    row = call.operator
    known = {*row.offsets, *row.copies, *row.tables, *row.reads, row.numbers, HOLDER}
    for name, value in call.arguments.items():
        if name not in known and _BOUNDARY.search(name) and not name.startswith("max_"):
            takes = ", ".join(filter(None, (*row.offsets, row.numbers, *sorted(row.reads)))) or "no boundaries"
            says = f"{row.name} does not read it, and where keywords are filtered nobody says so; it takes {takes}."
            yield call.breach("unread", name, _short(value), says, f"Leave {name} out; " + _remedy(call))
    if not call.where:
        for name in (*row.tables, *row.copies):
            if name in call.arguments and "cp_context" not in call.arguments:
                says = "A table or a copy belongs to offsets, and without them nothing keeps sequences apart."
                yield call.breach("alone", name, _short(call.get(name)), says)


def _remedy(call: Call) -> str:
    return f"take the boundaries {call.operator.remedy}"


def _containers(call: Call) -> Iterator[Breach]:
    where, numbers = call.where, call.operator.numbers
    rows = [where, "cu_seqlens_q"] if where.endswith("_padded") else [where]
    unreadable = [(name, call.row(name, host=call.operator.host)[1]) for name in rows if name in call.arguments]
    if numbers in call.arguments and not is_whole_tensor(call.get(numbers)):
        unreadable.append((numbers, f"{shape_of(call.get(numbers))}: it takes a tensor of whole numbers with values"))
    for name, got in unreadable:
        if got:
            yield call.breach("container", name, got, "The operator takes no other form of the same numbers.")
    if where and not any(got for _, got in unreadable) and len(call.offsets) < 2:
        says = "There is at least one sequence, behind the leading 0 where there is one."
        yield call.breach("count", where, f"{len(call.given)} entries", says)


def _sequences(call: Call) -> Iterator[Breach]:
    if not call.where:
        return
    offsets, where, got = call.offsets, call.where, str(list(call.given[:12]))
    if offsets[0] != 0:
        says = "Offsets begin with 0."
        if call.operator.form == "prefix and lengths":
            says = "The first entry counts tokens before the first sequence and is 0; lengths follow it."
        yield call.breach("first", where, got, says + _guess(call))
    if min(call.lengths) < 0:
        yield call.breach("falling", where, got, "No sequence ends before it begins.")
        return
    if offsets[-1] != call.total:
        says, remedy = "what lies behind them is somebody else's memory.", "Take the offsets from this very batch."
        if offsets[-1] < call.total:
            says = "what no sequence covers stays unwritten memory: NaN in gradients."
            remedy = "Count the tail as one more sequence: " + _remedy(call)
        says = f"The call has {call.total} tokens, and {says}" + _guess(call)
        yield call.breach("last", where, got, says, remedy)
    yield from _empties(call)
    if call.B > 1 and (call.total != call.B * call.T or call.word("backend", "triton") != "triton"):
        says = "Offsets are of one flat row."
        if "conv" in call.operator.name.lower():
            says += " The convolution's weight gradient is summed over memory nobody wrote."
        yield call.breach("rows", "B", f"{call.B} rows with {where}", says, "unpad() the batch to [1, T] first.")
    yield from _limits(call)


def _guess(call: Call) -> str:
    """What the same numbers would mean in another spelling."""
    given, form, meant = call.given, call.operator.form, ""
    if sum(given) == call.total and form != "lengths":
        meant = "lengths"
    elif given[-1] == call.total and form.startswith("offsets") == (given[0] != 0):
        meant = "ends without the leading 0" if given[0] else "offsets"
    return meant and f" They look like {meant}."


def _empties(call: Call) -> Iterator[Breach]:
    lengths, kind = call.lengths, call.operator.empties
    empty = [n for n, length in enumerate(lengths) if length == 0]
    inner = bool(empty) and empty[0] < len(lengths) - len(empty)
    old = kind == "fla" and inner and call.before(FLA_COUNTS_EMPTY)
    if old or (empty and kind == "never"):
        got = f"{list(call.given[:12])}: sequence {', '.join(map(str, empty[:8]))} is empty"
        says = "An empty sequence makes chunk tables name the wrong one, or has no last token."
        if old:
            says += f" fla {call.release('fla')} counts the others alone, since {FLA_COUNTS_EMPTY} it does not (#909)."
        yield call.breach("empty", call.where, got, says, "Drop empty sequences: " + _remedy(call))


def _limits(call: Call) -> Iterator[Breach]:
    most, longest = call.operator.most_tokens, max(call.lengths)
    if most is not None and longest > most:
        says = f"A sequence has 1 to {most} tokens in a call of the decoding rule."
        yield call.breach("length", call.where, f"{longest} tokens", says, "Use the chunked rule.")


def _tables(call: Call) -> Iterator[Breach]:
    row = call.operator
    if row.chunk_sizes and call.chunk_size not in row.chunk_sizes:
        taken = ", ".join(map(str, row.chunk_sizes))
        yield call.breach("chunk-size", "chunk_size", str(call.chunk_size), f"It takes {taken}.", f"Pass one of {taken}.")
    elif call.where:
        for name in row.copies:
            if name in call.arguments:
                yield from _copy(call, name)
        for name, chunk in row.tables.items():
            if name in call.arguments:
                block = {"rule": call.chunk_size, "conv": CONV_BLOCK, "cumsum": cumsum_block(call.chunk_size)}[chunk]
                yield from _table(call, name, block)


def _copy(call: Call, name: str) -> Iterator[Breach]:
    copy, unreadable = call.row(name, host=name.endswith(("_host", "_list")))
    if unreadable:
        yield call.breach("container", name, unreadable, "The copy lies on the host.", silent=False)
    elif copy != call.given:
        says = f"It is a copy of {call.where}, {list(call.given[:8])}; tables follow the one, lengths the other."
        yield call.breach("copy", name, str(list(copy[:12])), says)


def _table(call: Call, name: str, block: int) -> Iterator[Breach]:
    right, value = chunk_indices(call.offsets, block), call.get(name)
    says = f"It holds (sequence, chunk) for each piece of {block} tokens in their order, {len(right)} pairs here"
    if call.operator.host:
        flat, unreadable = call.row(name, host=True)
        if unreadable:
            yield call.breach("container", name, unreadable, f"{says}, as one flat list.")
        elif flat != tuple(right.reshape(-1).tolist()):
            says = f"{says}, {right[:4].reshape(-1).tolist()} ..."
            yield call.breach("table", name, f"{list(flat[:12])}, {len(flat)} numbers", says)
    elif not is_whole_tensor(value):
        yield call.breach("container", name, _short(value), f"{says}, as a tensor [{len(right)}, 2].", silent=False)
    elif not np.array_equal(table := host_tensor(name, value).numpy(), right):
        got, says = f"{shape_of(value)} {table[:4].tolist() if table.ndim else table}", f"{says}: {right[:4].tolist()} ..."
        remedy = f"Leave it out, or pass chunk_indices(offsets, {block}) of kernels.gated_delta."
        yield call.breach("table", name, got, says, remedy)


def _short(value: Any) -> str:
    return shape_of(value) if isinstance(value, Tensor) else repr(value)[:60]
