"""Real mcore-bridge models on a CPU: tiny, random, float32, built as ms-swift builds them, and what their layers receive.

Only hardware is stood in for (`cpu_world`): the card by the CPU, Transformer Engine's modules by ones that compute, fla's
two kernels by torch. Local attention without a mask is causal, as a flash kernel is.
"""

import contextlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import swift_world  # first: it puts the stand-ins for Transformer Engine in place
import torch
from cpu_world import groups, hardware, layers
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from torch import Tensor, nn

NATIVE = os.environ.get("USE_MCORE_GDN", "1") != "0"
FREQUENCY = 2
"""Every second layer is attention: GDN, attention, GDN, attention."""
DENSE = ("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")


def on_cpu() -> None:
    """Put a CPU where a card would be. For a process of its own: nothing is given back."""
    from mcore_bridge.model.mm_gpts.utils import HuggingFaceVit

    groups(context_parallel_size=int(os.environ.get("WORLD_SIZE", "1")))
    hardware(setattr)
    layers(setattr)
    stream = MagicMock()
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args, **kwargs: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    HuggingFaceVit.to = lambda self, *args, **kwargs: self
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def build(model_type: str, *, moe: bool = False, stages: int = 1, cp: int = 1, **changed: Any) -> list[nn.Module]:
    """The model as ms-swift's `get_mcore_model` builds it, one module for each pipeline stage, all with the same weights."""
    from mcore_bridge import get_mcore_model
    from swift.megatron.model.utils import get_mcore_model_config

    hf = swift_world.config(model_type)
    text = getattr(hf, "text_config", hf)
    text.full_attention_interval, text.num_hidden_layers = FREQUENCY, 4
    text.layer_types = ["linear_attention", "full_attention"] * 2
    local = {"attention_backend": "local", "masked_softmax_fusion": False, "bridge_backend": None}
    args = swift_world.arguments(model_type, cp=cp, **local)
    args.torch_dtype = torch.float32
    args.pipeline_model_parallel_size = stages
    args.megatron_extra_kwargs = {
        "use_cpu_initialization": True,
        "deterministic_mode": NATIVE,
        "moe_grouped_gemm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        **({} if moe else dict.fromkeys(DENSE)),
        **changed,
    }
    made = []
    for rank in range(stages):
        with stage_of(rank, stages):
            made += get_mcore_model(get_mcore_model_config(args, hf))
    for module in made:
        fill(module)
    return made


@contextlib.contextmanager
def stage_of(rank: int, stages: int) -> Iterator[None]:
    """This process as one stage of a pipeline: Megatron asks its state, and keeps the group in every module."""
    group, name = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, "_PIPELINE_MODEL_PARALLEL_GROUP"
    parallel_state.set_pipeline_model_parallel_world_size(stages)
    parallel_state.set_pipeline_model_parallel_rank(rank)
    setattr(parallel_state, name, SimpleNamespace(rank=lambda: rank, size=lambda: stages) if stages > 1 else group)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)
        setattr(parallel_state, name, group)


def fill(stage: nn.Module) -> None:
    """Weights by the name a parameter has in the whole model, so that stages of one model agree; each GDN remembers."""
    decoder = getattr(stage, "language_model", stage).decoder
    shift = decoder.layers[0].layer_number - 1
    for name, parameter in stage.named_parameters():
        whole = re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(int(found[0]) + shift), name)
        draw = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        with torch.no_grad():
            if "A_log" in name or "dt_bias" in name:
                parameter.uniform_(-1.5, -0.5, generator=draw)
            elif parameter.ndim == 1:
                parameter.normal_(0.0 if centered(stage, name) else 1.0, 0.1, generator=draw)
            else:
                parameter.normal_(0.0, 2.0 * parameter[0].numel() ** -0.5 if "conv1d" not in name else 0.5, generator=draw)


def centered(stage: nn.Module, name: str) -> bool:
    """Is this weight of a norm counted from zero?"""
    return bool(getattr(stage.get_submodule(name.rpartition(".")[0]), "zero_centered_gamma", True))


@dataclass
class Seen:
    """What the layers of one forward received, by layer number: what a run gathers in `recording`."""

    gdn: dict[int, Tensor] = field(default_factory=dict)
    """Places whose input to a recurrent layer's projection is exactly zero, bool `[B, S]`."""
    attention: dict[int, Tensor | None] = field(default_factory=dict)
    router: dict[int, Tensor | None] = field(default_factory=dict)
    """The padding mask of a router, bool `[B, S]`."""
    handed: dict[int, list[str]] = field(default_factory=dict)
    """Which of the two masks a layer's forward was handed, before anything of ours."""
    runs: Counter[int] = field(default_factory=Counter)
    """How often a layer ran, recomputing included."""


@contextlib.contextmanager
def recording(stages: list[nn.Module]) -> Iterator[Seen]:
    """Hooks on real layers; what the last forward showed them stays."""
    seen = Seen()
    with contextlib.ExitStack() as hooks:
        for layer in (layer for stage in stages for layer in getattr(stage, "language_model", stage).decoder.layers):
            number, inner = layer.layer_number, layer.self_attention
            hooks.enter_context(layer.register_forward_pre_hook(partial(_record_layer, seen, number), with_kwargs=True))
            taken = {getattr(inner, name, None): _record_gdn for name in ("in_proj", "in_proj_qkvz", "in_proj_qkv")}
            taken |= {
                getattr(inner, "core_attention", None): _record_attention,
                getattr(layer.mlp, "router", None): _record_router,
            }
            for module, take in taken.items():
                if module is not None:
                    hooks.enter_context(module.register_forward_pre_hook(partial(take, seen, number, inner)))
        yield seen


def _record_layer(seen: Seen, number: int, _: nn.Module, given: Any, named: dict[str, Any]) -> None:
    seen.handed[number] = [key for key in ("attention_mask_2d", "padding_mask") if named.get(key) is not None]
    seen.runs[number] += 1


def _record_gdn(seen: Seen, number: int, inner: nn.Module, _: nn.Module, given: tuple[Tensor, ...]) -> None:
    zero = given[0].eq(0).all(-1)
    seen.gdn[number] = zero.T if type(inner).__name__ == "GatedDeltaNet" else zero  # Megatron's; transformers' is [B, S, H]


def _record_attention(seen: Seen, number: int, inner: nn.Module, _: nn.Module, given: tuple[Any, ...]) -> None:
    seen.attention[number] = given[3]


def _record_router(seen: Seen, number: int, inner: nn.Module, _: nn.Module, given: tuple[Any, ...]) -> None:
    seen.router[number] = None if given[1] is None else given[1].T


def run(stages: list[nn.Module], batch: dict[str, Any]) -> Tensor:
    """The forward of each stage on the same batch, the hidden states handed on: as Megatron's schedules do it."""
    out = None
    for stage in stages:
        if out is not None:
            stage.set_input_tensor(out)
        out = stage(**batch)
    return out
