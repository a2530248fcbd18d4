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


def error(family: str, ours: bool) -> float:
    """How far loss and gradient of all ranks are from the model alone: `Trainer._prepare_context_parallel_inputs` on an
    ordinary collator's batch, padded right, in its own context."""
    import accelerate.accelerator
    import ring_on_cpu
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Trainer, TrainingArguments

    ring_on_cpu.install()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, truth = (tiny_model(family, vocab_size=40) for _ in range(2))
    if ours:
        adapt(model, sequence_group=mesh.get_group(), layout="head_tail")
    accelerate.accelerator._attach_context_parallel_hooks(model)
    rows = [torch.arange(length) * 3 % 39 for length in (9, 16)]
    trainer = Trainer(model, TrainingArguments(tempfile.mkdtemp(), report_to=[], use_cpu=True), data_collator=padded)
    trainer.accelerator = accelerator_on(mesh)
    context, inputs = trainer._prepare_context_parallel_inputs(model, padded(rows, 16, pad=39))
    right = truth(**padded(rows, 16, pad=39)).loss
    right.backward()
    with context():
        loss = model(**inputs, num_items_in_batch=sum(map(len, rows)) - len(rows)).loss
        loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    dist.all_reduce(found := gradient(model))
    return max(abs(float(total - right)), float((found - gradient(truth)).abs().max()))


def cell(family: str, ours: bool) -> dict[str, Any]:
    """The same, as a job of `peers/cells`."""
    try:
        return {"refused": "", "error": error(family, ours)}
    except Exception as raised:
        return {"refused": f"{type(raised).__name__}: {raised}"}
