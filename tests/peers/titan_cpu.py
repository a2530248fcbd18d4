"""torchtitan 0.3.0 on a CPU with Gloo: what stands for the hardware. Import it before torchtitan, in a process of its own.

torchtitan 0.3.0 is written against a torch after 2.13; the two functions that it calls and 2.13 lacks stand at the end.
"""

from types import SimpleNamespace
from typing import Any

import titan_kernels
import torch
import torch._utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention.flex_attention import create_block_mask

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

from torchtitan.models.common import attention  # noqa: E402

attention.FlexAttention._compiled_flex_attn = staticmethod(titan_kernels.dense_flex_attention)
for _user in (attention, _attention):  # test_torchtitan compiles it, and compares
    _user._compiled_create_block_mask = create_block_mask  # type: ignore[attr-defined]

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
