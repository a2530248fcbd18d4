"""One step of DeepSpeed's ZeRO-3, on the ranks that the environment tells; `python zero_work.py OUT.json FAMILY LAYOUT`."""

# ruff: noqa: E402
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "distributed"), str(Path(__file__).parent)]

import openrlhf_world

openrlhf_world.deepspeed_on_cpu()
import deepspeed
import torch.distributed as dist
from adapt_work import ROWS, VOCAB, batch_of
from deepspeed.utils import safe_get_full_grad

from collate_npu import adapt
from collate_npu.testing import tiny_model

CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}  # fmt: skip


def gradient_error(family, layout, first):
    """How far the gradient is from that of the samples alone; and how many parameters are not whole on this rank."""
    truth, model, parts = tiny_model(family, vocab_size=VOCAB), tiny_model(family, vocab_size=VOCAB), [ROWS[:2], ROWS[2:]]
    for part in parts:
        for row in part:
            weight = (len(row) - 1) / (sum(map(len, part)) - len(part)) / len(parts)
            (truth(input_ids=row[None], labels=row[None]).loss * weight).backward()
    if first == "before":
        adapt(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG)
    if first == "behind":
        adapt(engine)
    engine.backward(engine(**batch_of(parts[dist.get_rank()], layout)).loss)
    pairs = [(safe_get_full_grad(p), q.grad) for p, q in zip(model.parameters(), truth.parameters()) if q.grad is not None]
    gap, size = sum(float((p - q).norm() ** 2) for p, q in pairs), sum(float(q.norm() ** 2) for _, q in pairs)
    return (gap / size) ** 0.5, sum(p.numel() == 0 for p in model.parameters())


if __name__ == "__main__":
    out, family, layout = sys.argv[1:]
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    deepspeed.init_distributed("gloo")
    errors = {first: gradient_error(family, layout, first) for first in ("before", "behind")}
    if dist.get_rank() == 0:
        told = {first: error for first, (error, _) in errors.items()} | {"partitioned": errors["before"][1]}
        Path(out).write_text(json.dumps(told), encoding="utf-8")
    dist.barrier()
