"""A real `GPTModel` of megatron-core on a CPU, through its constructor; what stands in for hardware is listed in `on_cpu`.

`TEDotProductAttention` here is the test's own stand-in for Transformer Engine's kernel, which needs a GPU: causal, blind to
dense masks, thd by the offsets of PackedSeqParams, keys and values gathered over the context-parallel group. Local
attention of Megatron refuses context parallelism, so `DotProductAttention` here is the same kernel with a dense mask.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from importlib.metadata import version
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from collate_npu import Segments, gather_sequence, per_sequence
from collate_npu.parallel import ContextParallel, token_rows

if int(version("megatron-core").split(".")[1]) >= 18:
    import triton_stub  # noqa: F401  (before megatron)

VOCABULARY, PAD, HIDDEN = 64, 63, 32


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """A CPU in the place of CUDA, and process groups."""
    if "mcore_bridge" in sys.modules:
        pytest.skip("mcore-bridge, once imported, changes Megatron's classes: run these files in a process of their own")
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import attention, transformer_block
    from megatron.core.transformer.moe import moe_utils

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    tracker = SimpleNamespace(is_initialized=lambda: False, fork=lambda *args: nullcontext())
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(random, "_CUDA_RNG_STATE_TRACKER", tracker)
    patch.setattr(random, "initialize_rng_tracker", lambda *args, **kwargs: None)
    patch.setattr(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", _rotary_part)  # its index goes by pinned memory
    # Where another test file has put stand-ins for Transformer Engine in place, nothing here may call one.
    patch.setattr(transformer_block, "get_cpu_offload_context", lambda *args, **kwargs: (nullcontext(), None))
    patch.setattr(attention, "SplitAlongDim", None)
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # 0.16.1 reads the name and sets it with TE alone
    # Alone in its group a rank gets its own tensor back, as it is; this torch refuses to change that in place (mlp.py:247).
    reduce = staticmethod(lambda ctx, tensor, group: mappings._reduce(tensor.clone(), group))
    patch.setattr(mappings._ReduceFromModelParallelRegion, "forward", reduce)


def _rotary_part(frequencies: Tensor, dim: int, group: Any) -> Tensor:
    """Chunks r and 2 * size - 1 - r, as rope_utils.py:45-65 of 0.16.1 picks them on a GPU."""
    size, rank = group.size(), group.rank()
    chunks = frequencies.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def build(*, attention: Any = None, experts: bool = False, positions: str = "learned_absolute", **changed: Any) -> Any:
    """A model of two layers (and `mtp_num_layers` more), the same weights at every call; `attention` replaces the local."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig, transformer_block

    if experts:
        changed = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 1.0,
            "moe_router_load_balancing_type": "aux_loss",
            **changed,
        }
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=64,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            init_method_std=0.3,
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            **changed,
        )
        layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        if attention is not None:
            layer.submodules.self_attention.submodules.core_attention = attention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        spec = transformer_block.TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=Norm)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
        return GPTModel(config, spec, VOCABULARY, 64, position_embedding_type=positions, mtp_block_spec=mtp)


class Norm(torch.nn.LayerNorm):
    """In the place of Transformer Engine's: Megatron's torch one refuses sequence parallelism (torch_norm.py:32)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)


# --- samples and what comes of them


def samples(*lengths: int) -> list[dict[str, Any]]:
    ids = [[(5 * i + 3 * b) % 60 + 1 for i in range(length)] for b, length in enumerate(lengths)]
    return [{"input_ids": row, "labels": row} for row in ids]


def packed_rows(rows: list[dict[str, Any]], lengths: Any) -> dict[str, Tensor]:
    """The samples in rows as `lengths` says, padded on the right, with the three keys of the wire."""
    truth = Segments.from_lengths(lengths)
    whole = torch.full(truth.shape, PAD).masked_scatter(
        truth.keep, torch.tensor([i for row in rows for i in row["input_ids"]])
    )
    labels = whole.masked_fill(~truth.keep, -100)
    return {"input_ids": whole, "labels": labels, "attention_mask_2d": truth.keep, "segment_ids": truth.ids}


def loss_and_gradients(model: Any, runs: list[tuple[dict[str, Any], Segments]]) -> tuple[Tensor, list[Tensor], Any]:
    """Summed loss, logits of each sample and gradients, over batches `(inputs, truth)`."""
    model.zero_grad()
    total, logits = torch.zeros(()), []
    for inputs, truth in runs:
        logits += per_sequence(logits_of(model, inputs), truth)
        total = total + (model(**inputs) * inputs["loss_mask"]).sum()
    total.backward()
    return total.detach(), logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """With multi-token prediction 0.16.1 takes no labels=None; the logits are those of the main head."""
    if getattr(model.config, "mtp_num_layers", None):
        seen: list[Tensor] = []
        hook = model.output_layer.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        model(**inputs)
        hook.remove()
        return seen[-1].transpose(0, 1)
    return model(**{**inputs, "labels": None})


def aux_losses() -> dict[str, float]:
    """The losses that Megatron logged of its routers, layer by layer, since the last call."""
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

    tracked = get_moe_layer_wise_logging_tracker()
    told = {f"{name} {n}": float(x) for name, held in tracked.items() for n, x in enumerate(held["values"])}
    clear_aux_losses_tracker()
    tracked.clear()
    return told


def far(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to its size; inf where one is not finite."""
    gaps = [float((ours[key] - theirs[key]).abs().max() / (1 + theirs[key].abs().max())) for key in theirs]
    assert ours.keys() == theirs.keys()
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of any logit."""
    gaps = [float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


# --- attention in the place of a GPU's


class TEDotProductAttention(torch.nn.Module):
    """Causal; a dense mask that is given is not looked at, as Transformer Engine does under `causal`."""

    reads_dense = False

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, packed_seq_params: Any = None, **kwargs: Any
    ) -> Tensor:
        """`[S, B, H, D]`, or `[T, H, D]` with `packed_seq_params`: this rank's queries against everybody's keys."""
        size, rank = self.group.size(), self.group.rank()
        group = self.group if size > 1 else None
        flat = packed_seq_params is not None
        cp = ContextParallel(size, rank, layout="document_zigzag" if flat else "zigzag", group=group)
        bounds = _places(packed_seq_params) if flat else None
        keys, values = (gather_sequence(x, cp, dim=0, cu_seqlens=bounds, loss="local") for x in (key, value))
        rows = token_rows(len(keys), cp, bounds)
        if flat:
            allowed_QK = _allowed(packed_seq_params, len(keys), size)[rows]
            out = _softmax(query[:, None], keys[:, None], values[:, None], allowed_QK)
            return out.flatten(1)
        if self.reads_dense:
            assert masked is not None
            assert masked.shape[-2:] == (len(rows), len(keys))
            return _softmax(query, keys, values, ~masked).flatten(2)
        return _softmax(query, keys, values, torch.ones(len(keys), len(keys)).tril().bool()[rows]).flatten(2)


class DotProductAttention(TEDotProductAttention):
    """With the dense mask of this rank's queries, True = blocked."""

    reads_dense = True


def _places(params: Any) -> Tensor:
    """Some send no padded offsets (ms-swift): then there is nothing between sequences."""
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


def _softmax(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, -10000.0).softmax(-1)  # core/transformer/utils.py:54-55
    return torch.einsum("bhqk,kbhd->qbhd", weights, value)


def _allowed(params: Any, width: int, size: int) -> Tensor:
    """bool `[T, T]`: causal inside the real tokens of each sequence, which the physical offsets place.

    What Transformer Engine decides where nobody says it: v2.9 to v2.16, dot_product_attention.py `pad_between_seqs is None`.
    """
    real, physical = params.cu_seqlens_q.tolist(), _places(params).tolist()
    told = getattr(params, "pad_between_seqs", None)
    between = physical[:-1] != real[:-1] if told is None else told
    if not between and size > 1:
        assert not any((stop - start) % (2 * size) for start, stop in pairwise(real)), "TransformerEngine issue 3331"
    assert physical[-1] == width
    allowed = torch.zeros(width, width, dtype=torch.bool)
    for (start, stop), at in zip(pairwise(real), (physical if between else real)[:-1]):
        part = slice(at, at + stop - start)
        allowed[part, part] = torch.ones(stop - start, stop - start).tril().bool()
    return allowed
