"""Collators by name: `module:function` or `file.py:function`, made ready for a model and its tokenizer.

While code of the user's runs, and only then, modules of the working directory and those beside a named file are found,
behind all that is installed: no file there takes the place of a package. A file is run under a name of its own. Whatever
that code raises is refused with its file and line.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from collate_npu.errors import CollateError, explain
from collate_npu.tools.refusals import did_you_mean, refused

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
    remedy = "Write the path of its file, or run where Python finds the module."
    with _theirs(spec, "It is imported from here, and does not load.", remedy):
        found: Any = _module(place)
        for part in name.split("."):
            if not hasattr(found, part):
                remedy = did_you_mean([part], dir(found), "Look at its spelling.")
                raise CollateError(explain("--collator", f"{spec}: no {part} in {place}", _RULE, remedy))
            found = getattr(found, part)
        return _callable(spec, found, _RULE)


@contextmanager
def _theirs(spec: str, rule: str, remedy: str) -> Iterator[None]:
    """Code of the user's runs here."""
    place = spec.rpartition(":")[0]
    folders = [str(Path(place).resolve().parent)] * place.endswith(".py") + [str(Path.cwd())]
    added = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    sys.path += added
    end, process = os._exit, os.getpid()

    def raise_here(status: int) -> None:  # a process of its own may end; this one has a verdict to give
        if os.getpid() != process:
            end(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raise_here  # type: ignore[assignment]
    try:
        with refused("--collator", spec, rule, remedy, folders=folders):
            yield
    finally:
        os._exit = end
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def _callable(spec: str, found: Any, rule: str) -> Callable[..., Any]:
    if not callable(found):
        remedy = "Name a function of features, or what makes one."
        raise CollateError(explain("--collator", f"{spec}: a {type(found).__name__}", rule, remedy))
    return found  # type: ignore[no-any-return]


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return import_module(place)
    file = spec_from_file_location(f"--collator {Path(place).resolve()}", place)  # no import finds it by that
    assert file is not None
    assert file.loader is not None
    if file.name not in sys.modules:
        module = sys.modules[file.name] = module_from_spec(file)
        try:
            file.loader.exec_module(module)
        except BaseException:
            del sys.modules[file.name]
            raise
    return sys.modules[file.name]


def ready_collators(
    spec: str, sides: Sequence[str], *, tokenizer: Any, model: Any, pad_token_id: int
) -> list[Callable[..., Any]]:
    """The collator of a name: a function of features as it is, or what a class makes.

    A function that asks for arguments of `GIVEN`, or for none, makes one too. With a tokenizer one is made for each side,
    by a tokenizer that pads there.
    """
    found = named_collator(spec)
    with _theirs(spec, "Its arguments tell how it is made.", "Name a function of your own: def mine(tokenizer): ..."):
        arguments = list(inspect.signature(found).parameters)
    taken = [name for name in arguments if name in GIVEN]
    if not inspect.isclass(found) and arguments and not taken:
        return [partial(_called, spec, found)]
    by_side = tokenizer is not None and {"tokenizer", "processing_class"} & {*taken}
    rule = f"It is called with {', '.join(taken) or 'nothing'}, by the names of its arguments."
    made = []
    for side in sides if by_side else [None]:
        mine = copy.copy(tokenizer)
        if side:
            mine.padding_side = side
        given = dict(zip(GIVEN, (mine, mine, model, pad_token_id, False)))
        with _theirs(spec, rule, "Name a function of your own: def mine(tokenizer, model): return ..."):
            made.append(found(**{name: given[name] for name in taken}))
    rule = "It makes a collator, which is called with features."
    return [partial(_called, spec, _callable(spec, one, rule)) for one in made]


def _called(spec: str, collator: Callable[..., Any], features: Any) -> Any:
    with _theirs(spec, "It is called with features, a list of dicts.", "Mend it there."):
        return collator(features)
