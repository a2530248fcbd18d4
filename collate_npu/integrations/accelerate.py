"""Accelerate: batches that survive its dispatcher, gather, broadcast and pad_across_processes.

None, ints and strings raise there, and a tensor whose first dimension is not the batch is cut wrong without an error
(accelerate 1.15 utils/operations.py, data_loader.py `DataLoaderDispatcher`). The adapter belongs behind the prepared loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from collate_npu.collate.transport import shipped
from collate_npu.errors import CollateError, a_type, explain
from collate_npu.keys import KEEP_KEY, SEGMENT_KEY

PACKAGE, TESTED = "accelerate", "1.15.0"


@dataclass(frozen=True)
class DispatchCollator:
    """`inner`'s batch with every value a contiguous tensor `[B, ...]`: a None mask left out, `segment_ids` always beside a
    2D mask, anything else refused.

    With `dispatch_batches=True` (the default of an IterableDataset) the first process joins batches, so they need one
    width: `padding="max_length"`. `split_batches=True` joins only a last batch that does not divide by the processes with
    rows of the first one: it needs one width too, or `drop_last=True` in the DataLoader. Picklable if `inner` is.

    >>> from collate_npu import PaddingCollator
    >>> collator = DispatchCollator(PaddingCollator(pad_token_id=0, attention_mask="2d"))
    >>> list(collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]))
    ['input_ids', 'position_ids', 'attention_mask', 'attention_mask_2d', 'segment_ids']
    """

    inner: Callable[..., Mapping[str, Any]]

    def __call__(self, features: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The batch. Raises `CollateError` for each key that Accelerate cannot carry."""
        batch = {key: value for key, value in self.inner(features, *args, **kwargs).items() if value is not None}
        if KEEP_KEY in batch and SEGMENT_KEY not in batch:  # the first batch's keys are those of all that it joins
            batch[SEGMENT_KEY] = batch[KEEP_KEY].int()
        if problems := dispatch_problems(batch):
            listed = "; ".join(f"{key} is {what}" for key, what in problems.items())
            rule = "Accelerate can only gather tensors whose first dimension is the batch."
            remedy = "Leave these keys out (padding_free=False), or set dispatch_batches=False."
            raise CollateError(explain("batch", listed, rule, remedy, more="none-dispatch"))
        return shipped({key: value.contiguous() for key, value in batch.items()})


def dispatch_problems(batch: Mapping[str, Any]) -> dict[str, str]:
    """Key and reason for everything in a batch that Accelerate's dispatcher would break on, or break without a word."""
    size, found = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0), {}
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            found[key] = a_type(value)
        elif not value.ndim or len(value) != size:
            found[key] = f"of shape {list(value.shape)} in a batch of {size}"
    return found
