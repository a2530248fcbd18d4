"""`python -m verl.trainer.main_ppo`, one step on two CPU workers; `python verl_ppo_work.py OUT.json FOLDER own|ours`.

All is verl's: Ray, TransferQueue, agent loop, rewards, `compute_log_prob`, `update_actor`; verl_server.py is its vLLM.
"""

# ruff: noqa: E402
import json
import os
import runpy
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import pandas
from processes import saved_model
from verl_fsdp_work import PLUGIN, SETTINGS

from collate_npu.testing import byte_tokenizer

os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_server", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # Ray counts two, and nobody looks for them

WORDS = (
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1",
    "actor_rollout_ref.actor.optim.lr=0", "actor_rollout_ref.model.load_tokenizer=true", "critic.enable=False",
    "algorithm.adv_estimator=grpo", "data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=16",
    "data.dataloader_num_workers=0", "trainer.n_gpus_per_node=2", "trainer.device=cpu", "trainer.logger=[console,file]",
    "trainer.val_before_train=False", "trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1",
    "trainer.resume_mode=disable", "ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=2",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)  # fmt: skip


if __name__ == "__main__":
    out, folder, who = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    path, data, told = saved_model(folder, "qwen3_next"), folder / "data.parquet", folder / "metrics.jsonl"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    rows = [{"prompt": [{"role": "user", "content": f"{n} what"}], "extra_info": {"index": n}} for n in range(4)]
    scored = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "1"}}
    pandas.DataFrame([row | scored for row in rows]).to_parquet(data)
    os.environ["VERL_FILE_LOGGER_PATH"] = str(told)
    files = [f"actor_rollout_ref.model.path={path}", f"data.train_files={data}", f"data.val_files={data}"]
    sys.argv = ["main_ppo", *files, *SETTINGS, *WORDS, *[PLUGIN] * (who == "ours")]
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
    Path(out).write_text(json.dumps(json.loads(told.read_text().splitlines()[-1])["data"]), "utf-8")
