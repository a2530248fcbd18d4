"""Plain Accelerate loops and a planned Trainer, run by torchrun in two processes: prints what all ranks had."""

import json
import os
import sys
import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from trained import trainer_of

from collate_npu import BatchAdapter, PaddingCollator
from collate_npu.integrations.accelerate import DispatchCollator
from collate_npu.integrations.transformers import plan_batches
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.files import samples_of_rows, shipped_text


class Stream(torch.utils.data.IterableDataset):
    """An iterable dataset: accelerate dispatches its batches from the first process by default."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def loop(name: str, side: str, mode: str) -> dict:
    tokenizer = byte_tokenizer(padding_side=side)
    samples = samples_of_rows(shipped_text(), tokenizer, count=8, max_length=48)
    settings = {"padding": "max_length", "max_length": 48} if mode == "dispatch" else {}
    collator = DispatchCollator(PaddingCollator(tokenizer, **settings, attention_mask="omit"))
    config = DataLoaderConfiguration(dispatch_batches=mode != "shard", split_batches=mode == "split")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = tiny_model(name, vocab_size=len(tokenizer))
    data = Stream(samples) if mode != "shard" else samples
    loader = DataLoader(data, batch_size=4 if mode == "split" else 2, collate_fn=collator, num_workers=0)
    prepared, loader = accelerator.prepare(model, loader)
    adapter = BatchAdapter(model, consumer="transformers")
    report = {"world": accelerator.num_processes, "losses": [], "lengths": []}
    for batch in loader:
        out = adapter(batch)
        labels = out.pop("labels")
        logits = prepared(**out).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        accelerator.backward(loss)
        report["lengths"] += accelerator.gather(out["attention_mask"].sum(1)).tolist()
        report["losses"].append(float(accelerator.reduce(loss.detach(), "sum")))
    return report


def shapes(mode: str, padding: str) -> dict:
    """What this process gets of 11 rows of several widths, in batches of 6; or what went wrong."""
    rows = Stream([{"input_ids": [1] * (n + 1)} for n in range(11)])
    collator = DispatchCollator(PaddingCollator(pad_token_id=0, padding=padding, max_length=16, attention_mask="2d"))
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=mode.startswith("split"))
    loader = DataLoader(rows, batch_size=6, collate_fn=collator, drop_last=mode.endswith("drop_last"))
    try:
        batches = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
        return {"shapes": [list(batch["input_ids"].shape) for batch in batches]}
    except RuntimeError as error:
        return {"error": str(error)}


def planned() -> dict:
    """Two epochs of a Trainer, two batches of each rank in a step: the samples of its ranks, and the losses it logs."""
    tokenizer, seen = byte_tokenizer(padding_side="left"), []
    model = tiny_model("qwen3_next", vocab_size=len(tokenizer))
    collator = PaddingCollator(tokenizer, model=model)
    samples = samples_of_rows(shipped_text(), tokenizer, count=20, max_length=48)
    data = [{**row, "labels": row["input_ids"]} for row in samples]

    def collate(rows: list) -> dict:
        seen.append([row["input_ids"] for row in rows])
        return collator(rows)

    how = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    trainer = trainer_of(model, collate, tempfile.mkdtemp(), data, **how)
    plan_batches(trainer, max_tokens=120)
    trainer.train()
    torch.distributed.all_gather_object(ranks := [None, None], seen)
    return {"ranks": ranks, "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = {1: planned, 2: shapes, 3: loop}
    reports = [jobs[len(case.split())](*case.split()[case == "planned" :]) for case in sys.argv[1:]]
    if int(os.environ["RANK"]) == 0:
        print("REPORT " + json.dumps(reports), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it, with nothing left to do
