"""OpenRLHF's `--ds.ring_attn_size 2`, a Gloo rank each; `python openrlhf_ring_work.py OUT.json FOLDER JOB...`.

A job is "model own|ours". Its strategy sets up the true ring_flash_attn 0.1.8, below which flash_attn's kernel stands in.
"""

# ruff: noqa: E402
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import openrlhf_world
import torch
import torch.distributed as dist
from processes import run_jobs, saved_model


def varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal=True,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    """`[T, heads, size]`, sequence by sequence; the last query sees the last key."""
    outs, k, v = [], *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for (start, end), (first, last) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())):
        shape = (end - start, last - first)
        near = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
        if window_size_left >= 0:
            near &= near.triu(shape[1] - shape[0] - window_size_left)
        parts = (x.transpose(0, 1) for x in (q[start:end], k[first:last], v[first:last]))
        outs.append(torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=near, scale=softmax_scale))
    return torch.cat(outs, 1).transpose(0, 1), q.new_zeros(q.shape[1], len(q)), None, None


def gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


openrlhf_world.start()
names = ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_backward")
interface = sys.modules["flash_attn.flash_attn_interface"] = ModuleType("flash_attn.flash_attn_interface")
vars(interface).update(dict.fromkeys(names), _flash_attn_varlen_forward=varlen_forward)
sys.modules["flash_attn.utils.distributed"].all_gather = gathered

from cells import samples
from openrlhf.models import Actor, ring_attn_utils as ring
from openrlhf.utils import get_strategy
from test_openrlhf import batch_of, scored

from collate_npu.integrations import openrlhf as ours


@torch.no_grad()
def run(folder, family, who):
    path, group = saved_model(folder, family), ring.RING_ATTN_GROUP
    truth = Actor(path, attn_implementation="sdpa").float().eval()
    if who == "ours":
        ours.arm()
    actor = Actor(path, attn_implementation="sdpa", packing_samples=True).float().eval()
    ours.disarm()
    actor.model.config._attn_implementation = "flash_attention_2"
    ids, keep = batch_of(samples(), "right")
    try:
        found = actor(ids, attention_mask=keep, return_logprobs=True, ring_attn_group=group)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    wanted = [scored(truth, "right")([row])[0] for row in samples()]
    return {"refused": "", "error": max(float((x[: len(y)] - y).abs().max()) for x, y in zip(found, wanted))}


if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], size), rank=rank, world_size=size)
    ds = SimpleNamespace(zero_stage=3, param_dtype="bf16", ring_attn_size=2)
    train = SimpleNamespace(seed=0, micro_batch_size=4, batch_size=4)
    get_strategy(SimpleNamespace(ds=ds, train=train, local_rank=-1)).setup_distributed()
    sys.argv[1] += f".{rank}" * bool(rank)
    run_jobs(run)
