"""transformers' Trainer and accelerate's context between two ranks, on a tiny dense Qwen3; see ring_on_cpu."""

from __future__ import annotations

import functools
import tempfile
import types
from typing import Any

import torch
import torch.distributed as dist

from collate_npu import Segments
from collate_npu.integrations.context_parallel import (
    buffers_of,
    context_parallel,
    context_parallel_collator,
    ready_batch,
)
from collate_npu.parallel import ContextParallel, split_tensor


def tiny_qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        initializer_range=0.3,
        pad_token_id=None,  # else its embedding is zero, which hides a mask that is lost
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def features(lengths: list[int]) -> list[dict[str, list[int]]]:
    rows = [[(7 * n + 3 * i) % 39 for i in range(length)] for n, length in enumerate(lengths, start=1)]
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(rows: list[dict[str, list[int]]], width: int, side: str = "right") -> dict[str, torch.Tensor]:
    """An ordinary collator: ids, labels and a 2D mask of one width."""
    segments = Segments.from_lengths([len(row["input_ids"]) for row in rows], width=width, side=side)
    keep = segments.keep
    flat = torch.tensor([n for row in rows for n in row["input_ids"]])
    ids = torch.full(keep.shape, 39).masked_scatter(keep, flat)
    return {"input_ids": ids, "labels": ids.masked_fill(~keep, -100), "attention_mask": keep.long()}


def accelerator_on(mesh: Any) -> Any:
    """accelerate's own context and hooks on a CPU mesh.

    `Accelerator(parallelism_config=...)` itself refuses MULTI_CPU (parallelism_config.py:_validate_accelerator), so its
    methods are called on a stand-in that holds what they read.
    """
    from accelerate import Accelerator
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    config = types.SimpleNamespace(cp_backend="torch", cp_enabled=True, cp_size=mesh.size())
    stand_in = types.SimpleNamespace(
        parallelism_config=config, _cp_context=functools.partial(torch_context_parallel, mesh=mesh)
    )
    stand_in.maybe_context_parallel = types.MethodType(Accelerator.maybe_context_parallel, stand_in)
    return stand_in


def setup() -> tuple[Any, Any, Any]:
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh

    from collate_npu.tools.audit import ring_on_cpu

    ring_on_cpu.install()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = tiny_qwen3()
    _attach_context_parallel_hooks(model)
    return mesh, accelerator_on(mesh), model


def alone(batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model = tiny_qwen3()
    loss = model(**batch).loss
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters()}


def accelerate_step(lengths: list[int], width: int) -> dict[str, Any]:
    """One step in our context: the loss and gradients of the ranks together against the model alone."""
    mesh, accelerator, model = setup()
    batch = padded(features(lengths), width)
    right, grads = alone(batch)
    with context_parallel(accelerator, batch, model=model) as shard:
        seen = {key: tuple(value.shape) for key, value in shard.items()}
        cp = ContextParallel.from_mesh(mesh)
        in_order = torch.equal(shard["input_ids"], split_tensor(batch["input_ids"], cp))
        count = int((batch["labels"][:, 1:] != -100).sum())
        loss = model(**shard, num_items_in_batch=count).loss
        loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    worst = 0.0
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        worst = max(worst, float((parameter.grad - grads[name]).abs().max()))
    return {"loss": float(total), "right": right, "grads": worst, "seen": seen, "in_order": in_order}


def trainer_step(lengths: list[int], width: int) -> dict[str, Any]:
    """`Trainer._prepare_context_parallel_inputs` on our collator's batch, then the model inside its own context."""
    from transformers import Trainer, TrainingArguments

    _, accelerator, model = setup()
    collator = context_parallel_collator(functools.partial(padded, width=width), size=dist.get_world_size(), model=model)
    args = TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True)
    trainer = Trainer(model, args, data_collator=collator)
    trainer.accelerator = accelerator
    whole = padded(features(lengths), width)
    right, grads = alone(whole)
    context, inputs = trainer._prepare_context_parallel_inputs(model, collator(features(lengths)))
    with context():
        count = int((whole["labels"][:, 1:] != -100).sum())
        loss = model(**inputs, num_items_in_batch=count).loss
        loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    worst = 0.0
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        worst = max(worst, float((parameter.grad - grads[name]).abs().max()))
    return {"loss": float(total), "right": right, "grads": worst, "seen": {k: tuple(v.shape) for k, v in inputs.items()}}


def recurrent_shard() -> tuple[float, float]:
    """Mamba 2 on a context-parallel shard, which torch and accelerate before 1.15 let through: its loss there, and alone."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    _, accelerator, _ = setup()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=40, num_hidden_layers=1, initializer_range=0.3, **sizes))
    batch = padded(features([16, 16]), 16)
    shard = ready_batch(batch, size=2)
    buffers, dims = buffers_of(shard)
    with torch.no_grad():
        right = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)):
            logits = model(input_ids=shard["input_ids"]).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, shard["shift_labels"].flatten(), reduction="sum") / 30
    dist.all_reduce(loss)
    return float(loss), float(right)


def plain_trainer_step(side: str, lengths: list[int], width: int) -> float:
    """What Trainer does by itself with an ordinary collator's batch: the loss, to show what is refused."""
    from transformers import Trainer, TrainingArguments

    _, accelerator, model = setup()
    trainer = Trainer(model, TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True))
    trainer.accelerator = accelerator
    batch = padded(features(lengths), width, side)
    count = int((batch["labels"][:, 1:] != -100).sum())
    context, inputs = trainer._prepare_context_parallel_inputs(model, batch)
    with context(), torch.no_grad():
        loss = model(**inputs, num_items_in_batch=count).loss
    dist.all_reduce(loss)
    return float(loss)


def alone_loss(side: str, lengths: list[int], width: int) -> float:
    return alone(padded(features(lengths), width, side))[0]
