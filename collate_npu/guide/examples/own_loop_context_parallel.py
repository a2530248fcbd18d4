"""Train a hybrid model in a loop of your own where two ranks share each row, and see that the loss is that of one process.

    torchrun --nproc_per_node 2 own_loop_context_parallel.py
    torchrun --nproc_per_node 2 own_loop_context_parallel.py --model ./checkpoint  # a Qwen3-Next or Qwen3.5 of your own

`split_batch` gives each rank its tokens, and `adapt` lets the layers exchange them. Gated DeltaNet trades heads for tokens;
attention gets whole sequences, dealt out to the ranks. An attention that exchanges tokens itself (Ulysses, ring) is left
alone.

Prints the loss of each step, and how far the first one and its gradient are from those of each sample alone, in one process:

    step 0: loss ..., in one process ...
    loss: off by ..., gradient: off by ...

Exit code 1 if a difference is larger than rounding explains.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from collate_npu import ContextParallel, PaddingCollator, adapt, split_batch
from collate_npu.outputs import shift_labels
from collate_npu.testing import byte_tokenizer, tiny_model

TEXTS = ["Two ranks share this row, and each of them holds half of it.", "This row is padded on its left side."]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a checkpoint; by default a tiny random Qwen3-Next")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    on_card = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_card else torch.device("cpu")
    if on_card:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device.type])
    cp = ContextParallel.from_group(dist.group.WORLD)  # zigzag: causal work is level

    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else byte_tokenizer()
    load = AutoModelForCausalLM.from_pretrained
    model = load(args.model, dtype=torch.float32) if args.model else tiny_model("qwen3_next", vocab_size=len(tokenizer))
    model = model.to(device).eval()  # no dropout: two runs are compared
    data = [{"input_ids": ids, "labels": ids} for ids in tokenizer(TEXTS)["input_ids"]]
    count = sum(len(row["labels"]) - 1 for row in data)
    truth = torch.zeros((), device=device)
    for row in data:  # each sample alone
        ids = torch.tensor([row["input_ids"]], device=device)
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=count).loss
        loss.backward()
        truth += loss.detach()
    right = gradient(model)
    model.zero_grad()

    adapt(model, sequence_group=dist.group.WORLD, layout="head_tail")
    collator = PaddingCollator(tokenizer, padding_side="left", pad_to_multiple_of=cp.multiple, attention_mask="2d")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        batch = collator(data)  # or that of a loader, the same on each rank
        batch["shift_labels"] = shift_labels(batch.pop("labels"))  # before the split: a target may lie on another rank
        count = int((batch["shift_labels"] != -100).sum())  # of all ranks
        shard = {key: value.to(device) for key, value in split_batch(batch, cp).items()}
        loss = model(**shard, labels=shard["shift_labels"], num_items_in_batch=count).loss
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        if step == 0:
            off = float((total - truth).abs()), float((gradient(model) - right).norm() / right.norm())
        optimizer.step()
        optimizer.zero_grad()
        if cp.rank == 0:
            print(f"step {step}: loss {total:.6f}" + f", in one process {truth:.6f}" * (step == 0))
    if cp.rank == 0:
        print(f"loss: off by {off[0]:.1e}, gradient: off by {off[1]:.1e}")
    dist.barrier()
    dist.destroy_process_group()
    # kernels on a card multiply float32 in TF32; a wrong mask or a lost state moves the gradient by 0.3 and more
    return int(not max(off) < (2e-2 if on_card else 1e-4))


if __name__ == "__main__":
    sys.exit(main())
