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
from cells import Stack, verdict, worst
from processes import found_by
from rotation import some

NEEDS = ("torchtitan", "torchdata")
pytestmark = [
    pytest.mark.together("torchtitan's trainer"),
    pytest.mark.skipif(bool(importlib.util.find_spec("fla")), reason="fla is installed: it would be dispatched to"),
]
EXACT = 5e-6
FAMILIES = some(("llama3", "deepseek_v3", "gpt_oss"), 1)
STACK = Stack("torchtitan", ("torchtitan",), "peers_misc")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Two processes have run every job: a JSON of what rank 0 found, by step, for each."""
    folder = tmp_path_factory.mktemp("titan")
    assert found_by("titan_jobs", folder, ranks=2) == [True]
    return lambda job: {step["step"]: step for step in json.loads((folder / f"{job}.json").read_text())}


ONE, SHARED = (2, 256, 256), (2, 128, 256)
MASKS = {"qwen3": ONE, "qwen3_5": ONE, "qwen3 shared": SHARED, "qwen3_5 shared": (1, 256, 256)}
MASKS |= {f"{family}{shared}": masks for family in FAMILIES for shared, masks in (("", ONE), (" shared", SHARED))}
"""Each job, and the masks that attention gets: of whole rows; of a rank's queries under context parallelism (head-tail, and
by blocks of work); of a micro-batch of 1F1B, with the recurrent layer in one process and attention in the other."""


@pytest.mark.parametrize("job", MASKS)
def test_every_step_is_as_each_sample_alone(train, job):
    """Loss and gradients; of qwen3 also rows with holes, by segment_ids and `masks_in_forward`."""
    for step in train(job).values():
        assert max(step["loss error"], step["gradient error"]) <= EXACT, step
        assert {tuple(mask) for rank in step["ranks"] for mask in rank["masks"]} == {MASKS[job]}, step


def test_qwen3_5_gets_the_offsets_of_the_rows_that_a_stage_holds(train):
    whole, shared = (train(f"qwen3_5{shared}")["packed"]["ranks"] for shared in ("", " shared"))
    assert whole[0]["offsets"] == [[0, 60, 69, 119, 209, 256, 286, 386, 512]] * 2
    assert shared[0]["offsets"][:2] == [[0, 60, 69, 119, 209, 256], [0, 30, 130, 256]]
    assert (shared[0]["masks"], shared[1]["offsets"]) == ([], [])


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
    STACK.tell(family, layout, alone=alone, ours=worst(ours), line=LINE)


def refusal_to_share_out_a_recurrent_layer():
    with titan_kernels.with_fla():
        from torchtitan.models.qwen3_5.parallelize import parallelize_qwen3_5

        settings: Any = dict.fromkeys(("training", "ac_config", "dump_folder"))
        compiled = SimpleNamespace(enable=False, components=[])
        settings |= {"parallelism": SimpleNamespace(spmd_backend="partial_dtensor"), "compile_config": compiled}
        with pytest.raises(NotImplementedError, match="GatedDeltaNet") as caught:
            parallelize_qwen3_5(None, parallel_dims=SimpleNamespace(cp_enabled=True), **settings)
    return str(caught.value)
