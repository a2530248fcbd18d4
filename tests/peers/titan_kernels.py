"""The kernels that torchtitan's models call and a CPU lacks, in torch, with a backward. Import it before torchtitan.

FlexAttention has no backward on a CPU: `dense_flex_attention` reads a BlockMask as the real one does: full blocks are not
asked, partial blocks ask `mask_mod`, other blocks are skipped. flash-linear-attention needs a GPU: in the
place of its two kernels of Qwen3.5 stand our references; `fla_modules()` are the modules that torchtitan imports. Shown is
that masks and offsets arrive and keep documents apart, not what a card computes.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from stand_ins import module
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import cross_entropy

from collate_npu import Pattern

if importlib.util.find_spec("triton") is None:
    # Expert-parallel copies on CUDA, in triton: imported with every model, used by none that runs here.
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())


def attended(mask: BlockMask) -> Tensor:
    """bool `[B, 1, Q, K]`, as FlexAttention's kernels read the tables."""
    Q, K = mask.seq_lengths
    B = mask.kv_num_blocks.shape[0]
    asked = create_mask(mask.mask_mod, B, 1, Q, K, device="cpu")
    partial = _places(mask.kv_num_blocks, mask.kv_indices, mask)
    if mask.full_kv_num_blocks is None:
        return partial & asked
    return _places(mask.full_kv_num_blocks, mask.full_kv_indices, mask) | (partial & asked)


def _places(count: Tensor, indices: Tensor, mask: BlockMask) -> Tensor:
    B, H, rows, columns = indices.shape
    used = torch.arange(columns) < count[..., None]
    blocks = torch.zeros(B, H, rows, columns + 1, dtype=torch.bool)
    blocks.scatter_(-1, torch.where(used, indices, columns).long(), True)
    q, k = mask.BLOCK_SIZE
    Q, K = mask.seq_lengths
    return blocks[..., :columns].repeat_interleave(q, 2).repeat_interleave(k, 3)[:, :, :Q, :K]


def dense_flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: Any, **other: Any) -> Any:
    """`flex_attention` on dense scores, with a backward. As there, a mask of more rows is read from its first."""
    assert other["score_mod"] is None
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
    keep = attended(block_mask)[: len(q)]
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~keep, -torch.inf)
    aux = SimpleNamespace(lse=torch.logsumexp(scores, -1)) if other["return_aux"].lse else None
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v, aux  # a query that sees nothing gets 0


def float32_experts(patch: pytest.MonkeyPatch) -> None:
    """torchtitan's experts compute in bfloat16 whatever the model is in (models/common/moe.py:97-108): here they do not."""
    patch.setattr(Tensor, "bfloat16", lambda self: self)
    patch.setattr(torch, "_grouped_mm", _grouped_mm)


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    stops = [0, *offs.tolist(), len(a)]
    parts = [a[start:stop] @ each for start, stop, each in zip(stops, stops[1:], [*b, torch.zeros_like(b[0])])]
    return torch.cat(parts)


def delta_rule(*given: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, **settings: Any) -> Any:
    assert cu_seqlens is None or torch.equal(cu_seqlens, cu_seqlens_cpu)
    return reference_gated_delta_rule(*given, cu_seqlens=cu_seqlens, **settings)


def convolution(*, x: Tensor, backend: str, cu_seqlens_cpu: Tensor, **settings: Any) -> Any:
    return reference_causal_conv1d(x, **settings), None


def fla_modules() -> dict[str, ModuleType]:
    function = {name: type(name, (torch.autograd.Function,), {}) for name in ("Conv", "Chunk", "Recurrent")}
    rules = {"chunk_gated_delta_rule": delta_rule, "fused_recurrent_gated_delta_rule": None}
    contents: dict[str, dict[str, Any]] = {
        "fla.modules.conv.causal_conv1d": {"causal_conv1d": convolution},
        "fla.modules.conv.triton.ops": {"CausalConv1dFunction": function["Conv"]},
        "fla.ops.gated_delta_rule": rules,
        "fla.ops.gated_delta_rule.chunk": {"ChunkGatedDeltaRuleFunction": function["Chunk"]},
        "fla.ops.gated_delta_rule.fused_recurrent": {"FusedRecurrentFunction": function["Recurrent"]},
    }
    packages = ("fla", "fla.modules", "fla.modules.conv", "fla.modules.conv.triton", "fla.ops")
    return {name: module(name, **contents.get(name, {})) for name in (*packages, *contents)}


WINDOW = 3
WINDOWED = Pattern.sliding(WINDOW)
LAYERS: dict[str, Any] = {
    "gpt_oss": {"basic_mask": "causal", "sliding_window_mask": WINDOWED},
    "muse_glimmer": {"global": "causal", f"swa_{WINDOW}": WINDOWED},  # a window with rope, every fourth without both
}
"""Where masks have names of their own; the others are read off the model."""


def config_of(family: str, vocabulary: int = 512) -> Any:
    """The debug model in two layers, of each kind of attention one, with windows that a short row fills."""
    table = "deepseekv3_configs" if family == "deepseek_v3" else f"{family.replace('gpt_oss', 'gptoss')}_configs"
    debug = getattr(importlib.import_module(f"torchtitan.models.{family}"), table)["debugmodel"]
    words = {"deepseek_v3": ("flex", "standard"), "gpt_oss": ("standard", "flex")}
    config = debug(*words.get(family, ("flex",)))
    config.layers = config.layers[2:4] if family in ("muse_glimmer", "qwen3_5") else config.layers[:2]
    config.enable_weight_tying = False
    config.vocab_size = config.lm_head.out_features = vocabulary
    embedding = getattr(config.tok_embeddings, "embedding", config.tok_embeddings)
    embedding.num_embeddings, embedding.param_init = vocabulary, {"weight": partial(nn.init.normal_, std=0.02)}
    for layer in config.layers:
        attention = getattr(layer, "attention", None)
        for name in ("window_size", "sliding_window_size"):
            if getattr(attention, name, None) is not None and name in attention.__slots__:
                setattr(attention, name, WINDOW)
    return config


@contextmanager
def with_fla() -> Iterator[pytest.MonkeyPatch]:
    """fla's modules in place, and no mesh to check types against."""
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("fla is installed: its kernels would be dispatched to a GPU")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in fla_modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setattr("torchtitan.distributed.utils._spmd_backend", "default")
        yield patch


def built(config: Any) -> nn.Module:
    """The model of a config, the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = config.build()
        model.init_states(buffer_device=torch.device("cpu"))
        for name, weight in model.named_parameters():  # small random models hide wrong masks
            if weight.ndim > 1 and "vision" not in name:
                nn.init.normal_(weight, std=0.05)
            elif name == "norm.weight":  # Muse Glimmer begins at 0, and every logit with it
                nn.init.ones_(weight)
    return model


# --- every sample by itself, without anything of ours: what a batch is compared with


TEXT_ALONE = {"special_tokens": {"image_id": -1, "video_id": -1}}
"""What Qwen3.5 asks of a batch without images."""


def alone(config: Any, weights: dict[str, Tensor], batch: list[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of every sample by itself, on the same model built plainly, with the masks that it makes."""
    model, more = config.build(), TEXT_ALONE if "qwen3_5" in type(config).__module__ else {}
    model.init_states(buffer_device=torch.device("cpu"))
    model.load_state_dict(weights, strict=False)
    total, count = torch.zeros(()), 0
    for row in batch:
        ids, segments = (torch.tensor(row[key]) for key in ("input_ids", "attention_mask"))
        for number in range(1, int(segments.max()) + 1):
            sample = ids[segments == number][None]
            places = torch.arange(sample.shape[1])[None]
            logits = model(sample, positions=places, attention_masks=model.get_attention_masks(places), **more)
            follows = (segments == number).nonzero()[:, 0].diff() == 1  # across a hole nothing is predicted
            labels = torch.tensor([*torch.where(follows, sample[0, 1:], -100).tolist(), row.get("after", -100)])
            total = total + cross_entropy(logits[0], labels, reduction="sum")
            count += int((labels != -100).sum())
    (total / count).backward()
    told = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return float(total.detach() / count), told
