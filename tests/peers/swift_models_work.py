"""mcore-bridge's own models, built by its own loader from a tiny config: what reaches their recurrent layers, and what for.

For a process of its own, where a CPU stands for CUDA and mcore-bridge takes transformers' Gated DeltaNet.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

os.environ["USE_MCORE_GDN"] = "0"  # read at import (mcore_bridge/model/gpts/qwen3_next.py:591)

import megatron_on_cpu  # noqa: F401  (before mcore_bridge)
import swift_world
import torch
import transformers.utils
from mcore_bridge import ModelConfig, hf_to_mcore_config
from mcore_bridge.model import get_mcore_model_type, get_model_meta
from mcore_bridge.model.gpts import qwen3_next
from mcore_bridge.model.mm_gpts import qwen3_5
from megatron.core import parallel_state
from swift.megatron.trainers import utils as trainer_utils

from collate_npu import Segments
from collate_npu.integrations import swift
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.testing import tiny_config

LOCAL = {"attention_backend": "local", "masked_softmax_fusion": False}
_CPU = dict.fromkeys(
    ("persist_layer_norm", "bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "bf16", "fp16",
     "apply_rope_fusion", "masked_softmax_fusion", "moe_permute_fusion"), False)  # fmt: skip


def model_of(model_type: str, **stage: bool) -> Any:
    """Layers linear, full, linear; qwen3_5 types with their vision tower."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = tiny_config(model_type, vocab_size=swift_world.VOCABULARY)
    getattr(config, "text_config", config).full_attention_interval = 2
    meta = get_model_meta(get_mcore_model_type(model_type))
    given = hf_to_mcore_config(config) | _CPU | {"moe_grouped_gemm": True, "use_cpu_initialization": True}
    given |= {
        "mcore_model_type": meta.model_type,
        "hf_config": config,
        "params_dtype": torch.float32,
        "perform_initialization": True,
    }
    kind = getattr(meta, "config_cls", ModelConfig)
    names = {field.name for field in dataclasses.fields(kind)}
    torch.manual_seed(0)
    built = meta.loader(kind(**{key: value for key, value in given.items() if key in names})).build_model(**stage)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return built.eval()


class States:
    """What mcore-bridge's recurrent layers are given, and what they make of it (gpts/qwen3_next.py:58-66)."""

    def __init__(self, *, told: bool = True) -> None:
        self.given: list[Any] = []
        self._told, self._resolve = told, qwen3_next.resolve_gdn_attention_mask

    def __enter__(self) -> States:
        for module in (qwen3_next, qwen3_5):
            module.resolve_gdn_attention_mask = self._watched
        return self

    def _watched(self, kwargs: Any) -> Any:
        self.given.append(kwargs.get("attention_mask_2d"))
        return self._resolve(kwargs) if self._told else None

    def __exit__(self, *exception: Any) -> None:
        for module in (qwen3_next, qwen3_5):
            module.resolve_gdn_attention_mask = self._resolve


def believe_in_an_npu() -> None:
    there = lambda *args, **kwargs: True  # noqa: E731
    for module in (transformers.utils, trainer_utils, qwen3_next, qwen3_5):
        module.is_torch_npu_available = there


@torch.no_grad()
def padded_and_alone(model_type: str, side: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Through ms-swift's `prepare_batch` as installed: the worst logit of a real token against its sample alone, the same
    with recurrent layers that are told nothing, and whether each of them was given the 2D mask."""
    believe_in_an_npu()
    swift.install()
    model, truth = model_of(model_type), Segments.from_lengths(lengths, side=side)
    ids = torch.where(truth.keep, torch.arange(truth.ids.numel()).view(truth.shape) * 7 % 200 + 3, swift_world.PAD)
    rows = [ids[b, keep] for b, keep in enumerate(truth.keep)]
    alone = [_logits(model, model_type, row[None], torch.ones_like(row[None]))[0] for row in rows]
    with States() as seen:
        padded = _logits(model, model_type, ids, truth.keep.long())
    with States(told=False):
        blind = _logits(model, model_type, ids, truth.keep.long())
    return {
        "model": type(model).__name__,
        "given": [given is not None and torch.equal(given, truth.keep) for given in seen.given],
        "error": max(float((padded[b, keep] - alone[b]).abs().max()) for b, keep in enumerate(truth.keep)),
        "blind": max(float((blind[b, keep] - alone[b]).abs().max()) for b, keep in enumerate(truth.keep)),
        "size": max(float(x.abs().max()) for x in alone),
    }


def _logits(model: Any, model_type: str, ids: Any, keep: Any) -> Any:
    args = swift_world.arguments(model_type, **LOCAL)
    data = {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": keep,
        "position_ids": (keep.cumsum(1) - 1).clamp(min=0),
    }
    batch = trainer_utils.prepare_batch(args, data)
    if model_type in swift_world.MULTIMODAL:  # as its template does: three axes
        batch["position_ids"] = batch["position_ids"].expand(3, -1, -1)
    return model(**{key: value for key, value in batch.items() if key != "labels"})


@torch.no_grad()
def reaches_layers(installed: bool, first: bool) -> list[bool]:
    """Is a 2D mask given to each recurrent layer of a multimodal model: on its first pipeline stage, or a later one?"""
    believe_in_an_npu()
    swift.uninstall()
    mcore_bridge.install() if installed else mcore_bridge.uninstall()
    model = model_of("qwen3_5_moe", pre_process=first, post_process=True)
    if not first:
        model.set_input_tensor(torch.randn(4, 2, 64))
    given = {"position_ids": torch.arange(4).expand(3, 2, 4), "attention_mask_2d": torch.ones(2, 4, dtype=torch.bool)}
    with States() as seen:
        model(input_ids=torch.ones(2, 4, dtype=torch.long), attention_mask=None, **given)
    mcore_bridge.uninstall()
    return [mask is not None for mask in seen.given]


def built_without_us() -> str:
    swift.uninstall()
    mcore_bridge.uninstall()
    try:
        model_of("qwen3_next")
    except AttributeError as error:
        return str(error)
    return "built"
