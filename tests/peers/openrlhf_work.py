"""`openrlhf.cli.train_sft` as its launcher starts it, on a CPU; `python openrlhf_work.py OUT.json FOLDER JOB...`.

A job is "model ours|own". `ours` goes through `collate_npu.integrations.openrlhf`, with the launcher's `--local_rank`.
"""

# ruff: noqa: E402
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import openrlhf_world

openrlhf_world.start()
from openrlhf.models import actor
from processes import free_port, run_jobs, saved_model, watched
from watching import Watch

from collate_npu.integrations import openrlhf as ours
from collate_npu.testing import byte_tokenizer

TEXTS = ["1 a short one", "2 and another that is a little longer than it", "3 three", "4 four four"]
NAME = "openrlhf.cli.train_sft"


def settings(folder, model, *more):
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"input": text}) + "\n" for text in TEXTS), encoding="utf-8")
    named = {
        "model.model_name_or_path": saved_model(folder, model), "data.dataset": data, "data.max_len": 64,
        "train.batch_size": 4, "train.micro_batch_size": 4, "train.max_epochs": 1, "ds.zero_stage": 3,
        "ds.attn_implementation": "sdpa", "adam.lr": 0, "ckpt.output_dir": folder / "out", "ckpt.path": folder / "ckpt",
    }  # fmt: skip
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return [*words, "--model.pretrain_mode_enable", "--ckpt.disable_ds", *more]


def run(folder, model, who, *more):
    """One training step; the model is watched from the moment when OpenRLHF has built it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    build, seen, refused = actor.Actor.__init__, {}, ""

    def watched_build(self, *args, **kwargs):
        build(self, *args, **kwargs)
        seen["hooked"] = bool(self.model._forward_pre_hooks)
        seen["watch"] = Watch(self.model).__enter__()

    actor.Actor.__init__ = watched_build
    sys.argv = ["python", "--local_rank=0", *settings(folder, model, *more)]
    try:
        if who == "ours":
            sys.argv.insert(2, NAME)
            ours.main()
        else:
            runpy.run_module(NAME, run_name="__main__", alter_sys=True)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    finally:
        actor.Actor.__init__ = build
        ours.disarm()
    rows = {tuple(byte_tokenizer()(text)["input_ids"]) for text in TEXTS}
    return {"refused": refused} if not seen else watched(seen["watch"], rows, refused, "") | {"hooked": seen["hooked"]}


if __name__ == "__main__":
    run_jobs(run)
