"""Accelerate: batches as its dispatcher takes them, and models that share rows, with transformers' Trainer too.

Its dispatcher (`DispatchCollator`) gathers and broadcasts a batch. None, ints and strings raise there, and a tensor whose
first dimension is not the batch is cut wrong without an error (accelerate 1.15 utils/operations.py, data_loader.py
`DataLoaderDispatcher`). The adapter belongs behind the prepared loader.

Its sequence parallelism, torch's (`cp_size`) or DeepSpeed's Ulysses (`sp_size`), drops every mask, and refuses some models
by the names of their layers. Of a model that `adapt` runs, recurrent layers exchange what they need, and a batch for which
a dropped mask is not exact is refused.
Sources: transformers 5.23 trainer.py:2393-2485; accelerate 1.15 accelerator.py:2417 (Ulysses), 4152-4220 (`cp_size`),
big_modeling.py:755-840 (refusals, hooks); DeepSpeed 0.19.6 runtime/sequence_parallel/ulysses_sp.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from collate_npu.collate.transport import shipped
from collate_npu.consumers.by_sequence import runs_by_sequence
from collate_npu.consumers.model_traits import config_of, windows
from collate_npu.consumers.tiny_models import ulysses_of
from collate_npu.errors import CollateError, a_type, explain
from collate_npu.integrations.patching import patch, release
from collate_npu.keys import KEEP_KEY, KEYS, SEGMENT_KEY, of_kind


@dataclass(frozen=True)
class DispatchCollator:
    """A collator of `inner`'s batch with every value a contiguous tensor `[B, ...]`. A None mask is left out, `segment_ids`
    always stand beside a 2D mask, and any other value is refused.

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
        """Return the batch. Raises `CollateError` that lists each key which Accelerate cannot carry."""
        batch = {key: value for key, value in self.inner(features, *args, **kwargs).items() if value is not None}
        if KEEP_KEY in batch and SEGMENT_KEY not in batch:  # Accelerate joins batches by the keys of the first
            batch[SEGMENT_KEY] = batch[KEEP_KEY].int()
        problems = dispatch_problems(batch)
        for key in of_kind(batch, "vision"):
            if problems.get(key) or not _one_each(features, key):
                problems[key] = "images, and Accelerate cuts them by the count of rows, not by whose they are"
        if problems:
            listed = "; ".join(f"{key} is {what}" for key, what in problems.items())
            rule = "Accelerate can only gather tensors whose first dimension is the batch."
            remedy = "Set dispatch_batches=False. Offsets: padding_free=False. Images: one for each sample."
            raise CollateError(explain("batch", listed, rule, remedy, more="none-dispatch"))
        return shipped({key: value.contiguous() for key, value in batch.items()})


def _one_each(features: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True if each sample holds one image, or one value of an image, under this key."""
    values = [row.get(key) if isinstance(row, Mapping) else None for row in features]
    return all(x is not None and (getattr(x, "ndim", 0) == KEYS[key].unit or len(x) == 1) for x in values)


def dispatch_problems(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return each key on whose value Accelerate's dispatcher would raise, or which it would cut wrong, and the reason."""
    size, reasons = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0), {}
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            reasons[key] = a_type(value)
        elif not value.ndim or len(value) != size:
            reasons[key] = f"of shape {list(value.shape)} in a batch of {size}"
    return reasons


# --- rows that are shared out over ranks


def ulysses_group(model: Any) -> Any:
    """Return the ranks that share this model's rows under DeepSpeed's Ulysses; None without it, or where rows are whole."""
    held = ulysses_of(model)
    return None if held is None or (held.disable_in_eval and not model.training) else held.process_group


REFUSING = ("_refuse_recurrent_layers_under_sequence_parallelism", "_attach_context_parallel_hooks")
"""Accelerate's functions that refuse a model, before it is called."""
_HOLDERS = map("adapt {}".format, count())


def let_recurrent_layers_pass() -> Any:
    """Let `Accelerator.prepare` take models that `adapt` runs by sequence, until `.remove()` of what is returned: their
    recurrent layers exchange what they need (1.15 big_modeling.py:760-831)."""
    holder, home = next(_HOLDERS), sys.modules.get("accelerate.accelerator")  # transformers' models import it
    for name in REFUSING:
        if hasattr(home, name):
            patch(holder, home, name, unless_adapted)
    return SimpleNamespace(remove=partial(release, holder))


def unless_adapted(original: Callable[..., Any], model: Any) -> Any:
    """What is refused by the names of layers is looked up in the config: here none is named but for windows."""
    hides = runs_by_sequence(model) and not windows(config_of(model))
    return original(SimpleNamespace(named_modules=model.named_modules) if hides else model)
