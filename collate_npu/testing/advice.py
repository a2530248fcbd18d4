"""Advice: what is wrong in a batch whose numbers are wrong, and what to change.

Legend: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.models import needs_mask_2d
from collate_npu.host import Array, host_array
from collate_npu.segments import Segments
from collate_npu.testing.located import keep_of
from collate_npu.testing.measure import IGNORED, predicts_next

REMEDY_WRAP = "wrap_collator(your collator, consumer='transformers', model=model) emits what this model reads"


def what_to_change(model: Any, batch: Mapping[str, Any], segments: Segments, *, logits: bool) -> str:
    """One line: each fault that is seen in the batch, and the remedy. `logits`: are they wrong, or the loss alone?"""
    keep_BS = keep_of(batch)
    if keep_BS is not None and (keep_BS != segments.keep_array()).any():
        faults = [_wrong_mask(keep_BS, segments.keep_array())]
    else:
        faults = [*(_faults_of_masks(model, batch, segments) if logits else []), *_faults_of_labels(model, batch, segments)]
        faults += [REMEDY_WRAP]
    return ". ".join(faults) + "."


def _wrong_mask(keep_BS: Array, real_BS: Array) -> str:
    lost_B, added_B = (real_BS & ~keep_BS).sum(axis=1), (keep_BS & ~real_BS).sum(axis=1)
    row = int((lost_B + added_B).argmax())
    counts = f"drops {lost_B[row]} of {int(real_BS[row].sum())} real tokens of row {row} and keeps {added_B[row]} of padding"
    return f"The 2D mask {counts}: make it from the lengths, not from ids != pad_token_id"


def _faults_of_masks(model: Any, batch: Mapping[str, Any], segments: Segments) -> Iterator[str]:
    unmasked = keep_of(batch) is None and segments.num_padding > 0
    if unmasked and batch.get("attention_mask") is None:
        yield "The batch has padding and no attention_mask"
    elif unmasked and needs_mask_2d(model):
        yield "The batch has no 2D mask, and the recurrent layers of this model read that alone"
    elif segments.packed and needs_mask_2d(model):
        yield "A row holds several samples: recurrent layers read cu_seq_lens_q and seq_idx where each begins"
    elif segments.packed:
        yield "A row holds several samples, and attention runs over their boundaries"
    elif batch.get("position_ids") is None and segments.padding_side == "left":
        yield "Rows are padded left without position_ids, and this model counts places from the left edge"


def _faults_of_labels(model: Any, batch: Mapping[str, Any], segments: Segments) -> Iterator[str]:
    if batch.get("labels") is None or not predicts_next(model):
        return
    labels_BS: Tensor = torch.as_tensor(host_array("labels", batch["labels"]))
    read_BS = labels_BS != IGNORED
    read_BS[:, 0] = False  # the shift drops it
    first_BS = (segments.position_ids == 0) & segments.keep
    if padded := int((read_BS & ~segments.keep).sum()):
        yield f"{padded} labels stand at padding: set them to {IGNORED}"
    if first := int((read_BS & first_BS).sum()):
        yield f"{first} first labels are predicted from padding or from another sample: set them to {IGNORED}"
