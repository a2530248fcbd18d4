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
FAMILIES = ("qwen3", "qwen3_5", *some(("llama3", "deepseek_v3", "gpt_oss"), 1))
STACK = Stack("torchtitan", ("torchtitan",), "peers_misc")
LINE = "collate_fn=TitanCollator(PaddingCollator(...)) in the dataloader"
NO_PADDING = "torchtitan's loaders pack, and none pads"
STEPS = {"padded right": "right", "padded left": "left", "packed": "packed"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two processes have run every job: what rank 0 found of each, by step."""
    folder = tmp_path_factory.mktemp("titan")
    assert found_by("titan_jobs", folder, ranks=2) == [True]
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    jobs = {job: {step["step"]: step["error"] for step in steps} for job, steps in found.items() if isinstance(steps, list)}
    print(jobs)
    return jobs


def test_every_step_is_as_each_sample_alone(trained):
    """Also rows with holes, by segment_ids and `masks_in_forward`, rows that a load balancer shares out, and those of a
    micro-batch of 1F1B, with the recurrent layer in one process and attention in the other."""
    assert trained.keys() == {*FAMILIES, *(f"{family} shared" for family in FAMILIES)}
    assert {"holes:ids", "left", "packed"} <= trained["qwen3"].keys()
    assert max(error for steps in trained.values() for error in steps.values()) <= 5e-6


@pytest.mark.parametrize("layout", [*STEPS, "context parallel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cells(trained, family, layout):
    """Its own trainer on its own packed rows, and on ours; errors are those of the loss and the gradients, relative."""
    if layout == "context parallel" and family == "qwen3_5":
        none = verdict(refused=refusal_to_share_out_a_recurrent_layer())
        STACK.tell(family, layout, alone=none, ours=none, line=LINE)
        return
    found = trained[f"{family} shared" if layout == "context parallel" else family]
    ours = [verdict(found[step]) for step in ([STEPS[layout]] if layout in STEPS else ["left", "packed"])]
    own = layout in ("packed", "context parallel")
    alone = verdict(found["full:own"]) if own else verdict(not_run=NO_PADDING)
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
