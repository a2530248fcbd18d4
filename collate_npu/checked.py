"""Checked: what a public function is given is held against its own annotations, so that a wrong kind of thing is refused
in words and not met somewhere inside. Judged are tensors, whole numbers, flags, names and our own classes; what a function
reads in many forms (`Any`, sequences) it judges itself. Costs 1 us a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache, wraps
from itertools import chain
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain

P = ParamSpec("P")
T = TypeVar("T")
_NUMBERS: dict[Any, tuple[type, ...]] = {bool: (bool, np.bool_), int: (Real,), float: (Real,), str: (str,)}
"""Whether a number is whole, and large enough, is asked where it is used."""
_SPOKEN = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a name",
    Mapping: "a dict",
    NoneType: "None",
}


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which raises `CollateError` for an argument of a kind that its annotation does not name.

    >>> @checked
    ... def drawn(width: int = 3, *, folded: bool = False) -> int:
    ...     return width
    >>> drawn(4, folded="no")
    Traceback (most recent call last):
        ...
    collate_npu.errors.CollateError: folded: got a str. drawn takes True or False. Pass True or False.
    """
    names = function.__code__.co_varnames

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            hold_against(function, chain(zip(names, args), kwargs.items()))
        return function(*args, **kwargs)

    return called


def hold_against(function: Callable[..., Any], given: Iterable[tuple[str, Any]]) -> None:
    """Raise for what `function` would be given by name and does not take."""
    judged = _kinds(function)
    for name, value in given:
        kinds = judged.get(name)
        if kinds is not None and type(value) not in kinds and not _is_one(value, kinds):
            raise wrong_kind(name, value, function.__qualname__.removesuffix(".__init__"), *kinds)


def check_fields(held: Any) -> None:
    """The same for the fields of a dataclass, when it is made."""
    hold_against(held.__class__, ((name, getattr(held, name, None)) for name in _kinds(held.__class__) if name[0] != "_"))


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """By parameter, the kinds that are judged; none where it takes a form that is not."""
    found = {}
    for name, hint in _hints(function).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = tuple(dict.fromkeys(map(_kind, parts)))
        if name != "return" and None not in kinds:
            found[name] = kinds
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Of a dataclass those of its fields: Python 3.10 evaluates no `InitVar` and no `KW_ONLY`."""
    if not isinstance(function, type):
        return get_type_hints(function)
    names: dict[str, Any] = {}
    for base in reversed(function.__mro__):
        names |= vars(sys.modules[base.__module__])
    return get_type_hints(SimpleNamespace(__annotations__={field.name: field.type for field in fields(function)}), names)


def _kind(hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return type(get_args(hint)[0])
    if isinstance(origin, type) and issubclass(origin, (Mapping, Callable)):  # type: ignore[arg-type]
        return Mapping if issubclass(origin, Mapping) else Callable
    ours = isinstance(hint, type) and (hint in (*_NUMBERS, NoneType, Tensor) or hint.__module__.startswith("collate_npu."))
    return hint if ours else None


def _is_one(value: Any, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool in kinds
    if isinstance(value, Tensor) and value.ndim == 0 and not {int, float}.isdisjoint(kinds):
        return True
    if Callable in kinds and callable(value):
        return True
    return any(hasattr(value, "items") if kind is Mapping else isinstance(value, _NUMBERS.get(kind, kind)) for kind in kinds)


def dimension(name: str, x: Tensor, dim: Any) -> int:
    """The dimension of a tensor that is meant, counted from the first."""
    N = x.ndim
    if not (type(dim) is int or isinstance(dim, Integral)) or not -N <= int(dim) < N:
        rule = f"{name} has {N} dimensions."
        raise CollateError(explain("dim", repr(dim)[:80], rule, "Name the one that is the sequence."))
    return int(dim) % N


def here(device: Any, *, now: bool = True) -> Any:
    """A device that torch can make a tensor on. Raises `CollateError` for any other. Not `now`: its name is read and no
    card touched, for which one "cuda" is follows from the process at each batch."""
    try:
        return torch.empty(0, device=device).device if now else torch.device(device)
    except (RuntimeError, TypeError, AssertionError) as error:
        rule = f"torch makes no tensor there: {str(error)[:120].splitlines()[0]}."
        raise CollateError(explain("device", repr(device)[:60], rule, "Pass 'cpu', or a device of this machine.")) from None


def wrong_kind(name: str, value: Any, function: str, *kinds: Any) -> CollateError:
    """The refusal of an argument that is none of these kinds."""
    got = f"a tensor {list(value.shape)}" if type(value) is Tensor and not value.is_nested else f"a {type(value).__name__}"
    spoken = " or ".join(_SPOKEN.get(kind, f"a {kind.__name__}") for kind in kinds)
    return CollateError(explain(name, got, f"{function} takes {spoken}.", f"Pass {spoken}."))
