"""OpenRLHF's `ReferenceModelActor` in a Ray process of its own; `python openrlhf_ray_work.py OUT.json FOLDER`.

Ray runs `arm` where a user names it as `worker_process_setup_hook`; the tests' hook puts the CPU's stand-ins before it. The
class, group and strategy are the trainer's own; no card is asked for, and vLLM and the controller are not there.
"""

# ruff: noqa: E402
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import openrlhf_world

from collate_npu.integrations.openrlhf import arm


def hook():
    openrlhf_world.start()
    arm()


def settings(packing):
    names = {"zero_stage": 3, "param_dtype": "bf16", "attn_implementation": "sdpa", "packing_samples": packing}
    names |= {"experts_implementation": None, "load_in_4bit": False, "use_liger_kernel": False}
    return SimpleNamespace(
        ds=SimpleNamespace(**names), ref=SimpleNamespace(offload=False), rollout=SimpleNamespace(temperature=1.0),
        train=SimpleNamespace(seed=0, micro_batch_size=2, batch_size=2), local_rank=-1,
    )  # fmt: skip


def asked(folder, packing):
    """The log-probabilities of a batch, or what was said."""
    import ray
    import torch
    from openrlhf.trainer.ray.launcher import RayActorGroup, ReferenceModelActor
    from openrlhf.utils import get_strategy

    group = RayActorGroup(1, 1, ReferenceModelActor, num_gpus_per_actor=0)
    ray.get(group.async_init_model_from_pretrained(get_strategy(settings(packing)), folder))
    ids = torch.tensor([[5, 9, 2, 77, 3, 12], [40, 41, 42, 7, 7, 7]])
    keep = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    given = {"sequences": [ids], "action_mask": [keep[:, 1:]], "attention_mask": [keep]}
    try:
        ((found,),) = ray.get(group.async_run_method_batch("forward", **given))
        return found.float().tolist()
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)


if __name__ == "__main__":
    import ray

    openrlhf_world.start()
    out, folder = sys.argv[1:]
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180"}  # a loaded machine
    environment = {"worker_process_setup_hook": "openrlhf_ray_work.hook"}
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env=environment)
    Path(out).write_text(json.dumps({packing: asked(folder, packing == "packed") for packing in ("padded", "packed")}))
    ray.shutdown()
