"""torchtitan 0.3.0's own trainer, from its command line to the gradients, with our collator in its dataloader.

`titan_jobs.py` is `python -m torchtitan.train` on a CPU, and the user's job. Every step is another layout
of two rows, and rank 0 compares the step's loss and gradients with every sample alone.
"""

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest
import titan_kernels
from cells import Stack, verdict
from processes import found_by
from rotation import part

NEEDS = ("torchtitan", "torchdata")
pytestmark = [
    pytest.mark.long("torchtitan's trainer"),
    pytest.mark.skipif(bool(importlib.util.find_spec("fla")), reason="fla is installed: it would be dispatched to"),
]
EXACT = 5e-6
FAMILIES = part(("llama3", "deepseek_v3", "gpt_oss"), 1)
STACK = Stack("torchtitan", ("torchtitan",), "peers_misc")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Two processes have run every job: a JSON of what rank 0 found, by step, for each."""
    folder = tmp_path_factory.mktemp("titan")
    assert found_by("titan_jobs", folder, ranks=2) == [True]
    return lambda job: {step["step"]: step for step in json.loads((folder / f"{job}.json").read_text())}


def assert_as_alone(found: dict[str, Any], calls: list[list[int]], *steps: str) -> None:
    for name in steps:
        step = found[name]
        assert step["loss error"] <= EXACT, (name, step)
        assert step["gradient error"] <= EXACT, (name, step)
        assert len(step["ranks"]) == len(calls)
        for rank, shape in zip(step["ranks"], calls):
            assert all(mask == shape for mask in rank["masks"]), (name, step)
    assert any(rank["masks"] for rank in found[steps[0]]["ranks"])


def test_qwen3_trains_on_each_sample_alone(train):
    """Positions alone for the first three; holes with segment_ids, through masks_in_forward."""
    found = train("qwen3")
    assert_as_alone(found, [[2, 256, 256]], "right", "left", "packed", "holes:ids")


def test_qwen3_trains_on_two_context_parallel_ranks(train):
    """torchtitan cuts tokens, labels, positions and the BlockMask: head-tail, and by blocks of work (PTRR)."""
    assert_as_alone(train("qwen3 shared"), [[2, 128, 256]] * 2, "left", "packed", "packed:ptrr")


def test_qwen3_5_trains_on_each_sample_alone(train):
    found = train("qwen3_5")
    assert_as_alone(found, [[2, 256, 256]], "right", "packed")
    offsets = [0, 60, 69, 119, 209, 256, 286, 386, 512]
    assert found["packed"]["ranks"][0]["offsets"] == [offsets] * 2


def test_qwen3_5_trains_in_two_pipeline_stages(train):
    """1F1B with a row a micro-batch: the recurrent layer in one process, full attention in the other."""
    found = train("qwen3_5 shared")
    assert_as_alone(found, [[1, 256, 256]] * 2, "right", "left", "packed")
    first, last = found["packed"]["ranks"]
    assert first["offsets"][:2] == [[0, 60, 69, 119, 209, 256], [0, 30, 130, 256]]
    assert (first["masks"], last["offsets"]) == ([], [])


# --- cells


LINE = "collate_fn=TitanCollator(PaddingCollator(...)) in the dataloader"
NO_PADDING = "torchtitan's loaders pack, and none pads"
STEPS = {"padded right": "right", "padded left": "left", "packed": "packed"}


def measured(step):
    return verdict(max(step["loss error"], step["gradient error"]))


@pytest.mark.parametrize("layout", [*STEPS, "context parallel"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", *FAMILIES])
def test_cells(train, family, layout):
    """Its own trainer on its own packed rows, and on ours; errors are those of the loss and the gradients, relative."""
    if layout == "context parallel" and family == "qwen3_5":
        none = verdict(refused=refusal_to_share_out_a_recurrent_layer())
        STACK.tell(family, layout, alone=none, ours=none, line=LINE)
        return
    found = train(f"{family} shared" if layout == "context parallel" else family)
    own = layout in ("packed", "context parallel")
    ours = [measured(found[step]) for step in ([STEPS[layout]] if layout in STEPS else ["left", "packed"])]
    alone = measured(found["full:own"]) if own else verdict(not_run=NO_PADDING)
    assert (alone["verdict"], {each["verdict"] for each in ours}) == ("right" if own else "not run", {"right"})
    STACK.tell(family, layout, alone=alone, ours=max(ours, key=lambda each: each["error"]), line=LINE)


def refusal_to_share_out_a_recurrent_layer():
    with titan_kernels.with_fla():
        from torchtitan.models.qwen3_5.parallelize import parallelize_qwen3_5

        settings: Any = dict.fromkeys(("training", "ac_config", "dump_folder"))
        compiled = SimpleNamespace(enable=False, components=[])
        settings |= {"parallelism": SimpleNamespace(spmd_backend="partial_dtensor"), "compile_config": compiled}
        with pytest.raises(NotImplementedError, match="GatedDeltaNet") as caught:
            parallelize_qwen3_5(None, parallel_dims=SimpleNamespace(cp_enabled=True), **settings)
    return str(caught.value)
