"""axolotl 0.19.0: `axolotl train`, plain and through `collate-npu run`.

`python test_axolotl.py OUT.json FOLDER JOB...` trains; a job is "model setting". A plugin of the tests hands over the data
(axolotl's own preprocessing forks processes) and watches the model. triton and bitsandbytes, which axolotl imports at its
top, are stand-ins.
"""

# ruff: noqa: E402
import os
import sys
from unittest.mock import MagicMock

import pytest
import torch
import transformers.trainer  # noqa: F401  these look for the hardware's libraries before others stand in for them
import trl.trainer.sft_trainer  # noqa: F401
from stand_ins import put_module
from torch.utils._triton import has_triton, has_triton_package

NEEDS = ("axolotl",)

has_triton_package(), has_triton()
LINEAR = {name: type(name, (torch.nn.Linear,), {}) for name in ("Linear4bit", "Linear8bitLt")}
put_module("triton", MagicMock, __version__="3.4.0")
put_module("triton.language", MagicMock)
put_module("bitsandbytes", MagicMock, __version__="0.50.2")
put_module("bitsandbytes.nn", MagicMock, Params4bit=type("Params4bit", (torch.nn.Parameter,), {}), **LINEAR)
put_module("bitsandbytes.functional", MagicMock, QuantState=type("QuantState", (), {}))

import yaml
from axolotl.cli.main import main
from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import BasePlugin, PluginManager
from cells import Stack, check_job
from datasets import Dataset
from processes import TEXTS, found_by, refusal, run_jobs, saved_model, watched
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from watching import Watch

from collate_npu.testing import byte_tokenizer

STACK = Stack("axolotl", ("axolotl", "transformers"), "peers_axolotl")
LAYOUTS = {"plain": "padded right", "packed": "packed"}
CELLS = {(family, LAYOUTS[how]): f"{family} {how}" for family in ("qwen3", "qwen3_next") for how in LAYOUTS}
MORE = ("qwen3_next rows", "qwen3_next dpo", "qwen3_next patched")  # never taken back


def test_axolotl_train(tmp_path):
    """One step of each job. Without CUDA sample packing runs the states of a hybrid together in silence."""
    silent = {"AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled", "NUMBA_DISABLE_JIT": "1"}  # which compiles for each job
    jobs, both = (*CELLS.values(), *MORE), (silent, silent | {"RUN": "1"})
    own, ours = found_by("test_axolotl", tmp_path, tmp_path, *jobs, variants=both)
    STACK.tell_both(own, ours, CELLS, line="collate-npu run --")
    for job in MORE:
        check_job(ours[job])


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
        SEEN["watch"] = Watch(trainer.model).__enter__()


def config(folder, model, setting):
    data = {"datasets": [{"path": str(folder / "none.jsonl"), "ds_type": "json", "type": "completion"}], "val_set_size": 0}
    quiet = {"logging_steps": 1, "saves_per_epoch": 0, "save_strategy": "no", "output_dir": f"{folder}/{os.getpid()}"}
    fixed = {"sequence_len": 64, "max_steps": 1, "num_epochs": 1, "learning_rate": 0.0, "max_grad_norm": 0.0}
    plain = {"bf16": False, "fp16": False, "tf32": False, "attn_implementation": "sdpa", "gradient_checkpointing": False}
    more = {"gradient_accumulation_steps": 1, "use_cpu": True, "special_tokens": {"pad_token": "<|eos|>"}}
    named = {"base_model": saved_model(folder, model), "plugins": ["test_axolotl.Data"]}
    path = folder / f"{os.getpid()}.yaml"
    path.write_text(yaml.safe_dump(named | data | quiet | fixed | plain | more | SETTINGS[setting]), encoding="utf-8")
    return str(path)


def started():
    with pytest.raises(SystemExit) as done:  # click ends so
        main()
    assert not done.value.code, f"exit {done.value.code}"


def run(folder, model, setting):
    if f"{model} {setting}" in MORE and "RUN" not in os.environ:
        return None
    SEEN.clear()
    PluginManager.get_instance().plugins.clear()
    if setting == "patched":
        cuda_patch()
    sys.argv = ["axolotl", "train", config(folder, model, setting), "--launcher", "python"]
    refused = refusal(started)
    return watched(SEEN["watch"], SEEN["rows"], refused)


if __name__ == "__main__":
    sys.modules["test_axolotl"] = sys.modules["__main__"]  # the plugin manager imports it by this name
    run_jobs(run)
