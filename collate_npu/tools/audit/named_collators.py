"""Collators by name: `module:function` or `file.py:function`, made ready for a model and its tokenizer."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from collate_npu.errors import CollateError, explain
from collate_npu.tools.audit.attentions import first_line
from collate_npu.tools.audit.flat import FLAT_OTHERS, FLAT_OURS
from collate_npu.tools.audit.handover import OTHERS, OURS

_RULE = "A collator is named as module:function or file.py:function."
GIVEN = ("tokenizer", "processing_class", "model", "pad_token_id", "mlm")
"""What a class, or a function that makes a collator, is given by the names of its arguments.

`mlm` is False: tokens masked at random cannot be compared.
"""


def named_collator(spec: str) -> Callable[..., Any]:
    """The function or class of a name. Modules of the working directory are found. Raises `CollateError`."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise CollateError(explain("--collator", spec, _RULE, "For example transformers:DataCollatorForSeq2Seq."))
    found: Any = _module(spec, place)
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1, cutoff=0.5)
            remedy = f"Did you mean {near[0]}?" if near else "Look at its spelling."
            raise CollateError(explain("--collator", f"{spec}: no {part} in {place}", _RULE, remedy))
        found = getattr(found, part)
    if not callable(found):
        remedy = "Name a function of features, or a class."
        raise CollateError(explain("--collator", f"{spec}: a {type(found).__name__}", _RULE, remedy))
    return found  # type: ignore[no-any-return]


def _module(spec: str, place: str) -> Any:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        if not place.endswith(".py"):
            return import_module(place)
        file = spec_from_file_location(Path(place).stem, place)
        assert file is not None
        assert file.loader is not None
        module = sys.modules[file.name] = module_from_spec(file)
        file.loader.exec_module(module)
        return module
    except Exception as error:  # whatever a module of somebody else raises
        got = f"{spec} ({type(error).__name__}: {first_line(error)})"
        remedy = "Write the path of its file, or run where Python finds the module."
        raise CollateError(explain("--collator", got, "It is imported from here, and does not load.", remedy)) from None


def ready_collator(spec: str, *, tokenizer: Any, model: Any, pad_token_id: int) -> Callable[..., Any]:
    """The collator of a name: a function of features as it is, or what a class makes.

    A function that asks for arguments of `GIVEN`, or for none, makes one too.
    """
    found = named_collator(spec)
    if not _makes(found):
        return found
    given = dict(zip(GIVEN, (tokenizer, tokenizer, model, pad_token_id, False)))
    taken = [name for name in _arguments(found) if name in GIVEN]
    try:
        made = found(**{name: given[name] for name in taken})
    except Exception as error:  # whatever a class of somebody else raises
        got = f"{spec} ({type(error).__name__}: {first_line(error)})"
        rule = f"It is called with {', '.join(taken) or 'nothing'}, by the names of its arguments."
        remedy = "Name a function of your own: def mine(tokenizer, model): return ..."
        raise CollateError(explain("--collator", got, rule, remedy)) from None
    if not callable(made):
        rule = "It makes a collator, which is called with features."
        raise CollateError(explain("--collator", f"{spec}: a {type(made).__name__}", rule, "Return a callable."))
    return made  # type: ignore[no-any-return]


def ready_collators(spec: str, sides: Sequence[str], *, tokenizer: Any, **given: Any) -> list[Callable[..., Any]]:
    """The collator of a name; made for each side, by a tokenizer that pads there, where it is made with a tokenizer."""
    asked = {"tokenizer", "processing_class"} & {*_arguments(named_collator(spec))}
    if tokenizer is None or not asked:
        return [ready_collator(spec, tokenizer=tokenizer, **given)]
    return [ready_collator(spec, tokenizer=_padding(tokenizer, side), **given) for side in sides]


def _padding(tokenizer: Any, side: str) -> Any:
    padding = copy.copy(tokenizer)
    padding.padding_side = side
    return padding


def _makes(found: Any) -> bool:
    """Does it make a collator, rather than take features? A class does, and a function that asks for one of `GIVEN`."""
    arguments = _arguments(found)
    return inspect.isclass(found) or not arguments or any(name in GIVEN for name in arguments)


def _arguments(found: Any) -> list[str]:
    try:
        return list(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # written in C
        return ["features"]


def column_of(spec: str) -> str:
    """The name of a collator in a report: its own, or "your ..." where a way of handing over has that name."""
    name = spec.rpartition(":")[2]
    return f"your {name}" if name in {**OURS, **OTHERS, **FLAT_OURS, **FLAT_OTHERS} else name
