"""Host: what a caller hands in, as a CPU tensor or an array, or an error that names the type.

Everything public takes tensors, numpy arrays and nested lists alike; they come in here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain, shape_of

Array = npt.NDArray[Any]

_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN = frozenset((*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64))
_REMEDY = "Pass a dense tensor, a numpy array or nested lists of numbers."


def host_tensor(name: str, value: Any) -> Tensor:
    """`value` as a dense CPU tensor, detached; it may share memory with `value`.

    Sparse tensors become dense and 8-bit floats float32. Raises `CollateError` for what has no numbers to read (meta,
    fake, nested and complex tensors, objects, strings) and for unsigned numbers beyond int64.
    """
    plain: bool = type(value) is Tensor and value.dtype in _PLAIN and value.is_cpu
    if plain and value.layout is torch.strided and not value.is_nested:
        held: Tensor = value.detach() if value.requires_grad else value
        return held
    if not isinstance(value, Tensor):
        return torch.from_numpy(np.ascontiguousarray(host_array(name, value)))
    if _means_something_else(type(value)):
        rule = "It is a tensor by name only: what it means is in its class (torch's CausalBias holds no numbers)."
        raise CollateError(explain(name, f"a {type(value).__name__}", rule, _REMEDY))
    if value.is_nested or value.is_complex() or value.is_quantized or value.device.type == "meta" or _is_fake(value):
        what = "nested" if value.is_nested else "complex" if value.is_complex() else "without values"
        raise CollateError(explain(name, f"{type(value).__name__}, {what}", "Its values are read on the host.", _REMEDY))
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.is_floating_point() and value.element_size() == 1:
        value = value.float()
    return _signed(name, value.detach().cpu())


def host_array(name: str, value: Any) -> Array:
    """`value` as a numpy array of bools, whole numbers or floats (bfloat16 as float32). Errors as `host_tensor`."""
    if isinstance(value, Tensor):
        held = host_tensor(name, value)
        return (held.float() if held.dtype == torch.bfloat16 else held).numpy()
    if not isinstance(value, (list, tuple, np.ndarray, np.generic, int, float)):
        raise CollateError(explain(name, f"a {type(value).__name__}", "It holds numbers.", _REMEDY))
    try:
        array = np.asarray([host_array(name, v) for v in value] if _holds_tensors(value) else value)  # type: ignore[union-attr]
    except ValueError:
        raise CollateError(explain(name, "nested lists of unequal length", "Its rows are equally long.", _REMEDY)) from None
    if array.dtype.kind not in "biuf":
        raise CollateError(explain(name, f"values of type {array.dtype}", "It holds numbers.", _REMEDY))
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            rule = "Whole numbers are at most 64 bits with a sign."
            raise CollateError(explain(name, f"the value {array.max()}", rule, "Count again: it wrapped around."))
        array = array.astype(np.int64)
    return array


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(issubclass(kind, Tensor) for kind in set(map(type, value)))


def _signed(name: str, value: Tensor) -> Tensor:
    wide = (torch.uint16, torch.uint32, torch.uint64)
    return torch.from_numpy(host_array(name, value.numpy())) if value.dtype in wide else value


def _means_something_else(kind: type) -> bool:
    """Does this class answer torch's functions by itself, before Tensor does?"""
    return next(base for base in kind.__mro__ if "__torch_function__" in vars(base)) not in (Tensor, torch.nn.Parameter)


def _is_fake(value: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """`value` as an int. Raises `CollateError` for anything else: a float, a bool, a list."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_floating_point():
        value = int(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < least:
        got = shape_of(value) if isinstance(value, (Tensor, np.ndarray)) else repr(value)
        raise CollateError(explain(name, got, f"It is a whole number, at least {least}.", f"Pass {name} as an int."))
    return int(value)
