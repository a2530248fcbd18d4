"""`collate-npu run`: training scripts that know nothing of it. `python test_cli_run.py FAMILY ROWS HOW` is one of them."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import distributed as dist, nn

from collate_npu.testing import byte_tokenizer, tiny_model

pytest.importorskip("wrapt")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
RUN = [sys.executable, "-m", "collate_npu", "run"]
SAMPLES = [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in (5, 11, 8, 3)]


def started(*words, before=(), **env):
    process = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"] if words[-1] in ("DDP", "FSDP2") else []
    command = [*before, sys.executable, *["-m"][: len(process)], *process, __file__, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def off(done):
    """How far the gradient of a step is from that of each sample alone."""
    return max(map(float, re.findall(r"^off (\S+)$", done.stdout, flags=re.M)), default=done.stderr)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    ["qwen3_next left Trainer", "qwen3_next flat Trainer", "qwen3 left Trainer", "qwen3_next flat loop"]
    + [f"qwen3_next flat {how}" for how in ("LoRA", "DDP", "FSDP2")],
)
def test_a_step_is_that_of_each_sample_alone(words):
    assert off(started(*words.split())) > 0.01
    done = started(*words.split(), before=[*RUN, "--"])
    assert off(done) < 1e-5
    said = done.stderr.splitlines()[-1]
    processes = "2 processes" if "DDP" in words or "FSDP2" in words else "1 process,"
    assert f"collate-npu run: {processes}" in said
    assert "ForCausalLM: by sequence" in said
    assert "ForCausalLM: every layer with a known kernel got what the batch says · refused: nothing" in said
    assert ("padding saved: 0%" in said) == ("flat" in words)


@pytest.mark.long
def test_what_is_refused_or_not_adapted_is_said_and_the_exit_code_is_the_commands_own():
    done = started("qwen3_next", "flat", "compiled", before=[*RUN, "--no-check", "--"])
    assert done.returncode == 1, done.stderr
    assert (
        "first step: not checked · refused: 1 times attention_mask: got Segments(B=1, S=27" in done.stderr.splitlines()[-1]
    )
    done = subprocess.run(
        [*RUN, "--", sys.executable, "-c", "import torch, sys; sys.exit(3)"], capture_output=True, text=True
    )
    assert (done.returncode, "NOTHING WAS ADAPTED" in done.stderr) == (3, True)


@pytest.mark.long
def test_a_cluster_that_runs_already_and_watch_beside_it():
    """Nobody gathers what the processes did, so each says it at its end; a `watch` sees what they run."""
    asked = subprocess.run([*RUN, "--env"], capture_output=True, text=True, check=True).stdout
    watch = [sys.executable, "-m", "collate_npu", "watch", "--"]
    done = started("qwen3_next", "flat", "loop", before=watch, **json.loads(asked)["env_vars"])
    assert off(done) < 1e-5
    assert "collate-npu run: 1 process, Qwen3NextForCausalLM: by sequence · 5 batches" in done.stderr
    assert re.search(r"collate-npu watch: 1 process, no fault in \d+ of", done.stderr)


def gradient(model):
    grads = (
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters() if p.grad is not None
    )
    return torch.cat([grad.flatten() for grad in grads])


def alone(model, samples):
    """The gradient of the mean loss of these samples, one by one."""
    for each in samples:
        ids = torch.tensor([each["input_ids"]])
        loss_of(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, ids, samples).backward()
    found = gradient(model)
    model.zero_grad()
    return found


def loss_of(logits, labels, samples):
    summed = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return summed / sum(len(each["labels"]) - 1 for each in samples)


def step_of_trainer(model, collator):
    found = []

    class Kept(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            found.append(gradient(self.model))
            return loss

    plain = {"max_steps": 1, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    args = transformers.TrainingArguments("out", remove_unused_columns=False, **plain)
    Kept(model, args, train_dataset=SAMPLES, data_collator=collator).train()
    return found[0]


def wrapped(model, how):
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if how == "FSDP2":
        mesh = dist.init_device_mesh("cpu", (2,))
        return [dist.fsdp.fully_shard(each, mesh=mesh) for each in (*model.model.layers, model)][-1]
    return torch.compile(model, backend="eager") if how == "compiled" else model


def main(family, rows, how):
    torch.manual_seed(0)
    model, samples = tiny_model(family, vocab_size=257).train(), SAMPLES
    if how == "LoRA":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "in_proj_qkvz"], init_lora_weights=False))
    ranks = how in ("DDP", "FSDP2")
    if ranks:
        dist.init_process_group("gloo")
        samples = SAMPLES[dist.get_rank() :: 2]
    wanted = alone(model, samples)
    left = transformers.DataCollatorForSeq2Seq(byte_tokenizer(padding_side="left"))
    collator = left if rows == "left" else transformers.DataCollatorWithFlattening()
    if how == "Trainer":
        found = step_of_trainer(model, collator)
    else:
        batch, called = collator(samples), wrapped(model, how)
        loss_of(called(**{**batch, "labels": None}).logits, batch["labels"], samples).backward()
        found = gradient(model)
    if ranks:
        dist.all_reduce(wanted)
        wanted /= 2
    print(f"off {float((found - wanted).norm() / wanted.norm())}\n", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
