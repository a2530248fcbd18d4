"""Run as a program in two processes: twinkle's own Megatron models, a row on one rank and shared by both. Writes JSON.

Log-probabilities as `forward_only` gives them back, and gradients of `forward_backward`, against each sample alone.
"""

import json
import os
import re
import sys
import tempfile
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import twinkle_world as world
from megatron_world import TEDotProductAttention, _rotary_part, far

from collate_npu.integrations import twinkle
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule

LENGTHS = (7, 3, 5)
CALLER = re.compile(r"\[twinkle driver caller: .*?\] ")
SETTINGS = {"deterministic_mode": False, "use_distributed_optimizer": False}


def convolution(x: Any, weight: Any, **given: Any) -> Any:
    return reference_causal_conv1d(x, weight, **given), None


def built(kind: str, cp: int, flat: bool) -> Any:
    from twinkle import DeviceMesh

    world.device()  # there is no MindSpeed here, which twinkle asks for on an NPU
    sizes = {"dp_size": 1, "cp_size": 2} if cp > 1 else {"dp_size": 2}
    folder = world.checkpoint(tempfile.mkdtemp(), kind)
    model = world.megatron_model(folder, device_mesh=DeviceMesh.from_sizes(**sizes), **SETTINGS)
    model.model[0].config.attention_mask_type = "causal"  # what MindSpeed's config has
    world.device("npu")
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


def both(kind: str, known: Any, cp: int, flat: bool) -> dict[str, Any]:
    """Without us and with us: how far it is from each sample alone, or what was raised."""
    found: dict[str, Any] = {}
    for who in ("alone", "ours"):
        try:
            model = built(kind, cp, flat)
            twinkle.install(model) if who == "ours" else None
            rows, gradient = told(model, [world.features(*LENGTHS)])
            assert [len(row) for row in rows] == [len(row) for row in known[0]]
            furthest = [float((x - y).abs().max()) for x, y in zip(rows, known[0])]
            found[who] = {"refused": "", "error": max(far(gradient, known[1]), *furthest)}
        except Exception as raised:
            found[who] = {"refused": f"{type(raised).__name__}: {CALLER.sub('', str(raised))}"}
    return found


def main() -> dict[str, Any]:
    place = {"rank": int(os.environ["RANK"]), "world_size": 2}
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), **place)
    world.device()
    world.on_cpu()
    from mcore_bridge.model.modules import gated_delta_net as native
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    TESpecProvider.core_attention = lambda self: TEDotProductAttention
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = _rotary_part
    native.chunk_gated_delta_rule = reference_gated_delta_rule
    found: dict[str, Any] = {}
    for kind in ("qwen3", "qwen3_next"):
        with patch.object(native, "causal_conv1d", convolution):
            known = told(built(kind, 1, False), [[sample] for sample in world.features(*LENGTHS)])
        layouts = {"padded right": (1, False), "packed": (1, True), "context parallel": (2, False)}
        layouts |= {"packed, kernels there": (1, True)} if kind == "qwen3_next" else {"context parallel, flat": (2, True)}
        for layout, (cp, flat) in layouts.items():
            with nullcontext() if layout == "packed" else patch.object(native, "causal_conv1d", convolution):
                found[f"{kind} {layout}"] = both(kind, known, cp, flat)
    return found


if __name__ == "__main__":
    found = main()
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file, indent=1)
