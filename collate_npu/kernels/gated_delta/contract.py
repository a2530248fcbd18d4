"""Contract of a recurrent kernel's call: what the kernel would take in silence, and compute something else from.

Most host code looks at few of its boundaries: lengths given for offsets, a tail that nothing covers, a table of another
chunk size pass, and other sequences are computed, or memory nobody wrote. Left to the operators: chunk sizes, head counts,
dtypes, channels, strides. Costs some passes over one number a token. A mask beside or instead of boundaries is exact where
`zero_padding` is.

Legend: B rows, T tokens, and those of `operators` for shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import inf, prod
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu import releases
from collate_npu.arrays import Array, host_array, host_tensor, whole_number
from collate_npu.errors import CollateError, shape_of
from collate_npu.kernels import Breach
from collate_npu.kernels.call_boundaries import (
    CallBoundaries,
    boundary_reason,
    by_numbers,
    by_offsets,
    offset_values,
    places_in,
    row_starts,
    shown,
)
from collate_npu.kernels.gated_delta.arguments import chunk_indices, table_block
from collate_npu.kernels.gated_delta.operators import Call, operator_named, tensor_orders
from collate_npu.masks.derive import derive_segments
from collate_npu.segments import Segments


def gated_delta_breaches(kwargs: Mapping[str, Any], *, kernel: str, **says: Any) -> tuple[Breach, ...]:
    """Return every rule that the call breaks; arguments as in `check.check_call`, B and T among them."""
    call = Call(operator_named(kernel), kwargs, **says)
    found = list(_unread(call))
    if unreadable := list(_unreadable(call)):
        return (*found, *unreadable)
    found += list(_boundaries(call)) or _tables(call)
    for rules in (_tensors, _mask, _backward, *OWN.get(call.operator.name, ())):
        found += rules(call)
    if not found and call.segments is not None:
        found += _against_segments(call, call.segments)
    return tuple(found)


# --- the boundaries themselves

_BOUNDARY = re.compile(
    r"seq_?lens?|cu_|seq_idx|mask|chunk_ind|start_loc|seq_length|segment_id|position_id|total_tokens|qkv_format"
)
"""Argument names that look like boundaries, tables or masks."""


def _unread(call: Call) -> Iterator[Breach]:
    """Arguments that the operator does not read."""
    row = call.operator
    for name, value in call.arguments.items():
        if name not in row.names and _BOUNDARY.search(name) and not name.startswith("max_"):
            takes = ", ".join(row.names)
            says = f"{row.name} does not read it, and a caller that filters keywords drops it silently; it takes {takes}."
            yield call.breach("unread", name, shape_of(value), says, f"Leave {name} out. {row.remedy}")


def _unreadable(call: Call) -> Iterator[Breach]:
    """Rules without which no other can read the boundaries."""
    if call.where and len(call.offsets) < 2:
        says = "There is at least one sequence (after the leading 0, where the form has one)."
        yield call.breach("count", call.where, f"{len(call.given)} entries", says)
    elif call.where and min(call.lengths) < 0:
        yield call.breach("falling", call.where, shown(call.given), "No sequence ends before it begins.")


def _boundaries(call: Call) -> Iterator[Breach]:
    if not call.where:
        return
    offsets, lengths, where, got = call.offsets, call.lengths, call.where, shown(call.given)
    if offsets[0] != 0:
        says = "Offsets begin with 0."
        if call.operator.form == "prefix and lengths":
            says = "The first entry counts tokens before the first sequence and is 0; lengths follow it."
        yield call.breach("first", where, got, says)
    if offsets[-1] != call.total:
        says, remedy = "the kernel would read memory after them that is not its own.", "Take the offsets from this batch."
        if offsets[-1] < call.total:
            says = "tokens outside every sequence stay unwritten memory: NaN in gradients."
            remedy = f"Count the tail as one more sequence. {call.operator.remedy}"
        yield call.breach("last", where, got, f"The call has {call.total} tokens, and {says}", remedy)
    yield from _empties(call)
    longest, most = max(lengths), call.operator.most_tokens
    if most is not None and longest > most:
        says = f"A sequence has 1 to {most} tokens in a call of the decoding rule."
        yield call.breach("length", where, f"{longest} tokens", says, "Use the chunked rule.")


def _empties(call: Call) -> Iterator[Breach]:
    lengths, kind = call.lengths, call.operator.empties
    empty = [n for n, length in enumerate(lengths) if length == 0]
    inner = bool(empty) and empty[0] < len(lengths) - len(empty)
    old = kind == "fla" and inner and call.before(releases.FLA_COUNTS_EMPTY)
    if old or (empty and kind == "never"):
        got = f"{shown(call.given)}: sequence {', '.join(map(str, empty[:8]))} is empty"
        says = "An empty sequence makes chunk tables name the wrong one, or has no last token."
        if old:
            says += f" fla {call.release('fla')} counts the others alone, since {releases.FLA_COUNTS_EMPTY} it does not."
        yield call.breach("empty", call.where, got, says, f"Drop empty sequences. {call.operator.remedy}")


def _tables(call: Call) -> Iterator[Breach]:
    """Copies of the offsets, and chunk tables."""
    row = call.operator
    for name in (*row.tables, *row.copies):
        if name not in call.arguments:
            continue
        if not call.where:
            if "cp_context" not in call.arguments:
                says = "A table or a copy needs offsets beside it; without offsets nothing keeps sequences apart."
                yield call.breach("alone", name, shape_of(call.get(name)), says)
        elif name in row.tables:
            yield from _table(call, name, call.get(name), table_block(row.tables[name], call.chunk_size))
        elif (copy := offset_values(call.arguments, name)) != call.given:
            says = f"It is a copy of {call.where}, {shown(call.given)}; the kernel reads both."
            yield call.breach("copy", name, shown(copy), says)


def _table(call: Call, name: str, value: Any, block: int) -> Iterator[Breach]:
    right = chunk_indices(call.offsets, block)
    if (table := host_array(name, value).reshape(-1)).tolist() != right.reshape(-1).tolist():
        says = f"It holds (sequence, chunk) for each piece of {block} tokens in their order: {right[:4].tolist()} ..."
        remedy = f"Leave it out, or pass chunk_indices(offsets, {block}) of kernels.gated_delta."
        yield call.breach("table", name, str(table[:12].tolist()), says, remedy)


# --- tensors, by their shapes (device meta will do)


def _tensors(call: Call) -> Iterator[Breach]:
    """Each dimension has one size throughout the call; B and T are those of the call."""
    orders = tensor_orders(call.operator, call.arguments)
    sizes: dict[str, int] = {"B": call.B, "T": call.T}
    yield from (breach for name, order in orders.items() for breach in _shape(call, name, order, sizes))
    state, count = call.get("initial_state"), len(call.lengths) if call.where else call.B
    if isinstance(state, Tensor) and state.ndim and state.shape[0] != count and "cp_context" not in call.arguments:
        says, remedy = f"There is one state for each of {count} sequences.", "Build one for each sequence, in their order."
        yield call.breach("states", "initial_state", shape_of(state), says, remedy)
    if "q" in orders:  # of the rule
        yield from _scale(call)


def _shape(call: Call, name: str, order: str, sizes: dict[str, int]) -> Iterator[Breach]:
    x = call.get(name)
    if not isinstance(x, Tensor):
        return
    shape, listed = tuple(x.shape), "[" + ", ".join(order) + "]"
    if name == "x" and order == "BTD" and len(shape) > 3:
        shape = (*shape[:2], prod(shape[2:]))  # fla flattens what stands behind the tokens
    wrong = [f"{axis} is {sizes[axis]}" for axis, size in zip(order, shape) if sizes.setdefault(axis, size) != size]
    if wrong or len(shape) != len(order):
        remedy = "Build it with these sizes, in that order (transpose, then contiguous)."
        yield call.breach("shape", name, shape_of(x), f"It is {listed}; {', '.join(wrong) or 'no other rank'}.", remedy)


def _scale(call: Call) -> Iterator[Breach]:
    scale, remedy = call.get("scale"), "Pass scale=K**-0.5, or the model's own."
    if isinstance(scale, (int, float, np.integer, np.floating)) and not 0 < scale < inf:
        yield call.breach("scale", "scale", repr(scale)[:40], "It is a number above 0, and finite.", remedy)
    if scale is None and call.segments is not None and call.operator.name in _SCALED:
        yield call.breach("scale", "scale", "nothing", "The default is 1.0, where fla's rule uses K**-0.5.", remedy)


_SCALED = ("fla_npu.recurrent_gated_delta_rule", "torch_npu.npu_chunk_gated_delta_rule")


# --- a padding mask, by its values

_UNPAD = "unpad() the batch and take the boundaries from gated_delta_kwargs(segments, kernel=..., keep_padding=False)."
_RIGHT = "Pad on the right, where a causal layer needs no mask; or " + _UNPAD


def _mask(call: Call) -> Iterator[Breach]:
    value = call.get("attention_mask")
    if value is None or call.operator.masks == "none":
        return
    if call.operator.masks == "ignored":
        yield from _ignored(call, value)
    elif (values_BT := _mask_values(call)) is None:
        says = "The layer reads padding only from a [B, T] tensor with values; any other mask it ignores."
        yield call.breach("mask-form", "attention_mask", shape_of(value), says, "Pass segments.keep.long(), [B, T].")
    elif not np.isin(values_BT, (0, 1)).all():
        got = f"{shape_of(value)} with values {', '.join(f'{n:g}' for n in np.unique(values_BT)[:6])}"
        says = "It holds 1 for real and 0 for padding; numbered or additive masks are multiplied in."
        remedy = "Pass (ids > 0).long(), and boundaries for packed rows."
        yield call.breach("mask-values", "attention_mask", got, says, remedy)
    elif call.where:
        yield from _beside_offsets(call, values_BT.reshape(-1) == 1)
    else:
        yield from _alone(call, values_BT == 1)


def _mask_values(call: Call) -> Array | None:
    """float `[B, T]`: a mask that the layer multiplies in; None where it makes none of what it is given."""
    value = call.get("attention_mask")
    if call.operator.masks != "multiplied" or not isinstance(value, Tensor) or value.is_meta:
        return None
    return host_tensor("the mask", value).float().numpy() if tuple(value.shape) == (call.B, call.T) else None


def _alone(call: Call, keep_BT: Array) -> Iterator[Breach]:
    begins_BT = keep_BT & ~np.pad(keep_BT, ((0, 0), (1, 0)))[:, :-1]
    holes, left = _rows(begins_BT.sum(1) > 1), _rows(~keep_BT[:, 0] & keep_BT.any(1))
    if holes:
        says = "A mask does not undo padding inside a sequence: the state decays and the convolution reads it."
        yield call.breach("hole", "attention_mask", holes, says, _UNPAD)
    if left and (call.is_set("bias") or call.is_set("conv_bias")):
        says = "With a bias, padding on the left that was set to zero is not zero after the convolution."
        yield call.breach("bias", "attention_mask", left, says, _RIGHT)
    elif left and call.B == 1 and call.before(releases.SINGLE_ROW_MASKED):
        says = f"transformers {call.release('transformers')} reads a mask only if it has more than one row."
        yield call.breach("mask-dropped", "attention_mask", left, f"{says} {releases.SINGLE_ROW_MASKED} reads all.", _RIGHT)


def _beside_offsets(call: Call, keep_T: Array) -> Iterator[Breach]:
    """Padding must lie behind the real tokens of a sequence, or fill sequences of its own."""
    pieces = [keep_T[start:end] for start, end in pairwise(call.offsets)]
    if bad := [n for n, piece in enumerate(pieces) if (piece[1:] > piece[:-1]).any()]:
        says = f"The layer multiplies it in too, and in sequence {bad[0]} padding stands before or between real tokens."
        remedy = f"Make padding a sequence of its own, and leave the mask out: {_UNPAD}"
        yield call.breach("mask-and-offsets", "attention_mask", f"padding in sequences {bad[:8]}", says, remedy)


def _ignored(call: Call, value: Any) -> Iterator[Breach]:
    """Nobody reads it: harmless only where every row is padded on the right, or not at all."""
    if call.segments is not None or call.where:
        return
    got = shape_of(value)
    try:
        two_d = isinstance(value, Tensor) and value.ndim == 2
        truth = Segments.from_ids(value.long()) if two_d else derive_segments(value)
        if truth.padding_side in ("none", "right") and not truth.packed:
            return
        got += f", padding {truth.padding_side}" + ", several sequences a row" * truth.packed
    except CollateError as error:
        got += f", which cannot be read ({str(error).splitlines()[0][:120]})"
    says = "The layer never reads a mask: padding before or inside a sequence runs through its state."
    yield call.breach("mask-unread", "attention_mask", got, says, _RIGHT)


def _rows(bad_B: Any) -> str:
    rows = np.flatnonzero(bad_B).tolist()
    return f"row {', '.join(map(str, rows[:8]))}" if rows else ""


# --- the backward pass


def _backward(call: Call) -> Iterator[Breach]:
    if call.training and not call.operator.backward:
        says = "The operator has no backward: it is for decoding and inference."
        remedy = "Use the chunked rule for training, or check with training=False."
        yield call.breach("backward", "training", "True", says, remedy)


# --- against the batch


def _against_segments(call: Call, segments: Segments) -> Iterator[Breach]:
    """One breach that names the first token that goes on from a wrong one; read where no other rule is broken."""
    (B, S), given = segments.shape, list(_call_boundaries(call))
    if places_in(given[0], segments) is None:
        says = f"By the segments it is [{B}, {S}], [1, {B * S}], or [1, {segments.num_tokens}] without padding."
        remedy = "Pass the B and T of the tensors, and the segments of this batch."
        yield Breach("sizes-differ", "B, T", f"[{call.B}, {call.T}]", says, remedy, "Segments")
    elif found := "; ".join(dict.fromkeys(filter(None, (boundary_reason(each, segments) for each in given)))):
        where = ", ".join(filter(None, (call.where, call.operator.numbers))) or "boundaries"
        remedy = f"{call.operator.remedy} Or unpad() the batch and its tensors, or pass the segments that this call is for."
        yield Breach("differs-from-segments", where, found, "The segments say otherwise.", remedy, "Segments")


def _call_boundaries(call: Call) -> Iterator[CallBoundaries]:
    """The boundaries by offsets, which a rule reads, and by numbers, as far as the operator has them."""
    row, shape, total = call.operator, (call.B, call.T), call.B * call.T
    values_BT, rows_T = _mask_values(call), row_starts(*shape)
    neutral_T = np.zeros(total, bool) if values_BT is None else values_BT.reshape(-1) != 1
    if row.offsets or not row.numbers:
        first_T, left_T = by_offsets(call.offsets, total) if call.where else (rows_T, neutral_T)
        yield CallBoundaries(row.name, "rule", shape, first_T, neutral_T | left_T)
    if row.numbers:
        first_T = by_numbers(call.numbers_BT) if call.numbers_BT.size else rows_T
        yield CallBoundaries(row.name, "convolution", shape, first_T, neutral_T)


# --- rules of one operator

_OWN_NUMBERS = "gated_delta_kwargs(segments, kernel='causal_conv1d')."


def _convolution(call: Call) -> Iterator[Breach]:
    """fla's."""
    if call.training and call.where and call.B > 1:
        says = "Offsets are of one flat row. The convolution's weight gradient is summed over memory nobody wrote."
        yield call.breach("rows", "B", f"{call.B} rows with {call.where}", says, "unpad() the batch to [1, T] first.")


def _returning(call: Call, reach: float = 0) -> Iterator[Breach]:
    """Only equality of numbers counts, within the taps of a convolution; a scan reaches further."""
    reach = reach or call.taps
    for row in call.numbers_BT:
        starts = np.flatnonzero(np.diff(row, prepend=row[:1] - 1)).tolist()
        ended: dict[int, int] = {}
        for start, end in pairwise([*starts, len(row)]):
            before = ended.get(row[start])
            if before is not None and start - before < reach - 1:
                got = str(row[before - 1 : start + 1][:12].tolist())
                says = "All tokens with one number count as one sequence, even if others stand between them."
                remedy = f"Give each sequence of the flat row a number of its own: {_OWN_NUMBERS}"
                yield call.breach("numbers-return", "seq_idx", got, says, remedy)
                return
            ended[row[start]] = end


MAMBA_TOKENS = 61_000


def _mamba(call: Call) -> Iterator[Breach]:
    """mamba_ssm's scan, which takes `seq_idx` for boundaries."""
    if "cu_seqlens" in call.arguments and "seq_idx" not in call.arguments:
        says = "cu_seqlens is read only for return_varlen_states: without seq_idx the state runs from sequence to sequence."
        yield call.breach("offsets-alone", "cu_seqlens", "no seq_idx", says, f"Pass seq_idx: {_OWN_NUMBERS}")
    if call.B * call.T > MAMBA_TOKENS:
        says, remedy = f"Its int32 pointers overflow at about {MAMBA_TOKENS} tokens (mamba #1015).", "Use shorter rows."
        yield call.breach("tokens", "T", str(call.B * call.T), says, remedy)
    yield from _returning(call, inf)


def _flash(call: Call) -> Iterator[Breach]:
    """The vendor's whole rule uses tables unread: one, or one for each block, by its tokens as text."""
    for name in ("chunk_indices", "chunk_indices_list"):
        given = call.get(name) if call.offsets[:1] == (0,) else None
        by_block = given if isinstance(given, Mapping) or given is None else {call.chunk_size: given}
        for block, table in (by_block or {}).items():
            yield from _table(call, name, table, int(block) if str(block).isdecimal() else 0)


def _npu_convolution(call: Call) -> Iterator[Breach]:
    x, mode = call.get("x"), call.arguments.get("activation_mode", 0)
    rows = tuple(range(0, call.B * call.T + 1, call.T))
    in_rows = call.B > 1 or (isinstance(x, Tensor) and x.ndim == 3)
    if call.where and in_rows and len(call.offsets) == len(rows) and call.offsets != rows:
        says = f"An x [B, T, D] has one sequence a row, {list(rows[:8])}, whatever the boundaries say."
        remedy = "Pass x [T, D] with boundaries inside a row: x.reshape(-1, D)."
        yield call.breach("rows", call.where, shown(call.offsets), says, remedy)
    active = not isinstance(mode, int) or mode != 0
    outside = ("query_start_loc", "cache_indices", "initial_state_mode", "num_accepted_tokens")
    unbound = [*(name for name in outside if name in call.arguments), *["activation_mode"] * active]
    learns = active or any(isinstance(x, Tensor) and x.requires_grad for x in call.arguments.values())
    if call.training and unbound and learns:
        says = "The backward is bound only without boundaries, states and activation: here the output has no history."
        remedy = "Wrap it with npu_causal_conv1d_bwd in an autograd.Function and check both, activation apart; in inference "
        yield call.breach("history", ", ".join(unbound), "training", says, remedy + "pass training=False.")


def _layer(call: Call) -> Iterator[Breach]:
    """transformers' Gated DeltaNet, by release and installed kernels."""
    numbered, version = "seq_idx" in call.arguments, call.release("transformers")
    given = [name for name in (call.where, "seq_idx" * numbered) if name]
    if given and call.before(releases.BOUNDARIES_READ):
        says = f"transformers {version} reads no boundaries in its Gated DeltaNet layers; {releases.BOUNDARIES_READ} does."
        remedy = "Upgrade, or pass padded rows with a 2D mask."
        yield call.breach("release", ", ".join(given), "given", says, remedy)
        return
    yield from _pair(call)
    for package, name in (("fla", call.where), ("causal_conv1d", "seq_idx" * numbered)):
        if name and call.release(package) is None and call.before(releases.MISSING_KERNEL_RAISES):
            says = f"Without {package} a torch function stands in; transformers {version} drops boundaries without an error."
            remedy = f"Install {package} and name its release in versions, or pass padded rows with a 2D mask."
            yield call.breach("package", name, f"{package} is not there", says, remedy)
    yield from _returning(call)
    if call.segments is None:
        yield from _positions(call)


def _pair(call: Call) -> Iterator[Breach]:
    """The rule reads offsets and the convolution numbers; without its own either runs through the whole row."""
    by_offset, by_number = (each.first_T for each in _call_boundaries(call))
    if (not call.where or call.offsets[-1] == call.T) and not np.array_equal(by_offset, by_number):
        rule, convolution = (shown(np.unique(first_T).tolist()) for first_T in (by_offset, by_number))
        says = f"By cu_seq_lens_q the rule begins sequences at {rule}, by seq_idx the convolution at {convolution}."
        yield call.breach("pair", "cu_seq_lens_q, seq_idx", "two readings", says)


def _positions(call: Call) -> Iterator[Breach]:
    """Positions that begin again say that rows are packed, and no recurrent layer reads them."""
    positions, mask = call.get("position_ids"), call.get("attention_mask")
    if not call.where and isinstance(positions, Tensor) and positions.ndim == 2 and not positions.is_meta:
        real = mask.bool().cpu() if isinstance(mask, Tensor) and mask.shape == positions.shape else positions.cpu() > -1
        if bool(((positions.cpu()[:, 1:] == 0) & real[:, 1:] & real[:, :-1]).any()):
            says = "They restart inside a row: it is packed, and recurrent layers do not read positions."
            yield call.breach("positions-alone", "position_ids", shape_of(positions), says)


def _packed_fields(call: Call) -> Iterator[Breach]:
    """Megatron's `PackedSeqParams`: its padded and actual offsets, its totals."""
    total = whole_number("total_tokens", call.arguments.get("total_tokens", call.T))
    if call.where and total != call.T:
        says = f"The row has {call.T} tokens; sequence numbers are cut off or added without an error."
        yield call.breach("total", "total_tokens", str(total), says, "Pass the width of the row.")
    if call.where != "cu_seqlens_q_padded" or "cu_seqlens_q" not in call.arguments:
        return
    actual = offset_values(call.arguments, "cu_seqlens_q")
    real = [end - start for start, end in pairwise(actual)]
    fits = len(real) == len(call.lengths) and all(0 <= r <= n for r, n in zip(real, call.lengths)) and actual[:1] == (0,)
    if actual != call.given and not fits:
        says = f"Actual offsets fit into the padded ones, {shown(call.given)}, sequence by sequence."
        yield call.breach("padded-actual", "cu_seqlens_q", shown(actual), says, "Take both from pad_documents(batch, cp).")


OWN: dict[str, tuple[Callable[[Call], Iterator[Breach]], ...]] = {
    "fla.causal_conv1d": (_convolution,),
    "causal_conv1d.causal_conv1d_fn": (_returning,),
    "mamba.mamba_chunk_scan_combined": (_mamba,),
    "mamba.mamba_split_conv1d_scan_combined": (_mamba,),
    "fla_npu.flash_gated_delta_rule": (_flash,),
    "fla_npu.causal_conv1d": (_npu_convolution,),
    "transformers.gdn_layer": (_layer,),
    "megatron_core.GatedDeltaNet": (_packed_fields,),
}
"""Rules of one operator alone."""
