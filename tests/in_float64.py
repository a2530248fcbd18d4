"""What a model computes with every step in float64, those too that its layers take in float32: what rounding is told by."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Wide(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **{name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()})


def in_float64(model, work):
    wide = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # torch multiplies groups in float32 at most
    with _Wide():
        return work(wide)


def neighbour(model, seed):
    """A copy with each weight the next number above or below it: what one rounding may do."""
    near, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in near.parameters():
        weight.data = torch.nextafter(weight.data, torch.randn(weight.shape, generator=draw) * torch.inf)
    return near
