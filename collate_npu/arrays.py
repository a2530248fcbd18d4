"""Arrays: values of a caller as a CPU tensor or a numpy array. Public functions take tensors, arrays and nested lists."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, a_type, explain, shape_of

if TYPE_CHECKING:
    from functools import cached_property

    once = cached_property
else:

    class once:  # noqa: N801 (it decorates)
        """`functools.cached_property` without its lock, which before Python 3.12 all objects of a class share: two threads
        that ask two of them in another order would wait for each other for ever. Here both compute, and agree."""

        def __init__(self, function):
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, held, owner=None):
            if held is None:
                return self
            value = held.__dict__[self.name] = self.function(held)
            return value


Array = npt.NDArray[Any]
Side = Literal["right", "left"]
PaddingSide = Literal["none", "left", "right", "mixed"]

MOST_PLACES = 2**31 - 1
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PLAIN = frozenset((*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64))
_NUMPYS = PLAIN - {torch.bfloat16}
_REMEDY = "Pass a dense tensor, a numpy array or nested lists of numbers."
_UNPADDED = "Rows of unequal length must be padded first.", "Collate them with PaddingCollator, which takes them."


def entries(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of a mapping as a new dict; a TensorDict's non-tensor values as Python objects. Raises
    `CollateError` for a lazy stack whose rows differ in length or in keys (tensordict 0.15.3 _lazy.py)."""
    if "tensordict" not in sys.modules:
        return dict(batch.items())
    from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensor_collection  # type: ignore[import-not-found]

    if not is_tensor_collection(batch):
        return dict(batch.items())
    if isinstance(batch, LazyStackedTensorDict):
        try:
            same = len({frozenset(row.keys()) for row in batch.tensordicts}) == 1
            batch = batch.to_tensordict() if same else batch
        except RuntimeError:
            same = False
        if not same:
            raise CollateError(explain("batch", "a LazyStackedTensorDict of unequal rows", *_UNPADDED))
    return {key: value.tolist() if is_non_tensor(value) else value for key, value in batch.items()}


def host_tensor(name: str, value: Any) -> Tensor:
    """Return `value` as a dense CPU tensor, detached. It may share memory with `value`. Sparse tensors become dense and
    8-bit floats float32. Raises `CollateError` for meta, fake, nested and complex tensors, for objects and strings, and for
    unsigned numbers beyond int64."""
    plain = type(value) is Tensor and value.dtype in PLAIN and value.is_cpu and value.layout is torch.strided
    if plain and not value.is_nested:
        return cast(Tensor, value.detach())
    if not isinstance(value, Tensor):
        return torch.from_numpy(np.ascontiguousarray(host_array(name, value)))
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value).__name__ == "MemoryMappedTensor":  # tensordict's: a plain tensor whose memory is a file
        value = value.as_subclass(Tensor)
    with torch._C.DisableTorchFunctionSubclass():  # torch 2.6's CausalBias answers nothing
        nested = value.is_nested
    if nested:
        raise CollateError(explain(name, f"a nested {type(value).__name__}", *_UNPADDED))
    answers = next(base for base in type(value).__mro__ if "__torch_function__" in vars(base))
    if answers not in (Tensor, torch.nn.Parameter):  # it answers torch's functions by itself, before Tensor does
        rule = "Its class defines what it means, and it may hold no numbers (as torch's CausalBias)."
        raise CollateError(explain(name, a_type(value), rule, _REMEDY))
    if value.is_complex() or value.is_quantized or value.device.type == "meta" or isinstance(value, FakeTensor):
        what = "complex" if value.is_complex() else "without values"
        raise CollateError(explain(name, f"{type(value).__name__}, {what}", "Its values are read on the CPU.", _REMEDY))
    if value.layout != torch.strided:
        check_places(name, value.numel(), _REMEDY)
        value = value.to_dense()
    if value.is_floating_point() and value.element_size() == 1:
        value = value.float()
    value = value.detach().cpu()
    wide = value.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return torch.from_numpy(host_array(name, value.numpy())) if wide else value


def host_array(name: str, value: Any) -> Array:
    """Return `value` as a numpy array of bools, ints or floats (bfloat16 as float32). Raises as `host_tensor` does."""
    if type(value) is Tensor and value.dtype in _NUMPYS:
        with suppress(TypeError, RuntimeError):  # on a device, sparse, nested, part of a graph: the long way
            return value.numpy()
    if isinstance(value, Tensor):
        held = host_tensor(name, value)
        return (held.float() if held.dtype == torch.bfloat16 else held).numpy()
    if not isinstance(value, (list, tuple, np.ndarray, np.generic, int, float)):
        raise CollateError(explain(name, a_type(value), f"{name} is an array of numbers.", _REMEDY))
    if isinstance(value, np.ma.MaskedArray):
        raise CollateError(explain(name, "a masked array", "Its mask would be lost.", "Pass x.filled() and its own mask."))
    try:
        if isinstance(value, (list, tuple)) and any(issubclass(kind, Tensor) for kind in set(map(type, value))):
            value = [host_array(name, each) for each in value]
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # the last two are of tensors inside lists of lists
        got = "nested lists of unequal length" if isinstance(error, ValueError) else f"lists ({str(error)[:120]})"
        raise CollateError(explain(name, got, "All rows have one length and hold numbers.", _REMEDY)) from None
    if array.dtype.kind not in "biuf":
        raise CollateError(explain(name, f"values of type {array.dtype}", f"{name} is an array of numbers.", _REMEDY))
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            got, remedy = f"the value {array.max()}", "It wrapped around below 0: count again."
            raise CollateError(explain(name, got, "Whole numbers fit int64.", remedy))
        array = array.astype(np.int64)
    if not array.dtype.isnative or array.dtype.itemsize > 8 or min(array.strides, default=0) < 0:  # torch takes none
        array = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), order="C")
    return array


def dims(value: Any) -> tuple[int, ...]:
    """Return the shape of an array or a tensor, and () for a nested tensor and anything else."""
    nested = isinstance(value, Tensor) and value.is_nested
    return tuple(value.shape) if isinstance(value, (Tensor, np.ndarray)) and not nested else ()


def whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """Return `value` as an int. Raises `CollateError` for a float, a bool, a list, and a number of more than 64 bits."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_floating_point():
        value = host_array(name, value).item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not least <= value < 1 << 63:
        got = shape_of(value) if isinstance(value, (Tensor, np.ndarray)) else repr(value)
        rule = f"{name} is a whole number, at least {least}, below 2**63."
        raise CollateError(explain(name, got, rule, f"Pass an int of at least {least}."))
    return int(value)


OF_A_BATCH = "Pass the rows of one batch; an expanded tensor counts by its shape."


def check_places(name: str, places: int, remedy: str) -> None:
    """Raise `CollateError` for more places than int32 offsets can count, before memory is allocated."""
    if places > MOST_PLACES:
        rule = f"Offsets are int32, so a batch has at most {MOST_PLACES} places."
        raise CollateError(explain(name, f"{places} places", rule, remedy))
