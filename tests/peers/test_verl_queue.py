"""verl 0.9.1's trainer over TransferQueue 0.1.11: jagged rows through the queue to two Ray workers, and answers back."""

import os

import pytest
from processes import found_by

NEEDS = ("verl", "ray", "transfer_queue")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queue")
    local = {"RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    return found_by("verl_queue_work", folder, folder, variants=({**os.environ, **local},))[0]


@pytest.mark.long
def test_rows_of_the_queue_are_as_alone(found):
    print(found)
    assert found["layout"] == "torch.jagged"
    assert found["log_probs"] < 1e-5
    assert found["entropy"] < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["own", "ours"])
def test_main_ppo(who, tmp_path):
    """verl's own measure: the actor's probabilities in its batches, beside those that the server told of each row alone."""
    local = {"RAY_ADDRESS": "", "HYDRA_FULL_ERROR": "1"}
    (found,) = found_by("verl_ppo_work", tmp_path, tmp_path, who, variants=(local,))
    off = found["training/rollout_probs_diff_max"]
    print(who, off, found["actor/grad_norm"])
    assert off > 1e-3 if who == "own" else off < 1e-5
