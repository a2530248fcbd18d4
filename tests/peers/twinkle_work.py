"""Run as a program, `PART=... python twinkle_work.py OUT`: twinkle's own models, from `set_processor` to `forward_backward`.

`models` in this process; `ranks` in two, a row on one rank and shared by both: log-probabilities as `forward_only` gives
them back, and gradients, against each sample alone; `ray` as twinkle's README starts it: the model and its processor live
in a worker (`worker` prepares that process). What stands in is hardware: the platform's device, CUDA's random state and
streams, TransformerEngine's modules, fla's kernels, MindSpeed; in a process of its own, because nothing is given back.
"""

import os
import re
import tempfile
import traceback
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_world as world
import te_stub  # noqa: F401  (before megatron and mcore_bridge)
import torch
from megatron_world import DENSE, UNFUSED, Attention, cells_on_ranks, far, fill, hardware, kernels, layers, seen, watch
from processes import process_group, saved_model, write
from torch import nn


@cache
def checkpoint(kind: str) -> str:
    """A model and a tokenizer, as twinkle downloads them."""
    return saved_model(Path(tempfile.mkdtemp()), kind, full_attention_interval=2)


def device(name: str = "cuda") -> None:
    """What twinkle takes this machine for; tensors go to the CPU."""
    from twinkle import Platform

    Platform.get_local_device = staticmethod(lambda *_, **__: "cpu")
    Platform.device_prefix = staticmethod(lambda *_, **__: name)


def worker() -> None:
    """For each process of Ray's, before anything else in it. Those without a model of twinkle's need nothing."""
    warnings.filterwarnings("ignore")
    if "WORKER_NAME" in os.environ:
        device()
        on_cpu()


def on_cpu() -> None:
    """A CPU where a card would be, for this whole process."""
    from mcore_bridge.model import gpts  # noqa: F401  (its layers get what Megatron's get)

    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    hardware(setattr)
    layers(setattr, Attention)


def megatron_model(folder: str, cls: Any = None, **settings: Any) -> Any:
    """As twinkle's README makes one, the fused kernels switched off."""
    import twinkle
    from megatron.core import parallel_state
    from twinkle import DeviceMesh
    from twinkle.model.megatron import MegatronModel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    mesh = settings.pop("device_mesh", None) or DeviceMesh.from_sizes(dp_size=1)
    if "remote_group" not in settings:
        twinkle.initialize(mode="local", global_device_mesh=mesh)
    made = (cls or MegatronModel)(
        model_id=folder, device_mesh=mesh, mixed_precision="no", load_weights=False, recompute_granularity=None,
        **{"deterministic_mode": True, **UNFUSED, **DENSE, **settings},
    )  # fmt: skip
    for chunk in getattr(made, "model", ()):
        whole(chunk)
    return made


def whole(chunk: nn.Module) -> None:
    """In float32, every weight drawn: twinkle 0.5.1 takes "no" mixed precision for bfloat16 (strategy/megatron.py
    `params_type`), and layers built on a CPU leave some of theirs as memory had it."""
    chunk.float().config.params_dtype = torch.float32
    fill(chunk)


def features(*lengths: int, **more: Any) -> list[dict[str, Any]]:
    """What twinkle's templates emit for samples: labels are shifted already."""
    rows = []
    for b, length in enumerate(lengths):
        ids = [(5 * i + 3 * b) % 60 + 1 for i in range(length)]
        rows.append({
            "input_ids": ids, "labels": [*ids[1:], -100], "attention_mask": [1] * length,
            "position_ids": list(range(length)), **{key: make(length) for key, make in more.items()},
        })  # fmt: skip
    return rows


LENGTHS = (7, 3, 5, 1)
RESULTS: dict[str, Any] = {}


def reported(make: Any, *args: Any) -> Any:
    """A refusal and an accident are answers too."""
    try:
        return make(*args)
    except Exception as error:
        return {"raised": type(error).__name__, "said": str(error), "where": traceback.format_exc()[-1500:]}


def logits(model: Any, rows: list[Any]) -> list[Any]:
    """Of each row, real tokens alone, wherever its padding stands."""
    out = model.forward_only(inputs=[dict(row) for row in rows], micro_batch_size=len(rows), return_logits=True)
    side = next(iter(model.optimizer_group.values())).processor.padding_side
    found = out["logits"][0] if isinstance(out["logits"], list) else out["logits"]
    lengths = [len(row["input_ids"]) for row in rows]
    return [x[-n:] if side == "left" else x[:n] for x, n in zip(found, lengths)]


def error(model: Any, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> dict[str, Any]:
    """What a batch computes, against each sample alone."""
    rows = features(*lengths, **more)
    together = logits(model, rows)
    got = seen(model.model[0]) if isinstance(model.model, list) else {}
    alone = [logits(model, [row])[0] for row in rows if len(row["input_ids"]) > 1]
    together = [row for row in together if len(row) > 1]
    return {"error": max(float((x - y).abs().max()) for x, y in zip(together, alone)), **got}


def gradients(model: Any, batches: list[Any]) -> dict[str, Any]:
    for chunk in model.model:
        chunk.zero_grad()
    for rows in batches:
        model.forward_backward(inputs=[dict(row) for row in rows], micro_batch_size=len(rows))
    return {name: p.grad.clone() for name, p in model.model[0].named_parameters() if p.grad is not None}


def megatron(kind: str, npu: bool, **processor: Any) -> Any:
    device()  # to be built; there is no MindSpeed here, which twinkle asks for on an NPU
    model = megatron_model(checkpoint(kind))
    device("npu" if npu else "cuda")
    watch(model.model[0])
    if npu:
        model.model[0].config.attention_mask_type = "causal"  # what MindSpeed's config has
    model.set_processor("InputProcessor", **processor)
    return model


def in_megatron() -> None:
    from twinkle.processor import InputProcessor

    from collate_npu.integrations import patching, twinkle

    for npu in (False, True):
        device = "npu" if npu else "other"
        model = megatron("qwen3_next", npu)
        twinkle.install(model)
        twinkle.install(model)
        RESULTS[f"ours {device}"] = reported(error, model)
        RESULTS[f"objects go by Gloo {device}"] = patching.in_place(patching.gather_by_gloo)
        rows = features(7, 3, 5)
        RESULTS[f"gradient {device}"] = far(gradients(model, [rows]), gradients(model, [[row] for row in rows]))
        model.set_processor(InputProcessor, padding_side="left")
        RESULTS[f"ours left {device}"] = reported(error, model)
        twinkle.uninstall(model)
        if npu:
            RESULTS["upstream left"] = reported(error, model, (7, 3, 5))
    processor = next(iter(model.optimizer_group.values())).processor
    RESULTS["stages after uninstall"] = sorted({type(stage.__self__).__name__ for stage in processor.process_pipeline[1:3]})


def in_local_kernels() -> None:
    """Left padding where Megatron's own attention reads a dense mask, and the row's own zeros."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.transformer import dot_product_attention

    from collate_npu.integrations import twinkle

    TESpecProvider.core_attention = lambda self: dot_product_attention.DotProductAttention
    model = megatron("qwen3", False, padding_side="left")
    twinkle.install(model)
    RESULTS["ours dense left"] = reported(error, model)
    TESpecProvider.core_attention = lambda self: Attention


def in_transformers() -> None:
    from twinkle import DeviceMesh
    from twinkle.model import TransformersModel

    from collate_npu.integrations import twinkle

    mesh = DeviceMesh.from_sizes(dp_size=1)
    model = TransformersModel(model_id=checkpoint("qwen3_next"), device_mesh=mesh, mixed_precision="no")
    model.model.gradient_checkpointing_disable()
    model.set_processor("InputProcessor", padding_side="left")

    def told() -> Any:
        """Rows whose only mask is the 2D one."""
        rows = [{k: v for k, v in row.items() if k != "attention_mask"} for row in features(7, 3, 5)]
        rows = [{**row, "attention_mask_2d": [1] * len(row["input_ids"])} for row in rows]
        out = model.forward_only(inputs=[dict(row) for row in rows], return_logits=True)["logits"]
        alone = [model.forward_only(inputs=[dict(row)], return_logits=True)["logits"][0] for row in features(7, 3, 5)]
        return {"error": max(float((x[-len(y) :] - y).abs().max()) for x, y in zip(out, alone))}

    twinkle.install(model)
    RESULTS["ours transformers, 2D alone"] = reported(told)
    twinkle.uninstall(model)


def in_this_process() -> None:
    device()
    for part in (in_transformers, on_cpu, in_megatron, in_local_kernels):
        outcome = reported(part)  # mcore-bridge, which `on_cpu` imports, changes transformers' rotary positions
        if outcome is not None:
            RESULTS[part.__name__] = outcome


THREE = LENGTHS[:3]
CALLER = re.compile(r"\[twinkle driver caller: .*?\] ")
CONVOLUTION = "mcore_bridge.model.modules.gated_delta_net.causal_conv1d"
SETTINGS = {"deterministic_mode": False, "use_distributed_optimizer": False}


def built(kind: str, cp: int, flat: bool) -> Any:
    from twinkle import DeviceMesh

    device()  # there is no MindSpeed here, which twinkle asks for on an NPU
    sizes = {"dp_size": 1, "cp_size": 2} if cp > 1 else {"dp_size": 2}
    folder = checkpoint(kind)
    model = megatron_model(folder, device_mesh=DeviceMesh.from_sizes(**sizes), **SETTINGS)
    model.model[0].config.attention_mask_type = "causal"  # what MindSpeed's config has
    device("npu")
    model.set_processor("InputProcessor", padding_free=flat)
    return model


def told(model: Any, batches: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Log-probabilities of each sample of the batches, and the gradient of their sum: twinkle's is that of a mean."""
    rows: list[Any] = []
    total: dict[str, Any] = {}
    for batch in batches:
        (logps,) = model.forward_only(inputs=[dict(row) for row in batch], micro_batch_size=len(batch))["logps"]
        rows += [one[: len(row["input_ids"]) - 1].detach() for one, row in zip(logps, batch)]
        model.model[0].zero_grad_buffer()
        model.forward_backward(inputs=[dict(row) for row in batch], micro_batch_size=len(batch))
        learned = sum(len(row["input_ids"]) - 1 for row in batch)
        for name, p in model.model[0].named_parameters():
            total[name] = total.get(name, 0) + learned * p.main_grad
    return rows, total


def truth(kind: str) -> Any:
    return told(built(kind, 1, False), [[sample] for sample in features(*THREE)])


def layouts(kind: str, ranks: int) -> dict[str, Any]:
    """Of each layout its forms: ranks, whether rows are flat, whether there is a kernel for convolutions."""
    if ranks > 1:
        return {"context parallel": [(2, False, True), *([(2, True, True)] if kind == "qwen3" else [])]}
    there = {"packed, kernels there": [(1, True, True)]} if kind == "qwen3_next" else {}
    return {"padded right": [(1, False, True)], "packed": [(1, True, False)], **there}


def together(kind: str, form: tuple[int, bool, bool], ours: bool) -> Any:
    """The same of all samples in one batch, without us and with us."""
    from collate_npu.integrations import twinkle

    cp, flat, there = form
    with nullcontext() if there else patch(CONVOLUTION, None):
        model = built(kind, cp, flat)
        twinkle.install(model) if ours else None
        try:
            return told(model, [features(*THREE)])
        except Exception as refused:
            raise type(refused)(CALLER.sub("", str(refused))) from None
        finally:
            twinkle.uninstall(model) if ours else None


def on_two_ranks() -> None:
    process_group()
    device()
    on_cpu()
    kernels(setattr)
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    TESpecProvider.core_attention = lambda self: world.TEDotProductAttention
    RESULTS.update(cells_on_ranks(("qwen3", "qwen3_next"), layouts, truth, together))


def in_worker(handle: Any, function: Any) -> Any:
    import ray

    return ray.get(handle._actors[0].__ray_call__.remote(function))


def prepare(model: Any) -> None:
    watch(model.model[0])
    whole(model.model[0])


def stages(model: Any) -> list[str]:
    processor = next(iter(model.optimizer_group.values())).processor
    return sorted({type(stage.__self__).__name__ for stage in processor.process_pipeline if hasattr(stage, "__self__")})


def step(model: Any, rows: list[Any]) -> Any:
    """From the driver, as a training loop does it."""
    try:
        model.forward_backward(inputs=rows, micro_batch_size=len(rows))()
        return "computed"
    except Exception as refusal:
        return type(refusal).__name__ + " " + str(refusal)


def on_ray() -> None:
    import ray
    import twinkle
    from twinkle import DeviceGroup, DeviceMesh

    from collate_npu.integrations import twinkle as ours

    ray.init(num_cpus=8, include_dashboard=False, runtime_env={"worker_process_setup_hook": "twinkle_work.worker"})
    groups = [DeviceGroup(name="model", ranks=1, device_type="CPU")]
    twinkle.initialize(mode="ray", nproc_per_node=1, ncpu_proc_per_node=1, groups=groups)
    mesh = DeviceMesh.from_sizes(dp_size=1, device_type="cpu")
    model = megatron_model(checkpoint("qwen3_next"), remote_group="model", device_mesh=mesh)
    in_worker(model, prepare)
    model.set_processor("InputProcessor")
    rows = features(*LENGTHS)
    ours.install(model)
    RESULTS["stages"] = in_worker(model, stages)
    RESULTS["step"] = step(model, rows)
    RESULTS["ours"] = in_worker(model, error)
    model.set_processor("InputProcessor", padding_side="left")
    RESULTS["left"] = step(model, features(7, 3, 5))
    ours.uninstall(model)
    RESULTS["left afterwards"] = step(model, features(7, 3, 5))


PARTS = {"models": in_this_process, "ranks": on_two_ranks, "ray": on_ray}

if __name__ == "__main__":
    for kind in ("qwen3", "qwen3_next"):  # before a group, and before mcore-bridge changes rotary positions
        checkpoint(kind)
    PARTS[os.environ["PART"]]()
    write(RESULTS)
