"""Collators by name, `tools.named`, made ready for a model and its tokenizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from collate_npu.tools.named import check_callable, named, theirs

GIVEN = ("tokenizer", "processing_class", "model", "pad_token_id", "mlm")
"""What a class, or a function that makes a collator, is given by the names of its arguments.

`mlm` is False: tokens masked at random cannot be compared.
"""


def named_collator(spec: str) -> Callable[..., Any]:
    """The function or class of a name. Modules of the working directory are found. Raises `CollateError`."""
    remedy = "Name a function of features, or what makes one."
    return named("--collator", spec, "transformers:DataCollatorForSeq2Seq", remedy)


_theirs = partial(theirs, "--collator")


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
    remedy = "Name a function of features, or what makes one."
    return [partial(_called, spec, check_callable("--collator", spec, one, rule, remedy)) for one in made]


def _called(spec: str, collator: Callable[..., Any], features: Any) -> Any:
    with _theirs(spec, "It is called with features, a list of dicts.", "Mend it there."):
        return collator(features)
