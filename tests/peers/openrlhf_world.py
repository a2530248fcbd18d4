"""OpenRLHF on a CPU: stand-ins for flash_attn's padding (plain torch there too) and kernel, for vllm, and for the device."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from stand_ins import answer, pad_input, put_module, stand_in, unpad_input, varlen_attention


def varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal=True,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    out = varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left)
    return out, q.new_zeros(q.shape[1], len(q)), None, None


def gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def flash_attention():
    """Its modules that OpenRLHF (models/ring_attn_utils.py:3-4) and ring_flash_attn import."""
    import transformers  # noqa: F401  has looked for the true one
    from einops import rearrange

    padding = {"index_first_axis": lambda x, indices: x[indices], "unpad_input": unpad_input, "pad_input": pad_input}
    kernels = dict.fromkeys(("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_backward"))
    put_module("flash_attn")
    put_module("flash_attn.bert_padding", **padding, rearrange=rearrange)
    put_module("flash_attn.utils")
    put_module("flash_attn.utils.distributed", all_gather=gathered)
    put_module("flash_attn.flash_attn_interface", **kernels, _flash_attn_varlen_forward=varlen_forward)


class Cpu(str):
    """The device, and a number in `f"cuda:{...}"` (trainer/ppo_utils/replay_buffer.py:44), to where nothing is sent."""

    def __format__(self, spec):
        return "0"


def on_cpu():
    """What DeepSpeed's strategy and the actors ask CUDA for (utils/deepspeed/deepspeed.py:104-118)."""
    import torch.distributed.device_mesh as meshes

    made = meshes.init_device_mesh
    meshes.init_device_mesh = lambda device, *args, **kwargs: made("cpu", *args, **kwargs)
    answer(torch.cuda, **dict.fromkeys(("set_device", "empty_cache", "synchronize")))
    answer(torch.cuda, current_device=Cpu("cpu"), get_device_properties=SimpleNamespace(uuid="cpu"))


def FusedAdam(parameters, adam_w_mode=True, **settings):
    """In the place of the fused one, which is compiled for minutes."""
    return torch.optim.AdamW(parameters, **settings)


def deepspeed_on_cpu():
    """Its CPU accelerator on Gloo, without what it compiles: the fused Adam, and shared memory in the place of Gloo."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.torch
    import deepspeed.ops.adam

    deepspeed.comm.torch.build_shm_op = lambda: None
    deepspeed.ops.adam.FusedAdam = FusedAdam


def start():
    """All of it, before OpenRLHF is imported."""
    deepspeed_on_cpu()
    import datasets  # noqa: F401  look for the hardware's libraries before others stand in for them
    import peft  # noqa: F401

    flash_attention()
    stand_in(vllm="0.29.0")
    on_cpu()
