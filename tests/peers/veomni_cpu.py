"""VeOmni 0.1.12 on a CPU, by the doors it leaves open: its registry of kernels, which takes other backends
(ops/kernel_registry.py), and the slot under its flash attention (ops/kernels/attention/flash.py:34-38).

Stand-ins: a package `flash_attn` that is only looked for, Gloo for its card's backend, and a name for the device.
"""

import sys
from itertools import pairwise
from types import ModuleType

import torch
from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
from veomni.ops.kernels.attention import flash

import collate_npu.kernels.gated_delta.reference as gated_delta

found = ModuleType("flash_attn")
found.flash_attn_func = found.flash_attn_varlen_func = lambda *args, **kwargs: args
sys.modules["flash_attn"] = found
CARD = {"get_device_name": "A CPU", "empty_cache": None, "memory_stats": {"num_alloc_retries": 0}}
CARD |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "max_memory_reserved"), 0)
for name, answer in CARD.items():
    setattr(torch.cpu, name, lambda *_, answer=answer: answer)


TOLD = []
"""The offsets that attention and the recurrent layers were told, in turn."""


def convolution(x, weight, bias, activation, seq_idx, backend, cu_seqlens):
    TOLD.append(("conv", cu_seqlens.tolist()))
    return gated_delta.reference_causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens), None


def delta_rule(*args, cu_seqlens, **kwargs):
    TOLD.append(("rule", cu_seqlens.tolist()))
    return gated_delta.reference_gated_delta_rule(*args, cu_seqlens=cu_seqlens, **kwargs)


def attention(query, key, value, attention_mask, *, cu_seq_lens_q, softmax_scale, sliding_window=None, **kwargs):
    """Sequence by sequence, as a kernel with offsets goes: `[1, T, heads, size]`."""
    assert attention_mask is None or bool(attention_mask.all())
    TOLD.append(("attention", cu_seq_lens_q.tolist()))
    groups, outs = query.shape[2] // key.shape[2], []
    for start, end in pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (x[:, start:end].transpose(1, 2) for x in (query, key, value))
        near = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - (sliding_window or end))
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=softmax_scale)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1)


flash._flash_attention_forward = attention
for op, kernel in (("causal_conv1d", convolution), ("chunk_gated_delta_rule", delta_rule)):
    KERNEL_REGISTRY.register(
        KernelSpec("reference", op, "standard", lambda kernel=kernel: kernel, HardwareRequirement(device_type="any"))
    )

EAGER = ("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "rms_norm_gated", "load_balancing_loss")


def kernels(attention):
    """`model.ops_implementation` of its YAML."""
    ours = {f"{name}_implementation": "reference" for name in ("causal_conv1d", "chunk_gated_delta_rule")}
    eager = {f"{name}_implementation": "eager" for name in EAGER}
    return {"attn_implementation": attention, "moe_implementation": "eager", **ours, **eager}
