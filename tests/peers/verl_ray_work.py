"""Run as a program: verl's own `run_ppo` on a Ray cluster that stood before, with a task runner that asks verl's workers.

Arguments: one hydra override for each run, `--`, and those of all runs, as for `python -m verl.trainer.main_ppo`. Each run
leaves a JSON in `trainer.default_local_dir`.
"""

import json
import sys
from pathlib import Path

import ray
from hydra import compose, initialize_config_module
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.main_ppo import run_ppo

CONFIG, PLUGIN = "verl.trainer.config", "collate_npu.integrations.verl.plugin"


class Asked(Worker):
    """A worker of verl's, as `ActorRolloutRefWorker` is one."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def report(self, external_lib, path):
        told = {"by the environment": PLUGIN in sys.modules, "megatron before": "megatron.core" in sys.modules}
        if external_lib:
            from verl.workers.config import HFModelConfig

            HFModelConfig(path=path, external_lib=external_lib, load_tokenizer=False)
        from verl.models.mcore import registry, util

        forward = registry.get_mcore_engine_forward_fn(type("Config", (), {"architectures": ["Qwen3ForCausalLM"]}))
        functions = (forward, registry.model_forward_gen, util.preprocess_bshd_engine)
        return {**told, "ours": [hasattr(function, "__wrapped__") for function in functions]}


class Runner:
    """In the place of verl's `TaskRunner`, which trains: it starts a worker group as that does, and asks."""

    def run(self, config):
        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Asked)), device_name="cpu")
        (answer,) = group.report(config.actor_rollout_ref.model.external_lib, config.actor_rollout_ref.model.path)
        Path(config.trainer.default_local_dir, config.trainer.experiment_name).write_text(json.dumps(answer))


if __name__ == "__main__":
    split = sys.argv.index("--")
    for run, setting in enumerate(sys.argv[1:split]):
        with initialize_config_module(CONFIG, version_base=None):
            words = [setting, f"trainer.experiment_name={run}.json", *sys.argv[split + 1 :]]
            settings = compose("ppo_megatron_trainer", words)
        run_ppo(settings, task_runner_class=ray.remote(num_cpus=0)(Runner))
        ray.shutdown()
    print("done")
