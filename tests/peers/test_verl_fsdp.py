"""verl 0.9.1's FSDP engine, built by its `ActorRolloutRefWorker` on two ranks: log-probabilities, entropy and gradients.

Beside transformers 5.9.0, which its `cpu`, `vllm` and `sglang` extras pin. verl puts forwards of its own into qwen3_5 (with
a vision tower), whose recurrent layers then keep sequences apart without a kernel. On a CPU, with sdpa, all in torch.

`python test_verl_fsdp.py OUT.json FOLDER JOB...` is a rank: what comes out of its engine. A job is "family override,...", as
for `python -m verl.trainer.main_ppo`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import PAD, Stack, gradient_error, samples, scores
from datasets import Dataset
from processes import HERE, LAUNCH, QUIET, found_by, process_group, run_jobs, saved_model
from rotation import some
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig, AutoModelForImageTextToText

from collate_npu.consumers.tiny_models import make_honest
from collate_npu.testing import tiny_config

NEEDS = ("verl", "hydra")
pytestmark = pytest.mark.together("two ranks of FSDP")

STACK = Stack("verl FSDP", ("verl", "transformers"), "peers_misc")
IMAGES = ("qwen3_5", "qwen3_vl")
FAMILIES = ("qwen3_next", *some(("qwen3", *IMAGES, "qwen3_5_text", "lfm2"), 2))
LAYOUTS = {
    "padded right": "actor_rollout_ref.model.use_remove_padding=false",
    "packed": "actor_rollout_ref.actor.strategy=fsdp",  # as it is configured without a word
    "context parallel": "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
}
LINE = "collate-npu run -- torchrun"
JOBS = [f"{family} {words}" for family in FAMILIES for words in LAYOUTS.values()]
RIGHT, BOTH = 2e-5, ({}, {"RUN": "1"})
VERL = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("verl-fsdp")
    for family in FAMILIES:
        if family in IMAGES:
            model = AutoModelForImageTextToText.from_config(tiny_config(family, vocab_size=257))
            with torch.no_grad():
                make_honest(model, 5.0)
            model.save_pretrained(made / family)
        else:
            saved_model(made, family)
    return made


@pytest.fixture(scope="module")
def runs(folder):
    return dict(zip(("alone", "ours"), found_by(Path(__file__).stem, folder, folder, *JOBS, variants=BOTH, ranks=2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_cells(runs, family):
    """No rows are padded left: padding of prompts is taken out before the engine (workers/utils/padding.py)."""
    found = {at: {who: x and [x[f"{family} {words}"]] for who, x in runs.items()} for at, words in LAYOUTS.items()}
    STACK.tell_jobs({family: found}, line=LINE)


# --- `verl.trainer.sft_trainer` by the script of the guide, with words for a CPU; this file is its `external_lib`

CPU = (
    "engine.use_torch_compile=false", "engine.use_orig_params=true", "+engine.mixed_precision.param_dtype=fp32",
    "+model.override_config.attn_implementation=sdpa", "trainer.device=cpu", "data.train_batch_size=4",
    "data.micro_batch_size_per_gpu=2", "data.num_workers=0", "model.external_lib=test_verl_fsdp",
)  # fmt: skip
LORA = "model.lora_rank=4 model.target_modules=[q_proj]"


@pytest.mark.draws(1)
@pytest.mark.parametrize("words", ["", "model.use_remove_padding=false", "engine.strategy=fsdp2", LORA])
def test_fine_tuning_as_typed(folder, tmp_path, words):
    """Of Qwen3-Next: the norm of the gradient that it prints, and its checkpoint."""
    path, texts = folder / "qwen3_next", ["one", "and two, longer", "three three", "4"]
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    said = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]
    Dataset.from_dict({"messages": said}).to_parquet(tmp_path / "rows.parquet")
    env = {**os.environ, **QUIET, **VERL, "CARDS": "2", "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(LAUNCH / "verl.sh"), str(path), "rows.parquet", *CPU, *words.split()]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    _, wanted = truth_of(path, [list(f"?{text}".encode()) for text in texts])
    norm = float(torch.cat([each.flatten() for each in wanted.values()]).double().norm())
    assert float(re.search(r"grad_norm:(\S+)", done.stdout)[1]) == pytest.approx(norm, rel=RIGHT) or words == LORA
    assert re.search(r"collate-npu run: 2 processes, \w+: by sequence .* got what the batch says", done.stderr)


# --- a rank

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
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"actor_rollout_ref.model.path={path}", *SETTINGS, *words])


def worker(path, words):
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(config_of(path, *words).actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def batch(rows):
    """As the trainer's TensorDict reaches a worker (trainer/ppo/v1/agent_loop_tq.py:180-201)."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    fields = {"input_ids": rows, "position_ids": [range(len(row)) for row in rows], "prompts": [row[:2] for row in rows]}
    fields |= {"responses": [row[2:] for row in rows], "response_mask": [[1] * (len(row) - 2) for row in rows]}
    fields["loss_mask"] = [[0] + [1] * (len(row) - 1) for row in rows]
    data = TensorDict({key: jagged([list(row) for row in value]) for key, value in fields.items()}, batch_size=len(rows))
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=True, compute_loss=False, pad_token_id=PAD)
    return data


def grads(worker, data):
    """The gradient of verl's own loss for fine-tuning, before any step, of all ranks together."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    engine = worker.actor.engine
    keys = {"use_remove_padding": worker.actor.model_config.use_remove_padding, "use_dynamic_bsz": False}
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=2, **keys)
    with engine.train_mode(zero_grad_on_exit=False):
        engine.forward_backward_batch(data, lambda **given: sft_loss(None, **given), forward_only=False)
        with FullyShardedDataParallel.summon_full_params(engine.module, with_grads=True):
            named = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in engine.module.named_parameters()}
            return {name: grad.clone() for name, grad in named.items() if grad is not None}


def truth_of(path, rows):
    from verl.utils.model import get_hf_auto_model_class

    cls = get_hf_auto_model_class(AutoConfig.from_pretrained(path))  # with a vision tower where the type has one
    model = cls.from_pretrained(path, attn_implementation="sdpa").float()
    model.gradient_checkpointing_enable()
    told, loss = [], 0.0
    for row in rows:
        ids = torch.tensor([row])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        log = logits.log_softmax(-1)
        told.append({"log_probs": scores(logits, row), "entropy": -(log.exp() * log).sum(-1)})
        loss = loss - told[-1]["log_probs"].sum() / (sum(map(len, rows)) - len(rows))
    loss.backward()
    return told, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def engine(folder, family, words=""):
    """How far log-probabilities and entropy are off on any rank, and the gradient of all."""
    path, (rank, size) = saved_model(folder, family), (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    rows, shared = samples(), "ulysses" in words
    mine = slice(None) if shared else slice(rank, None, size)  # ranks that share out a row have the same ones
    try:
        made = worker(path, [*filter(None, words.split(","))])
        out = made.compute_log_prob(batch(rows[mine]))
        found = grads(made, batch(rows[mine]))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}", "error": None}
    truth, wanted = truth_of(path, rows)
    off = [0.0]
    for n, want in enumerate(truth[mine] if out is not None else []):  # of ranks that share a row the first one answers
        off.append(float((out["log_probs"][n][:-1] - want["log_probs"]).abs().max()))
        off.append(float((out["entropy"][n] - want["entropy"]).abs().max()))
    reached, meant = ({name for name, grad in one.items() if grad.any()} for one in (found, wanted))
    assert reached == meant, reached ^ meant
    told = [None] * size
    torch.distributed.all_gather_object(told, max(off))
    learned = gradient_error([found[name] for name in wanted], [*wanted.values()])
    return {"refused": "", "error": max(told), "gradient": learned}


if "CARDS" in os.environ or __name__ == "__main__":
    os.environ |= VERL
    from verl_cpu import registered

    registered()
if __name__ == "__main__":
    process_group()
    run_jobs(engine)
