"""megatron-core 0.16.1 `GPTModel`s built on a CPU through their constructor, hybrid ones too, that say what layers got.

Stand-ins are for hardware alone: the flash kernel (`Attention`), FLA's norm, and CUDA's current device and random state.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

VOCABULARY, PAD = 64, 63


@contextmanager
def one_rank():
    """Megatron's groups of one rank, and a CPU in the place of CUDA; both are gone afterwards, where they are ours."""
    from megatron.core import parallel_state

    if ours := not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    patch = patched()
    try:
        yield patch
    finally:
        patch.undo()
        if ours:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def patched():
    """CPU in the place of CUDA. The caller undoes it."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import attention, transformer_block
    from megatron.core.transformer.moe import moe_utils

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(schedules, "torch", _Torch())
    tracker = SimpleNamespace(is_initialized=lambda: False, fork=lambda *args: nullcontext())
    patch.setattr(random, "_CUDA_RNG_STATE_TRACKER", tracker)
    patch.setattr(random, "initialize_rng_tracker", lambda *args, **kwargs: None)
    patch.setattr(transformer_block, "get_cpu_offload_context", lambda *args, **kwargs: (nullcontext(), None))
    patch.setattr(fused_softmax, "get_default_causal_mask", lambda size: torch.ones(size, size).triu(1).bool())
    patch.setattr(attention, "SplitAlongDim", None)
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    # Alone in its group a rank gets its own tensor back; this torch refuses to change that in place (mlp.py:247).
    reduce = staticmethod(lambda ctx, tensor, group: tensor.clone())
    patch.setattr(mappings._ReduceFromModelParallelRegion, "forward", reduce)
    patch.setattr(gated_delta_net, "HAVE_FLA", True)
    patch.setattr(gated_delta_net, "l2norm", lambda x: normalize(x, dim=-1, eps=1e-6), raising=False)
    return patch


class _Torch:
    """torch for Megatron's schedules, which count their tokens on "cuda"."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *args, device=None, **kwargs):
        return torch.zeros(*args, **kwargs)


class Attention(torch.nn.Module):
    """In the place of the flash kernel: causal, packed rows by their offsets, and dense masks [B, 1, S, S], True = blocked.

    Like Ascend's it takes no [B, S] mask; `lenient` ignores one, as TransformerEngine's causal kernels do.
    """

    lenient = False

    def __init__(self, config, **_):
        super().__init__()
        self.seen = []

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        self.seen.append(None if attention_mask is None else tuple(attention_mask.shape))
        groups = query.shape[-2] // key.shape[-2]
        key, value = (x.repeat_interleave(groups, dim=-2) for x in (key, value))
        if packed_seq_params is not None:
            return torch.cat([attend(*row) for row in rows_of(packed_seq_params, query, key, value)])
        assert self.lenient or attention_mask is None or attention_mask.ndim == 4, "a mask [B, S] is invalid"
        return attend(query, key, value, attention_mask)


def attend(query, key, value, masked=None):
    """`[S, B, N, D]`, or `[T, N, D]` of one sequence."""
    order = (1, 2, 0, 3) if query.ndim == 4 else (1, 0, 2)
    q, k, v = (x.permute(order) for x in (query, key, value))
    dense = masked is not None and masked.ndim == 4
    out = scaled_dot_product_attention(q, k, v, attn_mask=~masked if dense else None, is_causal=not dense)
    out = out.permute((2, 0, 1, 3) if query.ndim == 4 else (1, 0, 2))
    return out.flatten(-2)


def rows_of(params, *tensors):
    """Each sequence of packed `[T, N, D]`, or `[T, 1, N, D]`."""
    offsets = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    for start, end in zip(offsets.tolist(), offsets.tolist()[1:]):
        yield [x.squeeze(1)[start:end] if x.ndim == 4 else x[start:end] for x in tensors]


def gpt(kinds="aa", *, mtp=0, flash=Attention, **changed):
    """A model of these layers: `a` attention, `g` Gated DeltaNet. It needs `patched` and Megatron's groups.

    `flash` is the kernel in the place of TransformerEngine's; None leaves Megatron's local attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.manual_seed(0)
    recurrent = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [k == "g" for k in kinds]}
    recurrent["deterministic_mode"] = True
    config = TransformerConfig(
        num_layers=len(kinds), hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False, init_method_std=0.3,
        mtp_num_layers=mtp or None, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=4, linear_num_value_heads=4,
        **{**(recurrent if "g" in kinds else {}), **changed},
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(num_experts=changed.get("num_moe_experts"), normalization="RMSNorm")
    if flash:
        layer.submodules.self_attention.submodules.core_attention = flash
    layers = [gated_delta(layer) if kind == "g" else layer for kind in kinds]
    spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
    more = {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)} if mtp else {}
    made = GPTModel(config, spec, VOCABULARY, 64, position_embedding_type="rope", **more)
    with torch.no_grad():  # a zero row for the padding would hide what reaches it
        made.embedding.word_embeddings.weight[[0, PAD]] += 1.0
    return made.eval()


def gated_delta(layer):
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    layer = copy.deepcopy(layer)
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return layer


def seen(model):
    """What the attention layers of the last forward received, and what the recurrent ones did."""
    got = {"attention": [], "recurrent": []}
    for module in model.modules():
        if isinstance(module, Attention) and module.seen:
            got["attention"].append(module.seen[-1])
        if type(module).__name__ == "GatedDeltaNet" and getattr(module, "got", None):
            got["recurrent"].append(module.got[-1])
    return got


def received(model):
    """The same, whoever it was."""
    return {mask for masks in seen(model).values() for mask in masks}


def watch(model):
    """Let the recurrent layers note the mask they are handed."""
    for module in model.modules():
        if type(module).__name__ == "GatedDeltaNet":
            module.got = []
            module.register_forward_pre_hook(note, with_kwargs=True)
    return model


def note(module, args, kwargs):
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    module.got.append(None if mask is None else tuple(mask.shape))
