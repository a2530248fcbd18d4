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
from collate_npu.host import Array, host_array
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.polarity import BLOCKED_BELOW
from collate_npu.segments import Segments

_LISTED = 8
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def hazards(batch: Mapping[str, Any], segments: Segments | None) -> dict[str, str]:
    """Kind -> what goes wrong where, and what to do. `segments` is None where the batch is refused: then less is known."""
    found = dict(_of_masks(batch, segments))
    return found if segments is None else found | dict(_of_no_mask(batch, segments)) | dict(_of_tokens(batch, segments))


def say_hazards(batch: Mapping[str, Any], segments: Segments) -> None:
    """With COLLATE_NPU_DEBUG=1: each kind once a process, with the first batch that shows it."""
    _say(hazards(batch, segments))


def say_hazards_of_tokens(batch: Mapping[str, Any], segments: Segments) -> None:
    """The same for a batch whose masks are ours."""
    _say(dict(_of_tokens(batch, segments)))


def _say(found: Mapping[str, str]) -> None:
    for kind, text in found.items():
        debug.say(("hazard", kind), f"hazard in a batch as it arrives: {text}")


def reads(full: Tensor, segments: Segments | None) -> str:
    """What True, or a number, of a dense mask means, by what stands on its diagonal at a real token; "" where unknown."""
    if full.is_floating_point():
        return "additive" if bool((full <= BLOCKED_BELOW).any()) else ""
    if segments is None or not segments.spans or full.shape[-1] != segments.shape[1] or full.shape[-2] != full.shape[-1]:
        return ""
    b, start, _ = segments.spans[0]
    keeps = bool(full.reshape(-1, *full.shape[-2:])[b if full.ndim > 2 and full.shape[0] > 1 else 0, start, start])
    name = "True" if full.dtype == torch.bool else "1"
    return f"{name} = {'attends' if keeps else 'blocked'}"


def _of_masks(batch: Mapping[str, Any], segments: Segments | None) -> Iterator[tuple[str, str]]:
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
    if full.dtype in _INTEGERS:
        means = reads(full, segments)
        yield (
            "integer polarity",
            f"attention_mask is {str(full.dtype)[6:]} and 4D{f', {means}' if means else ''}. Megatron and "
            "npu_fusion_attention read 1 as blocked, transformers takes 1 for attended, and sdpa takes no integers. Name "
            "the consumer.",
        )
    if full.is_floating_point():
        yield from _of_bias(full, batch)


def _of_bias(full: Tensor, batch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if bool(((full == 0) | (full == 1)).all()):
        yield (
            "float without a bias",
            f"attention_mask is {str(full.dtype)[6:]} and holds 0 and 1 alone. Layers add it to scores: nothing is blocked. "
            "Hand over bool, or 0 and the lowest number of the dtype.",
        )
    embeds = batch.get("inputs_embeds")
    computed = embeds.dtype if isinstance(embeds, Tensor) else None
    if full.dtype == torch.float64 or (computed is not None and full.dtype != computed):
        beside = f"the model computes in {str(computed)[6:]}" if computed else "models compute in another dtype"
        yield (
            "dtype of a bias",
            f"attention_mask is {str(full.dtype)[6:]} and {beside}. sdpa takes a bias in the dtype of the queries alone, "
            "and the lowest float32 is -inf in float16. Build it in the model's dtype.",
        )
    if bool((full == -torch.inf).all(-1).any()):
        yield (
            "empty rows of -inf",
            "attention_mask has query rows that are -inf throughout. Their softmax is NaN, which gradients spread. Use the "
            "lowest finite number, or let those rows attend themselves.",
        )


def _of_no_mask(batch: Mapping[str, Any], segments: Segments) -> Iterator[tuple[str, str]]:
    exact = none_is_exact(segments)
    if batch.get("attention_mask") is None and not exact and not _is_flat(batch) and "attention_masks" not in batch:
        yield (
            "no mask",
            f"there is no attention_mask, and {exact.why}. Let a BatchAdapter build one for the model that reads the batch.",
        )


def _of_tokens(batch: Mapping[str, Any], segments: Segments) -> Iterator[tuple[str, str]]:
    if segments.padding_side == "none":
        return
    keep_BS = segments.keep_array()
    if (labelled := _tokens(batch, "labels", keep_BS)) is not None and (labelled & ~keep_BS).any():
        rows = np.flatnonzero((labelled & ~keep_BS).any(axis=1)).tolist()[:_LISTED]
        count = int((labelled & ~keep_BS).sum())
        yield (
            "labels on padding",
            f"{count} labels stand on padding (rows {rows}), and the loss counts them. Set them to -100.",
        )
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor) and tuple(ids.shape) == segments.shape:
        yield from _of_pad_id(host_array("input_ids", ids), keep_BS)


def _is_flat(batch: Mapping[str, Any]) -> bool:
    return any(batch.get(key) is not None for key in ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q", "packed_seq_params"))


def _tokens(batch: Mapping[str, Any], key: str, keep_BS: Array) -> Array | None:
    """Which tokens have a label; None where labels are not one a token."""
    value = batch.get(key)
    if not isinstance(value, Tensor) or tuple(value.shape) != keep_BS.shape or value.is_floating_point():
        return None
    found: Array = host_array(key, value) >= 0
    return found


def _of_pad_id(ids_BS: Array, keep_BS: Array) -> Iterator[tuple[str, str]]:
    held = np.unique(ids_BS[~keep_BS])
    shared = int(np.isin(ids_BS[keep_BS], held).sum())
    if len(held) and shared:
        yield (
            "pad id of a real token",
            f"padding holds the id {', '.join(map(str, held[:_LISTED].tolist()))}, as do {shared} of {keep_BS.sum()} real "
            f"tokens (is pad eos?). A mask made of ids != pad loses them. Carry {KEEP_KEY}, as the collators here do.",
        )
