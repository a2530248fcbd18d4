"""A card's matrix units, pretended: products round their float32 inputs to ten bits, as TF32 and HF32 do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

PRODUCTS = {
    F.linear, F.scaled_dot_product_attention, F.conv1d, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum,
    Tensor.matmul, Tensor.__matmul__, Tensor.bmm,
}  # fmt: skip


class _Round(torch.autograd.Function):
    """To nearest, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        bits = x.contiguous().view(torch.int32)
        return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return _Round.apply(gradient)


class RoundedProducts(TorchFunctionMode):
    """While this is entered, every product of float32 tensors rounds them first."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            args = [self._rounded(x) for x in args]
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _rounded(x):
        return _Round.apply(x) if isinstance(x, Tensor) and x.dtype == torch.float32 else x
