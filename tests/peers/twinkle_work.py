"""Run as a program: twinkle's own models in this process, from `set_processor` to `forward_backward`. Prints JSON.

A process of its own, because a CPU is put in the place of a card for all of it.
"""

import gc
import json
import sys
import tempfile
import traceback
from typing import Any

import cpu_world
import torch
import twinkle_world as world
from cpu_world import seen, watch
from megatron_world import far

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
    rows = world.features(*lengths, **more)
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
    world.device()  # to be built; there is no MindSpeed here, which twinkle asks for on an NPU
    model = world.megatron_model(world.checkpoint(tempfile.mkdtemp(), kind))
    world.device("npu" if npu else "cuda")
    watch(model.model[0])
    if npu:
        model.model[0].config.attention_mask_type = "causal"  # what MindSpeed's config has
    model.set_processor("InputProcessor", **processor)
    return model


def in_megatron() -> None:
    from twinkle.processor import InputProcessor

    from collate_npu.integrations import twinkle

    for npu in (False, True):
        device = "npu" if npu else "other"
        model = megatron("qwen3_next", npu)
        RESULTS[f"upstream {device}"] = reported(error, model, (7, 3, 5))
        twinkle.install(model)
        twinkle.install(model)
        RESULTS[f"ours {device}"] = reported(error, model)
        rows = world.features(7, 3, 5)
        RESULTS[f"gradient {device}"] = far(gradients(model, [rows]), gradients(model, [[row] for row in rows]))
        model.set_processor(InputProcessor, padding_side="left")
        RESULTS[f"ours left {device}"] = reported(error, model)
        twinkle.uninstall(model)
        RESULTS[f"upstream left {device}"] = reported(error, model, (7, 3, 5))
    processor = next(iter(model.optimizer_group.values())).processor
    RESULTS["stages after uninstall"] = sorted({type(stage.__self__).__name__ for stage in processor.process_pipeline[1:3]})


def in_local_kernels() -> None:
    """Left padding where Megatron's own attention reads a dense mask, and the row's own zeros."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.transformer import dot_product_attention

    from collate_npu.integrations import twinkle

    TESpecProvider.core_attention = lambda self: dot_product_attention.DotProductAttention
    model = megatron("qwen3", False, padding_side="left")
    RESULTS["upstream dense left"] = reported(error, model, (7, 3, 5))
    twinkle.install(model)
    RESULTS["ours dense left"] = reported(error, model)
    TESpecProvider.core_attention = lambda self: cpu_world.Attention


def hybrid() -> str:
    """A checkpoint of transformers' own Qwen3-Next."""
    from transformers import AutoConfig, Qwen3NextForCausalLM

    folder = world.checkpoint(tempfile.mkdtemp())
    made = Qwen3NextForCausalLM(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(3.0 if p.ndim > 1 else 1.0)
        made.get_input_embeddings().weight[0] += 1.0
    made.save_pretrained(folder)
    return folder


def in_adapters() -> None:
    """An adapter that is added, and its processor that is set, after `install`: its mask disagrees with its 2D one."""
    from peft import LoraConfig
    from twinkle import DeviceMesh
    from twinkle.model import MultiLoraTransformersModel

    from collate_npu.integrations import twinkle

    mesh = DeviceMesh.from_sizes(dp_size=1)
    model = MultiLoraTransformersModel(model_id=hybrid(), device_mesh=mesh, mixed_precision="no", max_loras=1, max_r=4)
    twinkle.install(model)
    model.add_adapter_to_model("mine", LoraConfig(r=4, target_modules="all-linear"))
    model.set_processor("InputProcessor", adapter_name="mine")
    rows = [{**row, "attention_mask_2d": [1] * len(row["input_ids"])} for row in world.features(5, 3)]
    RESULTS["adapter"] = reported(lambda: model.forward_only(inputs=rows, adapter_name="mine") and "computed")
    rows[1]["attention_mask_2d"] = [1, 1, 0]
    RESULTS["adapter, 2D disagrees"] = reported(lambda: model.forward_only(inputs=rows, adapter_name="mine") and "computed")
    twinkle.uninstall(model)


def in_transformers() -> None:
    from twinkle import DeviceMesh
    from twinkle.model import TransformersModel

    from collate_npu.integrations import twinkle

    folder = hybrid()
    model = TransformersModel(model_id=folder, device_mesh=DeviceMesh.from_sizes(dp_size=1), mixed_precision="no")
    model.model.gradient_checkpointing_disable()
    model.set_processor("InputProcessor", padding_side="left")

    def told() -> Any:
        """Rows whose only mask is the 2D one."""
        rows = [{k: v for k, v in row.items() if k != "attention_mask"} for row in world.features(7, 3, 5)]
        rows = [{**row, "attention_mask_2d": [1] * len(row["input_ids"])} for row in rows]
        out = model.forward_only(inputs=[dict(row) for row in rows], return_logits=True)["logits"]
        alone = [model.forward_only(inputs=[dict(row)], return_logits=True)["logits"][0] for row in world.features(7, 3, 5)]
        return {"error": max(float((x[-len(y) :] - y).abs().max()) for x, y in zip(out, alone))}

    RESULTS["upstream transformers, 2D alone"] = reported(told)
    twinkle.install(model)
    RESULTS["ours transformers, 2D alone"] = reported(told)
    packed = world.features(4, 4)
    packed[0]["attention_mask"] = [1, 1, 2, 2]
    RESULTS["ours transformers, packed"] = reported(lambda: model.forward_only(inputs=packed) and "computed")
    twinkle.uninstall(model)


def objects() -> None:
    """Whose gather twinkle calls, on an NPU and elsewhere."""
    from twinkle import torch_util

    import collate_npu.integrations.twinkle as ours

    gc.collect()  # models of the parts before, which nobody uninstalled
    called: list[str] = []
    kept, ours.gather_object = ours.gather_object, lambda *args: called.append("ours") or kept(*args)
    model = megatron("qwen3", False)
    ours.install(model)
    for device in ("cuda", "npu"):
        world.device(device)
        RESULTS[f"gathered on {device}"] = [torch_util.gather_object(["told"], model.device_mesh), list(called)]
    ours.uninstall(model)
    RESULTS["gathered afterwards"] = [torch_util.gather_object(["told"], model.device_mesh), list(called)]


if __name__ == "__main__":
    world.device()
    for part in (in_transformers, in_adapters, world.on_cpu, in_megatron, in_local_kernels, objects):
        outcome = reported(part)  # mcore-bridge, which `on_cpu` imports, changes transformers' rotary positions
        if outcome is not None:
            RESULTS[part.__name__] = outcome
    with open(sys.argv[1], "w") as file:
        json.dump(RESULTS, file, indent=1)
