"""ms-swift 4.6.0: each Megatron trainer, built by its own pipeline: what its loss pools, against every sample alone.

The pipelines of `megatron sft` and `megatron rlhf` parse the words a user types, load a checkpoint, and construct the
trainer; a CPU stands for CUDA (`megatron_on_cpu`). GRPO and GKD need a rollout engine: of them the log probabilities alone.
"""

from itertools import pairwise

import pytest
from gloo_pool import Pool
from swift_launch import save_model

NEEDS = ("swift", "mcore_bridge", "megatron", "trl")

TRAINERS = {
    "seq_cls": "MegatronTrainer",
    "embedding": "MegatronEmbeddingTrainer",
    "reranker": "MegatronRerankerTrainer",
    "rm": "MegatronRewardTrainer",
    "dpo": "MegatronDPOTrainer",
    "kto": "MegatronKTOTrainer",
}


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    model = save_model(folder / "model")
    pool = Pool(1)
    yield lambda name, *how: pool(f"swift_trainers_work.{name}", model, str(folder), *how, seconds=300)[0]
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
