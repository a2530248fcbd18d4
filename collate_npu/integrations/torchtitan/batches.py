"""What a dataloader gives torchtitan's trainer: `({"input": ..., "positions": ...}, labels)`.

The trainer hands every key beside `input` to the model, builds the masks from `positions` (a document begins at each 0) and
cuts all of it under context parallelism (torchtitan 0.3.0 trainer.py:690-765, 800-860). Legend: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor

from collate_npu import debug
from collate_npu.consumers.routes import say_batch
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.integrations.torchtitan.masks import positions
from collate_npu.keys import KEYS, SEGMENT_KEY, of_kind, with_role
from collate_npu.masks.find import segments_from_batch
from collate_npu.outputs import shift_labels
from collate_npu.segments import Segments

TrainerBatch = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True)
class TitanCollator:
    """`inner`'s batch as torchtitan's trainer takes it: `collate_fn=` of a `ParallelAwareDataloader`.

    `inner` is a `PaddingCollator` or `wrap_collator(...)` without a consumer. `extra` is handed to the model beside the
    tokens (qwen3_5 wants its `special_tokens`). `segment_ids=True` is for `masks_in_forward`. Picklable if `inner` is.

    >>> from collate_npu import PaddingCollator
    >>> inner = PaddingCollator(pad_token_id=0, attention_mask="2d")
    >>> samples = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    >>> inputs, labels = TitanCollator(inner)(samples)
    >>> inputs["positions"].tolist(), labels.tolist()
    ([[0, 1, 2], [0, 0, 1]], [[2, 3, -100], [-100, -100, -100]])
    """

    inner: Callable[..., Mapping[str, Any]]
    _: KW_ONLY
    segment_ids: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> TrainerBatch:
        """`trainer_batch` of the inner batch, with the same errors."""
        input_dict, labels = trainer_batch(self.inner(features), segment_ids=self.segment_ids)
        return {**input_dict, **self.extra}, labels


def trainer_batch(batch: Mapping[str, Any], segments: Segments | None = None, *, segment_ids: bool = False) -> TrainerBatch:
    """`({"input": int64 [B, S], "positions": int64 [B, S]}, labels int64 [B, S])` of a padded or packed batch.

    Labels are moved to the token before them; padding and the last token of a sequence get -100. `segment_ids`, int32, are
    for `masks_in_forward`. Raises without labels, and for holes and keys that the model would be called with.
    """
    _refuse_keys(batch)
    segments = segments or segments_from_batch(batch)
    if not segment_ids and (torn := [(b, "holes") for b in segments.hole_rows]):
        rule = "torchtitan begins a document at every position 0, so positions cannot tell of padding inside a sequence."
        remedy = "Take the holes out of the samples, or pass segment_ids=True and call masks_in_forward(part) on each part."
        raise UnsupportedFormError(explain_rows("segments", torn, rule, remedy))
    tokens = batch[next(iter(with_role(batch, "tokens")))]
    input_dict = {"input": tokens, "positions": positions(segments)}
    if segment_ids:
        input_dict[SEGMENT_KEY] = segments.ids
    if debug.ON:
        told = "segment_ids" if segment_ids else "positions"
        say_batch("trainer_batch of torchtitan", input_dict, segments, why=f"the trainer builds its masks of {told}")
    return input_dict, _labels(batch, segments)


def _labels(batch: Mapping[str, Any], segments: Segments) -> Tensor:
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor):
        remedy = "Let each sample carry labels, a copy of its input_ids for plain language modelling."
        raise CollateError(explain("labels", type(labels).__name__, "The trainer counts and reads labels [B, S].", remedy))
    return labels.masked_fill(~segments.keep, -100) if "shift_labels" in batch else shift_labels(labels, segments)


def _refuse_keys(batch: Mapping[str, Any]) -> None:
    read = {*of_kind(KEYS, "truth", "offsets", "positions"), *with_role(KEYS, "tokens", "labels"), "shift_labels"}
    other = [(n, key) for n, key in enumerate(batch) if key not in read and batch[key] is not None]
    if other:
        rule = "The trainer calls the model's forward with every key beside `input`, and its loss reads none of them."
        remedy = "Leave it out of the samples, build inner without consumer= and model=, or name it in extra=."
        raise UnsupportedFormError(explain_rows("batch (rows are keys)", other, rule, remedy))
