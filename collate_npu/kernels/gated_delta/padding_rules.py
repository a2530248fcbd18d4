"""Rules of a padding mask beside or instead of boundaries: who reads one, and when that is exact.

Measured (reference rule and transformers' layers): zeroing the layer's input at padding is exact on the left and right of
one sequence a row, without biases before the rule; never for padding inside a sequence, and never for packed rows.
Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from collate_npu.errors import CollateError, shape_of
from collate_npu.host import Array, host_tensor
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operator_call import Call
from collate_npu.masks.derive import derive_segments
from collate_npu.segments import Segments

UNPAD = "unpad() the batch and take the boundaries from gated_delta_kwargs(segments, kernel=..., keep_padding=False)."
RIGHT = "Pad on the right, where a causal layer needs no mask; or " + UNPAD


def mask_name(call: Call) -> str:
    """The argument that holds a padding mask which the operator knows of, `""` without one."""
    return next((n for n in ("attention_mask", "mask") if n in call.arguments and n in call.operator.reads), "")


def kept(call: Call) -> Array | None:
    """bool `[B, T]` where a mask of two dimensions is read by the layer; None where the rows count as they are."""
    name = mask_name(call)
    value = call.get(name) if name else None
    read = call.operator.masks in ("multiplied", "unpadded") and not _dropped_by_release(call)
    if not read or not isinstance(value, Tensor) or tuple(value.shape) != (call.B, call.T):
        return None
    keep_BT: Array = _values(value) == 1
    return keep_BT


def breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the 2D mask of a call, if it has one."""
    name = mask_name(call)
    if not name:
        return
    value = call.get(name)
    if call.operator.masks == "ignored":
        yield from _ignored(call, name, value)
        return
    form = list(_form(call, name, value))
    yield from form
    if not form:
        keep_BT = _values(value) == 1
        yield from _with_boundaries(call, name, keep_BT) if call.where else _alone(call, name, keep_BT)


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
    holes, left = _rows(_has_hole(keep_BT)), _rows(np.array(~keep_BT[:, 0] & keep_BT.any(1)))
    kind = call.operator.masks
    if kind == "unpadded":
        if (empty := _rows(np.array(~keep_BT.any(1)))) and call.releases.before("fla", "0.5.1"):
            says = (
                f"A row of padding alone becomes an empty sequence; fla {call.releases.text('fla')} counts it wrong (#909)."
            )
            yield call.breach("empty", name, empty, says, "Drop the row, or take fla 0.5.1 or later.")
        return
    if holes:
        says = "Padding inside a sequence is not undone by a mask: the state decays and the convolution reads it."
        yield call.breach("hole", name, holes, says, UNPAD, silent=True)
    if left and kind == "output":
        says = "The mask is applied to the output: the first real tokens still read the padding before them."
        remedy = "Pad on the right, or zero the input at padding and pass no mask."
        yield call.breach("left-padding", name, left, says, remedy, silent=True)
    elif left and (call.is_set("bias") or call.is_set("conv_bias")) and call.operator.package != "fla":
        says = "With a bias, zeroed padding on the left is no longer zero behind the convolution."
        yield call.breach("bias", name, left, says, RIGHT, silent=True)
    elif left and (why := _dropped_by_release(call)):
        yield call.breach("mask-dropped", name, left, why, RIGHT, silent=True)


def _with_boundaries(call: Call, name: str, keep_BT: Array) -> Iterator[Breach]:
    """Both at once: padding must lie behind the real tokens of a sequence, or fill sequences of its own."""
    if call.operator.masks == "unpadded":
        says = f"Given both, {call.where} wins and the mask is dropped: padding runs through the layer."
        yield call.breach("mask-and-offsets", name, shape_of(call.get(name)), says, "Pass one of them.", silent=True)
        return
    if "mask-and-offsets" in call.operator.checks:
        yield call.breach(
            "mask-and-offsets", name, shape_of(call.get(name)), "Only one of them is taken.", "Pass one of them."
        )
        return
    flat = keep_BT.reshape(-1)
    pieces = [flat[start:end] for start, end in zip(call.offsets, call.offsets[1:])]
    bad = [n for n, piece in enumerate(pieces) if (piece[1:] > piece[:-1]).any()]
    if bad:
        says = f"It is multiplied in as well, and in sequence {bad[0]} padding stands before or between real tokens."
        remedy = "Make padding a sequence of its own, and leave the mask out: " + UNPAD
        yield call.breach("mask-and-offsets", name, f"padding in sequences {bad[:8]}", says, remedy, silent=True)


def _ignored(call: Call, name: str, value: object) -> Iterator[Breach]:
    """Nobody reads it: harmless only where every row is padded on the right, or not at all."""
    if call.trusted or call.where:
        return
    says = "The layer never reads a mask: padding before or inside a sequence runs through its state."
    try:
        two_d = isinstance(value, Tensor) and value.ndim == 2
        truth = Segments.from_ids(value.long()) if two_d else derive_segments(value)  # type: ignore[attr-defined, arg-type]
    except CollateError as error:
        says += f" Which padding this one means cannot be told ({str(error).splitlines()[0][:120]})."
        yield call.breach(
            "mask-unread", name, shape_of(value), says, "Pass segments=..., which say it; or " + RIGHT, silent=True
        )
        return
    if truth.padding_side not in ("none", "right") or truth.packed:
        got = f"{shape_of(value)}, padding {truth.padding_side}" + (", several sequences a row" if truth.packed else "")
        yield call.breach("mask-unread", name, got, says, RIGHT, silent=True)


def _dropped_by_release(call: Call) -> str:
    """Why a mask of one row has no effect, `""` where it has."""
    package = call.operator.package
    if package == "mindspeed_llm" and call.B == 1:
        return "MindSpeed-LLM reads a mask of more than one row alone."
    if package == "transformers" and call.B == 1 and call.releases.before("transformers", "5.15"):
        return f"transformers {call.releases.text('transformers')} reads a mask of more than one row alone (5.15 reads all)."
    return ""


def _has_hole(keep_BT: Array) -> Array:
    """bool `[B]`: does a real token follow padding that follows a real token?"""
    begins = keep_BT & ~np.pad(keep_BT, ((0, 0), (1, 0)))[:, :-1]
    several: Array = begins.sum(1) > 1
    return several


def _rows(bad_B: Array) -> str:
    rows = np.flatnonzero(bad_B).tolist()
    return f"row {', '.join(map(str, rows[:8]))}" if rows else ""
