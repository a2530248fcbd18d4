"""LLaMA-Factory 0.9.5: its trainers from YAML files, and its collators, padded and packed.

`python test_llamafactory.py OUT.json FOLDER JOB...` trains; a job is "stage model setting ours|own", and `ours` goes through
`collate-npu run`. torchaudio is a stand-in: there is no wheel of it for this torch, and no sound in these tests.
"""

# ruff: noqa: E402
import json
import os
import sys
from importlib.metadata import version
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import yaml
from stand_ins import put_module

NEEDS = ("llamafactory",)

put_module("torchaudio", __version__="2.13.0")

from cells import Stack, check_job, split_by
from llamafactory.data import collator as theirs
from processes import TEXTS, found_by, refusal, run_jobs, saved_model, watched
from rotation import some
from test_recorded import remade
from transformers import Trainer
from watching import Watch

from collate_npu.testing import byte_tokenizer, tiny_model

STACK = Stack("LLaMA-Factory", ("llamafactory", "transformers"), "peers_llamafactory")
LAYOUTS = {"plain": "padded right", "neat": "packed"}
CELLS = {(family, LAYOUTS[how]): f"sft {family} {how}" for family in ("qwen3", "qwen3_next") for how in LAYOUTS}
MORE = [f"{stage} qwen3_next plain" for stage in some(("dpo", "kto", "rm"), 1)]
MORE += ["sft qwen3_next lora"]  # PEFT last


@pytest.mark.skipif(version("transformers") > "5.6.1", reason="llamafactory 0.9.5 trains with transformers up to 5.6.0")
def test_its_trainers(tmp_path):
    """One step of each job."""
    write_data(tmp_path)
    jobs = [f"{job} {who}" for job, who in product(CELLS.values(), ("own", "ours"))] + [f"{job} ours" for job in MORE]
    found = found_by("test_llamafactory", tmp_path, tmp_path, *jobs, variants=({}, {"RUN": "1"}))
    own, ours = (one and split_by(one, who)[0] for one, who in zip(found, ("own", "ours")))
    STACK.tell_both(own, ours, CELLS, line="collate-npu run --")
    for job in MORE:
        check_job(ours[job] | {"gradient": None})  # their losses are others than the mean over labels


def test_the_flat_row_of_neat_packing_on_flash_attention():
    """It drops the padding and the mask, and leaves positions alone."""
    ids = [[(31 * n + 7 * i) % 250 for i in range(length)] for n, length in ((1, 5), (2, 3))]
    tokenizer, whole = byte_tokenizer(), [*ids[0], *ids[1]]
    row = {"input_ids": whole + [tokenizer.pad_token_id] * 8, "labels": whole + [-100] * 8}
    row |= {"attention_mask": [1] * 5 + [2] * 3 + [0] * 8, "position_ids": [*range(5), *range(3)] + [0] * 8}
    silent = SimpleNamespace(mm_plugin=SimpleNamespace(image_token=None, audio_token=None, get_mm_inputs=lambda *args: {}))
    given = {"tokenizer": tokenizer, "template": silent, "model": tiny_model("qwen3_next", vocab_size=258)}
    given |= {"block_diag_attn": True, "attn_implementation": "flash_attention_2", "compute_dtype": torch.float32}
    batch = theirs.SFTDataCollatorWith4DAttentionMask(**given, pad_to_multiple_of=8, neat_packing=True)([row])
    remade("LLaMA-Factory, neat packing on flash attention", dict(batch), "run", ids)


# --- a run of its command

SETTINGS = {
    "plain": {"finetuning_type": "full"},
    "lora": {"finetuning_type": "lora", "lora_target": "all"},
    "neat": {"finetuning_type": "full", "neat_packing": True, "packing": True},
}


def write_data(folder):
    """The tables of LLaMA-Factory's `dataset_info.json`."""
    asked = [{"instruction": "say", "input": "", "output": text} for text in TEXTS]
    pairs = [{"instruction": "say", "input": "", "chosen": a, "rejected": b} for a, b in zip(TEXTS, TEXTS[::-1])]
    tags = [{**row, "kto_tag": i % 2 == 0} for i, row in enumerate(asked)]
    columns = {"prompt": "instruction", "query": "input"}
    paired = {**columns, "chosen": "chosen", "rejected": "rejected"}
    info = {"sft": {"file_name": "sft.json"}, "dpo": {"file_name": "dpo.json", "ranking": True, "columns": paired}}
    info |= {"kto": {"file_name": "kto.json", "columns": {**columns, "response": "output", "kto_tag": "kto_tag"}}}
    for name, table in {"sft": asked, "dpo": pairs, "kto": tags, "dataset_info": info}.items():
        (folder / f"{name}.json").write_text(json.dumps(table), encoding="utf-8")


def config(folder, stage, model, setting):
    quiet = {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "overwrite_output_dir": True}
    fixed = {"template": "empty", "do_train": True, "max_steps": 1, "learning_rate": 1e-9, "use_cpu": True}
    data = {"dataset": "dpo" if stage == "rm" else stage, "dataset_dir": str(folder), "cutoff_len": 96}
    paths = {"model_name_or_path": saved_model(folder, model), "output_dir": f"{folder}/{os.getpid()}", "max_grad_norm": 0.0}
    chosen = {"stage": stage, "per_device_train_batch_size": 2 if setting == "neat" else 4, **SETTINGS[setting]}
    path = folder / f"{os.getpid()}.yaml"
    path.write_text(yaml.safe_dump({**quiet, **fixed, **data, **paths, **chosen}), encoding="utf-8")
    return str(path)


def with_a_watch(build, seen, self, *args, **kwargs):
    """In the place of `Trainer.__init__`: a Watch on the model."""
    build(self, *args, **kwargs)
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
    from llamafactory.train.tuner import run_exp

    if (who == "ours") != ("RUN" in os.environ):
        return None
    build, seen = Trainer.__init__, {}
    Trainer.__init__ = lambda self, *args, **kwargs: with_a_watch(build, seen, self, *args, **kwargs)
    sys.argv = ["train.py", config(folder, stage, model, setting)]
    refused = refusal(run_exp)
    Trainer.__init__ = build
    return watched(seen["watch"], sequences(seen["rows"]), refused)


if __name__ == "__main__":
    run_jobs(run)
