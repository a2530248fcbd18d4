"""SkyRL's `sequence_parallel_size=2`, a Gloo rank each; `python skyrl_work.py OUT.json FOLDER JOB...`.

A job is "model attention layout own|ours"; as its workers do it (workers/worker.py:143-151). What stands in for flash
attention goes sequence by sequence; who is told what, and what ranks exchange, is SkyRL's.
"""

# ruff: noqa: E402
import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
import torch.distributed as dist
from processes import run_jobs

from test_skyrl import alone, answers, samples, wrapped  # isort: skip  (its stand-ins first)
from skyrl.backends.skyrl_train.distributed.ulysses import apply_monkey_patch, monkey_patch
from skyrl.backends.skyrl_train.distributed.ulysses.utils import set_ulysses_sequence_parallel_group

from collate_npu import adapt


def flash_attention(query, key, value, mask=None, *args, position_ids=None, softmax_scale=None, **kwargs):
    """`[B, T, heads, size]`, causal, by the mask or by positions that begin again."""
    _, T, heads, _ = query.shape
    ids = (position_ids == 0).cumsum(-1) if mask is None else mask
    near = (ids[:, :, None] == ids[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near[:, None], scale=softmax_scale)
    return out.transpose(1, 2)


monkey_patch._flash_attention_forward = flash_attention


def run(folder, family, attention, layout, who):
    set_ulysses_sequence_parallel_group(None)
    wanted = alone(family, samples())[1]
    wrapper = wrapped(family, packs=layout == "packed", sequence_parallel_size=2)
    wrapper.model.config._attn_implementation = attention
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    apply_monkey_patch(wrapper.model, ulysses_sp_size=2)
    if who == "ours":
        adapt(wrapper.model)
    try:
        found = answers(wrapper, samples(), "left")
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"refused": "", "error": max(float((x - y).detach().abs().max()) for x, y in zip(found, wanted))}


if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    sys.argv[1] += f".{rank}" * bool(rank)
    run_jobs(run)
