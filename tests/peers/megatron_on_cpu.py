"""A CPU in the place of CUDA, and layers of Megatron's own in the place of Transformer Engine's: `megatron sft` then trains.

For a process of its own (`swift_site/sitecustomize.py` imports it there). Nothing of ms-swift or collate_npu is touched, and
no forward of mcore-bridge: what stands in is hardware, Transformer Engine's layers, and fla's norm of a vector.
"""

import contextlib
from typing import Any

import te_stub  # noqa: F401  (before anything imports Megatron)
import torch
from megatron.core import optimizer, utils
from megatron.core.optimizer import clip_grads
from megatron_world import hardware, layers
from stand_ins import OnCpu, answer
from torch.optim import SGD, AdamW


def put_optimizers() -> None:
    """torch's, where Megatron would take those of Apex or Transformer Engine."""
    optimizer.Adam, optimizer.SGD, optimizer.USING_PYTORCH_OPTIMIZER = AdamW, SGD, True
    for user in (clip_grads, optimizer.optimizer):
        user.multi_tensor_applier = utils.local_multi_tensor_applier
        user.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm


class Stream:
    """Streams and events of a CPU: nobody waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Stream()


def cuda_is_the_cpu() -> None:
    answer(torch.cuda, current_stream=Stream(), stream=contextlib.nullcontext())
    answer(torch.cuda, synchronize=None, empty_cache=None, max_memory_reserved=0, memory_allocated=0, memory_reserved=0)
    torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[misc,assignment]
    torch.cuda.get_rng_state = torch.get_rng_state
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    OnCpu().__enter__()


layers(setattr)
put_optimizers()
cuda_is_the_cpu()
from mcore_bridge.model import modules  # noqa: E402, F401  (its classes derive from those that compute)

hardware(setattr)
