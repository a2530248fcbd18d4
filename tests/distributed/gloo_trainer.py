"""transformers' Trainer, in accelerate's context, between two ranks; see ring_on_cpu."""

import functools
import tempfile
import types
from typing import Any

import torch
import torch.distributed as dist
from shared_work import gradient, padded

from collate_npu import adapt
from collate_npu.testing import tiny_model


def features(lengths: list[int]) -> list[dict[str, list[int]]]:
    rows = [[(7 * n + 3 * i) % 39 for i in range(length)] for n, length in enumerate(lengths, start=1)]
    return [{"input_ids": row, "labels": row} for row in rows]


def accelerator_on(mesh: Any) -> Any:
    """accelerate's own context and hooks on a CPU mesh.

    `Accelerator(parallelism_config=...)` itself refuses MULTI_CPU (parallelism_config.py:_validate_accelerator), so its
    methods are called on a stand-in that holds what they read.
    """
    from accelerate import Accelerator
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    config = types.SimpleNamespace(cp_backend="torch", cp_enabled=True, cp_size=mesh.size())
    shared_out = functools.partial(torch_context_parallel, mesh=mesh)
    stand_in = types.SimpleNamespace(parallelism_config=config, _cp_context=shared_out)
    stand_in.maybe_context_parallel = types.MethodType(Accelerator.maybe_context_parallel, stand_in)
    return stand_in


def setup(family: str, adapted: bool = False) -> tuple[Any, Any]:
    import accelerate.accelerator
    import ring_on_cpu
    from torch.distributed.device_mesh import init_device_mesh

    ring_on_cpu.install()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = tiny_model(family, vocab_size=40)
    if adapted:
        adapt(model, sequence_group=mesh.get_group(), layout="head_tail")
    accelerate.accelerator._attach_context_parallel_hooks(model)
    return accelerator_on(mesh), model


def shared(model: Any, whole: dict[str, torch.Tensor], context: Any, inputs: Any, family: str) -> dict[str, Any]:
    """The loss and gradients of all ranks together, against the model alone; the context shares the inputs."""
    alone, count = tiny_model(family, vocab_size=40), int((whole["labels"][:, 1:] != -100).sum())
    right = alone(**whole).loss
    right.backward()
    with context:
        loss = model(**inputs, num_items_in_batch=count).loss
        loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    dist.all_reduce(found := gradient(model))
    return {"loss": float(total), "right": float(right), "grads": float((found - gradient(alone)).abs().max())}


def trainer_step(
    lengths: list[int], width: int, side: str = "right", *, ours: bool = True, family: str = "qwen3"
) -> dict[str, Any]:
    """`Trainer._prepare_context_parallel_inputs` on an ordinary collator's batch, in its own context."""
    from transformers import Trainer, TrainingArguments

    accelerator, model = setup(family, adapted=ours)
    collator = functools.partial(padded, width=width, side=side, pad=39)
    args = TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True)
    trainer = Trainer(model, args, data_collator=collator)
    trainer.accelerator = accelerator
    context, inputs = trainer._prepare_context_parallel_inputs(model, collator(features(lengths)))
    return shared(model, collator(features(lengths)), context(), inputs, family)


def cell(family: str, ours: bool) -> dict[str, Any]:
    """Rows padded right, as a job of `peers/cells`."""
    try:
        found = trainer_step([9, 16], 16, ours=ours, family=family)
    except Exception as raised:
        return {"refused": f"{type(raised).__name__}: {raised}"}
    return {"refused": "", "error": max(abs(found["loss"] - found["right"]), found["grads"])}
