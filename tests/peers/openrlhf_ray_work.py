"""OpenRLHF's `ReferenceModelActor` and `PolicyModelActor` in Ray processes; `python openrlhf_ray_work.py OUT.json FOLDER`.

Ray runs `arm` where a user names it as `worker_process_setup_hook`; the tests' hook puts the CPU's stand-ins before it. The
class, group and strategy are the trainer's own; no card is asked for, and vLLM and the controller are not there.
"""

# ruff: noqa: E402
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import openrlhf_world

from collate_npu.integrations.openrlhf import arm


def hook():
    openrlhf_world.start()
    arm()


def settings():
    names = {"zero_stage": 3, "param_dtype": "bf16", "attn_implementation": "sdpa", "packing_samples": False}
    names |= {"experts_implementation": None, "load_in_4bit": False, "use_liger_kernel": False}
    return SimpleNamespace(
        ds=SimpleNamespace(**names), ref=SimpleNamespace(offload=False), rollout=SimpleNamespace(temperature=1.0),
        train=SimpleNamespace(seed=0, micro_batch_size=2, batch_size=2), local_rank=-1,
    )  # fmt: skip


def told(*words):
    """The arguments of `openrlhf.cli.train_ppo_ray`, as it parses and checks them."""
    import ray

    def caught():
        raise InterruptedError(sys._getframe(1).f_locals["args"])

    asks, ray.is_initialized, sys.argv = ray.is_initialized, caught, ["train_ppo_ray", *words]
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    except InterruptedError as found:
        return found.args[0]
    finally:
        ray.is_initialized = asks


def stepped(folder, packing, at_once):
    """A step of its trainer on the policy: experience goes into the replay buffer, and `fit` learns from it; or what was
    said."""
    import ray
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray.launcher import RayActorGroup
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.utils import get_strategy

    named = {
        "actor.model_name_or_path": folder, "actor.adam.lr": 0, "actor.num_gpus_per_node": 1, "reward.remote_url": "none",
        "train.batch_size": 2, "train.micro_batch_size": at_once, "ds.attn_implementation": "sdpa", "vllm.num_engines": 1,
        "rollout.batch_size": 2, "rollout.n_samples_per_prompt": 1, "rollout.micro_batch_size": 1,
        "vllm.sync_backend": "gloo",
    }  # fmt: skip
    args = told(*(word for name, value in named.items() for word in (f"--{name}", str(value))))
    args.ds.packing_samples = packing  # by the command line on flash attention alone
    group = RayActorGroup(1, 1, PolicyModelActor, num_gpus_per_actor=0)
    ray.get(group.async_init_model_from_pretrained(get_strategy(args), folder, 1, None))
    ids = torch.tensor([[5, 9, 2, 77, 3, 12], [40, 41, 42, 7, 7, 7]])
    keep = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    old, gain = torch.full((2, 5), -4.8), torch.tensor([[1.0], [2.0]]).expand(2, 5)
    given = {"sequences": ids, "attention_mask": keep, "action_mask": keep[:, 1:].bool(), "action_log_probs": old}
    ray.get(group.async_run_method_batch("append", experience=[Experience(**given, advantages=gain, info={})]))
    try:
        return ray.get(group.async_run_method("fit", kl_ctl=0))[0]
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)


def asked(folder):
    """The log-probabilities of a batch."""
    import ray
    import torch
    from openrlhf.trainer.ray.launcher import RayActorGroup, ReferenceModelActor
    from openrlhf.utils import get_strategy

    group = RayActorGroup(1, 1, ReferenceModelActor, num_gpus_per_actor=0)
    ray.get(group.async_init_model_from_pretrained(get_strategy(settings()), folder))
    ids = torch.tensor([[5, 9, 2, 77, 3, 12], [40, 41, 42, 7, 7, 7]])
    keep = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    given = {"sequences": [ids], "action_mask": [keep[:, 1:]], "attention_mask": [keep]}
    ((found,),) = ray.get(group.async_run_method_batch("forward", **given))
    return found.float().tolist()


if __name__ == "__main__":
    import ray

    openrlhf_world.start()
    out, folder = sys.argv[1:]
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180"}  # a loaded machine
    environment = {"worker_process_setup_hook": "openrlhf_ray_work.hook"}
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env=environment)
    found = {"padded": asked(folder)}
    steps = {"one by one": (False, 1), "together": (False, 2), "joined": (True, 2)}
    found |= {name: stepped(folder, *step) for name, step in steps.items()}
    Path(out).write_text(json.dumps(found))
    ray.shutdown()
