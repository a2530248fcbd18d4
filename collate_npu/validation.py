"""Validation: what a public function receives is compared with its own annotations, so that a wrong type is refused in words
and not met somewhere inside.

Checked are tensors, dtypes, whole numbers, flags, the names of a `Literal` and classes of this package; a function checks by
itself what it reads in many forms (`Any`, sequences). Costs 1 us a call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache, wraps
from inspect import Signature, signature
from itertools import chain
from numbers import Integral
from os import PathLike
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.errors import CollateError, a_type, did_you_mean, explain, not_one_of, shape_of


def check_model(model: Any, *, config: bool = False, name: str = "model") -> None:
    """Raise `CollateError` for what is no module; where `config` is taken too, for what is no config either."""
    if isinstance(model, nn.Module):
        return
    loaded, remedy = _not_made(model, "AutoModelForCausalLM"), ""
    if isinstance(model, (bool, str)) and model in (True, False, "longest", "max_length"):
        remedy = "The second argument is the model. Pass padding= by its name."
    elif loaded:
        named = config and isinstance(model, str) and model.isidentifier()
        remedy = loaded + " A model type alone goes to BatchAdapter(model_type=)." * named
    elif callable(getattr(model, "decode", None)):
        remedy = "That is a tokenizer: pass the model."
    elif model is ...:
        remedy = "A collator does not keep its model. Pass model= again."
    elif callable(getattr(model, "get_text_config", None)):
        remedy = "" if config else "That is a config: build the model, AutoModelForCausalLM.from_config(config)."
    elif not config or not hasattr(model, "__dict__"):
        remedy = "Pass the model, or its config." if config else "Pass the model."
    if remedy:
        rule = "A model is a torch module or its config." if config else "A model is a torch module."
        raise CollateError(explain(name, _kind_of(model), rule, remedy))


def check_tokenizer(tokenizer: Any, *, does: str = "pad_token_id") -> None:
    """Raise `CollateError` where this attribute of a tokenizer is missing."""
    remedy = _not_made(tokenizer, "AutoTokenizer")
    if isinstance(tokenizer, nn.Module):
        remedy = "That is a model: pass the tokenizer first, and model= by its name."
    elif not remedy and not hasattr(tokenizer, does):
        remedy = "Pass the tokenizer, or pad_token_id= without one." if does == "pad_token_id" else "Pass the tokenizer."
        remedy = "Pass processor.tokenizer." if hasattr(tokenizer, "tokenizer") else remedy
    if remedy:
        raise CollateError(explain("tokenizer", _kind_of(tokenizer), f"A tokenizer has {does}.", remedy))


def check_return_tensors(value: Any) -> None:
    """Raise `CollateError` for what transformers calls another framework's tensors."""
    if value not in (None, "pt"):
        raise CollateError(explain("return_tensors", repr(value)[:60], "Batches are torch tensors.", "Pass 'pt'."))


def check_held(name: str, value: float, dtype: torch.dtype) -> None:
    """Raise unless tensors of this dtype hold the value: uint8 makes 156 of -100, bool True, and whole numbers 0 of 0.5."""
    value = value.item() if isinstance(value, Tensor) else value
    low, high = (0, 1) if dtype == torch.bool else (-math.inf, math.inf)
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if low > -math.inf and not (low <= value <= high and value == int(value)):
        rule = f"It stands at padding in a tensor of {str(dtype).removeprefix('torch.')}, which has no such value."
        remedy = "Convert the tensor first (x.long()), or pass a value that it holds."
        raise CollateError(explain(name, repr(value), rule, remedy))


def check_collator(collator: Any, name: str = "collator") -> None:
    """Raise `CollateError` for what cannot be called with features; a class makes what can."""
    other = isinstance(collator, nn.Module) or callable(getattr(collator, "decode", None))
    if other or isinstance(collator, type) or not callable(collator):
        then = " first, then the model" * (name == "inner")
        remedy = f"Pass a collator{then}; or make one: PaddingCollator(tokenizer, model)."
        remedy = remedy if other else _not_made(collator, "") if isinstance(collator, type) else "Pass that function."
        raise CollateError(explain(name, _kind_of(collator), "A collator is called with features, a list of dicts.", remedy))


def check_batch(batch: Any, collator: Any) -> None:
    """Raise `CollateError` for what is no batch, with the place of the function that returned it."""
    if hasattr(batch, "items"):
        return
    code = getattr(getattr(collator, "func", collator), "__code__", None)
    code = code or getattr(type(collator).__call__, "__code__", None)
    place = f"{code.co_filename}, line {code.co_firstlineno}" if code else type(collator).__name__
    rule = "A collator returns a batch, a dict of tensors."
    raise CollateError(explain(place, f"{_kind_of(batch)} from {type(collator).__name__}", rule, "Return the batch there."))


def _not_made(given: Any, loader: str) -> str:
    """How to make one of a name or a class; "" where it is neither."""
    if isinstance(given, (str, PathLike)):
        return f"Load it: {loader}.from_pretrained({str(given)[:80]!r})."
    made = ".from_pretrained(...)" if hasattr(given, "from_pretrained") else "(...)"
    return f"Make one of it: {given.__name__}{made}." if isinstance(given, type) else ""


def _kind_of(given: Any) -> str:
    other = f"the name {str(given)[:80]!r}" if isinstance(given, (str, PathLike)) else a_type(given)
    return f"the class {given.__name__}" if isinstance(given, type) else other


P = ParamSpec("P")
T = TypeVar("T")
_NUMBERS: dict[Any, tuple[type, ...]] = {bool: (bool, np.bool_), str: (str,)}
_NUMBERS |= dict.fromkeys((int, float), (int, float, np.integer, np.floating))
"""Whether a number is whole, and large enough, is checked where it is used."""
_SPOKEN: dict[Any, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a name"}
_SPOKEN |= {Mapping: "a dict", torch.dtype: "a torch dtype", NoneType: "None"}
_EXAMPLES = {"segments": "Segments.from_keep(attention_mask_2d)", "batch": "what your collator returns"}
_EXAMPLES |= dict.fromkeys(("cp", "context_parallel"), "ContextParallel(size, rank)")
REMEDIES = {
    "attention_mask": "'auto' suits most trainers.",
    "mask_2d": "'local' suits layers that see their own tokens.",
    "polarity": "Pass polarity='keep' (True attends), 'masked' (True is blocked) or 'bias' (additive).",
}
"""What to pass in place of a name that an option does not have."""


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which raises `CollateError` for arguments that it does not have, and for one of a kind that its annotation
    does not name."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    needed, known = names[: code.co_argcount - len(function.__defaults__ or ())], frozenset(names)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            if not known >= kwargs.keys() or not all(name in kwargs for name in needed[len(args) :]):
                _check_call(function.__qualname__, signature(function), args, kwargs)
            hold_against(function, chain(zip(names, args), kwargs.items()))
        return function(*args, **kwargs)

    return called


def options_checked(name: str, elsewhere: Mapping[str, str] = {}) -> Callable[[T], T]:
    """The class, which raises `CollateError` for arguments that it does not have. The error says what to write instead, from
    `elsewhere` for options of other packages; "" there is for arguments that are missing, or too many by place."""

    def decorated(made: Any) -> Any:
        init, takes = made.__init__, signature(made)

        @wraps(init)
        def called(self: Any, *args: Any, **kwargs: Any) -> None:
            _check_call(name, takes, args, kwargs, elsewhere)
            init(self, *args, **kwargs)

        made.__init__ = called
        return made

    return decorated


def _check_call(
    name: str, takes: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], elsewhere: Mapping[str, str] = {}
) -> None:
    """Raise `CollateError` for arguments that are missing, too many, or of no such name; the error says what to write."""
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        known = [each for each in takes.parameters if each not in ("self", "cls")]
        key = next((each for each in kwargs if each not in known), "")
        got = repr(kwargs[key])[:60] if key else f"{len(args)} arguments by place"
        rule = f"{name} has no such argument." if key else f"{str(error).capitalize()}."
        remedy = elsewhere.get(key, did_you_mean(key, known, f"It takes {', '.join(known)}."))
        raise CollateError(explain(key or name, got, rule, remedy)) from None


def hold_against(function: Callable[..., Any], given: Iterable[tuple[str, Any]]) -> None:
    """Raise for what `function` would be given by name and does not take."""
    judged, named = _kinds(function), _names(function)
    for name, value in given:
        kinds = judged.get(name)
        if kinds is not None and type(value) not in kinds and not _is_one(value, kinds):
            raise wrong_kind(name, value, function.__qualname__.removesuffix(".__init__"), *kinds)
        if name in named and value not in named[name]:
            known = [each for each in named[name] if each is not None]
            raise not_one_of(name, value, known, REMEDIES.get(name, "Name one of them."))


def check_fields(held: Any) -> None:
    """Check the fields of a dataclass as `hold_against` does, when it is made. Its numbers become Python's."""
    values = {name: getattr(held, name, None) for name in _kinds(held.__class__) if name[0] != "_"}
    hold_against(held.__class__, values.items())
    for name, value in values.items():
        if isinstance(value, np.generic) or (isinstance(value, Tensor) and not value.ndim):
            object.__setattr__(held, name, value.item())


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return by parameter the kinds that are judged; none where it takes a form that is not."""
    found = {name: tuple(dict.fromkeys(map(_kind, _parts(hint)))) for name, hint in _hints(function).items()}
    return {name: kinds for name, kinds in found.items() if name != "return" and None not in kinds}


@cache
def _names(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return by parameter all that it takes, where its annotation says so."""
    found = {}
    for name, hint in _hints(function).items():
        names = [get_args(part) if get_origin(part) is Literal else (None,) * (part is NoneType) for part in _parts(hint)]
        if name in _kinds(function) and () not in names and name != "loss":  # of a gather: ranks that wait are told
            found[name] = tuple(chain(*names))
    return found


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations, of a dataclass those of its fields: Python 3.10 evaluates no `InitVar` and no `KW_ONLY`."""
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
    known = (*_NUMBERS, NoneType, Tensor, torch.dtype)
    return hint if isinstance(hint, type) and (hint in known or hint.__module__.startswith("collate_npu.")) else None


def _is_one(value: Any, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool in kinds
    if isinstance(value, Tensor) and value.ndim == 0 and is_plain(value) and not (value.is_meta or value.is_complex()):
        return float in kinds or (int in kinds and not value.is_floating_point()) or Tensor in kinds
    if Callable in kinds and callable(value):
        return True
    return any(hasattr(value, "items") if kind is Mapping else isinstance(value, _NUMBERS.get(kind, kind)) for kind in kinds)


def is_plain(x: Tensor) -> bool:
    """True for a block of numbers that torch can index: not nested, sparse or quantised, nor of unsigned words."""
    words = (torch.uint16, torch.uint32, torch.uint64)
    return not (x.is_nested or x.is_quantized or x.dtype in words) and x.layout is torch.strided


def check_of_batch(name: str, x: Tensor, shape: tuple[int, int], remedy: str) -> None:
    """Raise `CollateError` unless `x` is a plain tensor `[B, S, ...]` of this batch."""
    if not is_plain(x) or tuple(x.shape[:2]) != shape:
        rule = f"The batch is {list(shape)} (rows, width), and the tensor a dense one that torch can index."
        raise CollateError(explain(name, shape_of(x), rule, remedy))


def dimension(name: str, x: Tensor, dim: Any) -> int:
    """The dimension of a tensor that is meant, counted from the first."""
    N = x.ndim
    if not (type(dim) is int or isinstance(dim, Integral)) or not -N <= int(dim) < N:
        raise CollateError(explain("dim", repr(dim)[:80], f"{name} has {N} dimensions.", "Pass that of the sequence."))
    return int(dim) % N


def here(device: Any, *, now: bool = True) -> Any:
    """A device that torch can make a tensor on. Raises `CollateError` for any other. Not `now`: its name is read and no
    card touched, for which one "cuda" is follows from the process at each batch."""
    try:
        return torch.empty(0, device=device).device if now else torch.device(device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        rule = f"torch makes no tensor there: {str(error)[:120].splitlines()[0]}."
        raise CollateError(explain("device", repr(device)[:60], rule, "Pass 'cpu', or a device of this machine.")) from None


def wrong_kind(name: str, value: Any, function: str, *kinds: Any) -> CollateError:
    """The refusal of an argument that is none of these kinds."""
    got = f"a tensor {list(value.shape)}" if type(value) is Tensor and not value.is_nested else a_type(value)
    spoken = " or ".join(_SPOKEN.get(kind) or a_type(kind) for kind in kinds)
    example = f": {_EXAMPLES[name]}" if name in _EXAMPLES else ""
    return CollateError(explain(name, got, f"{function} takes {spoken}.", f"Pass {spoken}{example}."))
