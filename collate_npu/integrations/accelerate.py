"""Accelerate: batches that survive its dispatcher, gather, broadcast and pad_across_processes.

Accelerate moves tensors between processes and nothing else: None, ints and strings raise there, and a tensor whose first
dimension is not the batch is cut wrong without an error (accelerate 1.15 utils/operations.py `concatenate`,
`find_batch_size`, data_loader.py `DataLoaderDispatcher`). After `prepare`, the adapter belongs behind the loader::

    loader = accelerator.prepare(DataLoader(data, 8, collate_fn=DispatchCollator(PaddingCollator(tokenizer))))
    adapter = BatchAdapter(model, consumer="transformers")
    for batch in loader:
        loss = model(**adapter(batch)).loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from collate_npu.collate.transport import shipped
from collate_npu.errors import CollateError, explain

PACKAGE, TESTED = "accelerate", "1.15.0"


@dataclass(frozen=True)
class DispatchCollator:
    """`inner`'s batch with every value a contiguous tensor `[B, ...]`: a None mask left out, anything else refused.

    For `dispatch_batches=True` (the default of an IterableDataset) all processes' batches must have one width as well:
    give the inner collator `padding="max_length"`, or use `split_batches=True`. Picklable if `inner` is.

    >>> from collate_npu import PaddingCollator
    >>> collator = DispatchCollator(PaddingCollator(pad_token_id=0))
    >>> list(collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]))
    ['input_ids', 'position_ids', 'attention_mask_2d']
    >>> collator([{"input_ids": [1, 2, 3], "name": "a"}, {"input_ids": [4], "name": "b"}])
    Traceback (most recent call last):
        ...
    collate_npu.errors.CollateError: batch: got name is a list. Accelerate carries tensors whose first dimension is the
        batch. Leave these keys out of the samples, or set dispatch_batches=False.
    """

    inner: Callable[..., Mapping[str, Any]]

    def __call__(self, features: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The batch. Raises `CollateError` for each key that Accelerate cannot carry."""
        batch = {key: value for key, value in self.inner(features, *args, **kwargs).items() if value is not None}
        problems = dispatch_problems(batch)
        if problems:
            rule = "Accelerate carries tensors whose first dimension is the batch."
            listed = "; ".join(f"{key} is {what}" for key, what in problems.items())
            remedy = "Leave these keys out of the samples, or set dispatch_batches=False."
            raise CollateError(explain("batch", listed, rule, remedy))
        return shipped({key: value.contiguous() for key, value in batch.items()})


def dispatch_problems(batch: Mapping[str, Any]) -> dict[str, str]:
    """Key and reason for everything in a batch that Accelerate's dispatcher would break on, or break without a word.

    >>> import torch
    >>> dispatch_problems({"input_ids": torch.zeros(2, 3), "cu_seqlens": torch.zeros(5), "attention_mask": None})
    {'cu_seqlens': 'of shape [5] in a batch of 2', 'attention_mask': 'a NoneType'}
    """
    size = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0)
    found = {key: _problem(value, size) for key, value in batch.items()}
    return {key: what for key, what in found.items() if what}


def _problem(value: Any, size: int) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if not value.ndim or len(value) != size:
        return f"of shape {list(value.shape)} in a batch of {size}"
    return ""
