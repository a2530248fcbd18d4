"""NeMo Automodel 0.7.0: `automodel config.yaml` (nemo_automodel.cli.app) on a CPU; what its collators and its THD conversion
hand on is read in tests/producers.

`python test_nemo_automodel.py OUT FOLDER JOB...` trains; a job is "model setting ours|own", "model.own" for Automodel's
own implementation of that name, on sdpa. The process is the one worker that torchrun would start, or one of two that share
rows; CUDA devices are the CPU. `ours` is a collator in the YAML, or a recipe of four lines with `adapt`, as in the guide.
Automodel's own packing (`packed_sequence_size`) asks for FlashAttention; here the packs are made beforehand by the same
functions and collated by the same collators.
"""

import os
import sys

import pytest
import torch
import yaml
from cells import PAD, Stack, of_job, samples, verdict
from nemo_automodel.cli.app import main
from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
from nemo_automodel.components.datasets.llm.packed_sequence import pack_dataset
from nemo_automodel.components.datasets.utils import default_collater
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from processes import found_by, refusal, run_jobs, saved_model, watched
from rotation import some
from stand_ins import OnCpu, answer
from transformers import AutoConfig
from watching import Watch

from collate_npu import CollateError, PaddingCollator, adapt
from collate_npu.masks.batch_reader import segments_from_batch

NEEDS = ("nemo_automodel",)

STACK = Stack("NeMo Automodel", ("nemo-automodel", "transformers"), "peers_nemo")
LINE = "adapt(part) for each of recipe.model_parts"
FAMILIES = ["qwen3", "qwen3_next", *some(("qwen3_5_text", "gemma3_text"), 1)]
OWN = some(("qwen3_next.own", "qwen3_5_text.own", "qwen3_moe.own"), 1)
HYBRIDS = ("qwen3_next", "qwen3_5_text")
ADAPTED = "adapt(part, consumer='transformers') for each of recipe.model_parts"
SETTINGS = {"padded right": "right", "padded left": "left", "packed": "thd"}
ALONE = [
    ("qwen3_5_text.own packs", "wrong", "refused"),  # torch's rule and convolution read no boundaries
    ("qwen3_next.own packs", "refused", "refused"),
    ("qwen3_next neat", "wrong", "right"),  # Automodel#2147, before its own layers
    ("qwen3 neat", "right", "right"),
    ("qwen3 aligned", "wrong", "right"),
    ("qwen3_next rows", "right", "right"),
    ("qwen3_next collator", "right", "right"),
]
"""More jobs, and how each sequence is then, left as it is and with ours."""
JOBS = [
    f"{job} {who}"
    for job in (*(f"{f} {s}" for f in (*FAMILIES, *OWN) for s in SETTINGS.values()), *(job for job, *_ in ALONE))
    for who in ("own", "ours")
]
ENVIRONMENT = {"TORCHELASTIC_RUN_ID": "one", "NEMO_ENABLE_USER_MODULES": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every job gave; one process, one training step each."""
    folder = tmp_path_factory.mktemp("automodel")
    return found_by("test_nemo_automodel", folder, folder, *JOBS, variants=(ENVIRONMENT,), ranks=1)[0]


@pytest.mark.parametrize("layout", SETTINGS)
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_its_cell(runs, family, layout):
    own, ours = (runs[f"{family} {SETTINGS[layout]} {who}"] for who in ("own", "ours"))
    print(family, layout, own, ours)
    name, line = family.replace(".own", ", Automodel's own"), ADAPTED if family in OWN else LINE
    STACK.tell(name, layout, alone=of_job(own), ours=of_job(ours), line=line)


def test_its_cells_of_context_parallel(tmp_path):
    """Two ranks: hybrids are refused before a step; attention gets as far as torch's ring, which a CPU has no kernel for."""
    jobs = [f"{family} cp own" for family in FAMILIES] + [f"{family} cp ours" for family in FAMILIES if family in HYBRIDS]
    for family in FAMILIES:
        saved_model(tmp_path, family)
    found = found_by("test_nemo_automodel", tmp_path, tmp_path, *jobs, variants=(ENVIRONMENT,), ranks=2)[0]
    for family in FAMILIES:
        own = verdict(refused=found[f"{family} cp own"]["refused"])
        if family in HYBRIDS:
            assert "not supported for hybrid model" in own["why"]
            STACK.tell(family, "context parallel", alone=own, ours=of_job(found[f"{family} cp ours"]), line=LINE)
        else:
            assert "does not have a sharding strategy" in own["why"]
            why = verdict(not_run=own["why"])
            STACK.tell(family, "context parallel", alone=why, ours=why, line=LINE)


@pytest.mark.parametrize(("job", "own", "ours"), ALONE)
def test_each_sequence_as_alone(runs, job, own, ours):
    found = {who: runs[f"{job} {who}"] for who in ("own", "ours")}
    assert [of_job(each)["verdict"] for each in found.values()] == [own, ours]
    assert all(each["compared"] == 4 for each in found.values() if not each["refused"])
    if ours == "refused":
        assert "packs" in job or "Give each sequence its own row" in found["ours"]["refused"]


def test_rows_without_a_mask_are_refused():
    """The padding mask is a guess then, `input_ids == pad`. Rows with the tokenizer's mask are in tests/producers."""
    bare = default_collater([{"input_ids": ids, "labels": [*ids[1:], -100]} for ids in samples()])
    with pytest.raises(CollateError, match="No key says which tokens are padding"):
        segments_from_batch(bare)


COLLATE = "nemo_automodel.components.datasets.utils."
DATA = {
    "right": ("padded", "default_collater"),
    "cp": ("padded", "default_collater"),
    "left": ("left", "default_collater"),
    "collator": ("bare", "default_collater"),
    "rows": ("bare", "packed_sequence_thd_collater"),
    "thd": ("thd", "packed_sequence_thd_collater"),
    "aligned": ("aligned", "packed_sequence_thd_collater"),
    "neat": ("neat", "neat_packed_collater"),
    "packs": ("bare", "default_collater"),
}
BACKEND = {"_target_": "nemo_automodel.components.models.common.BackendConfig", "attn": "sdpa", "linear": "torch"}
SEEN = {}


class Recipe(TrainFinetuneRecipeForNextTokenPrediction):
    """What a user writes for `ours`, and a Watch on the model. The last norm of Automodel's Qwen3-Next multiplies by its
    weight, transformers' by one more (qwen3_next/model.py:214): with a tiny checkpoint's zeros there nothing is left."""

    def setup(self):
        super().setup()
        for each in self.model_parts:
            if SEEN["adapted"]:
                adapt(each, **({"consumer": "transformers"} if SEEN["theirs"] else {}))
            if SEEN["theirs"] and not each.model.norm.weight.any():
                torch.nn.init.ones_(each.model.norm.weight)
        SEEN["watch"] = Watch(self.model_parts[0]).__enter__()


def rows(kind):
    """The data, with the labels moved by the dataset, as Automodel's are (datasets/llm/formatting_utils.py)."""
    whole = [{"input_ids": ids, "labels": [*ids[1:], -100], "attention_mask": [1] * len(ids)} for ids in samples()]
    if kind == "left":
        fill = {"input_ids": PAD, "labels": -100, "attention_mask": 0}
        return [{key: [fill[key]] * (18 - len(row)) + row for key, row in each.items()} for each in whole]
    if kind == "padded":
        return [{**each, "___PAD_TOKEN_IDS___": {"input_ids": PAD}} for each in whole]
    if kind == "bare":
        return [{key: each[key] for key in ("input_ids", "labels")} for each in whole]
    if kind == "neat":
        return neat_pack_dataset(Table(whole), "train", 24, padding_idx=PAD)
    return pack_dataset(whole, None, 28, padding_idx=PAD, pad_to_multiple_of=4 if kind == "aligned" else 1)


class Table(list):
    """Without splits."""


def collate(features):
    """Our collator, in the user's own file."""
    ours = PaddingCollator(
        pad_token_id=PAD, padding_side="left", model=SEEN["config"], consumer="transformers", labels_shifted=True
    )
    return ours(features)


def config(folder, model, setting, who):
    kind, collate = DATA[setting]
    packed = kind in ("thd", "aligned", "neat") or setting == "packs"
    model, _, theirs = model.partition(".")
    SEEN["theirs"] = bool(theirs)
    size = 2 if packed else 4
    auto = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
    built = {"_target_": auto, "pretrained_model_name_or_path": saved_model(folder, model)}
    built |= {"backend": BACKEND} if theirs else {"force_hf": True}
    collate_fn = "test_nemo_automodel.collate" if (setting, who) == ("collator", "ours") else COLLATE + collate
    SEEN["config"] = AutoConfig.from_pretrained(saved_model(folder, model))
    whole = {
        "recipe": "test_nemo_automodel.Recipe",
        "step_scheduler": {"global_batch_size": size, "local_batch_size": size, "max_steps": 1, "num_epochs": 1},
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "model": built | {"attn_implementation": "sdpa", "torch_dtype": "float32", "use_liger_kernel": False},
        "distributed": {"strategy": "fsdp2", "cp_size": 2} if setting == "cp" else {"strategy": "ddp"},
        "checkpoint": {"enabled": False},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": "test_nemo_automodel.rows", "kind": kind},
        "dataloader": {"collate_fn": collate_fn, "shuffle": False},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.0},
    }
    if setting == "packs":  # its own packing
        whole["packed_sequence"] = {"packed_sequence_size": 24, "packing_strategy": "neat"}
    path = folder / f"config{os.environ['RANK']}.yaml"
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    return str(path)


def run(folder, model, setting, who):
    SEEN.clear()
    SEEN["adapted"] = who == "ours" and setting != "collator"
    sys.argv = ["automodel", config(folder, model, setting, who)]
    with OnCpu():
        refused = refusal(main)
    if "watch" not in SEEN:
        return {"refused": refused}
    return watched(SEEN["watch"], set(map(tuple, samples())), refused)


if __name__ == "__main__":
    sys.modules["test_nemo_automodel"] = sys.modules["__main__"]  # the YAML names it so
    answer(torch.cuda, reset_peak_memory_stats=0, current_device=0, max_memory_allocated=0)
    run_jobs(run)
