"""verl's `ActorRolloutRefWorker` on a CPU; `python verl_work.py OUT.json FOLDER JOB...`.

A job "family alone|ours override,override..." is a worker on this rank: what its FSDP engine hands to the model, and what
comes out. Overrides are those of `python -m verl.trainer.main_ppo`; `ours` is one more of them: the plugin, which runs
`install_fsdp`.
"""

import os

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "RAY_USAGE_STATS_ENABLED": "0"}

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


if __name__ == "__main__":
    registered()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    run_jobs(engine)
