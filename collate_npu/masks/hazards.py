"""Hazards: what is legal in a batch and goes wrong in silence somewhere, in words; for people, not for decisions.

`describe` lists them, and COLLATE_NPU_DEBUG=1 says each once, for batches as they arrive. Costs a few passes over the masks.
Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu import debug
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.polarity import BLOCKED_BELOW
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, keep_array

_LISTED = 8


def hazards(sources: Sources, segments: Segments | None) -> dict[str, str]:
    """Kind -> what goes wrong where, and what to do. `segments` is None where the batch is refused: then less is known."""
    found = dict(_of_mask(sources, segments))
    if segments is None:
        return found
    exact = none_is_exact(segments)
    flat = sources.named["offsets"] or sources.get("packed_seq_params") is not None
    if not (exact or flat or sources.named["mask"] or "attention_masks" in sources):
        remedy = "Let a BatchAdapter build one for the model that reads the batch."
        found["no mask"] = f"there is no attention_mask, and {exact.why}. {remedy}"
    return found | hazards_of_tokens(sources, segments)


def say_hazards(found: Mapping[str, str]) -> None:
    """With COLLATE_NPU_DEBUG=1: each kind once a process, with the first batch that shows it."""
    for kind, text in found.items():
        debug.say(("hazard", kind), f"hazard in a batch as it arrives: {text}")


def reads(full: Tensor, segments: Segments | None) -> str:
    """What True, or a number, of a dense mask means, by what stands on its diagonal at a real token; "" where unknown."""
    if full.is_floating_point():
        return "additive" if bool((full <= BLOCKED_BELOW).any()) else ""
    if segments is None or not segments.spans or tuple(full.shape[-2:]) != (segments.shape[1],) * 2:
        return ""
    b, start, _ = segments.spans[0]
    for at in (b, 0)[: full.ndim - 2]:  # of the first head; one row may be that of all
        full = full[min(at, len(full) - 1)]
    keeps = bool(full[start, start])
    return f"{'True' if full.dtype == torch.bool else '1'} = {'attends' if keeps else 'blocked'}"


def _of_mask(batch: Sources, segments: Segments | None) -> Iterator[tuple[str, str]]:
    full = batch.get("attention_mask")
    if not isinstance(full, Tensor) or full.ndim < 3:
        return
    harmless = segments is not None and segments.padding_side == "none" and not segments.packed
    if batch.get(KEEP_KEY) is None and not harmless:
        yield (
            "4D alone",
            f"attention_mask is {full.ndim}D and alone. Recurrent layers of a hybrid model (Gated DeltaNet) read a 2D mask "
            f"and ignore this one, without an error. Carry {KEEP_KEY} beside it.",
        )
    held = f"attention_mask is {str(full.dtype)[6:]}"
    if full.is_floating_point():
        yield from _of_bias(full, held, batch.get("inputs_embeds"))
    elif full.dtype != torch.bool:
        means = reads(full, segments)
        yield (
            "integer polarity",
            f"{held} and 4D{f', {means}' if means else ''}. Megatron and npu_fusion_attention read 1 as blocked, "
            "transformers takes 1 for attended, and sdpa takes no integers. Name the consumer.",
        )


def _of_bias(full: Tensor, held: str, embeds: Any) -> Iterator[tuple[str, str]]:
    if bool(((full == 0) | (full == 1)).all()):
        yield (
            "float without a bias",
            f"{held} and holds 0 and 1 alone. Layers add it to scores: nothing is blocked. Hand over bool, or 0 and the "
            "lowest number of the dtype.",
        )
    computed = embeds.dtype if isinstance(embeds, Tensor) else None
    if full.dtype == torch.float64 or (computed is not None and full.dtype != computed):
        beside = f"the model computes in {str(computed)[6:]}" if computed else "models compute in another dtype"
        yield (
            "dtype of a bias",
            f"{held} and {beside}. sdpa takes a bias in the dtype of the queries alone, and the lowest float32 is -inf in "
            "float16. Build it in the model's dtype.",
        )
    if bool((full == -torch.inf).all(-1).any()):
        yield (
            "empty rows of -inf",
            "attention_mask has query rows that are -inf throughout. Their softmax is NaN, which gradients spread. Use the "
            "lowest finite number, or let those rows attend themselves.",
        )


def hazards_of_tokens(sources: Sources, segments: Segments) -> dict[str, str]:
    """Those of a batch whose masks are ours."""
    if segments.padding_side == "none":
        return {}
    keep_BS, found = keep_array(segments), dict[str, str]()
    each = {key for key in ("labels", "input_ids") if tuple(getattr(sources.get(key), "shape", ())) == segments.shape}
    if "labels" in each and (labels_BS := sources.array("labels")).dtype.kind != "f":
        lost_BS = (labels_BS >= 0) & ~keep_BS
        rows = np.flatnonzero(lost_BS.any(axis=1)).tolist()[:_LISTED]
        if rows:
            told = f"{lost_BS.sum()} labels stand on padding (rows {rows}), and the loss counts them. Set them to -100."
            found["labels on padding"] = told
    if "input_ids" in each:
        ids_BS = sources.array("input_ids")
        padded = np.unique(ids_BS[~keep_BS])
        if shared := int(np.isin(ids_BS[keep_BS], padded).sum()):
            found["pad id of a real token"] = (
                f"padding holds the id {', '.join(map(str, padded[:_LISTED].tolist()))}, as do {shared} of {keep_BS.sum()} "
                "real tokens (is pad eos?). A mask made of ids != pad loses them. Carry attention_mask_2d, as the collators "
                "here do."
            )
    return found
