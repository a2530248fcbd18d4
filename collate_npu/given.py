"""Given: what was passed in the place of a model or a tokenizer, such as its name, its class or its config, and what to pass
instead."""

from __future__ import annotations

import math
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from collate_npu.errors import CollateError, explain


def check_model(model: Any, *, config: bool = False, name: str = "model") -> None:
    """Raise `CollateError` for what is no module; where `config` is taken too, for what is no config either.

    >>> check_model("Qwen/Qwen3-Next")
    Traceback (most recent call last):
        ...
    collate_npu.errors.CollateError: model: got the name 'Qwen/Qwen3-Next'. A model is a module, which is looked at. Load
        it: AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-Next').
    """
    if isinstance(model, nn.Module):
        return
    loaded, remedy = _not_made(model, "AutoModelForCausalLM"), ""
    if loaded:
        a_type = config and isinstance(model, str) and model.isidentifier()
        remedy = loaded + " A model type alone goes to BatchAdapter(model_type=)." * a_type
    elif callable(getattr(model, "decode", None)):
        remedy = "That is a tokenizer: pass the model."
    elif callable(getattr(model, "get_text_config", None)):
        remedy = "" if config else "That is a config: build the model, AutoModelForCausalLM.from_config(config)."
    elif not config or not hasattr(model, "__dict__"):
        remedy = "Pass the model, or its config." if config else "Pass the model."
    if remedy:
        rule = "A model is a module, or its config, which is read." if config else "A model is a module, which is looked at."
        raise CollateError(explain(name, _kind(model), rule, remedy))


def check_tokenizer(tokenizer: Any, *, does: str = "pad_token_id") -> None:
    """Raise `CollateError` for what has not that one attribute of a tokenizer."""
    remedy = _not_made(tokenizer, "AutoTokenizer")
    if isinstance(tokenizer, nn.Module):
        remedy = "That is a model: pass the tokenizer first, and model= by its name."
    elif not remedy and not hasattr(tokenizer, does):
        remedy = "Pass the tokenizer, or pad_token_id= without one." if does == "pad_token_id" else "Pass the tokenizer."
        remedy = "Pass processor.tokenizer." if hasattr(tokenizer, "tokenizer") else remedy
    if remedy:
        raise CollateError(explain("tokenizer", _kind(tokenizer), f"A tokenizer has {does}.", remedy))


def check_return_tensors(asked: Any) -> None:
    """Raise `CollateError` for what transformers calls another framework's tensors."""
    if asked not in (None, "pt"):
        raise CollateError(explain("return_tensors", repr(asked)[:60], "Batches are torch tensors.", "Pass 'pt'."))


def check_held(name: str, value: float, dtype: torch.dtype) -> None:
    """Raise unless tensors of this dtype hold the value: uint8 makes 156 of -100, bool True, and whole numbers 0 of 0.5."""
    value = value.item() if isinstance(value, Tensor) else value
    low, high = (0, 1) if dtype == torch.bool else (-math.inf, math.inf)
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if low > -math.inf and not (low <= value <= high and value == int(value)):
        rule = f"It stands at padding in a tensor of {str(dtype).removeprefix('torch.')}, which has no such value."
        raise CollateError(
            explain(name, repr(value), rule, "Convert the tensor first (x.long()), or pass a value that it holds.")
        )


def check_collator(collator: Any, name: str = "collator") -> None:
    """Raise `CollateError` for what cannot be called with features; a class makes what can."""
    if isinstance(collator, type) or not callable(collator):
        remedy = _not_made(collator, "") if isinstance(collator, type) else "Pass that function."
        raise CollateError(explain(name, _kind(collator), "A collator is called with features, a list of dicts.", remedy))


def check_batch(batch: Any, collator: Any) -> None:
    """Raise `CollateError` for what is no batch, with the place of the function that returned it."""
    if hasattr(batch, "items"):
        return
    code = getattr(getattr(collator, "func", collator), "__code__", None) or getattr(
        type(collator).__call__, "__code__", None
    )
    place = f"{code.co_filename}, line {code.co_firstlineno}" if code else type(collator).__name__
    rule = "A collator returns a batch, a dict of tensors."
    raise CollateError(explain(place, f"{_kind(batch)} from {type(collator).__name__}", rule, "Return the batch there."))


def _not_made(given: Any, loader: str) -> str:
    """How to make one of a name or a class; "" where it is neither."""
    if isinstance(given, (str, PathLike)):
        return f"Load it: {loader}.from_pretrained({str(given)[:80]!r})."
    if isinstance(given, type):
        made = "from_pretrained(...)" if hasattr(given, "from_pretrained") else "(...)"
        return f"Make one of it: {given.__name__}{'.' * (made[0] != '(')}{made}."
    return ""


def _kind(given: Any) -> str:
    if isinstance(given, (str, PathLike)):
        return f"the name {str(given)[:80]!r}"
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
