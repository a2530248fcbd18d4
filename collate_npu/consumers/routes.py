"""Routes: what becomes of the masks of one batch, and how that is told to people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from collate_npu import debug
from collate_npu.keys import KEEP_KEY
from collate_npu.parallel import ContextParallel
from collate_npu.rows import PaddingSide
from collate_npu.segments import Segments

MaskForm = Literal["none", "keep_2d", "masked", "keep", "bias", "mapping", "block_mask"]
Keeps = Literal["recurrent", "always", "never"]

WHY_2D: Mapping[tuple[Keeps, bool], str] = {
    ("recurrent", True): "recurrent layers read it",
    ("recurrent", False): "no recurrent layer is here to read it",
    ("always", True): "this consumer always reads it",
    ("never", False): "this consumer never reads it",
}
"""Why `attention_mask_2d` stays or not, by when a consumer keeps it and whether it does."""
_SPELLED: Mapping[MaskForm, str] = {
    "none": "None",
    "keep_2d": "the 2D mask, True or 1 = real",
    "masked": "4D, True = blocked",
    "keep": "4D, True = attends",
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
    why_2d: str
    """Why `attention_mask_2d` stays, or not."""

    def say(self, reader: str, key: str, segments: Segments, cp: ContextParallel | None) -> None:
        """With COLLATE_NPU_DEBUG=1: each route once a process, with the first batch that took it."""
        lines = (
            f"{reader}",
            f"{key}: {_SPELLED[self.form]} ({self.why})",
            f"attention_mask_2d: {'stays' if self.keeps_mask_2d else 'taken out'} ({self.why_2d})",
            f"the first such batch: {shape_said(segments)}",
            f"context parallelism: {cp or 'none'}",
        )
        taken = (reader, self.form, self.keeps_mask_2d, self.why_2d, segments.padding_side, segments.packed, cp)
        debug.say(taken, "\n  ".join(lines))


def say_batch(
    reader: str, out: Mapping[str, Any], segments: Segments, *, why: str, cp: ContextParallel | None = None
) -> None:
    """The same for a finished batch of a stack whose route no consumer chooses."""
    key = "attention_masks" if "attention_masks" in out else "attention_mask"
    kept = KEEP_KEY in out
    form = _form_of(out.get(key))
    why_2d = "whoever reads this batch needs it" if kept else "nobody here reads it"
    Route(form=form, keeps_mask_2d=kept, why=why, why_2d=why_2d).say(reader, key, segments, cp)


def _form_of(full: Any) -> MaskForm:
    if isinstance(full, Tensor):
        return "keep_2d" if full.ndim == 2 else "masked"
    if isinstance(full, Mapping):
        return "mapping"
    return "block_mask" if hasattr(full, "mask_mod") else "none"


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
