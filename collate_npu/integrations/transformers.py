"""transformers' Trainer, and TRL's: columns that it drops, a check of its first batch, and planned batches.

The line of integration is `data_collator=PaddingCollator(tokenizer, consumer="transformers", model=model)`. In TRL 1.16 the
trainers of SFT on padded rows, DPO, KTO and rewards take `data_collator=wrap_collator(theirs, model=model)`. For the others
call `adapt(trainer.model)`: GRPO and RLOO collate nothing (grpo_trainer.py:964), ORPO and CPO join rows behind the collator
(experimental/orpo/orpo_trainer.py:606), and SFT refuses a collator with `packing` or `padding_free` (sft_trainer.py:917).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from collate_npu.collate.batch_sampler import BalancedBatchSampler, lengths_of
from collate_npu.errors import CollateError, explain
from collate_npu.keys import KEYS, of_kind
from collate_npu.proof.delivery import guard_forward, refuse_compiled
from collate_npu.validation import check_collator

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
        own = None if self._collator is None else kwargs["train_dataloader"].collate_fn
        while own is not self._collator and (inner := getattr(own, "data_collator", None)) is not None:
            own = inner  # transformers wraps it to remove columns (trainer_utils.py, RemoveColumnsCollator)
        if own is not self._collator:
            rule = "The dataloader collates with a function that you did not pass."
            remedy = "Find who replaced it, and set it again: trainer.data_collator = collator."
            raise CollateError(explain("data_collator", type(own).__name__, rule, remedy))
        refuse_compiled(kwargs["model"], compiled=getattr(args, "torch_compile", False))
        guard_forward(kwargs["model"], lambda batch: torch.is_grad_enabled(), alone=self._alone)


def plan_batches(trainer: Any, *, max_tokens: int, lengths: Any = None, **options: Any) -> BalancedBatchSampler:
    """Let a Trainer, or TRL's SFTTrainer, train on planned batches, and return their sampler. Call it before `train()`; it
    takes the place of `trainer.get_train_dataloader`, and of the arguments for batch size and sampling.

    `lengths` are those of the train dataset; None counts `input_ids`. `options` are those of `BalancedBatchSampler`; ranks,
    seed and `pack` are taken from the trainer and its collator.

    >>> from transformers import Trainer, TrainingArguments
    >>> from collate_npu import PaddingCollator
    >>> from collate_npu.testing import tiny_model
    >>> model, data = tiny_model("qwen3_next", vocab_size=257), [{"input_ids": [n] * n} for n in (1, 2, 3, 4)]
    >>> collator, args = PaddingCollator(pad_token_id=0, model=model), TrainingArguments("out", use_cpu=True)
    >>> trainer = Trainer(model, args, data_collator=collator, train_dataset=data)
    >>> len(plan_batches(trainer, max_tokens=6, shuffle=False))
    3
    """
    args, collator, data = trainer.args, trainer.data_collator, trainer.train_dataset
    _check_plannable(trainer)
    options = {"seed": args.seed if args.data_seed is None else args.data_seed, "num_replicas": args.world_size} | options
    rows = bool(getattr(collator, "packing", False))  # of one width
    packs = rows or bool(getattr(collator, "padding_free", False))
    options = ({"width": collator.max_length} if rows else {}) | options
    lengths = lengths_of(data) if lengths is None else lengths
    sampler = BalancedBatchSampler(lengths, max_tokens=max_tokens, rank=None, pack=packs, **options)
    if len(sampler.lengths) != len(data):
        got, remedy = f"{len(sampler.lengths)} for {len(data)} samples", "Pass lengths_of(trainer.train_dataset)."
        raise CollateError(explain("lengths", got, "Each sample has a length.", remedy))

    def get_train_dataloader() -> Any:
        made = Trainer.get_train_dataloader(trainer)  # with the trainer's columns, collator and workers
        trainer.accelerator._dataloaders.remove(made)
        names = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn")
        kept = {name: getattr(made, name) for name in names}
        trainer.accelerator.even_batches, even = False, trainer.accelerator.even_batches  # before 1.15 Accelerate asks
        try:
            return trainer.accelerator.prepare(DataLoader(made.dataset, batch_sampler=sampler, **kept))
        finally:
            trainer.accelerator.even_batches = even

    trainer.get_train_dataloader = get_train_dataloader
    trainer.add_callback(_SetEpoch(sampler))
    return sampler


class _SetEpoch(TrainerCallback):  # type: ignore[misc]
    """Sets the epoch of the sampler, also if Accelerate wraps it or skips its first batches (1.15 data_loader.py)."""

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self._sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._sampler.set_epoch(int(state.epoch or 0))


def _check_plannable(trainer: Any) -> None:
    args, shared = trainer.args, trainer.accelerator.dataloader_config
    own, sizes = type(trainer).get_train_dataloader, getattr(trainer.accelerator, "parallelism_config", None)
    several = args.world_size > 1
    for name, wrong, remedy in (
        ("a loader of its own", own is not Trainer.get_train_dataloader, "Leave plan_batches out."),
        ("ranks that share rows", bool(sizes and sizes.non_data_parallel_size > 1), "Leave plan_batches out."),
        ("one process that cuts batches", shared.dispatch_batches or shared.split_batches, "Leave both options False."),
        ("average_tokens_across_devices=False", several and not args.average_tokens_across_devices, "Set it to True."),
    ):
        if wrong:
            rule = "Each process loads the batches of its rank, and divides by the tokens of all ranks."
            raise CollateError(explain(type(trainer).__name__, name, rule, remedy))
