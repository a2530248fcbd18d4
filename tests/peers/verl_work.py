"""verl's `ActorRolloutRefWorker` and trainer on a CPU; `python verl_work.py OUT.json FOLDER JOB...`.

A job "family alone|ours override,override..." is a worker on this rank: what its FSDP engine hands to the model, and what
comes out. Overrides are those of `python -m verl.trainer.main_ppo`, `ours` is one more of them: the plugin, which runs
`install_fsdp`. `ppo own|ours` is
one step of `main_ppo` on two CPU workers; all is verl's (Ray, TransferQueue, agent loop, rewards, `compute_log_prob`,
`update_actor`) but vLLM, in whose place is verl_server.py.
"""

# ruff: noqa: E402
import json
import os
import runpy
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "RAY_USAGE_STATS_ENABLED": "0"}
if any(word.startswith("ppo") for word in sys.argv):
    os.environ["VERL_USE_EXTERNAL_MODULES"] += ",verl_server"
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # Ray counts two, and nobody looks for them

import torch
from cells import PAD, samples
from hydra import compose, initialize_config_module
from processes import run_jobs, saved_model
from tensordict import TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig
from verl.utils import tensordict_utils as tu
from verl.utils.model import get_hf_auto_model_class
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import sft_loss
from verl_cpu import registered

from collate_npu.testing import byte_tokenizer

PLUGIN = "actor_rollout_ref.model.external_lib=collate_npu.integrations.verl.plugin"
SETTINGS = (
    "+actor_rollout_ref.model.load_tokenizer=false", "actor_rollout_ref.actor.use_torch_compile=false",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa", "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "actor_rollout_ref.actor.fsdp_config.use_orig_params=true",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
)  # fmt: skip


def config_of(path, *words):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"actor_rollout_ref.model.path={path}", *SETTINGS, *words])


def worker(path, words):
    worker = ActorRolloutRefWorker(config_of(path, *words).actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def batch(rows):
    """As the trainer's TensorDict reaches a worker (trainer/ppo/v1/agent_loop_tq.py:180-201)."""
    fields = {"input_ids": rows, "position_ids": [range(len(row)) for row in rows], "prompts": [row[:2] for row in rows]}
    fields |= {"responses": [row[2:] for row in rows], "response_mask": [[1] * (len(row) - 2) for row in rows]}
    fields["loss_mask"] = [[0] + [1] * (len(row) - 1) for row in rows]
    data = TensorDict({key: jagged([list(row) for row in value]) for key, value in fields.items()}, batch_size=len(rows))
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=True, compute_loss=False, pad_token_id=PAD)
    return data


def grads(worker, data):
    """The gradient of verl's own loss for fine-tuning, before any step, of all ranks together."""
    engine = worker.actor.engine
    keys = {"use_remove_padding": worker.actor.model_config.use_remove_padding, "use_dynamic_bsz": False}
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=2, **keys)
    with engine.train_mode(zero_grad_on_exit=False):
        loss = engine.forward_backward_batch(data, lambda **given: sft_loss(None, **given), forward_only=False)["loss"]
        whole = FullyShardedDataParallel.summon_full_params
        module, fsdp1 = engine.module, isinstance(engine.module, FullyShardedDataParallel)
        if not fsdp1:
            return loss, {name: p.grad.full_tensor() for name, p in module.named_parameters() if p.grad is not None}
        with whole(module, with_grads=True):
            named = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in module.named_parameters()}
            return loss, {name: grad.clone() for name, grad in named.items() if grad is not None}


def alone(path, rows):
    cls = get_hf_auto_model_class(AutoConfig.from_pretrained(path))  # with a vision tower where the type has one
    model = cls.from_pretrained(path, attn_implementation="sdpa").float()
    model.gradient_checkpointing_enable()
    told, loss = [], 0.0
    for row in rows:
        ids = torch.tensor([row])
        log = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        told.append({"log_probs": log[:-1].gather(1, ids[0, 1:, None])[:, 0], "entropy": -(log.exp() * log).sum(-1)})
        loss = loss - told[-1]["log_probs"].sum() / (sum(map(len, rows)) - len(rows))
    loss.backward()
    return told, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def received(worker):
    """What the model below the wrappers gets."""
    seen = []

    def note(module, args, kwargs):
        seen.append({key: list(value.shape) for key, value in kwargs.items() if isinstance(value, torch.Tensor)})

    base = next(module for module in worker.actor.engine.module.modules() if hasattr(module, "lm_head"))
    base.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def engine(folder, family, who, words=""):
    path, (rank, size) = saved_model(folder, family), (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    rows, shared = samples(), "ulysses" in words
    mine = rows if shared else rows[rank::size]  # ranks that share out a row have the same ones
    try:
        made = worker(path, [*filter(None, words.split(",")), *([PLUGIN] if who == "ours" else [])])
        seen = received(made)
        out = made.compute_log_prob(batch(mine))
        _, found = grads(made, batch(mine))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    truth, wanted = alone(path, rows)
    off = {"log_probs": 0.0, "entropy": 0.0}
    rated = truth if shared else truth[rank::size]
    for n, want in enumerate(rated if out is not None else []):  # of ranks that share a row the first one answers
        off["log_probs"] = max(off["log_probs"], float((out["log_probs"][n][:-1] - want["log_probs"]).abs().max()))
        off["entropy"] = max(off["entropy"], float((out["entropy"][n] - want["entropy"]).abs().max()))
    if "lora" not in words:
        assert set(found) == set(wanted), set(found) ^ set(wanted)
        off["gradient"] = max(
            float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-6)) for name in wanted
        )
    told = [None] * size
    rows_out = [] if out is None else [row[:-1].tolist() for row in out["log_probs"].unbind()]
    torch.distributed.all_gather_object(told, (off, rows_out, seen))
    worst = {key: max(each[0][key] for each in told) for key in off}
    answers = told[0][1] if shared else [told[n % size][1][n // size] for n in range(len(rows))]
    return {"refused": "", "seen": told[0][2], **worst, "answers": answers}


# --- main_ppo

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


def ppo(folder, who):
    import pandas

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
    return json.loads(told.read_text().splitlines()[-1])["data"]


if __name__ == "__main__":
    if "RANK" in os.environ:
        registered()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    run_jobs(lambda folder, *words: ppo(folder, *words[1:]) if words[0] == "ppo" else engine(folder, *words))
