"""verl 0.9.1's FSDP engine, built by its `ActorRolloutRefWorker` on two ranks: log-probabilities, entropy and gradients.

Beside transformers 5.9.0, which its `cpu`, `vllm` and `sglang` extras pin. verl puts forwards of its own into qwen3_5 (with
a vision tower), whose recurrent layers then keep sequences apart without a kernel. On a CPU, with sdpa and recurrent layers
in torch; no card, no flash attention.

`python test_verl_fsdp.py OUT.json FOLDER JOB...` is a rank: what its engine hands to the model, and what comes out. A job is
"family alone|ours override,override...", as for `python -m verl.trainer.main_ppo`; `ours` is one more of them: the plugin,
which runs `install_fsdp`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import PAD, Stack, alone, gradient_error, samples, scores
from datasets import Dataset
from processes import HERE, LAUNCH, QUIET, found_by, process_group, run_jobs, saved_model
from rotation import part
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from collate_npu.consumers.tiny_models import make_honest
from collate_npu.testing import tiny_config

NEEDS = ("verl", "hydra")
pytestmark = pytest.mark.long("two ranks of FSDP")

STACK = Stack("verl FSDP", ("verl", "transformers"), "peers_misc")
FAMILIES = ("qwen3_next", "qwen3", "qwen3_5", *part(("qwen3_5_text", "lfm2"), 1))
LAYOUTS = {
    "padded right": "actor_rollout_ref.model.use_remove_padding=false",
    "packed": "actor_rollout_ref.actor.strategy=fsdp",  # as it is configured without a word
    "context parallel": "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
}
FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2"
LORA = "actor_rollout_ref.model.lora_rank=4,actor_rollout_ref.model.target_modules=[q_proj]"
LINE = "actor_rollout_ref.model.external_lib=collate_npu.integrations.verl.plugin"
WHO = ("alone", "ours")  # in this order: a plugin stays in its process
JOBS = [f"{family} {who} {words}" for who in WHO for family in FAMILIES for words in LAYOUTS.values()]
JOBS += [f"qwen3_next ours {FSDP2}", f"qwen3_next ours {LORA}"]
RIGHT, WRONG = 2e-5, 0.05
VERL = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("verl-fsdp")
    for family in FAMILIES:
        if family == "qwen3_5":
            model = AutoModelForImageTextToText.from_config(tiny_config(family, vocab_size=257))
            with torch.no_grad():
                make_honest(model, 5.0)
            model.save_pretrained(made / family)
        else:
            saved_model(made, family)
    return made


@pytest.fixture(scope="module")
def runs(folder):
    return found_by("test_verl_fsdp", folder, folder, *JOBS, ranks=2)[0]


@pytest.mark.parametrize("words", [LAYOUTS["packed"], FSDP2, LORA])
def test_with_the_plugin_each_sequence_of_a_hybrid_is_as_alone(runs, words):
    found = runs[f"qwen3_next ours {words}"]
    print(found["seen"][0], *(found.get(key) for key in ("log_probs", "entropy", "gradient")))
    assert found["refused"] == ""
    assert max(found[key] for key in ("log_probs", "entropy", "gradient") if key in found) < RIGHT


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_keeps_its_flat_row(runs, family):
    """Without the plugin the states of hybrids, or qwen3_5's attention, run on in silence."""
    own, ours = (runs[f"{family} {who} {LAYOUTS['packed']}"] for who in WHO)
    assert own["seen"][0]["input_ids"] == ours["seen"][0]["input_ids"] == [1, 11]
    assert (own["log_probs"] > WRONG and own["gradient"] > WRONG) == (family != "qwen3")
    assert max(ours[key] for key in ("log_probs", "entropy", "gradient")) < RIGHT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["padded right", "padded left", "packed", "context parallel"])
def test_cells(runs, folder, family, layout):
    cls = AutoModelForImageTextToText if family == "qwen3_5" else AutoModelForCausalLM
    truth = alone(cls.from_pretrained(folder / family, attn_implementation="sdpa").float())

    def told(who):
        if layout == "padded left":
            return "padding of prompts is taken out before the engine (workers/utils/padding.py left_right_2_no_padding)"

        def run(rows):
            found = runs[f"{family} {who} {LAYOUTS[layout]}"]
            if found["refused"]:
                raise RuntimeError(found["refused"])
            return found["answers"]

        return run

    found = {who: runs.get(f"{family} {who} {LAYOUTS.get(layout)}", {}) for who in WHO}
    learned = {f"{who}_learned": one["learned"] for who, one in found.items() if "learned" in one}
    STACK.cell(family, layout, truth=truth, alone=told("alone"), ours=told("ours"), line=LINE, **learned)


# --- `verl.trainer.sft_trainer` by the script of the guide, with words for a CPU; this file is its `external_lib`

CPU = (
    "engine.use_torch_compile=false", "engine.use_orig_params=true", "+engine.mixed_precision.param_dtype=fp32",
    "+model.override_config.attn_implementation=sdpa", "trainer.device=cpu", "data.train_batch_size=4",
    "data.micro_batch_size_per_gpu=2", "data.num_workers=0", "model.external_lib=test_verl_fsdp",
)  # fmt: skip


@pytest.mark.parametrize("words", ["qwen3_next", "qwen3_next model.use_remove_padding=false", "qwen3"])
def test_fine_tuning_as_typed(folder, tmp_path, words):
    (family, *more), texts = words.split(), ["one", "and two, longer", "three three", "4"]
    (folder / family / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"messages": [{"role": "assistant", "content": text}]} for text in texts]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    env = {**os.environ, **QUIET, **VERL, "CARDS": "2", "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(LAUNCH / "verl.sh"), str(folder / family), "rows.parquet", *CPU, *more]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "learned0.pt")
    _, wanted = truth_of(folder / family, [list(text.encode()) for text in texts])
    assert gradient_error([found[name] for name in wanted], [*wanted.values()]) < RIGHT
    assert re.search(r"collate-npu run: 2 processes, Qwen\w+: by sequence .* got what the batch says", done.stderr)


def keep_what_is_learned():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
    from verl_cpu import registered

    registered()
    step = FSDPEngine.optimizer_step

    def kept(engine):
        torch.save(learned(engine.module), f"learned{os.environ['RANK']}.pt")
        return step(engine)

    FSDPEngine.optimizer_step = kept


if "CARDS" in os.environ:
    keep_what_is_learned()


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
        return learned(engine.module)


def learned(module):
    """The gradient, whole on each rank."""
    if not isinstance(module, FullyShardedDataParallel):
        return {name: p.grad.full_tensor() for name, p in module.named_parameters() if p.grad is not None}
    with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
        named = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in module.named_parameters()}
        return {name: grad.clone() for name, grad in named.items() if grad is not None}


def truth_of(path, rows):
    from verl.utils.model import get_hf_auto_model_class

    cls = get_hf_auto_model_class(AutoConfig.from_pretrained(path))  # with a vision tower where the type has one
    model = cls.from_pretrained(path, attn_implementation="sdpa").float()
    model.gradient_checkpointing_enable()
    told, loss = [], 0.0
    for row in rows:
        ids = torch.tensor([row])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        log = logits.log_softmax(-1)
        told.append({"log_probs": scores(logits, row), "entropy": -(log.exp() * log).sum(-1)})
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
        made = worker(path, [*filter(None, words.split(",")), *([LINE] if who == "ours" else [])])
        seen = received(made)
        out = made.compute_log_prob(batch(mine))
        found = grads(made, batch(mine))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    truth, wanted = truth_of(path, rows)
    off = {"log_probs": 0.0, "entropy": 0.0}
    rated = truth if shared else truth[rank::size]
    for n, want in enumerate(rated if out is not None else []):  # of ranks that share a row the first one answers
        off["log_probs"] = max(off["log_probs"], float((out["log_probs"][n][:-1] - want["log_probs"]).abs().max()))
        off["entropy"] = max(off["entropy"], float((out["entropy"][n] - want["entropy"]).abs().max()))
    if "lora" not in words:
        assert set(found) == set(wanted), set(found) ^ set(wanted)
        gaps = {name: (found[name] - wanted[name]).norm() for name in wanted}
        off["gradient"] = max(float(gap / wanted[name].norm().clamp(min=1e-6)) for name, gap in gaps.items())
        off["learned"] = gradient_error([found[name] for name in wanted], [*wanted.values()])
    told = [None] * size
    rows_out = [] if out is None else [row[:-1].tolist() for row in out["log_probs"].unbind()]
    torch.distributed.all_gather_object(told, (off, rows_out, seen))
    worst = {key: max(each[0][key] for each in told) for key in off}
    answers = told[0][1] if shared else [told[n % size][1][n // size] for n in range(len(rows))]
    return {"refused": "", "seen": told[0][2], **worst, "answers": answers}


if __name__ == "__main__":
    os.environ |= VERL
    from verl_cpu import registered

    registered()
    process_group()
    run_jobs(engine)
