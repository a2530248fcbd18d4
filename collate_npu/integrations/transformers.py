"""transformers' Trainer (and TRL's): `data_collator=PaddingCollator(tokenizer, consumer="transformers", model=model)` is
the whole integration. Here is what stands around it: columns the Trainer drops before any collator sees them, and proof of
what each layer received.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.models import needs_mask_2d
from collate_npu.errors import CollateError, explain
from collate_npu.keys import KEYS, of_kind
from collate_npu.masks.find import segments_from_batch

PACKAGE, TESTED = "transformers", "5.23.0"

COLUMNS = tuple(sorted(of_kind(KEYS, "tokens", "positions", "truth", "vision")))
"""Every column that `PaddingCollator` reads by name."""


def declare_columns(trainer: Any, *names: str) -> None:
    """Keep the collator's columns (and `names`) from a Trainer's `remove_unused_columns`, which is True by default.

    It drops whatever the model's forward does not name, `seq_lengths` and `loss_scale` among it, before the collator sees
    a sample (transformers 5.23 trainer.py `_set_signature_columns_if_needed`). Call it before `train()`.
    """
    trainer._set_signature_columns_if_needed()
    kept = trainer._signature_columns
    trainer._signature_columns = [*kept, *(name for name in (*COLUMNS, *names) if name not in kept)]


@contextmanager
def received_masks(model: nn.Module) -> Iterator[dict[str, list[Tensor | None]]]:
    """Record what every layer of a model receives as `attention_mask`: `{module name: [mask of each call]}`.

    Costs a copy of each mask. For tests and debugging: a mask that a layer drops is dropped without an error.
    """
    received: dict[str, list[Tensor | None]] = {}
    handles = []
    for name, module in model.named_modules():
        if "attention_mask" in inspect.signature(module.forward).parameters and name.count(".") > 1:
            received[name] = []
            handles.append(module.register_forward_pre_hook(_recorder(received[name]), with_kwargs=True))
    try:
        yield received
    finally:
        for handle in handles:
            handle.remove()


def _recorder(calls: list[Tensor | None]) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        found = bound.get("attention_mask")
        calls.append(found.detach().clone() if isinstance(found, Tensor) else None)

    return record


def check_delivery(model: nn.Module, batch: dict[str, Any]) -> None:
    """Run one padded batch and raise unless its padding reached the layers: a layer that gets no mask ignores padding.

    Costs one forward pass without gradients. Raises `CollateError` naming the layers; says nothing of a batch without
    padding, for which transformers drops the mask itself.
    """
    keep = segments_from_batch(batch).keep
    if keep.all():
        return
    with received_masks(model) as received, torch.no_grad():
        model(**{key: value for key, value in batch.items() if key != "labels"})
    layers = {name: calls[-1] for name, calls in received.items() if calls}
    deaf = [name for name, found in layers.items() if found is None]
    told = any(found is not None and found.ndim == 2 and torch.equal(found != 0, keep) for found in layers.values())
    if deaf or (needs_mask_2d(model) and not told):
        rule = "Every layer takes a mask, and recurrent layers take the 2D mask of the batch."
        got = f"no mask in {', '.join(deaf[:8])}" if deaf else "the 2D mask in no layer"
        raise CollateError(explain("attention_mask", got, rule, "Use BatchAdapter(model, consumer='transformers')."))
