"""transformers' Trainer (and TRL's): `data_collator=PaddingCollator(tokenizer, consumer="transformers", model=model)` is
the whole integration. Here is what stands around it: columns the Trainer drops before any collator sees them, and a callback
that proves, at the first batch, what each layer received.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from collate_npu.errors import CollateError, explain
from collate_npu.keys import KEYS, of_kind
from collate_npu.proof.delivery import guard_first_batch, refuse_compiled
from collate_npu.validation import check_collator

PACKAGE, TESTED = "transformers", "5.23.0"

COLUMNS = tuple(sorted(of_kind(KEYS, "tokens", "positions", "truth", "vision")))
"""Every column that `PaddingCollator` reads by name."""


def declare_columns(trainer: Any, *names: str) -> None:
    """Keep the collator's columns (and `names`) from a Trainer's `remove_unused_columns`, which is True by default and drops
    whatever the model's forward does not name (transformers 5.23 trainer.py). Call it before `train()`.

    >>> from transformers import Trainer, TrainingArguments
    >>> from collate_npu.testing import tiny_model
    >>> trainer = Trainer(tiny_model("qwen3_next", vocab_size=257), TrainingArguments("out", use_cpu=True))
    >>> declare_columns(trainer, "my_weights")
    >>> {"seq_lengths", "loss_scale", "my_weights"} <= set(trainer._signature_columns)
    True
    """
    trainer._set_signature_columns_if_needed()
    trainer._signature_columns = list(dict.fromkeys([*trainer._signature_columns, *COLUMNS, *names]))


class DeliveryCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[DeliveryCallback(collator)])`: the first batch is checked as `check_delivery` does it.

    With `collator`, training does not start where the dataloader has another one: some libraries replace it without a
    word (unsloth-zoo#1279). `alone=True` runs two sequences of that batch again by themselves.

    >>> from collate_npu import PaddingCollator
    >>> collator = PaddingCollator(pad_token_id=0, consumer="transformers")
    >>> callback = DeliveryCallback(collator, alone=True)  # Trainer(..., data_collator=collator, callbacks=[callback])
    """

    def __init__(self, collator: Any = None, *, alone: bool = False) -> None:
        if collator is not None:
            check_collator(collator)
        self._collator = collator
        self._alone = alone

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises `CollateError` for another collator, and guards the first forward that trains: GRPO generates before it."""
        if self._collator is not None:
            _check_collator(self._collator, kwargs["train_dataloader"])
        refuse_compiled(kwargs["model"], compiled=getattr(args, "torch_compile", False))
        guard_first_batch(kwargs["model"], alone=self._alone, only=lambda batch: torch.is_grad_enabled())


def _check_collator(expected: Any, loader: Any) -> None:
    found = loader.collate_fn
    while found is not expected and (inner := getattr(found, "data_collator", None)) is not None:
        found = inner  # transformers wraps it to remove columns (trainer_utils.py, RemoveColumnsCollator)
    if found is not expected:
        rule = "The dataloader collates with a function that you did not pass."
        remedy = "Find who replaced it, and set it again: trainer.data_collator = collator."
        raise CollateError(explain("data_collator", type(found).__name__, rule, remedy))
