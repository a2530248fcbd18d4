"""Train a hybrid model in a loop of your own where two ranks share each row, and see that the loss is that of one process.

    torchrun --nproc_per_node 2 own_loop_context_parallel.py
    torchrun --nproc_per_node 2 own_loop_context_parallel.py --model ./checkpoint  # a Qwen3-Next or Qwen3.5 of your own

`split_batch` gives each rank its tokens, `gather_sequence` brings the row together where a layer needs it. Attention gathers
keys and values, and computes its own queries. A recurrent layer gathers the row, runs over all of it, and keeps its own
tokens: right, but its work is not shared. Megatron and MindSpeed share that out too.

Prints the loss of each step, and how far the first one and its gradient are from those of one process:

    step 0: loss ..., in one process ...
    loss: off by ..., gradient: off by ...

Exit code 1 if a difference is larger than rounding explains.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from collate_npu import BatchAdapter, ContextParallel, PaddingCollator, gather_sequence, split_batch
from collate_npu.masks import dense
from collate_npu.outputs import shift_labels
from collate_npu.parallel import query_rows, split_tensor
from collate_npu.testing import byte_tokenizer, tiny_model

TEXTS = ["Two ranks share this row, and each of them holds half of it.", "This row is padded on its left side."]


def share_rows(model: torch.nn.Module, cp: ContextParallel, whole: dict) -> None:
    """Let every layer of the model see the whole row; `whole["keep"]` is the padding mask of the whole batch."""

    def attention(module, query, key, value, attention_mask, **kwargs):  # [B, heads, tokens, D]
        key, value = (gather_sequence(x, cp, dim=2, loss="local") for x in (key, value))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("gathered", attention)
    model.set_attn_implementation("gathered")
    for layer in model.modules():
        if type(layer).__name__.endswith("GatedDeltaNet"):

            def over_the_row(hidden_states, forward=layer.forward, **kwargs):
                # "local": each rank goes on with its own tokens, so the gradient of the row is the sum over the ranks
                row = gather_sequence(hidden_states, cp, loss="local")
                return split_tensor(forward(row, **{**kwargs, "attention_mask": whole["keep"]}), cp)

            layer.forward = over_the_row


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def loss_of(logits: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum of the loss of these tokens, over the number of targets of all ranks."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum") / count


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
    collator = PaddingCollator(tokenizer, padding_side="left", pad_to_multiple_of=cp.multiple, attention_mask="2d")
    batch = collator([{"input_ids": ids, "labels": ids} for ids in tokenizer(TEXTS)["input_ids"]])  # or those of a loader
    inputs, segments = BatchAdapter(model).with_segments(batch)
    inputs = {key: value.to(device) for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    targets = shift_labels(inputs.pop("labels"), segments)  # before the split: a target may lie on another rank
    count = int((targets != -100).sum())
    truth = loss_of(model(**inputs).logits, targets, count)  # the whole batch in one process
    truth.backward()
    truth, right = truth.detach(), gradient(model)
    model.zero_grad()

    whole: dict[str, torch.Tensor] = {}
    share_rows(model, cp, whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        whole["keep"] = segments.keep.to(device)
        row = {"input_ids": inputs["input_ids"], "position_ids": segments.position_ids.to(device), "shift_labels": targets}
        shard = split_batch(row, cp, segments=segments)
        mine = shard.pop("shift_labels")
        keep = dense(segments, rows=query_rows(segments.shape[1], cp)).to(device)  # this rank's queries, all keys
        loss = loss_of(model(**shard, attention_mask=keep).logits, mine, count)
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
