"""A generation server in the place of vLLM, for `verl.trainer.main_ppo` on a CPU: it answers with fixed tokens, and with
their log-probabilities in a row of their own, against which verl holds those of its actor (`rollout_probs_diff`).

`VERL_USE_EXTERNAL_MODULES=verl_cpu,verl_server`: verl imports it in each of its processes.
"""

import ray
import torch
import torch.distributed as dist
import verl_cpu
from verl.plugin.platform import get_platform
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


class Cpu(str):
    """The device, and a number in `f"cpu:{...}"` (utils/fsdp_utils.py:229)."""

    def __format__(self, spec):
        return "0"


type(get_platform()).current_device = lambda self: Cpu("cpu")
verl_cpu.registered()
made = dist.init_process_group
dist.init_process_group = lambda backend=None, **more: made("gloo", **more)  # a CPU is named twice (utils/distributed.py:63)


class Adapter(base.BaseRollout):
    """A server of its own process needs no weights from this one: the learning rate is 0."""

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, **more):
        for _ in weights:
            pass


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path).eval()

    async def generate(self, request_id, prompt_ids, sampling_params, **more):
        told = [3 + (7 * n + sum(prompt_ids)) % 90 for n in range(3 + sum(prompt_ids) % 5)]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([[*prompt_ids, *told]])).logits[0, len(prompt_ids) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(told)[:, None])[:, 0]
        return TokenOutput(
            token_ids=told, log_probs=log_probs.tolist(), stop_reason="completed", extra_fields={"global_steps": 0}
        )

    async def sleep(self):
        pass

    wake_up = clear_kv_cache = sleep


class Replica(RolloutReplica):
    async def launch_servers(self):
        self._server_address, self._server_handle = f"here:{self.replica_rank}", Server.remote(self.model_config.path)
        self.servers = [self._server_handle]


base._ROLLOUT_REGISTRY["vllm", "async"] = "verl_server.Adapter"
RolloutReplicaRegistry.register("vllm", lambda: Replica)
