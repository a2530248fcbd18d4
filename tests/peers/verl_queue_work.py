"""verl's trainer over TransferQueue, without its rollout: rows are put as its agent loop puts them, two of its workers take
them by their keys, and the answers are read back as `PPOTrainer._compute_old_log_prob` reads them.

`python verl_queue_work.py OUT.json FOLDER`.
"""

# ruff: noqa: E402
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
import torch
import transfer_queue as tq
from cells import samples
from hydra import compose, initialize_config_module
from processes import saved_model
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested
from verl_cpu import registered
from verl_fsdp_work import PLUGIN, SETTINGS, alone


class OnCPU(ActorRolloutRefWorker):
    """verl's worker; its own call for a process group names the device's backend twice on a CPU."""

    def __init__(self, config, role, **more):
        registered()
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        super().__init__(config, role, **more)


def field(row):
    """trainer/ppo/v1/agent_loop_tq.py:180-201."""
    ids = torch.tensor(row)
    mask = torch.ones(len(row) - 2, dtype=torch.int64)
    told = {"prompts": ids[:2], "responses": ids[2:], "response_mask": mask, "loss_mask": mask}
    return {**told, "input_ids": ids, "position_ids": torch.arange(len(row))}


def main(out, folder):
    path, rows = saved_model(Path(folder), "qwen3_next"), samples()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [f"actor_rollout_ref.model.path={path}", *SETTINGS, PLUGIN])
    ray.init(address="local", num_cpus=8, include_dashboard=False, runtime_env={"env_vars": {"TRANSFER_QUEUE_ENABLE": "1"}})
    config.transfer_queue.enable = True
    config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    tq.init(config.transfer_queue)
    made = RayClassWithInitArgs(ray.remote(OnCPU), config=config.actor_rollout_ref, role="actor")
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False, max_colocate_count=1), made, device_name="cpu")
    group.init_model()
    keys = [f"{n}_0_0" for n in range(len(rows))]
    fields = list_of_dict_to_tensordict([field(row) for row in rows])
    batch = tq.kv_batch_put(keys=keys, fields=fields, tags=[{"seq_len": len(row)} for row in rows], partition_id="train")
    batch.extra_info.update({"calculate_entropy": True, "compute_loss": False, "temperature": 1.0})
    group.compute_log_prob(batch)
    names = ["entropy", "log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=names)
    found = {name: response_from_nested(data[name], data["response_mask"]).unbind() for name in names[:2]}
    truth, _ = alone(path, rows)
    off = dict.fromkeys(found, 0.0)
    for name, got in found.items():
        for row, want in zip(got, truth):
            want = want[name] if name == "log_probs" else want[name][:-1]
            off[name] = max(off[name], float((row - want[1:]).detach().abs().max()))
    Path(out).write_text(json.dumps({**off, "layout": str(data["log_probs"].layout)}), "utf-8")
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
