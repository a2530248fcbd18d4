"""A CPU as one of verl's platforms: `VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu`, as a vendor adds its device.

verl registers its FSDP engines for cuda and npu (workers/engine/fsdp/transformer_impl.py); `registered` adds this one.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*args, **kwargs):
    return None


class Module:
    """`torch.cpu`, with the questions about memory that verl asks of a device."""

    def __getattr__(self, name):
        if name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
            return lambda *args: 0
        if name == "mem_get_info":
            return lambda *args: (0, 0)
        if name == "get_device_name":
            return lambda *args: "cpu"
        if name == "get_device_properties":
            return lambda *args: SimpleNamespace(name="cpu", total_memory=0)
        return getattr(torch.cpu, name, nothing)


def told(value):
    return lambda self, *args, **kwargs: value


@contextmanager
def ranged(self, msg):
    yield


ANSWERS = {
    "device_name": property(told("cpu")), "vendor_name": property(told("cpu")), "device_module": property(told(Module())),
    "current_device": told(torch.device("cpu")), "device_count": told(1), "is_available": told(True), "nvtx_range": ranged,
    "communication_backend_name": told("gloo"), "visible_devices_envvar": told("CPU_VISIBLE_DEVICES"),
    "ray_resource_name": told("CPU"), "ray_resource_options": told({}), "ray_noset_envvars": told([]),
    "rollout_env_vars": told({}), "is_ipc_supported": told(False), "get_device_capability": told((0, 0)),
}  # fmt: skip
others = {name: told(None) for name in PlatformBase.__abstractmethods__ - set(ANSWERS)}
PlatformRegistry.register(platform="cpu")(type("PlatformCPU", (PlatformBase,), {**others, **ANSWERS}))

_group = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend=None, **given: _group("gloo", **given)  # not cpu:gloo,cpu:gloo


def registered():
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for engine, model_type in ((FSDPEngineWithLMHead, "language_model"), (FSDPEngineWithValueHead, "value_model")):
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device=["cpu"])(engine)
    _fsdp1()


def _fsdp1():
    """torch's FSDP1 sends a CPU's weights to no other rank (`sync_module_states`): here each rank reads them itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from verl.workers.engine.fsdp import transformer_impl

    original = FullyShardedDataParallel.__init__

    def on_cpu(self, *args, sync_module_states=None, **kwargs):
        original(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = on_cpu
    transformer_impl.get_init_weight_context_manager = lambda **kwargs: nullcontext
    transformer_impl.load_fsdp_model_to_gpu = nothing
