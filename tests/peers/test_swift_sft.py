"""`swift sft` and `megatron sft`, typed as their users type them: what arrives in the processes they start.

The console entries start everything: the trainer's process, torchrun's ranks, the dataloader's workers. A second plugin file
(`swift_recorder`) writes what each layer received there, and runs each sample again alone in the same process.
`megatron sft` runs with a CPU for CUDA and layers that compute in the place of Transformer Engine's (`megatron_on_cpu`).
"""

from itertools import pairwise
from pathlib import Path

import pytest
from gloo_pool import Pool
from launches import CARDS, JOBS, check_sizes, words_of
from swift.megatron.arguments import MegatronSftArguments
from swift.utils.utils import _patch_get_type_hints
from swift_launch import MEGATRON, PLUGIN, RECORDER, TRANSFORMERS, chats, run, save_model, save_rows
from transformers import HfArgumentParser

import collate_npu

NEEDS = ("swift", "mcore_bridge", "megatron", "matplotlib", "trl")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    model, rows = save_model(folder / "model"), save_rows(folder / "train.jsonl", chats())
    return folder, ("--model", model, "--dataset", rows)


def rows_of(lengths, width, side="right"):
    real = [[1] * n for n in lengths]
    return [(row + [0] * (width - len(row))) if side == "right" else ([0] * (width - len(row)) + row) for row in real]


def masks(step, ending):
    """What the layers of one kind received."""
    found = [mask for name, mask in step["layers"].items() if name.endswith(ending)]
    assert found
    return found


# --- the transformers backend


def test_swift_sft_trains_each_sample_as_alone(here):
    """Its own 2D mask is right, on either side (test_swift_transformers); our plugin changes nothing of it."""
    folder, data = here
    words = (*TRANSFORMERS, *data, "--padding_side", "left", "--external_plugins", PLUGIN, RECORDER)
    code, said, ran = run("swift", *words, record=folder / "swift")
    assert code == 0, said[-3000:]
    ((step,),) = [process["steps"] for process in ran]
    width = max(step["lengths"])
    assert step["mask"] == {"dtype": "int64", "shape": [3, width], "rows": rows_of(step["lengths"], width, "left")}
    assert masks(step, "GatedDeltaNet") == [step["mask"], step["mask"]]
    assert [mask["shape"] for mask in masks(step, "Attention")] == [[3, 1, width, width]]
    assert step["ours"], "the plugin has run"
    assert step["error"] < 2e-5
    assert step["alone_loss"] == pytest.approx(step["loss"], rel=1e-5)
    assert step["blind"] > 0.5  # told nothing, the same model is wrong


# --- Megatron


@pytest.mark.long
def test_megatron_sft_on_two_ranks_gives_none_and_the_routers_their_padding(here):
    """ms-swift's defaults: flash attention, Megatron's own Gated DeltaNet; two workers a rank."""
    folder, data = here
    words = (*MEGATRON, *data, "--global_batch_size", "6", "--dataloader_num_workers", "2", "--train_iters", "1")
    words += ("--external_plugins", PLUGIN, RECORDER)
    code, said, ran = run("megatron", *words, record=folder / "two", ranks=2, COLLATE_NPU_GUARD="1")
    assert code == 0, said[-3000:]
    assert said.count(" got what the batch says: ") == 2
    assert len(ran) == 2
    for process in ran:
        (step,) = process["steps"]
        width, keep = max(step["lengths"]), rows_of(step["lengths"], max(step["lengths"]))
        assert step["trainer"] == "MegatronTrainer"
        assert "attention_mask" not in step["sent"]  # by the worker
        assert step["sent"]["attention_mask_2d"] == {"dtype": "bool", "shape": [3, width], "rows": keep}
        assert set(masks(step, "GatedDeltaNet") + masks(step, "SelfAttention")) == {None}
        padding = [[1 - real for real in row] for row in keep]
        assert [seen["rows"] for seen in step["routers"].values()] == [padding] * 3
        assert step["error"] < 2e-5
    assert ran[0]["steps"][0]["lengths"] != ran[1]["steps"][0]["lengths"]


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
    assert (env["COLLATE_NPU_GUARD"], env["NPROC_PER_NODE"]) == ("1", str(CARDS))
    assert (given.model, given.dataset) == ("MODEL", ["DATASET"])
    assert [Path(path) for path in given.external_plugins] == [
        Path(collate_npu.__file__).parent / "integrations/swift/plugin.py"
    ]
    assert given.global_batch_size % (given.micro_batch_size * CARDS // (sizes[0] * sizes[1] * sizes[2])) == 0


def test_a_word_that_is_not_ms_swifts_would_be_seen():
    with _patch_get_type_hints():
        parser = HfArgumentParser([MegatronSftArguments])
    assert parser.parse_known_args(["--expert_parallel_size", "4"])[1] == ["--expert_parallel_size", "4"]


# --- each Megatron trainer, built by its own pipeline: what its loss pools, against every sample alone
#
# The pipelines of `megatron sft` and `megatron rlhf` parse the words a user types, load a checkpoint, and construct the
# trainer; a CPU stands for CUDA (`megatron_on_cpu`). GRPO and GKD need a rollout engine: of them the log-probabilities.


TRAINERS = {
    "seq_cls": "MegatronTrainer",
    "embedding": "MegatronEmbeddingTrainer",
    "reranker": "MegatronRerankerTrainer",
    "rm": "MegatronRewardTrainer",
    "dpo": "MegatronDPOTrainer",
    "kto": "MegatronKTOTrainer",
}


@pytest.fixture(scope="module")
def measure(here, tmp_path_factory):
    folder, pool = str(tmp_path_factory.mktemp("trainers")), Pool(1)
    yield lambda name, *how: pool(f"swift_trainers_work.{name}", here[1][1], folder, *how, seconds=300)[0]
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


def test_the_log_probabilities_of_grpo_are_those_of_samples_alone(measure):
    found = measure("per_token")
    assert found["error"] <= 1e-5 * (1 + found["size"])
    assert found["size"] > 1


def test_a_flat_row_hands_the_recurrent_layers_offsets_of_the_whole_row(measure):
    """`--padding_free true`, its default, with Megatron's own Gated DeltaNet; fla's kernels are the references."""
    found = measure("flat")
    assert found["said"].count(" got what the batch says: ") == 1
    offsets, width = found["reached"]
    assert offsets[-1] == width == found["width"]
    assert [b - a for a, b in pairwise(offsets)] == found["lengths"]
    assert max(found["errors"]) < 2e-5
