"""VeOmni 0.1.12 on a CPU, and its `train.py config.yaml` on two ranks; `python veomni_work.py OUT.json FOLDER JOB...`.

A job is "model attention setting own|ours", FSDP2 on Gloo, a rank each. `ours` is one line of the user's train.py, between
its trainer and its training. A CPU enters by the doors that VeOmni leaves open: its registry of kernels, which takes other
backends (ops/kernel_registry.py), and the slot under its flash attention (ops/kernels/attention/flash.py:34-38). Stand-ins:
a package `flash_attn` that is only looked for, Gloo for its card's backend, and a name for the device.
"""

import os
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import yaml
from veomni.arguments import parse_args
from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
from veomni.ops.kernels.attention import flash
from veomni.trainer.text_trainer import TextTrainer, VeOmniArguments

from collate_npu import CollateError, adapt
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule

found = ModuleType("flash_attn")
found.flash_attn_func = found.flash_attn_varlen_func = lambda *args, **kwargs: args
sys.modules["flash_attn"] = found
CARD = {"get_device_name": "A CPU", "empty_cache": None, "memory_stats": {"num_alloc_retries": 0}}
CARD |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "max_memory_reserved"), 0)
for name, answer in CARD.items():
    setattr(torch.cpu, name, lambda *_, answer=answer: answer)


def convolution(x, weight, bias, activation, seq_idx, backend, cu_seqlens):
    return reference_causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens), None


def delta_rule(*args, cu_seqlens, **kwargs):
    return reference_gated_delta_rule(*args, cu_seqlens=cu_seqlens, **kwargs)


def attention(query, key, value, attention_mask, *, cu_seq_lens_q, softmax_scale, sliding_window=None, **kwargs):
    """Sequence by sequence, as a kernel with offsets goes: `[1, T, heads, size]`."""
    assert attention_mask is None or bool(attention_mask.all())
    groups, outs = query.shape[2] // key.shape[2], []
    for start, end in pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (x[:, start:end].transpose(1, 2) for x in (query, key, value))
        near = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - (sliding_window or end))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=softmax_scale)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1)


flash._flash_attention_forward = attention
for op, kernel in (("causal_conv1d", convolution), ("chunk_gated_delta_rule", delta_rule)):
    KERNEL_REGISTRY.register(
        KernelSpec("reference", op, "standard", lambda kernel=kernel: kernel, HardwareRequirement(device_type="any"))
    )

EAGER = ("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "rms_norm_gated", "load_balancing_loss")


def kernels(attention):
    """`model.ops_implementation` of its YAML."""
    ours = {f"{name}_implementation": "reference" for name in ("causal_conv1d", "chunk_gated_delta_rule")}
    eager = {f"{name}_implementation": "eager" for name in EAGER}
    return {"attn_implementation": attention, "moe_implementation": "eager", **ours, **eager}


# --- a job

SETTINGS = {"packed": {}, "tail": {"pad_to_length": True}, "ulysses": {"ulysses_size": 2}}
SETTINGS["single"] = {"dyn_bsz": False, "max_steps": 4}


def config(folder, model, attention, *, pad_to_length=False, ulysses_size=1, dyn_bsz=True, max_steps=1):
    told_kernels = kernels(attention)
    data = {"train_path": str(folder / "data.jsonl"), "data_type": "plaintext", "text_keys": "content_split"}
    data |= {"max_seq_len": 64, "train_size": 256, "dyn_bsz_buffer_size": 4}
    data |= {"dataloader": {"num_workers": 0, "pin_memory": False, "drop_last": False}}
    whole = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "float32")
    parallel = {"ulysses_size": ulysses_size, "fsdp_config": {"fsdp_mode": "fsdp2", "mixed_precision": whole}}
    train = {"accelerator": parallel, "init_device": "meta", "micro_batch_size": 1, "global_batch_size": 2}
    train |= {"num_train_epochs": 1, "max_steps": max_steps, "pad_to_length": pad_to_length, "dyn_bsz": dyn_bsz}
    train |= {"gradient_checkpointing": {"enable": False}, "wandb": {"enable": False}, "optimizer": {"lr": 0.0}}
    train |= {"checkpoint": {"output_dir": str(folder / "out"), "save_steps": 0, "save_epochs": 0, "save_hf_weights": False}}
    named = {"model_path": str(folder / model), "tokenizer_path": str(folder / model), "ops_implementation": told_kernels}
    path = folder / f"{model}-{os.environ['RANK']}.yaml"
    path.write_text(yaml.safe_dump({"model": named, "data": data, "train": train}), encoding="utf-8")
    return str(path)


def run(folder, model, attention, setting, who):
    seen, refused = [], ""
    sys.argv = ["train.py", config(folder, model, attention, **SETTINGS[setting])]
    trainer = TextTrainer(parse_args(VeOmniArguments))
    if who == "ours":
        adapt(trainer.base.model)

    def note(module, args, kwargs, output):
        seen.append((kwargs["input_ids"][0].tolist(), output.logits.detach().view(-1, output.logits.shape[-1])))

    trainer.base.model.register_forward_hook(note, with_kwargs=True)
    try:
        trainer.train()
    except (CollateError, RuntimeError) as error:
        refused = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        trainer.base.destroy_distributed()
    return {"seen": seen, "refused": refused}


if __name__ == "__main__":
    out, folder, *jobs = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    found = {}
    for n, job in enumerate(jobs):
        store = dist.FileStore(f"{os.environ['STORE']}-{n}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found[job] = run(Path(folder), *job.split())
    torch.save(found, f"{out}.{rank}.pt")
    Path(out).write_text("null", encoding="utf-8")
    os._exit(0)  # a trainer that refused leaves threads of its data behind
