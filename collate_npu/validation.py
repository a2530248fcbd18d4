"""Validation: misspelt options and names are refused in words, and so is what is no model, tokenizer, collator or tensor.

Other arguments of a wrong kind raise Python's own `TypeError`. Costs 1 us a call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial, wraps
from inspect import signature
from itertools import chain
from os import PathLike
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.errors import CollateError, a_type, did_you_mean, explain, not_one_of, shape_of

Made = TypeVar("Made")
REMEDIES = {
    "attention_mask": "'auto' suits most trainers.",
    "polarity": "Pass polarity='keep' (True attends), 'masked' (True is blocked) or 'bias' (additive).",
}
"""What to pass in place of a name that an option does not have."""


@overload
def checked(made: Made) -> Made: ...
@overload
def checked(*, instead: Mapping[str, str]) -> Callable[[Made], Made]: ...
def checked(made: Any = None, *, instead: Mapping[str, str] = {}) -> Any:
    """Return a function or a class, which raises `CollateError` for a keyword that it does not have, for a name that its
    `Literal` does not have, and for a flag that is neither True nor False.

    `instead` says what to write in place of a keyword of other packages.
    """
    if made is None:
        return partial(checked, instead=instead)
    a_class = isinstance(made, type)
    function = made.__init__ if a_class else made
    order = [*signature(made).parameters]
    known = frozenset(order)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for name in kwargs.keys() - known:
                near = did_you_mean(name, order, f"It takes {', '.join(order)}.")
                rule = f"{made.__qualname__} has no such argument."
                raise CollateError(explain(name, repr(kwargs[name])[:60], rule, instead.get(name, near)))
            _check_names(made, chain(zip(order, args[a_class:]), kwargs.items()))
        return function(*args, **kwargs)

    if a_class:
        made.__init__ = called
    return made if a_class else called


def _check_names(made: Any, given: Any) -> None:
    taken = _names(made)
    for name, value in given:
        if name not in taken or (isinstance(value, str) and value in taken[name]):
            continue
        if bool in taken[name] and not isinstance(value, (bool, np.bool_)):
            raise CollateError(explain(name, a_type(value), "It is a flag.", "Pass True or False."))
        if bool not in taken[name] and (isinstance(value, np.ndarray) or value not in taken[name]):
            known = [each for each in taken[name] if each is not None]
            raise not_one_of(name, value, known, REMEDIES.get(name, "Name one of them."))


@cache
def _names(made: Any) -> dict[str, tuple[Any, ...]]:
    """Return by argument all names that it takes, where its annotation lists them; `(bool,)` for a flag."""
    found = {}
    for name, hint in _hints(made).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        names = [get_args(part) if get_origin(part) is Literal else (None,) * (part is NoneType) for part in parts]
        if name not in ("return", "loss") and (hint is bool or () not in names):  # of a gather: ranks that wait are told
            found[name] = (bool,) if hint is bool else tuple(chain(*names))
    return found


def _hints(made: Any) -> dict[str, Any]:
    """Return the annotations, of a dataclass those of its fields: Python 3.10 evaluates no `InitVar` and no `KW_ONLY`."""
    if not is_dataclass(made):
        return get_type_hints(getattr(made, "__init__", made) if isinstance(made, type) else made)
    names: dict[str, Any] = {}
    for base in reversed(getattr(made, "__mro__", ())):
        names |= vars(sys.modules[base.__module__])
    return get_type_hints(SimpleNamespace(__annotations__={field.name: field.type for field in fields(made)}), names)


def check_model(model: Any, *, config: bool = False) -> None:
    """Raise `CollateError` unless `model` is a torch module; with `config=True` its config is taken too."""
    named, tokenizer = isinstance(model, (str, PathLike)), callable(getattr(model, "decode", None))
    held = config and hasattr(model, "__dict__") and not (named or tokenizer or isinstance(model, type))
    if isinstance(model, nn.Module) or held:
        return
    remedy = "Pass the model, or its config." if config else "Pass the model."
    remedy = "That is a tokenizer: pass the model." if tokenizer else remedy
    remedy = f"Load it: AutoModelForCausalLM.from_pretrained({str(model)[:80]!r})." if named else remedy
    rule = "A model is a torch module or its config." if config else "A model is a torch module."
    raise CollateError(explain("model", a_type(model), rule, remedy))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `CollateError` for what has no `pad_token_id`."""
    if isinstance(tokenizer, nn.Module) or not hasattr(tokenizer, "pad_token_id"):
        remedy = "Pass the tokenizer (of a processor: processor.tokenizer), or pad_token_id= without one."
        remedy = "Pass the tokenizer first, and model= by its name." if isinstance(tokenizer, nn.Module) else remedy
        raise CollateError(explain("tokenizer", a_type(tokenizer), "A tokenizer has pad_token_id.", remedy))


def check_return_tensors(value: Any) -> None:
    """Raise `CollateError` unless `return_tensors` is None or "pt"."""
    if value not in (None, "pt"):
        raise CollateError(explain("return_tensors", repr(value)[:60], "Batches are torch tensors.", "Pass 'pt'."))


def check_collator(collator: Any) -> None:
    """Raise `CollateError` unless `collator` can be called with features."""
    if isinstance(collator, (nn.Module, type)) or callable(getattr(collator, "decode", None)) or not callable(collator):
        rule, remedy = "A collator is called with features, a list of dicts.", "Make one: PaddingCollator(tokenizer, model)."
        raise CollateError(explain("collator", a_type(collator), rule, remedy))


def check_batch(batch: Any, collator: Any) -> None:
    """Raise `CollateError` unless `batch` is a mapping; the message names the collator that returned it."""
    if not hasattr(batch, "items"):
        name = getattr(collator, "__qualname__", type(collator).__name__)
        rule = "A collator returns a batch, a dict of tensors."
        raise CollateError(explain(name, a_type(batch), rule, "Return the batch there."))


def check_held(name: str, value: float, dtype: torch.dtype) -> None:
    """Raise `CollateError` unless tensors of this dtype hold the value: uint8 turns -100 into 156, int64 0.5 into 0."""
    value = value.item() if isinstance(value, Tensor) else value
    low, high = (0, 1) if dtype == torch.bool else (-math.inf, math.inf)
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if low > -math.inf and not (low <= value <= high and value == int(value)):
        rule = f"It stands at padding in a tensor of {str(dtype).removeprefix('torch.')}, which has no such value."
        remedy = "Convert the tensor first (x.long()), or pass a value that it holds."
        if dtype == torch.bool and name != "fill":
            remedy = "A mask of learned tokens holds no labels: pass input_ids.masked_fill(~learned, -100)."
        raise CollateError(explain(name, repr(value), rule, remedy))


def is_plain(x: Tensor) -> bool:
    """Return True if torch can index the tensor: it is not nested, sparse or quantised, nor of uint16, uint32 or uint64."""
    words = (torch.uint16, torch.uint32, torch.uint64)
    return not (x.is_nested or x.is_quantized or x.dtype in words) and x.layout is torch.strided


def check_of_batch(name: str, x: Tensor, shape: tuple[int, int], remedy: str) -> None:
    """Raise `CollateError` unless `x` is a plain tensor `[B, S, ...]` of this batch."""
    if not is_plain(x) or tuple(x.shape[:2]) != shape:
        rule = f"The batch is {list(shape)} (rows, width), and the tensor a dense one that torch can index."
        raise CollateError(explain(name, shape_of(x), rule, remedy))


def dimension(name: str, x: Tensor, dim: int) -> int:
    """Return `dim` counted from the first dimension. Raises `CollateError` if `x` has no such dimension."""
    if not -x.ndim <= dim < x.ndim:
        raise CollateError(explain("dim", str(dim), f"{name} has {x.ndim} dimensions.", "Pass that of the sequence."))
    return int(dim) % x.ndim
