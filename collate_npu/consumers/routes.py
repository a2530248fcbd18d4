"""Routes: what becomes of the masks of one batch, and how that is told to people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from collate_npu import debug
from collate_npu.arrays import PaddingSide
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.forms import none_is_exact
from collate_npu.parallel import ContextParallel
from collate_npu.segments import Segments

MaskForm = Literal["none", "keep_2d", "masked", "keep", "bias", "mapping", "block_mask"]
Keeps = Literal["recurrent", "always", "never"]

SPELLED: Mapping[MaskForm, str] = {
    "none": "None",
    "keep_2d": "the 2D mask, True or 1 = real",
    "masked": "4D, True is blocked",
    "keep": "4D, True attends",
    "bias": "4D, additive",
    "mapping": "a mask for each kind of layer",
    "block_mask": "a BlockMask",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What becomes of the masks of one batch."""

    form: MaskForm
    keeps_mask_2d: bool
    """Does `attention_mask_2d` stay in the batch?"""
    why: str
    """Why this form."""


def say_route(reader: str, key: str, route: Route, segments: Segments, cp: ContextParallel | None, reads_2d: str) -> None:
    """With COLLATE_NPU_DEBUG=1: each route once a process, with the first batch that took it."""
    whole = cp is None and route.form in ("masked", "keep", "bias")
    cost = f", {cost_said(route.form, segments)}" if whole else ""
    kept = f"stays ({reads_2d})" if route.keeps_mask_2d else "taken out (nobody here reads it)"
    lines = (
        reader,
        f"{key}: {SPELLED[route.form]}{cost} ({route.why})",
        f"attention_mask_2d: {kept}",
        f"the first such batch: {shape_said(segments)}",
        f"context parallelism: {cp or 'none'}",
    )
    debug.say((reader, route.form, kept, segments.padding_side, segments.packed, cp), "\n  ".join(lines))


def say_batch(
    reader: str, out: Mapping[str, Any], segments: Segments, *, why: str, cp: ContextParallel | None = None
) -> None:
    """The same for a finished batch of a stack whose route no consumer chooses."""
    key = "attention_masks" if "attention_masks" in out else "attention_mask"
    full = out.get(key)
    form: MaskForm = "mapping" if isinstance(full, Mapping) else "block_mask" if hasattr(full, "mask_mod") else "none"
    if isinstance(full, Tensor):
        form = "keep_2d" if full.ndim == 2 else "masked"
    route = Route(form=form, keeps_mask_2d=KEEP_KEY in out, why=why)
    say_route(reader, key, route, segments, cp, "whoever reads this batch needs it")


def cost_said(form: MaskForm, segments: Segments) -> str:
    """`18 bytes`, `8.0 MiB`: what such a mask takes; "" where only the kernel's package knows."""
    B, S = segments.shape
    each = {"keep_2d": 1, "masked": S, "keep": S, "bias": 4 * S}
    return bytes_said(each[form] * B * S) if form in each else ""


def bytes_said(size: int) -> str:
    return f"{size} bytes" if size < 2**20 else f"{size / 2**20:.1f} MiB"


def cheapest_said(segments: Segments) -> str:
    """Which form of these rows takes least and says everything of plain causal attention, and what others take."""
    dense, in_rows = cost_said("keep", segments), cost_said("keep_2d", segments)
    if segments.packed:
        offsets = bytes_said(4 * (segments.num_sequences + 1))
        return f"offsets of a flat row, {offsets}; a dense 4D takes {dense}"
    if none_is_exact(segments):
        return f"None with a causal kernel; the 2D mask takes {in_rows}, the dense 4D that models make of it {dense}"
    return f"the 2D mask, {in_rows}; the dense 4D that models make of it takes {dense}"


def shape_said(segments: Segments) -> str:
    """`2 rows of 5, one sequence each; padding on the left, 2 of 10 places (20%)`."""
    B, S = segments.shape
    sequences = f"{segments.num_sequences} sequences" if segments.packed or segments.empty_rows else "one sequence each"
    padded, where = B * S - segments.num_tokens, _WHERE[segments.padding_side]
    share = f", {padded} of {B * S} places ({100 * padded / max(B * S, 1):.0f}%)" if padded else ""
    return f"{B} row{'s' if B != 1 else ''} of {S}, {sequences}; {where}{share}"


_WHERE: Mapping[PaddingSide, str] = {
    "none": "no padding",
    "left": "padding on the left",
    "right": "padding on the right",
    "mixed": "padding before, between or behind tokens",
}
