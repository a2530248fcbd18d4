"""`train.py config.yaml`, two ranks, FSDP2 on Gloo; `python veomni_work.py OUT.json FOLDER JOB...`, a rank each.

A job is "model attention setting own|ours". `ours` is one line of the user's train.py, between its trainer and its training.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import veomni_cpu
import yaml
from veomni.arguments import parse_args
from veomni.trainer.text_dpo_trainer import TextDPOTrainer, VeOmniDPOArguments
from veomni.trainer.text_trainer import TextTrainer, VeOmniArguments

from collate_npu import CollateError, adapt

SETTINGS = {"packed": {}, "tail": {"pad_to_length": True}, "ulysses": {"ulysses_size": 2}}
SETTINGS |= {"dpo": {"name": "pairs"}, "dpo-ulysses": {"name": "pairs", "ulysses_size": 2}}
SETTINGS["single"] = {"dyn_bsz": False, "max_steps": 4}


def config(folder, model, attention, *, pad_to_length=False, ulysses_size=1, dyn_bsz=True, max_steps=1, name="data"):
    kernels = veomni_cpu.kernels(attention)
    data = {"train_path": str(folder / f"{name}.jsonl"), "data_type": "plaintext", "text_keys": "content_split"}
    data |= {"max_seq_len": 64, "train_size": 256, "dyn_bsz_buffer_size": 4}
    data |= {"dataloader": {"num_workers": 0, "pin_memory": False, "drop_last": False}}
    whole = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "float32")
    parallel = {"ulysses_size": ulysses_size, "fsdp_config": {"fsdp_mode": "fsdp2", "mixed_precision": whole}}
    train = {"accelerator": parallel, "init_device": "meta", "micro_batch_size": 1, "global_batch_size": 2}
    train |= {"num_train_epochs": 1, "max_steps": max_steps, "pad_to_length": pad_to_length, "dyn_bsz": dyn_bsz}
    train |= {"gradient_checkpointing": {"enable": False}, "wandb": {"enable": False}, "optimizer": {"lr": 0.0}}
    train |= {"checkpoint": {"output_dir": str(folder / "out"), "save_steps": 0, "save_epochs": 0, "save_hf_weights": False}}
    named = {"model_path": str(folder / model), "tokenizer_path": str(folder / model), "ops_implementation": kernels}
    path = folder / f"{model}-{os.environ['RANK']}.yaml"
    told = {"model": named, "data": data, "train": train}
    told |= {"dpo_config": {"refer_model_precision": "float32"}} if name == "pairs" else {}
    path.write_text(yaml.safe_dump(told), encoding="utf-8")
    return str(path)


def detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def run(folder, model, attention, setting, who):
    seen, refused = [], ""
    sys.argv = ["train.py", config(folder, model, attention, **SETTINGS[setting])]
    if setting.startswith("dpo"):
        TextDPOTrainer.model = property(lambda self: self.base.model)  # asked for, and not there (text_dpo_trainer.py:211)
        trainer = TextDPOTrainer(parse_args(VeOmniDPOArguments))
        models = [trainer.base.model, trainer.reference_model]
        forward = trainer.concatenated_forward
        trainer.concatenated_forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    else:
        trainer = TextTrainer(parse_args(VeOmniArguments))
        models = [trainer.base.model]
    if who == "ours":
        for model in models:
            adapt(model)

    def note(module, args, kwargs, output):
        seen.append((kwargs["input_ids"][0].tolist(), output.logits.view(-1, output.logits.shape[-1])))

    if not setting.startswith("dpo"):
        trainer.base.model.register_forward_hook(note, with_kwargs=True)
    try:
        trainer.train()
    except (CollateError, RuntimeError) as error:
        refused = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        trainer.base.destroy_distributed()
    return {"seen": [tuple(map(detached, each)) for each in seen], "refused": refused}


if __name__ == "__main__":
    out, folder, *jobs = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    found = {}
    for n, job in enumerate(jobs):
        store = dist.FileStore(f"{os.environ['STORE']}-{n}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        veomni_cpu.TOLD.clear()
        found[job] = run(Path(folder), *job.split()) | {"told": list(veomni_cpu.TOLD)}
    torch.save(found, f"{out}.{rank}.pt")
    Path(out).write_text("null", encoding="utf-8")
    os._exit(0)  # a trainer that refused leaves threads of its data behind
