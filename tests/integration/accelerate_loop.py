"""A plain Accelerate loop, run by torchrun in two processes: prints what each rank received and the loss it got."""

from __future__ import annotations

import json
import os
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from collate_npu import BatchAdapter, PaddingCollator
from collate_npu.integrations.accelerate import DispatchCollator
from collate_npu.integrations.delivery import received_masks
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.audit.data import shipped_text
from collate_npu.tools.audit.samples import sample_ids


class Stream(torch.utils.data.IterableDataset):
    """An iterable dataset: accelerate dispatches its batches from the first process by default."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def main(name: str, side: str, mode: str) -> None:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer(padding_side=side)
    samples = [{"input_ids": ids, "labels": ids} for ids in sample_ids(shipped_text(), tokenizer, count=8, max_length=48)]
    settings = {"padding": "max_length", "max_length": 48} if mode == "dispatch" else {}
    collator = DispatchCollator(PaddingCollator(tokenizer, **settings, attention_mask="omit"))
    config = DataLoaderConfiguration(dispatch_batches=mode != "shard", split_batches=mode == "split")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = tiny_model(name, vocab_size=len(tokenizer))
    data = Stream(samples) if mode != "shard" else samples
    loader = DataLoader(data, batch_size=4 if mode == "split" else 2, collate_fn=collator, num_workers=0)
    prepared, loader = accelerator.prepare(model, loader)
    adapter = BatchAdapter(model, consumer="transformers")
    losses, lengths, received_all = [], [], []
    for batch in loader:
        with received_masks(model) as received:
            out = adapter(batch)
            labels = out.pop("labels")
            logits = prepared(**out).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        accelerator.backward(loss)
        everywhere = accelerator.gather(out["attention_mask"].sum(1))
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
        lengths += everywhere.tolist()
        layers = [calls for key, calls in received.items() if key.endswith("linear_attn")]
        keep = out["attention_mask"]
        received_all += [
            keep.all().item() if mask is None else torch.equal(mask, keep) for calls in layers for mask in calls
        ]
    if accelerator.is_main_process:
        report = {"world": accelerator.num_processes, "losses": losses, "lengths": lengths, "received": received_all}
        print("REPORT " + json.dumps(report), flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it, with nothing left to do


if __name__ == "__main__":
    main(*sys.argv[1:])
