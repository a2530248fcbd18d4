"""Rules of the tensors of a call, by their shapes (tensors on device meta will do); and of a padding mask, by its values.

A mask beside or instead of boundaries is exact where `zero_padding` is.

Legend: B rows, T tokens, and those of `operator_call` for shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import inf, prod
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, host_tensor
from collate_npu.errors import CollateError, shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import Call, Operator
from collate_npu.masks.derive import derive_segments
from collate_npu.releases import FLA_COUNTS_EMPTY, SINGLE_ROW_MASKED
from collate_npu.segments import Segments

UNPAD = "unpad() the batch and take the boundaries from gated_delta_kwargs(segments, kernel=..., keep_padding=False)."
RIGHT = "Pad on the right, where a causal layer needs no mask; or " + UNPAD
TOKENS_FIRST = "Put the dimensions in that order (transpose, then contiguous)."
V_FIRST = ("state_v_first", "transpose_state_layout")
"""The second is the old name of the first (fla 0.5.2 ops/gated_delta_rule/chunk.py:506-514)."""


def breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the shapes and dtypes of the tensors of a call."""
    sizes: dict[str, int] = {"B": call.B, "T": call.T, "C": call.chunk_size}
    given = orders(call.operator, call.arguments).items()
    found = [breach for name, order in given for breach in _shape(call, name, order, sizes)]
    yield from found or (*_heads(call, sizes), *_channels(call, sizes))
    yield from _states(call)
    yield from _scale(call)
    if "head_first" in call.arguments and call.operator.package == "fla":
        got, says = repr(call.get("head_first")), "fla takes [B, T, H, ...] alone and raises for the argument."
        yield call.breach("removed", "head_first", got, says, "Leave head_first out, and put tokens first.", silent=False)


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


def _heads(call: Call, sizes: Mapping[str, int]) -> Iterator[Breach]:
    heads, values = sizes.get("H"), sizes.get("N")
    if heads and values and values % heads:
        says, remedy = "Value heads are a whole multiple of key heads.", "Repeat neither; change the model's head counts."
        yield call.breach("heads", "v", f"{heads} key heads, {values} value heads", says, remedy)
    for axis, where in (("K", "q"), ("V", "v")):
        if axis in call.operator.limits and sizes.get(axis, 0) > (most := call.operator.limits[axis]):
            remedy = "Use another kernel for this head size."
            yield call.breach("head-size", where, str(sizes[axis]), f"{axis} is at most {most}.", remedy)


def _channels(call: Call, sizes: Mapping[str, int]) -> Iterator[Breach]:
    row, x, D, W = call.operator, call.get("x"), sizes.get("D"), sizes.get("W")
    last = isinstance(x, Tensor) and x.ndim == 3 and x.stride(1) == 1 and x.stride(2) > 1
    last |= "seq_idx" in call.arguments  # causal-conv1d takes its kernel for channels last (csrc/causal_conv1d.cpp:175-198)
    multiple = {"causal_conv1d": 8 if last else 1, "fla_npu": 16}.get(row.package)
    if D and multiple and D % multiple:
        remedy = "Pad the channels, or use another convolution."
        yield call.breach("channels", "x", f"{D} channels", f"Channels are a multiple of {multiple}.", remedy)
    if W and "taps" in row.checks and not 2 <= W <= 4:
        says = f"weight is [{', '.join(orders(row, call.arguments)['weight'])}] with 2 to 4 taps."
        yield call.breach("taps", "weight", shape_of(call.get("weight")), says, "Transpose it, or use another convolution.")
    if row.package == "causal_conv1d" and isinstance(x, Tensor) and "seq_idx" in call.arguments:
        strides = x.stride()
        if D != 1 and (strides[1] != 1 or (call.B > 1 and strides[0] % 8) or (call.T > 1 and strides[2] % 8)):
            says = "With seq_idx the channels lie together: stride(1) is 1, the other strides are multiples of 8."
            yield call.breach("strides", "x", f"strides {strides}", says, "Pass x_BTD.contiguous().transpose(1, 2).")


def _states(call: Call) -> Iterator[Breach]:
    """One state a sequence; a row has one where there are no boundaries."""
    state = call.get("initial_state")
    if not isinstance(state, Tensor) or "cp_context" in call.arguments:
        return
    count = len(call.lengths) if call.where else call.B
    if state.ndim and state.shape[0] != count:
        says, remedy = f"There is one state for each of {count} sequences.", "Build one for each sequence, in their order."
        yield call.breach("states", "initial_state", shape_of(state), says, remedy)
    if "state-dtype" in call.operator.checks and shape_of(state).split()[0] != "float32":
        yield call.breach("state-dtype", "initial_state", shape_of(state), "It is float32.", "Pass initial_state.float().")


def _scale(call: Call) -> Iterator[Breach]:
    """Of the rule, which has queries: the decoding rule alone refuses what is not finite (_aclnn_ctypes.py:825)."""
    scale = call.get("scale")
    number = isinstance(scale, (int, float, np.integer, np.floating))
    if scale is not None and "q" in orders(call.operator, call.arguments) and not (number and 0 < scale < inf):
        says, remedy = "It is a number above 0, and finite.", "Pass scale=K**-0.5, or the model's own."
        yield call.breach("scale", "scale", repr(scale)[:40], says, remedy, silent=number)


def kept(call: Call) -> Array | None:
    """bool `[B, T]` where a mask of two dimensions is read by the layer; None where the rows count as they are."""
    value = call.get(_name(call))
    read = call.operator.masks in ("multiplied", "unpadded") and not _dropped_by_release(call)
    if not read or not isinstance(value, Tensor) or tuple(value.shape) != (call.B, call.T):
        return None
    return np.equal(_values(value), 1)


def mask_breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the 2D mask of a call, if it has one."""
    if not (name := _name(call)):
        return
    value = call.get(name)
    if call.operator.masks == "ignored":
        yield from _ignored(call, name, value)
    elif form := list(_form(call, name, value)):
        yield from form
    elif call.where:
        yield from _with_boundaries(call, name, _values(value) == 1)
    else:
        yield from _alone(call, name, _values(value) == 1)


def _name(call: Call) -> str:
    """The argument that holds a padding mask which the operator knows of, `""` without one."""
    return next((n for n in ("attention_mask", "mask") if n in call.arguments and n in call.operator.reads), "")


def _values(value: Tensor) -> Array:
    array: Array = host_tensor("the mask", value).float().numpy()
    return array


def _form(call: Call, name: str, value: object) -> Iterator[Breach]:
    """`[B, T]` of zeros and ones."""
    if not isinstance(value, Tensor) or value.is_meta:
        got = "no values" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        yield call.breach("mask-form", name, got, "It is a tensor [B, T], 1 = real.", "Pass segments.keep.long().")
    elif value.ndim != 2:
        says = "The layer reads padding from a [B, T] mask alone; of one with another rank it makes none."
        yield call.breach("mask-rank", name, shape_of(value), says, "Pass segments.keep.long(), [B, T].")
    elif tuple(value.shape) != (call.B, call.T):
        says, remedy = f"The call has [{call.B}, {call.T}] tokens.", "Pass the mask of this very batch."
        yield call.breach("mask-shape", name, shape_of(value), says, remedy)
    elif not np.isin(_values(value), (0, 1)).all():
        seen = ", ".join(f"{n:g}" for n in np.unique(_values(value))[:6])
        says = "It holds 1 for real and 0 for padding; numbered or additive masks are multiplied in, or counted wrong."
        remedy = "Pass (ids > 0).long(), and boundaries for packed rows."
        yield call.breach("mask-values", name, f"{shape_of(value)} with values {seen}", says, remedy, silent=True)


def _alone(call: Call, name: str, keep_BT: Array) -> Iterator[Breach]:
    begins_BT = keep_BT & ~np.pad(keep_BT, ((0, 0), (1, 0)))[:, :-1]
    holes, left = _rows(begins_BT.sum(1) > 1), _rows(~keep_BT[:, 0] & keep_BT.any(1))
    if call.operator.masks == "unpadded":
        if (empty := _rows(~keep_BT.any(1))) and call.before(FLA_COUNTS_EMPTY):
            says = f"A row of padding alone is an empty sequence; fla {call.release('fla')} counts it wrong (#909)."
            yield call.breach("empty", name, empty, says, f"Drop the row, or take fla {FLA_COUNTS_EMPTY} or later.")
        return
    if holes:
        says = "Padding inside a sequence is not undone by a mask: the state decays and the convolution reads it."
        yield call.breach("hole", name, holes, says, UNPAD, silent=True)
    if left and (call.is_set("bias") or call.is_set("conv_bias")) and call.operator.package != "fla":
        says = "With a bias, zeroed padding on the left is no longer zero behind the convolution."
        yield call.breach("bias", name, left, says, RIGHT, silent=True)
    elif left and (why := _dropped_by_release(call)):
        yield call.breach("mask-dropped", name, left, why, RIGHT, silent=True)


def _with_boundaries(call: Call, name: str, keep_BT: Array) -> Iterator[Breach]:
    """Both at once: padding must lie behind the real tokens of a sequence, or fill sequences of its own."""
    flat_T, got, remedy = keep_BT.reshape(-1), shape_of(call.get(name)), "Pass one of them."
    pieces = [flat_T[start:end] for start, end in pairwise(call.offsets)]
    if call.operator.masks == "unpadded":
        says = f"Given both, {call.where} wins and the mask is dropped: padding runs through the layer."
        yield call.breach("mask-and-offsets", name, got, says, remedy, silent=True)
    elif "mask-and-offsets" in call.operator.checks:
        yield call.breach("mask-and-offsets", name, got, "Only one of them is taken.", remedy)
    elif bad := [n for n, piece in enumerate(pieces) if (piece[1:] > piece[:-1]).any()]:
        says = f"It is multiplied in as well, and in sequence {bad[0]} padding stands before or between real tokens."
        remedy = "Make padding a sequence of its own, and leave the mask out: " + UNPAD
        yield call.breach("mask-and-offsets", name, f"padding in sequences {bad[:8]}", says, remedy, silent=True)


def _ignored(call: Call, name: str, value: Any) -> Iterator[Breach]:
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
        yield call.breach("mask-unread", name, shape_of(value), says, remedy, silent=True)
        return
    if truth.padding_side not in ("none", "right") or truth.packed:
        got = f"{shape_of(value)}, padding {truth.padding_side}" + (", several sequences a row" if truth.packed else "")
        yield call.breach("mask-unread", name, got, says, RIGHT, silent=True)


def _dropped_by_release(call: Call) -> str:
    """Why a mask of one row has no effect, `""` where it has."""
    if call.operator.package == "mindspeed_llm" and call.B == 1:
        return "MindSpeed-LLM reads a mask of more than one row alone."
    if call.operator.package == "transformers" and call.B == 1 and call.before(SINGLE_ROW_MASKED):
        read = f"more than one row alone ({SINGLE_ROW_MASKED} reads all)"
        return f"transformers {call.release('transformers')} reads a mask of {read}."
    return ""


def _rows(bad_B: Any) -> str:
    rows = np.flatnonzero(bad_B).tolist()
    return f"row {', '.join(map(str, rows[:8]))}" if rows else ""
