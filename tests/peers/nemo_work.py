"""`automodel config.yaml` (nemo_automodel.cli.app) on a CPU; `python nemo_work.py OUT.json FOLDER JOB...`.

A job is "model setting ours|own", "model.own" for Automodel's own of that name. The process is the one worker that torchrun
would start, or one of two that share rows. What stands in is the hardware: CUDA devices are the CPU. `ours` is what the
guide adds: a collator in the YAML, or a recipe of four lines with `adapt`.
"""

import os
import sys
import traceback

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}
if "WORLD_SIZE" in os.environ:  # several ranks on this machine
    TORCHRUN |= {"RANK": os.environ["RANK"], "LOCAL_RANK": os.environ["RANK"]}
    TORCHRUN |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), os.environ["WORLD_SIZE"])
os.environ |= {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "NEMO_ENABLE_USER_MODULES": "1"}

# ruff: noqa: E402
import torch
import yaml
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """A device of CUDA, by name or number, is the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        numbered = getattr(func, "__name__", "") in ("to", "_parse_to")
        there = lambda x: str(x).startswith("cuda") if isinstance(x, (str, torch.device)) else numbered and type(x) is int  # noqa: E731
        kwargs = {key: "cpu" if key == "device" and (there(x) or type(x) is int) else x for key, x in (kwargs or {}).items()}
        return func(*("cpu" if there(x) else x for x in args), **kwargs)


for name in ("reset_peak_memory_stats", "current_device", "max_memory_allocated"):
    setattr(torch.cuda, name, lambda *args: 0)

from cells import PAD, samples
from nemo_automodel.cli.app import main
from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
from nemo_automodel.components.datasets.llm.packed_sequence import pack_dataset
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from processes import run_jobs, saved_model, watched
from transformers import AutoConfig
from watching import Watch

from collate_npu import PaddingCollator, adapt
from collate_npu.collate.collators import Layout

COLLATE = "nemo_automodel.components.datasets.utils."
SETTINGS = {
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
MOVED = Layout(labels_shifted=True)
SEEN = {}


class Recipe(TrainFinetuneRecipeForNextTokenPrediction):
    """What a user writes for `ours`, and a Watch on the model. The last norm of Automodel's Qwen3-Next multiplies by its
    weight, transformers' by one more (qwen3_next/model.py:214): with a tiny checkpoint's zeros there nothing is left."""

    def setup(self):
        super().setup()
        for part in self.model_parts:
            if SEEN["adapted"]:
                adapt(part, **({"consumer": "transformers"} if SEEN["theirs"] else {}))
            if SEEN["theirs"] and not part.model.norm.weight.any():
                torch.nn.init.ones_(part.model.norm.weight)
        SEEN["collator"] = type(self.dataloader.collate_fn).__name__
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
        pad_token_id=PAD, padding_side="left", model=SEEN["config"], consumer="transformers", layout=MOVED
    )
    return ours(features)


def config(folder, model, setting, who):
    kind, collate = SETTINGS[setting]
    packed = kind in ("thd", "aligned", "neat") or setting == "packs"
    model, _, theirs = model.partition(".")
    SEEN["theirs"] = bool(theirs)
    size = 2 if packed else 4
    auto = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
    built = {"_target_": auto, "pretrained_model_name_or_path": saved_model(folder, model)}
    built |= {"backend": BACKEND} if theirs else {"force_hf": True}
    collate_fn = "nemo_work.collate" if (setting, who) == ("collator", "ours") else COLLATE + collate
    SEEN["config"] = AutoConfig.from_pretrained(saved_model(folder, model))
    whole = {
        "recipe": "nemo_work.Recipe",
        "step_scheduler": {"global_batch_size": size, "local_batch_size": size, "max_steps": 1, "num_epochs": 1},
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "model": built | {"attn_implementation": "sdpa", "torch_dtype": "float32", "use_liger_kernel": False},
        "distributed": {"strategy": "fsdp2", "cp_size": 2} if setting == "cp" else {"strategy": "ddp"},
        "checkpoint": {"enabled": False},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": "nemo_work.rows", "kind": kind},
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
    refused = ""
    try:
        with OnCpu():
            main()
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return (
        watched(SEEN["watch"], set(map(tuple, samples())), refused, SEEN["collator"])
        if "watch" in SEEN
        else {"refused": refused}
    )


if __name__ == "__main__":
    sys.modules["nemo_work"] = sys.modules["__main__"]  # the YAML names it so
    run_jobs(run)
