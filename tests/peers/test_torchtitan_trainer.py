"""torchtitan 0.3.0's own trainer, from its command line to the gradients, with our collator in its dataloader.

`titan_train.py` is `python -m torchtitan.train` on a CPU; `titan_jobs.py` is the user's job. Every step is another layout
of two rows, and rank 0 compares the step's loss and gradients with every sample alone. `WITHOUT` is what the same rows
give without us.
"""

import importlib.util
import json
from typing import Any

import pytest
from processes import found_by

NEEDS = ("torchtitan", "torchdata")
pytestmark = pytest.mark.skipif(bool(importlib.util.find_spec("fla")), reason="fla is installed: it would be dispatched to")
EXACT, WITHOUT = 5e-6, 0.1


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Two processes have run every job: a JSON of what rank 0 found, by step, for each."""
    folder = tmp_path_factory.mktemp("titan")
    assert found_by("titan_train", folder, ranks=2) == [True]
    return lambda job: {step["step"]: step for step in json.loads((folder / f"{job}.json").read_text())}


def assert_as_alone(found: dict[str, Any], calls: list[list[int]], *steps: str) -> None:
    for name in steps:
        step = found[name]
        assert step["loss error"] <= EXACT, (name, step)
        assert step["gradient error"] <= EXACT, (name, step)
        assert [rank["wrong places"] for rank in step["ranks"]] == [0] * len(calls), (name, step)
        for rank, shape in zip(step["ranks"], calls):
            assert all(mask == shape for mask in rank["masks"]), (name, step)
    assert any(rank["masks"] for rank in found[steps[0]]["ranks"])


def test_qwen3_trains_on_each_sample_alone(train):
    """Positions alone for the first three; holes with segment_ids, through masks_in_forward."""
    found = train("qwen3")
    assert_as_alone(found, [[2, 256, 256]], "right", "left", "packed", "holes:ids")
    for name in ("left:theirs", "packed:theirs"):
        assert found[name]["gradient error"] > WITHOUT
        assert found[name]["ranks"][0]["wrong places"] > 10_000


def test_qwen3_trains_on_two_context_parallel_ranks(train):
    """torchtitan cuts tokens, labels, positions and the BlockMask: head-tail, and by blocks of work (PTRR)."""
    assert_as_alone(train("qwen3 shared"), [[2, 128, 256]] * 2, "left", "packed", "packed:ptrr")


def test_qwen3_5_trains_on_each_sample_alone(train):
    found = train("qwen3_5")
    assert_as_alone(found, [[2, 256, 256]], "right", "packed")
    offsets = [0, 60, 69, 119, 209, 256, 286, 386, 512]
    assert found["packed"]["ranks"][0]["offsets"] == [offsets] * 2
    assert found["packed:theirs"]["ranks"][0]["offsets"] == [[0, 256, 512]] * 2
    assert found["packed:theirs"]["gradient error"] > WITHOUT


def test_qwen3_5_trains_in_two_pipeline_stages(train):
    """1F1B with a row a micro-batch: the recurrent layer in one process, full attention in the other."""
    found = train("qwen3_5 shared")
    assert_as_alone(found, [[1, 256, 256]] * 2, "right", "left", "packed")
    first, last = found["packed"]["ranks"]
    assert first["offsets"][:2] == [[0, 60, 69, 119, 209, 256], [0, 30, 130, 256]]
    assert (first["masks"], last["offsets"]) == ([], [])
