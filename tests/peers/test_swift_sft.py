"""`megatron sft` and `swift sft`, typed as their users type them: what they log of their first step.

The console entry starts everything: torchrun's ranks, and the dataloader's workers. `megatron sft` runs with a CPU for CUDA
and layers that compute in the place of Transformer Engine's (`megatron_on_cpu`), `swift sft` with a stand-in for flash_attn
(`swift_flash`). The truth is transformers' model of the same weights, on each sample alone.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import CARDS, JOBS, QUIET, check_sizes, free_port, saved_model, words_of
from swift.megatron.arguments import MegatronSftArguments
from swift.utils.utils import _patch_get_type_hints
from swift_world import alone, template
from transformers import AutoModelForCausalLM, HfArgumentParser

import collate_npu

NEEDS = ("swift", "mcore_bridge", "megatron", "matplotlib", "trl")


# --- what a user types: a tiny random Qwen3-Next with its tokenizer, a jsonl, and the command line

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLUGIN = str(ROOT / "collate_npu/integrations/swift/plugin.py")
FLASH = str(HERE / "swift_flash.py")

MODEL = ("--template", "chatml", "--torch_dtype", "float32", "--tuner_type", "full")
DATA = ("--load_from_cache_file", "false", "--max_length", "256", "--check_model", "false", "--logging_steps", "1")
_OFF = ("bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "apply_rope_fusion",
        "moe_permute_fusion", "cross_entropy_loss_fusion", "fp16", "bf16", "use_distributed_optimizer")  # fmt: skip
MEGATRON = (
    *MODEL, *DATA, "--model_type", "qwen3_next", "--micro_batch_size", "3", "--train_iters", "2", "--padding_free", "false",
    "--eval_iters", "0",
    "--ddp_backend", "gloo", "--use_cpu_initialization", "true", "--recompute_granularity", "none", "--clip_grad", "0",
    "--report_to", "print", "--no_save_optim", "true", "--no_save_rng", "true", "--masked_softmax_fusion", "false",
    "--megatron_extra_kwargs", '{"deterministic_mode": true, "persist_layer_norm": false}',
    *(word for name in _OFF for word in (f"--{name}", "false")),
)  # fmt: skip
"""No fusion, no half precision, Megatron's own rule of Gated DeltaNet in torch: what a CPU can run."""


def save_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": role, "content": each} for role, each in zip(("user", "assistant"), said)]


def chats(number: int = 6) -> list[dict[str, Any]]:
    """Samples of different lengths."""
    return [{"messages": chat("q" * (3 + 5 * (i % 4)), "a b c"[: 1 + i % 5])} for i in range(number)]


def run(*words: str, folder: Path, ranks: int, program: str, command: str = "sft", through: str = "") -> tuple[int, str]:
    """`megatron sft ...` or `swift sft ...` through the console entry: exit code and output."""
    path = [str(ROOT), str(HERE.parent), str(HERE), str(HERE / "swift_site")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    given |= QUIET | ({"NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(free_port())} if ranks else {})
    argv = [str(Path(sys.executable).with_name(program)), command, *words, "--output_dir", str(folder / "out")]
    argv = [sys.executable, "-m", "collate_npu", *through.split(), "--", *argv] if through else argv
    done = subprocess.run(argv, env=given, cwd=folder, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def first_step(folder: Path) -> dict[str, float]:
    return json.loads(next(folder.glob("out/*/logging.jsonl")).read_text().partition("\n")[0])


def truth(path: str, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """The loss and the norm of the gradient of all samples alone."""
    model = AutoModelForCausalLM.from_pretrained(path)
    encoder = template(transformers=model.config.model_type)
    _, loss, gradient = alone(model, [encoder.encode(row) for row in rows])
    return float(loss), float(gradient.double().norm())


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    model = saved_model(folder, "qwen3_next", pad_is_eos=False, full_attention_interval=2)  # which mcore-bridge reads
    return folder, model, save_rows(folder / "train.jsonl", chats())


def test_megatron_sft_on_two_ranks(here):
    """ms-swift's defaults: flash attention, Megatron's own Gated DeltaNet; two workers a rank."""
    folder, model, rows = here
    words = (*MEGATRON, "--model", model, "--dataset", rows, "--global_batch_size", "6", "--dataloader_num_workers", "2")
    words += ("--train_iters", "1", "--external_plugins", PLUGIN)
    code, said = run(*words, folder=folder, ranks=2, program="megatron", through="watch --stop")
    assert code == 0, said[-3000:]
    assert re.search(r"collate-npu watch: 2 processes, no fault in (\d) of \1 forwards", said)
    assert first_step(folder)["loss"] == pytest.approx(truth(model, chats())[0], rel=1e-4)


SFT = (*MODEL, *DATA, "--max_steps", "1", "--use_cpu", "true", "--save_strategy", "no", "--report_to", "none")
LAYOUTS = {"left": ("--padding_side", "left"), "packed": ("--padding_free", "true", "--attn_impl", "flash_attn")}
LAYOUTS |= {"shared": ("--sequence_parallel_size", "2")}
TYPED = [*(f"qwen3_next packed {who} 1" for who in ("own", "plugin", "run")), "qwen3_next shared run 2"]
REFUSED = {"shared": "A hook cut these rows", "plugin": "put `collate-npu run --` before the command"}


@pytest.mark.draws(1)
@pytest.mark.parametrize("job", [*TYPED, "qwen3 packed run 1", "qwen3_next left run 2"])
def test_swift_sft(job, tmp_path):
    """With its workers, gradient checkpointing and labels as by default."""
    family, layout, who, ranks = job.split()
    path, data = saved_model(tmp_path, family, pad_is_eos=False), chats(4)
    rows, gloo = save_rows(tmp_path / "rows.jsonl", data), ["--ddp_backend", "gloo"] * (ranks == "2")
    words = (*SFT, "--external_plugins", FLASH, *[PLUGIN] * (who == "plugin"), *LAYOUTS[layout], *gloo, "--model", path)
    words += ("--model_type", family, "--dataset", rows, "--per_device_train_batch_size", str(4 // int(ranks)))
    through = who if who == "run" else ""
    code, said = run(*words, folder=tmp_path, ranks=2 * (ranks == "2"), program="swift", through=through)
    if layout in REFUSED or who in REFUSED:
        assert (bool(code), REFUSED.get(layout, REFUSED.get(who)) in said) == (True, True), said[-3000:]
        return
    assert code == 0, said[-3000:]
    assert (first_step(tmp_path)["grad_norm"] == pytest.approx(truth(path, data)[1], rel=1e-5)) == (who != "own")
    found = re.search(r"collate-npu run: (\d) process\w*, Qwen\w+: by sequence .* got what the batch says", said)
    assert (found and found[1]) == (ranks if who == "run" else None)


# --- the launch script of the guide, its words parsed by the class that `megatron sft` parses them with


@pytest.mark.parametrize("job", JOBS)
def test_megatron_sft_knows_every_word(job, tmp_path):
    words, env = words_of("ms-swift.sh", "megatron", job, tmp_path)
    with _patch_get_type_hints():
        parser = HfArgumentParser([MegatronSftArguments])
    given, rest = parser.parse_known_args(words[1:])
    assert (words[0], rest) == ("sft", [])
    sizes = [getattr(given, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context")]
    check_sizes(job, *sizes, CARDS // (sizes[0] * sizes[1] * sizes[2]), given.expert_model_parallel_size)
    assert (given.padding_free, given.sequence_parallel) == (False, True)
    assert env["NPROC_PER_NODE"] == str(CARDS)
    assert (given.model, given.dataset) == ("MODEL", ["DATASET"])
    plugin = Path(collate_npu.__file__).parent / "integrations/swift/plugin.py"
    assert [Path(path) for path in given.external_plugins] == [plugin]
    assert given.global_batch_size % (given.micro_batch_size * CARDS // (sizes[0] * sizes[1] * sizes[2])) == 0


# --- each Megatron trainer: a step on one batch is that of its samples, each a batch of its own


def paired(i: int) -> dict[str, Any]:
    asked = "q" * (2 + 3 * i)
    return {"messages": chat(asked, "good"), "rejected_messages": chat(asked, "b" * (i + 1))}


CLASSES = ("--task_type", "seq_cls", "--num_labels", "3", "--problem_type", "single_label_classification")
TRAINERS: dict[str, Any] = {
    "seq_cls": ("sft", CLASSES, lambda i: {"messages": chat("q" * (2 + 3 * i)), "label": i % 3}),
    "rm": ("rlhf", ("--rlhf_type", "rm"), paired),
    "dpo": ("rlhf", ("--rlhf_type", "dpo"), paired),
}


@pytest.mark.draws(1)
@pytest.mark.parametrize("kind", TRAINERS)
def test_what_a_trainer_logs_of_a_batch_it_logs_of_samples_alone(kind, here, tmp_path):
    """Its loss, the norm of its gradient and what it pools. GRPO and GKD need a rollout engine."""
    command, more, row = TRAINERS[kind]
    rows = save_rows(tmp_path / "rows.jsonl", [row(i) for i in range(1, 4)])
    words = (*MEGATRON, *more, "--model", here[1], "--dataset", rows, "--external_plugins", PLUGIN, "--train_iters", "1")
    words += ("--attention_backend", "local", "--global_batch_size", "3", "--dataset_shuffle", "false")
    steps = []
    for size in ("3", "1"):
        folder = tmp_path / size
        folder.mkdir()
        given = {"folder": folder, "ranks": 1, "program": "megatron", "command": command}
        code, said = run(*words, "--micro_batch_size", size, **given)
        assert code == 0, said[-3000:]
        steps.append(first_step(folder))
    timed = ("memory(GiB)", "train_speed(s/it)")
    together, alone = ({name: x for name, x in step.items() if isinstance(x, float) and name not in timed} for step in steps)
    assert together == pytest.approx(alone, rel=1e-4)
    assert together["grad_norm"] > 0.01
