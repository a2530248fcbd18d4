"""`megatron sft`, typed as its users type it: what arrives in the processes it starts.

The console entry starts everything: torchrun's ranks, and the dataloader's workers. A second plugin file
(`swift_recorder`) writes what each layer received there, and runs each sample again alone in the same process.
`megatron sft` runs with a CPU for CUDA and layers that compute in the place of Transformer Engine's (`megatron_on_cpu`).
"""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gloo_pool import Pool
from processes import CARDS, JOBS, QUIET, check_sizes, free_port, saved_model, words_of
from swift.megatron.arguments import MegatronSftArguments
from swift.utils.utils import _patch_get_type_hints
from transformers import HfArgumentParser

import collate_npu

NEEDS = ("swift", "mcore_bridge", "megatron", "matplotlib", "trl")


# --- what a user types: a tiny random Qwen3-Next with its tokenizer, a jsonl, and the command line

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLUGIN = str(ROOT / "collate_npu/integrations/swift/plugin.py")
RECORDER = str(HERE / "swift_recorder.py")

MODEL = ("--model_type", "qwen3_next", "--template", "chatml", "--torch_dtype", "float32", "--tuner_type", "full")
DATA = ("--load_from_cache_file", "false", "--max_length", "256", "--check_model", "false", "--logging_steps", "1")
_OFF = ("bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "apply_rope_fusion",
        "moe_permute_fusion", "cross_entropy_loss_fusion", "fp16", "bf16", "use_distributed_optimizer")  # fmt: skip
MEGATRON = (
    *MODEL, *DATA, "--micro_batch_size", "3", "--train_iters", "2", "--padding_free", "false", "--eval_iters", "0",
    "--ddp_backend", "gloo", "--use_cpu_initialization", "true", "--recompute_granularity", "none", "--clip_grad", "0",
    "--report_to", "print", "--no_save_optim", "true", "--no_save_rng", "true", "--masked_softmax_fusion", "false",
    "--megatron_extra_kwargs", '{"deterministic_mode": true, "persist_layer_norm": false}',
    *(word for name in _OFF for word in (f"--{name}", "false")),
)  # fmt: skip
"""No fusion, no half precision, Megatron's own rule of Gated DeltaNet in torch: what a CPU can run."""


def save_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(number: int = 6) -> list[dict[str, Any]]:
    """Samples of different lengths."""
    said = [("q" * (3 + 5 * (i % 4)), "a b c"[: 1 + i % 5]) for i in range(number)]
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said]


def run(*words: str, record: Path, ranks: int, program: str = "megatron", through: str = "") -> tuple[int, str, Any]:
    """`megatron sft ...` or `swift sft ...` through the console entry: exit code, output, and each rank's JSON."""
    record.mkdir(exist_ok=True)
    path = [str(ROOT), str(HERE.parent), str(HERE), str(HERE / "swift_site")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "SWIFT_RECORD": str(record)}
    given |= QUIET | ({"NPROC_PER_NODE": str(ranks), "MASTER_PORT": str(free_port())} if ranks > 1 else {})
    argv = [str(Path(sys.executable).with_name(program)), "sft", *words, "--output_dir", str(record / "out")]
    argv = [sys.executable, "-m", "collate_npu", *through.split(), "--", *argv] if through else argv
    done = subprocess.run(argv, env=given, cwd=record, capture_output=True, text=True, timeout=400)
    said = [json.loads(file.read_text()) for file in sorted(record.glob("rank*.json"))]
    return done.returncode, done.stdout + done.stderr, said


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    model = saved_model(folder, "qwen3_next", pad_is_eos=False, full_attention_interval=2)  # which mcore-bridge reads
    rows = save_rows(folder / "train.jsonl", chats())
    return folder, ("--model", model, "--dataset", rows)


# --- the whole run


def test_megatron_sft_on_two_ranks_gives_none_and_the_routers_their_padding(here):
    """ms-swift's defaults: flash attention, Megatron's own Gated DeltaNet; two workers a rank."""
    folder, data = here
    words = (*MEGATRON, *data, "--global_batch_size", "6", "--dataloader_num_workers", "2", "--train_iters", "1")
    words += ("--external_plugins", PLUGIN, RECORDER)
    code, said, ran = run(*words, record=folder / "two", ranks=2, through="watch --stop")
    assert code == 0, said[-3000:]
    assert re.search(r"collate-npu watch: 2 processes, no fault in (\d) of \1 forwards", said)
    assert len(ran) == 2
    for step in ran:
        width = max(step["lengths"])
        keep = [[1] * length + [0] * (width - length) for length in step["lengths"]]
        assert step["trainer"] == "MegatronTrainer"
        assert "attention_mask" not in step["sent"]  # by the worker
        assert step["keep"] == ["torch.bool", keep]
        assert [name.endswith("GatedDeltaNet") for name in step["layers"]] == [True, False, True]
        assert {*step["layers"].values()} == {None}
        assert [*step["routers"].values()] == [[[1 - real for real in row] for row in keep]] * 3
        assert step["error"] < 2e-5
    assert ran[0]["lengths"] != ran[1]["lengths"]


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


# --- each Megatron trainer, built by its own pipeline: what its loss pools, against every sample alone
#
# The pipelines of `megatron sft` and `megatron rlhf` parse the words a user types, load a checkpoint, and construct the
# trainer; a CPU stands for CUDA (`megatron_on_cpu`). GRPO and GKD need a rollout engine: of them the log-probabilities.


TRAINERS = {"seq_cls": "MegatronTrainer", "rm": "MegatronRewardTrainer", "dpo": "MegatronDPOTrainer"}


@pytest.fixture(scope="module")
def measure(here, tmp_path_factory):
    folder, pool = str(tmp_path_factory.mktemp("trainers")), Pool(1)
    yield lambda name, *how: pool(f"swift_work.{name}", here[1][1], folder, *how, seconds=300)[0]
    pool.close()


@pytest.mark.parametrize("kind", TRAINERS)
def test_what_a_trainer_pools_is_what_its_samples_give_alone(measure, kind):
    """Two batches are prepared and run forward before the loss of the second, then of the first, is taken."""
    found = measure("measure", kind, [2, 1], [1, 0])
    assert found["trainer"] == TRAINERS[kind]
    assert found["finite"]
    assert len(set(found["widths"])) == 2
    assert found["error"] <= 1e-5 * (1 + found["size"])
    assert found["size"] > 0.01


def test_a_flat_row_hands_the_recurrent_layers_offsets_of_the_whole_row(measure):
    """`--padding_free true`, its default, with Megatron's own Gated DeltaNet; fla's kernels are the references."""
    found = measure("flat")
    assert "no fault in 1 of 1 forwards" in found["said"]
    offsets, width = found["reached"]
    assert offsets[-1] == width == found["width"]
    assert [b - a for a, b in pairwise(offsets)] == found["lengths"]
    assert max(found["errors"]) < 2e-5
