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

import torch
import yaml
from cells import PAD, Stack, of_job, samples, split_by
from nemo_automodel.cli.app import main
from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
from nemo_automodel.components.datasets.llm.packed_sequence import pack_dataset
from nemo_automodel.components.datasets.utils import default_collater
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from processes import found_by, refusal, run_jobs, saved_model, watched
from rotation import some
from stand_ins import OnCpu, answer
from test_recorded import ROWS, remade
from transformers import AutoConfig
from watching import Watch

from collate_npu import PaddingCollator, adapt

NEEDS = ("nemo_automodel",)

STACK = Stack("NeMo Automodel", ("nemo-automodel", "transformers"), "peers_nemo")
LINE = "adapt(part) for each of recipe.model_parts"
ADAPTED = "adapt(part, consumer='transformers') for each of recipe.model_parts"
FAMILIES = ["qwen3", "qwen3_next", *some(("qwen3_5_text", "gemma3_text"), 1)]
OWN = some(("qwen3_next.own", "qwen3_5_text.own", "qwen3_moe.own"), 1)
HYBRIDS = [family for family in FAMILIES if family in ("qwen3_next", "qwen3_5_text")]
SETTINGS = {"padded right": "right", "padded left": "left", "packed": "thd"}
MORE = {
    "qwen3_5_text.own packs": "refused",  # torch's rule and convolution read no boundaries
    "qwen3_next.own packs": "refused",
    "qwen3_next neat": "right",  # Automodel#2147, before its own layers
    "qwen3 aligned": "right",
    "qwen3_next rows": "right",
    "qwen3_next collator": "right",
}
"""More jobs, and how each sequence is with ours."""
ENVIRONMENT = {"TORCHELASTIC_RUN_ID": "one", "NEMO_ENABLE_USER_MODULES": "1"}


def cells(families):
    return {
        (family.replace(".own", ", Automodel's own"), layout): f"{family} {setting}"
        for family in families
        for layout, setting in SETTINGS.items()
    }


def test_its_cells_and_more(tmp_path):
    """One training step of each job."""
    jobs = [f"{job} {who}" for job in cells([*FAMILIES, *OWN]).values() for who in ("own", "ours")]
    jobs += [f"{job} ours" for job in MORE]
    (found,) = found_by("test_nemo_automodel", tmp_path, tmp_path, *jobs, variants=(ENVIRONMENT,), ranks=1)
    own, ours = split_by(found, "own", "ours")
    STACK.tell_both(own, ours, cells(FAMILIES), line=LINE)
    STACK.tell_both(own, ours, cells(OWN), line=ADAPTED)
    assert {job: of_job(ours[job])["verdict"] for job in MORE} == MORE
    assert all(ours[job]["compared"] == 4 for job, said in MORE.items() if said == "right")


def test_its_cells_of_context_parallel(tmp_path):
    """Hybrids on two ranks: Automodel refuses them before a step. Attention alone gets as far as torch's ring, which a CPU
    has no kernel for."""
    for family in HYBRIDS:
        saved_model(tmp_path, family)
    jobs = [f"{family} cp {who}" for family in HYBRIDS for who in ("own", "ours")]
    (found,) = found_by("test_nemo_automodel", tmp_path, tmp_path, *jobs, variants=(ENVIRONMENT,), ranks=2)
    context = {(family, "context parallel"): f"{family} cp" for family in HYBRIDS}
    STACK.tell_both(*split_by(found, "own", "ours"), context, line=LINE)


def test_rows_without_a_mask():
    """The padding mask is a guess then, `input_ids == pad`. Rows with the tokenizer's mask are in tests/producers."""
    bare = default_collater([{"input_ids": ids, "labels": [*ids[1:], -100]} for ids in ROWS])
    remade("NeMo Automodel, without masks", bare, "run", refused="No key says which tokens are padding")


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
