"""Planned batches in a Trainer: what it trains on, when it resumes, and what is refused."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.data_loader import BatchSamplerShard
from trained import step_of, trainer_of
from transformers import Trainer

from collate_npu import CollateError, PaddingCollator
from collate_npu.collate import BalancedBatchSampler
from collate_npu.integrations.transformers import plan_batches
from collate_npu.releases import installed, numbers
from collate_npu.testing import check_step, tiny_model

pytestmark = pytest.mark.models
DRAWN = torch.Generator().manual_seed(5)
ROWS = [torch.randint(1, 250, (int(n),), generator=DRAWN).tolist() for n in torch.randint(2, 40, (40,), generator=DRAWN)]
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


class Seen:
    """A collator, with the samples of each batch."""

    def __init__(self, collator):
        self.collator, self.padding_free, self.batches = collator, collator.padding_free, []

    def __call__(self, features):
        self.batches.append([row["input_ids"] for row in features])
        return self.collator(features)


@pytest.mark.parametrize("flat", [False, True])
def test_each_epoch_has_every_sample_and_a_checkpoint_goes_on_where_it_was(flat, tmp_path):
    model = tiny_model("qwen3", vocab_size=257)
    how = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole, rest = (Seen(PaddingCollator(pad_token_id=256, model=model, padding_free=flat)) for _ in range(2))
    trainer = trainer_of(model, whole, tmp_path, DATA, **how)
    sampler = plan_batches(trainer, max_tokens=120)
    trainer.train()
    first, second = whole.batches[: len(sampler)], whole.batches[len(sampler) :]
    assert first != second
    for epoch in (first, second):
        assert sorted(row for batch in epoch for row in batch) == sorted(ROWS)
    steps = -(-len(sampler) // 2)
    begun = next(n for n in range(3, 2 * steps, 3) if n > steps)
    again = trainer_of(model, rest, tmp_path, DATA, **how)
    plan_batches(again, max_tokens=120)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{begun}"))
    assert rest.batches == second[2 * (begun - steps) :]


class CountsEachBatch(Trainer):  # divides by the tokens of a micro-batch, and the gradient by their number
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) / self.args.gradient_accumulation_steps


@pytest.mark.draws(1)
@pytest.mark.parametrize("made", [Trainer, CountsEachBatch])
def test_a_count_for_each_micro_batch_is_found(made, tmp_path):
    model = tiny_model("qwen3_next", vocab_size=257)
    collator = PaddingCollator(pad_token_id=256, model=model, padding_side="left")
    how = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_grad_norm": 0.0}

    def step(samples):
        data = [{"input_ids": ids, "labels": ids} for ids in samples]
        return step_of(trainer_of(model, collator, tmp_path, data, made=made, save_strategy="no", **how))[1]

    with nullcontext() if made is Trainer else pytest.raises(AssertionError, match="a step of several samples is wrong"):
        assert check_step(step) < 1e-3


@pytest.mark.parametrize("even", [True, False])
def test_accelerate_shares_the_batches_of_all_ranks_out_as_planned(even):
    if even and numbers(installed("accelerate")) < (1, 15):
        pytest.skip("before 1.15 Accelerate asks for even_batches=False itself")
    how = {"max_tokens": 120, "num_replicas": 3}
    whole = BalancedBatchSampler(map(len, ROWS), rank=None, **how)
    for rank in range(3):
        shard = BatchSamplerShard(whole, 3, rank, even_batches=even)
        own = BalancedBatchSampler(map(len, ROWS), rank=rank, **how)
        assert list(shard) == list(own)
        assert len(shard) == len(own)


def test_packed_rows_are_planned_by_their_width(tmp_path):
    model = tiny_model("qwen3", vocab_size=257)
    collator = PaddingCollator(pad_token_id=256, model=model, packing=True, max_length=50)
    trainer = trainer_of(model, collator, tmp_path, DATA, made=CountsEachBatch)  # a stack's own class, as TRL's
    plan_batches(trainer, max_tokens=120)
    assert max(batch["input_ids"].numel() for batch in trainer.get_train_dataloader()) <= 120


class Own(Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


def test_what_cannot_be_planned_is_refused(tmp_path):
    model, collator = tiny_model("qwen3", vocab_size=257), PaddingCollator(pad_token_id=256, consumer="transformers")
    for how, lengths, says in (
        ({"made": Own}, None, "Own: got a loader of its own.*Leave plan_batches out"),
        ({"accelerator_config": {"split_batches": True}}, None, "one process that cuts batches"),
        ({}, [3, 4], "2 for 40 samples"),
    ):
        trainer = trainer_of(model, collator, tmp_path, DATA, **how)
        with pytest.raises(CollateError, match=says):
            plan_batches(trainer, max_tokens=120, lengths=lengths)
        assert not any("Epoch" in type(each).__name__ for each in trainer.callback_handler.callbacks)
