"""transformers' Trainer and TRL's on a CPU, with the collators that their users pick: what a step computes, and learns.

A cell's error is that of the log-probabilities or that of the gradient, whichever is larger.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from cells import PAD, Stack, gradient_error, samples, scores, verdict, worst_of
from datasets import Dataset
from trained import gradient_of
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from collate_npu import adapt, wrap_collator
from collate_npu.testing import byte_tokenizer, tiny_model

NEEDS = ("trl", "transformers")
pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
TRAINER = Stack("transformers Trainer", ("transformers", "accelerate"), "tests")
TRL = Stack("TRL SFTTrainer", ("trl", "transformers"), "tests")
FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1")
QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 1, "learning_rate": 0.0, "save_strategy": "no"}
QUIET |= {"disable_tqdm": True, "per_device_eval_batch_size": 4, "per_device_train_batch_size": 4}


def tokenizer_of(side):
    """Its pad token is text, too."""
    tokenizer = byte_tokenizer(padding_side=side)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)
    return tokenizer


def build(family):
    return tiny_model(family, vocab_size=257)


def step(trainer, places):
    """Log-probabilities of each sample and the gradient, of the batch that this trainer makes of all."""
    model = trainer.model
    batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader())))
    model.train()
    model.zero_grad(set_to_none=True)
    loss, out = trainer.compute_loss(model, dict(batch), return_outputs=True)
    loss.backward()
    rows = [out["logits"][row, span] for row, span in places]
    return [scores(logits.detach(), ids) for logits, ids in zip(rows, samples())], gradient_of(model)


def truth(family):
    """The same of each sample alone."""
    model = build(family).train()
    count, found = sum(len(ids) - 1 for ids in samples()), []
    for ids in samples():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        found.append(scores(logits.detach(), ids))
        (torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(ids[1:]), reduction="sum") / count).backward()
    return found, gradient_of(model)


def told(run, known):
    try:
        found, learned = run()
    except Exception as error:
        return verdict(refused=f"{type(error).__name__}: {error}")
    far = torch.stack([(x - y).abs().max() for x, y in zip(found, known[0])]).max()
    off = gradient_error([learned], [known[1]])
    return verdict(float(torch.maximum(far, torch.tensor(off))), gradient=off)


def physical_offsets(layout):
    lengths = [len(ids) for ids in samples()]
    if layout.startswith("packed"):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        return [(0, slice(end - length, end)) for end, length in zip(ends, lengths)]
    return [(n, slice(0, L) if layout == "padded right" else slice(max(lengths) - L, None)) for n, L in enumerate(lengths)]


def both(run, family, layout, folder):
    known, found = truth(family), {}
    for who in ("alone", "ours"):
        model = build(family)
        found[who] = told(partial(run, model, layout, str(folder), ours=who == "ours"), known)
    return found


def trained(model, layout, folder, *, ours):
    packs = layout.startswith("packed")
    side = layout.removeprefix("padded ")
    collator = DataCollatorWithFlattening() if packs else DataCollatorForSeq2Seq(tokenizer_of(side))
    with adapt(model) if ours and packs else nullcontext():
        collator = wrap_collator(collator, model=model, padding_free=packs) if ours else collator
        data = [{"input_ids": ids, "labels": ids} for ids in samples()]
        trainer = Trainer(model, TrainingArguments(folder, **QUIET), data_collator=collator, eval_dataset=data)
        return step(trainer, physical_offsets(layout))


def cells_of(*layouts):
    return pytest.mark.parametrize(("family", "layout"), [*product(FAMILIES, layouts)])


@cells_of("padded right", "padded left", "packed")
def test_transformers_trainer(family, layout, tmp_path):
    line = "adapt(model); wrap_collator(collator, model=model, padding_free=True)"
    line = line if layout.startswith("packed") else "wrap_collator(collator, model=model)"
    TRAINER.tell(family, layout, **both(trained, family, layout, tmp_path), line=line)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_trainer_with_a_row_on_two_ranks(ranks, family):
    """torch's context parallelism in Trainer's own step; see distributed/gloo_trainer for what stands in."""
    run = lambda who: worst_of(ranks(2)("gloo_trainer.cell", family, who == "ours", seconds=120))  # noqa: E731
    line = "adapt(model, sequence_group=group, layout='head_tail')"
    TRAINER.tell(family, "context parallel", alone=run("alone"), ours=run("ours"), line=line)


def tuned(model, layout, folder, *, ours):
    """TRL's own collator pads right, and packs."""
    args = SFTConfig(folder, **QUIET, padding_free=layout != "padded right", max_length=None)
    data = Dataset.from_list([{"input_ids": ids} for ids in samples()])
    trainer = SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer_of("right"))
    with adapt(trainer.model) if ours else nullcontext():
        return step(trainer, physical_offsets(layout))


@cells_of("padded right", "packed")
def test_trl(family, layout, tmp_path):
    TRL.tell(family, layout, **both(tuned, family, layout, tmp_path), line="adapt(trainer.model)")
