"""transformers' Trainer and TRL's on a CPU, as their users build them: what a step learns, by `collate-npu need`."""

import json

import pytest
from cells import Stack, verdict, worst_of
from typed import typed

pytest.importorskip("rich")
from collate_npu.tools import need

NEEDS = ("trl", "transformers")
pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
TRAINER = Stack("transformers Trainer", ("transformers", "accelerate"), "tests")
TRL = Stack("TRL SFTTrainer", ("trl", "transformers"), "tests")
FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1")
CELLS = {
    "Trainer, DataCollatorForSeq2Seq, padded right": (TRAINER, "padded right"),
    "Trainer, DataCollatorForSeq2Seq, padded left": (TRAINER, "padded left"),
    "Trainer, DataCollatorWithFlattening": (TRAINER, "packed"),
    "TRL SFTTrainer, padded": (TRL, "padded right"),
    "TRL SFTTrainer, padding_free=True": (TRL, "packed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_each_trainer(family, monkeypatch):
    monkeypatch.setattr(need, "_LENGTHS", (7, 16, 4, 11))
    rows = {row["by"]: row for row in json.loads(typed("need", "--json", "--model", family).stdout)["rows"]}
    for by, (stack, layout) in CELLS.items():
        alone, ours = (cell_of(rows[by][who]) for who in ("plain", "ours"))
        stack.tell(family, layout, alone=alone, ours=ours, line=rows[by]["line"])


def cell_of(step):
    return verdict(step["gradient"], gradient=step["gradient"], refused=step["note"])


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_trainer_with_a_row_on_two_ranks(ranks, family):
    """torch's context parallelism in Trainer's own step; see distributed/gloo_trainer for what stands in."""
    run = lambda who: worst_of(ranks(2)("gloo_trainer.cell", family, who == "ours", seconds=120))  # noqa: E731
    line = "adapt(model, sequence_group=group, layout='head_tail')"
    TRAINER.tell(family, "context parallel", alone=run("alone"), ours=run("ours"), line=line)
