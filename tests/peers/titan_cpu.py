"""torchtitan 0.3.0 on a CPU with Gloo: what stands for the hardware. Import it before torchtitan.

The device is the CPU. FlexAttention has no backward there, so a dense kernel stands for it that reads a BlockMask as the
real one does: full blocks are not asked, partial blocks ask `mask_mod`, other blocks are skipped. torchtitan 0.3.0 is
written against a torch after 2.13; the two functions that it calls and 2.13 lacks stand at the end.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.pipelining import schedules
from torch.nn.attention.flex_attention import BlockMask, create_mask

torch._utils._get_available_device_type = lambda: "cpu"
_DEVICE = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30, name="CPU"),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda *_: {},
    "current_device": lambda: 0,
}
for _name, _function in _DEVICE.items():
    setattr(torch.cpu, _name, _function)
# Expert-parallel copies on CUDA, in triton: imported with every model, used by none that runs here.
sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())

from torchtitan.models.common import attention  # noqa: E402

RECEIVED: list[Tensor] = []
"""bool `[B, Q, K]` of each call: what a query attends."""


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
    """`flex_attention` on dense scores, with a backward. As there, a mask that is too long is read from its beginning."""
    assert (other["score_mod"], other["return_aux"].lse) == (None, False)
    keep = attended(block_mask)[:, :, : q.shape[2], : k.shape[2]]
    RECEIVED.append(keep[:, 0])
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(~keep, -torch.inf), -1)
    return torch.nan_to_num(weights) @ v, None  # a query that sees nothing gets 0


attention.FlexAttention._compiled_flex_attn = staticmethod(dense_flex_attention)

_divide_factors = _fsdp_collectives._get_gradient_divide_factors
# Gloo has no PREMUL_SUM.
_fsdp_collectives._get_gradient_divide_factors = lambda *args, **kwargs: _divide_factors(
    *args[:5], **{**kwargs, "force_sum_reduction_for_comms": True}
)

# --- after torch 2.13

torch.distributed.set_timeout = lambda timeout, group: None  # called by torchtitan distributed/utils.py:595


def _step(step: Any) -> Any:
    """`step(arg_mbs=, kwarg_mbs=, target_mbs=)`: micro-batches as they are (pytorch pull request 188500)."""

    def pre_split(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "kwarg_mbs" not in kwargs:
            return step(self, *args, **kwargs)
        self._stage.has_backward = self._has_backward
        self._stage.clear_runtime_states()
        given = [kwargs.pop(name) for name in ("arg_mbs", "kwarg_mbs", "target_mbs", "losses")]
        return self._step_microbatches(*given, **kwargs)

    return pre_split


schedules.PipelineScheduleSingle.step = _step(schedules.PipelineScheduleSingle.step)
