"""`axolotl train config.yaml`, with stand-ins for what only cards have; `python axolotl_work.py OUT.json FOLDER JOB...`.

A job is "model setting ours|own". `ours` is one more line of the YAML: our plugin. A plugin of the tests hands over the data
(its own preprocessing forks processes) and watches the model. triton and bitsandbytes are imported by axolotl at its top.
"""

# ruff: noqa: E402
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
import transformers.trainer  # noqa: F401  these look for the hardware's libraries before others stand in for them
import trl.trainer.sft_trainer  # noqa: F401
from stand_ins import put_module
from torch.utils._triton import has_triton, has_triton_package

has_triton_package(), has_triton()


class Anything:
    def __init__(self, *args, **kwargs): ...

    def __getattr__(self, name):
        return Anything()

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else Anything()


LINEAR = {name: type(name, (torch.nn.Linear,), {}) for name in ("Linear4bit", "Linear8bitLt")}
put_module("triton", Anything, __version__="3.4.0")
put_module("triton.language", Anything)
put_module("bitsandbytes", Anything, __version__="0.50.2")
put_module("bitsandbytes.nn", Anything, Params4bit=type("Params4bit", (torch.nn.Parameter,), {}), **LINEAR)
put_module("bitsandbytes.functional", Anything, QuantState=type("QuantState", (), {}))

import yaml
from axolotl.cli.main import main
from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import BasePlugin, PluginManager
from datasets import Dataset
from processes import run_jobs, saved_model, watched
from watching import Watch

from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.testing import byte_tokenizer

TEXTS = ["1 a short one", "2 and another that is a little longer than it", "3 three", "4 four four"]
SETTINGS = {
    "plain": {"sample_packing": False, "micro_batch_size": 4},
    "packed": {"sample_packing": True, "micro_batch_size": 1, "pad_to_sequence_len": True},
    "rows": {"sample_packing": True, "micro_batch_size": 2, "pad_to_sequence_len": True},
    "patched": {"sample_packing": True, "micro_batch_size": 2, "pad_to_sequence_len": True},
    "dpo": {"rl": "dpo", "micro_batch_size": 2, "sample_packing": False},
}
SEEN = {}


def cuda_patch():
    """What axolotl does where torch.cuda.is_available(), with the references for fla's kernels."""
    from axolotl.monkeypatch.models.qwen3_next import modeling

    def convolve(x, weight, bias, activation, cu_seqlens):
        assert len(x) == 1
        return reference_causal_conv1d(x, weight, bias, activation, cu_seqlens=cu_seqlens), None

    modeling.fla_causal_conv1d, modeling.fla_chunk_gated_delta_rule = convolve, reference_gated_delta_rule
    modeling.patch_qwen3_next_modeling_packing()


class Data(BasePlugin):
    """The tokenized data, and a Watch on the model."""

    def load_datasets(self, cfg, preprocess=False):
        rows = [byte_tokenizer()(text)["input_ids"] for text in TEXTS] * 2
        table = {"input_ids": rows, "labels": rows, "attention_mask": [[1] * len(row) for row in rows]}
        table |= {"position_ids": [list(range(len(row))) for row in rows], "length": list(map(len, rows))}
        if cfg.rl:
            table = {"prompt": ["say "] * 4, "chosen": TEXTS, "rejected": TEXTS[::-1]}
            rows = [byte_tokenizer()("say " + text)["input_ids"] for text in TEXTS]
        SEEN["rows"] = {tuple(row) for row in rows}
        return TrainDatasetMeta(train_dataset=Dataset.from_dict(table), eval_dataset=None, total_num_steps=1)

    def post_trainer_create(self, cfg, trainer):
        SEEN["trainer"] = trainer
        SEEN["watch"] = Watch(trainer.model).__enter__()


def config(folder, model, setting, who):
    plugins = ["axolotl_work.Data", *(["collate_npu.integrations.axolotl.CollatePlugin"] if who == "ours" else [])]
    data = {"datasets": [{"path": str(folder / "none.jsonl"), "ds_type": "json", "type": "completion"}], "val_set_size": 0}
    quiet = {"logging_steps": 1, "saves_per_epoch": 0, "save_strategy": "no", "output_dir": str(folder / "out")}
    fixed = {"sequence_len": 64, "max_steps": 1, "num_epochs": 1, "learning_rate": 0.0, "optimizer": "adamw_torch"}
    plain = {"bf16": False, "fp16": False, "tf32": False, "attn_implementation": "sdpa", "gradient_checkpointing": False}
    more = {"gradient_accumulation_steps": 1, "use_cpu": True, "special_tokens": {"pad_token": "<|eos|>"}}
    whole = {"base_model": saved_model(folder, model), "plugins": plugins, **data, **quiet, **fixed, **plain, **more}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(whole | SETTINGS[setting]), encoding="utf-8")
    return str(path)


def run(folder, model, setting, who):
    SEEN.clear()
    PluginManager.get_instance().plugins.clear()
    if setting == "patched":
        cuda_patch()
    sys.argv = ["axolotl", "train", config(folder, model, setting, who), "--launcher", "python"]
    refused = ""
    try:
        main()
    except SystemExit as done:  # click ends so
        refused = "" if not done.code else f"exit {done.code}"
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return watched(SEEN["watch"], SEEN["rows"], refused, type(SEEN["trainer"].data_collator).__name__)


if __name__ == "__main__":
    sys.modules["axolotl_work"] = sys.modules["__main__"]  # the plugin manager imports it by this name
    run_jobs(run)
