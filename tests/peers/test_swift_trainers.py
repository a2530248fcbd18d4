"""ms-swift 4.6.0: each Megatron trainer, built by its own pipeline: what its loss pools, against every sample alone.

The pipelines of `megatron sft` and `megatron rlhf` parse the words a user types, load a checkpoint, and construct the
trainer; a CPU stands for CUDA (`megatron_on_cpu`). GRPO and GKD need a rollout engine: of them the log probabilities alone.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
for _name in ("swift", "mcore_bridge", "trl"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"{_name} is not installed", allow_module_level=True)

from gloo_pool import Pool  # noqa: E402
from swift_launch import save_model  # noqa: E402

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
    found = measure("measure", kind, [2, 1], [1, 0], True)
    assert found["trainer"] == TRAINERS[kind]
    assert found["finite"]
    assert len(set(found["widths"])) == 2
    assert found["error"] <= 1e-5 * (1 + found["size"])
    assert found["size"] > 0.01
    theirs = measure("measure", kind, [2, 1], [1, 0], False)
    assert theirs["error"] <= 1e-5 * (1 + found["size"])  # right padding, local kernels, one rank: right without us too


def test_the_log_probabilities_of_grpo_are_those_of_samples_alone(measure):
    found = measure("per_token")
    assert found["error"] <= 1e-5 * (1 + found["size"])
    assert found["size"] > 1
