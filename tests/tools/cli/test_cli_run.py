"""`collate-npu run`: training scripts that know nothing of it. `python test_cli_run.py FAMILY ROWS HOW` is one of them."""

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import pytest
import torch
from torch import distributed as dist, nn

from collate_npu.testing import byte_tokenizer, tiny_model

pytest.importorskip("wrapt")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
OURS = [sys.executable, "-m", "collate_npu"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SAMPLES = [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in (5, 11, 8, 3)]
RAY = pytest.param("qwen3_next left Ray", marks=pytest.mark.skipif(find_spec("ray") is None, reason="no ray"))
CASES = ["qwen3_next left Trainer", "qwen3_next flat Trainer", "qwen3 left Trainer", "qwen3_next flat DDP", RAY]


def started(words, *before, **env):
    """Return how far the gradient of a step is from that of each sample alone; what was said; how it ended."""
    command = [*before, sys.executable, *(["-m", *TORCHRUN] if "DDP" in words else []), __file__, *words.split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=folder)
    off = re.findall(r"^off (\S+)$", done.stdout, flags=re.M)
    return max(map(float, off), default=done.stderr), done.stderr, done.returncode


@pytest.mark.draws(2)
@pytest.mark.parametrize("words", CASES)
def test_a_step_is_that_of_each_sample_alone(words):
    assert started(words)[0] > 0.01
    off, said, _ = started(words, *OURS, "run", "--")
    assert off < 1e-5
    line = (
        r"run: (1 process|2 processes), (Qwen\w+ForCausalLM): by sequence · \d+ batches, padding saved: (\d+)% of \d+ places"
    )
    processes, name, saved = re.search(line, said).groups()
    assert (processes == "2 processes", saved != "0") == ("DDP" in words, "left" in words)
    assert f"first step: {name}: every layer with a known kernel got what the batch says · refused: nothing" in said


def test_what_is_refused_or_not_adapted_is_said_and_the_exit_code_is_the_commands_own():
    _, said, code = started("qwen3_next flat compiled", *OURS, "run", "--no-check", "--")
    assert (code, "first step: not checked · refused: 1 times attention_mask: got Segments(B=1, S=27" in said) == (1, True)
    own = "from collate_npu.testing import tiny_model; from collate_npu import adapt; x = torch.ones(1, 2, dtype=int); "
    own += "model = tiny_model('qwen3', vocab_size=9); h = adapt(model); model(x, x); sys.exit(h.way != 'by sequence')"
    cases = ("sys.exit(3)", 3, "NOTHING WAS ADAPTED"), (own, 0, "Qwen3ForCausalLM: as its user adapted it")
    for script, code, line in cases:
        command = [*OURS, "run", "--", sys.executable, "-c", f"import torch, sys; {script}"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, line in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize("words", ["qwen3_next flat loop", RAY])
def test_a_cluster_that_runs_already_and_watch_beside_it(words):
    """Nobody gathers what the processes did, so each says it at its end; a `watch` sees what they run."""
    asked = subprocess.run([*OURS, "run", "--env"], capture_output=True, text=True, check=True).stdout
    watched, env = ([], {"RUNTIME": asked}) if "Ray" in words else ([*OURS, "watch", "--"], json.loads(asked)["env_vars"])
    off, said, _ = started(words, *watched, **env)
    assert off < 1e-5, said
    assert "collate-npu run: 1 process, Qwen3NextForCausalLM: by sequence · 5 batches" in said
    assert bool(watched) == bool(re.search(r"collate-npu watch: 1 process, no fault in \d+ of", said))


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def loss_of(logits, labels, samples):
    summed = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return summed / sum(len(each["labels"]) - 1 for each in samples)


class Kept(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.found = gradient(self.model)
        return loss


def main(family, rows, how):
    torch.manual_seed(0)
    model, samples = tiny_model(family, vocab_size=257).train(), SAMPLES
    if how == "DDP":
        dist.init_process_group("gloo")
        samples = SAMPLES[dist.get_rank() :: 2]
    for each in samples:
        ids = torch.tensor([each["input_ids"]])
        loss_of(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, ids, samples).backward()
    wanted = gradient(model)
    model.zero_grad()
    model = pickle.loads(pickle.dumps(model)) if how == "loop" else model
    left = transformers.DataCollatorForSeq2Seq(byte_tokenizer(padding_side="left"))
    collator = left if rows == "left" else transformers.DataCollatorWithFlattening()
    if how == "Trainer":
        quiet = {"max_steps": 1, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "save_strategy": "no"}
        trainer = Kept(model, transformers.TrainingArguments(**quiet), train_dataset=SAMPLES, data_collator=collator)
        trainer.train()
        found = trainer.found
    else:
        wrappers = {
            "DDP": nn.parallel.DistributedDataParallel,
            "compiled": lambda model: torch.compile(model, backend="eager"),
        }
        called, batch = wrappers.get(how, lambda model: model)(model), collator(samples)
        loss_of(called(**{**batch, "labels": None}).logits, batch["labels"], samples).backward()
        found = gradient(model)
    if how == "DDP":
        dist.all_reduce(wanted)
        wanted /= 2
    return float((found - wanted).norm() / wanted.norm())


def in_an_actor(*words):
    """Of a cluster that this process starts, whose workers have a PYTHONPATH of their own."""
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), "of/the/cluster")))
    ray.init(num_cpus=1, include_dashboard=False, runtime_env=json.loads(os.environ.get("RUNTIME", "null")))
    actor = ray.remote(type("Actor", (), {"step": lambda self: (main(*words), os.environ["PYTHONPATH"])})).remote()
    off, path = ray.get(actor.step.remote())
    return off if "of/the/cluster" in path else path


if __name__ == "__main__":
    print(f"off {(in_an_actor if 'Ray' in sys.argv else main)(*sys.argv[1:])}\n", end="", flush=True)
