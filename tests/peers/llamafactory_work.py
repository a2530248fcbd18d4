"""LLaMA-Factory's trainers, run from YAML files as its users do; `python llamafactory_work.py OUT.json FOLDER JOB...`.

A job is "stage model setting ours|own". What is `ours` is what README says: a script of six lines in place of
`llamafactory-cli train`. torchaudio is a stand-in: there is no wheel of it for this torch, and no sound in these tests.
"""

import json
import sys
import traceback
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

# ruff: noqa: E402
import yaml
from stand_ins import put_module

put_module("torchaudio", __version__="2.13.0")
from llamafactory.train.tuner import run_exp
from processes import run_jobs, saved_model, watched
from transformers import Trainer
from watching import Watch

from collate_npu import wrap_collator

SETTINGS = {
    "plain": {"finetuning_type": "full"},
    "lora": {"finetuning_type": "lora", "lora_target": "all"},
    "neat": {"finetuning_type": "full", "neat_packing": True, "packing": True},
    "flat": {"finetuning_type": "full", "neat_packing": True, "packing": True},  # and padding_free=True
}
TEXTS = ["1 a short one", "2 and another that is a little longer than it", "3 three", "4 four four"]


def write_data(folder):
    """The tables of LLaMA-Factory's `dataset_info.json`."""
    asked = [{"instruction": "say", "input": "", "output": text} for text in TEXTS]
    pairs = [{"instruction": "say", "input": "", "chosen": a, "rejected": b} for a, b in zip(TEXTS, TEXTS[::-1])]
    tags = [{**row, "kto_tag": i % 2 == 0} for i, row in enumerate(asked)]
    columns = {"prompt": "instruction", "query": "input"}
    paired = {**columns, "chosen": "chosen", "rejected": "rejected"}
    info = {
        "sft": {"file_name": "sft.json"},
        "dpo": {"file_name": "dpo.json", "ranking": True, "columns": paired},
        "kto": {"file_name": "kto.json", "columns": {**columns, "response": "output", "kto_tag": "kto_tag"}},
    }
    for name, table in {"sft": asked, "dpo": pairs, "kto": tags, "dataset_info": info}.items():
        (folder / f"{name}.json").write_text(json.dumps(table), encoding="utf-8")


def config(folder, stage, model, setting):
    quiet = {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "overwrite_output_dir": True}
    fixed = {"template": "empty", "do_train": True, "max_steps": 1, "learning_rate": 1e-9, "use_cpu": True}
    data = {"dataset": "dpo" if stage == "rm" else stage, "dataset_dir": str(folder), "cutoff_len": 96}
    paths = {"model_name_or_path": saved_model(folder, model), "output_dir": str(folder / "out")}
    chosen = {"stage": stage, "per_device_train_batch_size": 2 if setting in ("neat", "flat") else 4, **SETTINGS[setting]}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**quiet, **fixed, **data, **paths, **chosen}), encoding="utf-8")
    return str(path)


def with_ours(build, seen, wrap, self, *args, **kwargs):
    """What README's script puts in the place of `Trainer.__init__`, and a Watch on the model."""
    build(self, *args, **kwargs)
    seen["collator"] = type(self.data_collator).__name__
    if wrap is not None:
        self.data_collator = wrap(self.data_collator, model=self.model)
    seen["rows"] = list(self.train_dataset)
    model = getattr(self.model, "pretrained_model", self.model)  # TRL's value head
    seen["watch"] = Watch(getattr(model, "get_base_model", lambda: model)()).__enter__()


def sequences(rows):
    """Every sequence of the tokenized data, packed rows taken apart by their numbers."""
    for row in rows:
        for key in [key for key in row if key.endswith("input_ids")]:
            mask = row[key.replace("input_ids", "attention_mask")]
            for n in sorted({*mask} - {0}):
                yield tuple(token for token, number in zip(row[key], mask) if number == n)


def run(folder, stage, model, setting, who):
    build, seen = Trainer.__init__, {}
    wrap = None if who == "own" else partial(wrap_collator, padding_free=setting == "flat")
    Trainer.__init__ = lambda self, *args, **kwargs: with_ours(build, seen, wrap, self, *args, **kwargs)
    sys.argv = ["train.py", config(folder, stage, model, setting)]
    try:
        run_exp()
        refused = ""
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    finally:
        Trainer.__init__ = build
    return watched(seen["watch"], sequences(seen["rows"]), refused, seen["collator"])


if __name__ == "__main__":
    run_jobs(run, write_data)
