"""Planted: collators with one fault each, for `collate-npu audit --packed --collator benchmarks/planted.py:NAME`.

Those with `flat` in their names make one row of all samples, for a model that `adapt` keeps apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from collate_npu import PaddingCollator, adapt
from collate_npu.consumers.by_sequence import runs_by_sequence

Batch = dict[str, Any]
Collator = Callable[[Sequence[Any]], Batch]
RIGHT = ("right", "right_flat")
FAULTS = (
    "no_mask", "inverted", "late_mask", "pads_learned", "late_flat", "merged_flat", "late_positions_flat", "learned_flat",
)  # fmt: skip


def right(model: Any) -> Collator:
    return PaddingCollator(pad_token_id=0, model=model, padding_side="left")


def right_flat(model: Any) -> Collator:
    if not runs_by_sequence(model):
        adapt(model)
    return PaddingCollator(pad_token_id=0, model=model, padding_free=True)


def no_mask(model: Any) -> Collator:
    """Nothing says what is padding: positions would."""
    return _changed(right(model), lambda batch: [batch.pop(key) for key in {*batch} - {"input_ids", "labels"}])


def inverted(model: Any) -> Collator:
    return _changed(_in_2d(), lambda batch: batch.update(attention_mask=1 - batch["attention_mask"]))


def late_mask(model: Any) -> Collator:
    """One place to the right: a pad is kept, and a token is not."""
    return _changed(_in_2d(), lambda batch: batch.update(attention_mask=batch["attention_mask"].roll(1, -1)))


def pads_learned(model: Any) -> Collator:
    """Logits are right, the loss is not."""
    return _changed(_in_2d(), _learn_all)


def late_flat(model: Any) -> Collator:
    """Each boundary one token late, in all that says where one is."""

    def later(batch: Batch) -> None:
        ends, T = _ends(batch), batch["input_ids"].shape[1]
        ends[1:-1] += 1
        n_T = torch.bucketize(torch.arange(T), ends[1:-1].long(), right=True)
        _as_told(batch, ends, n_T)

    return _changed(right_flat(model), later)


def merged_flat(model: Any) -> Collator:
    """Two sequences as one."""

    def merge(batch: Batch) -> None:
        ends, T = _ends(batch), batch["input_ids"].shape[1]
        ends = torch.cat((ends[:1], ends[2:]))
        _as_told(batch, ends, torch.bucketize(torch.arange(T), ends[1:-1].long(), right=True))

    return _changed(right_flat(model), merge)


def late_positions_flat(model: Any) -> Collator:
    """Positions run on over the boundaries, and nothing else says where they are."""

    def run_on(batch: Batch) -> None:
        T = batch["input_ids"].shape[1]
        kept = {key: batch[key] for key in ("input_ids", "labels")}
        batch.clear()
        batch.update(kept, position_ids=torch.arange(T)[None], attention_mask=torch.ones(1, T, dtype=torch.long))

    return _changed(right_flat(model), run_on)


def learned_flat(model: Any) -> Collator:
    """The first token of each sequence is learned from the last of the one before."""
    return _changed(right_flat(model), _learn_all)


def _in_2d() -> Collator:
    """As transformers' own collators: one mask for all layers."""
    made = PaddingCollator(pad_token_id=0, padding_side="left")

    def collate(features: Sequence[Any]) -> Batch:
        batch = made(features)
        return {**{key: batch[key] for key in ("input_ids", "labels")}, "attention_mask": batch["attention_mask_2d"].long()}

    return collate


def _learn_all(batch: Batch) -> None:
    batch["labels"] = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def _ends(batch: Batch) -> torch.Tensor:
    """The offsets of a flat row, by its positions."""
    starts = (batch["position_ids"].reshape(-1, batch["input_ids"].shape[1])[0] == 0).nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([batch["input_ids"].shape[1]]))).int()


def _as_told(batch: Batch, ends: torch.Tensor, n_T: torch.Tensor) -> None:
    """Everything that a flat row may say of its boundaries: offsets, numbers and positions."""
    places = torch.arange(len(n_T)) - ends.long()[n_T]
    kept = {key: batch[key] for key in ("input_ids", "labels")}
    batch.clear()
    batch.update(kept, cu_seq_lens_q=ends, cu_seq_lens_k=ends.clone(), seq_idx=n_T[None].int(), position_ids=places[None])


def _changed(made: Collator, change: Callable[[Batch], Any]) -> Collator:
    def collate(features: Sequence[Any]) -> Batch:
        batch = dict(made(features))
        change(batch)
        return batch

    return collate
