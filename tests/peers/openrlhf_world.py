"""OpenRLHF on a CPU: stand-ins for flash_attn's padding (plain torch there too), for vllm, and for the card's device."""

import os
import sys
from types import ModuleType, SimpleNamespace

import torch
from stand_ins import pad_input, stand_in, unpad_input


def flash_attention():
    """Its modules that OpenRLHF imports (models/ring_attn_utils.py:3-4)."""
    import transformers  # noqa: F401  has looked for the true one
    from einops import rearrange

    functions = {"index_first_axis": lambda x, indices: x[indices], "unpad_input": unpad_input, "pad_input": pad_input}
    held = {"bert_padding": {**functions, "rearrange": rearrange}, "utils": {}, "utils.distributed": {"all_gather": None}}
    for name, values in {"": {}, **held}.items():
        module = sys.modules[f"flash_attn.{name}".rstrip(".")] = ModuleType(f"flash_attn.{name}".rstrip("."))
        module.__path__ = []
        vars(module).update(values)


class Cpu(str):
    """The device, and a number in `f"cuda:{...}"` (trainer/ppo_utils/replay_buffer.py:44), to where nothing is sent."""

    def __format__(self, spec):
        return "0"


def on_cpu():
    """What DeepSpeed's strategy and the actors ask CUDA for (utils/deepspeed/deepspeed.py:104-118)."""
    import torch.distributed.device_mesh as meshes

    made = meshes.init_device_mesh
    meshes.init_device_mesh = lambda device, *args, **kwargs: made("cpu", *args, **kwargs)
    nothing = lambda *args, **kwargs: None  # noqa: E731
    cuda = {"set_device": nothing, "empty_cache": nothing, "synchronize": nothing, "current_device": lambda: Cpu("cpu")}
    vars(torch.cuda).update(cuda, get_device_properties=lambda *_: SimpleNamespace(uuid="cpu"))


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
