"""Asking: what a stack answers for the samples of a batch, in the forms that stacks have, as float64 numbers on the host.

Legend: N samples, L tokens of a sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from collate_npu.arrays import host_tensor
from collate_npu.errors import CollateError, explain, explain_rows, shape_of

Sample = list[int]
Ask = Callable[[str, list[Sample]], list[Tensor]]
"""The name of a batch and its samples to their log-probabilities, float64 `[L - 1]` each."""
Run = Callable[..., Any]
"""`run(samples)`, or `run(samples, layout=name)`: N lists of token ids to N lists of L - 1 log-probabilities."""
RULE = "A sample of L tokens has L - 1 log-probabilities, one for each token from the second on."
_REMEDY = "Return a list, an array or a tensor for each sample, without the first token, which nothing predicts."


def ways_of(run: Any, layouts: Any) -> dict[str, Ask]:
    """How each layout is asked for."""
    if not callable(run):
        rule = "run(samples) returns the log-probabilities of each sample."
        raise CollateError(explain("run", f"a {type(run).__name__}", rule, "Pass a function of lists of token ids."))
    if isinstance(run, type):
        rule = "run(samples) returns the log-probabilities of each sample, and a class returns itself."
        raise CollateError(explain("run", f"the class {run.__name__}", rule, f"Pass {run.__name__}(...), or its method."))
    try:
        takes = "layout" in inspect.signature(run).parameters
    except (TypeError, ValueError):  # of a class of C
        takes = False
    if layouts is None:
        layouts = ("left", "right") if takes else ()
    named = isinstance(layouts, (list, tuple)) and all(isinstance(name, str) for name in layouts)
    if not named or (takes and not layouts) or (layouts and not takes):
        got = f"{layouts!r} for a run that {'takes' if takes else 'does not take'} layout"
        rule = "layouts are names, each handed to run(samples, layout=name)."
        raise CollateError(explain("layouts", got, rule, "Write def run(samples, layout), or leave layouts out."))
    if not takes:
        return {"as it is": partial(_ask, run, "")}
    return {name: partial(_ask, partial(run, layout=name), f", layout {name!r}") for name in layouts}


def _ask(run: Run, layout: str, name: str, samples: list[Sample]) -> list[Tensor]:
    """The answers to one batch, float64 `[L - 1]` each."""
    where = f"run{layout}, batch {name!r}"
    try:
        given = run([list(ids) for ids in samples])  # of its own: it may write in them
    except CollateError as error:
        raise CollateError(f"{error} ({where})") from error
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        rule = f"It was asked for {len(samples)} samples of {[len(ids) for ids in samples]} tokens."
        raise CollateError(
            explain(where, got, rule, "Mend it there; a layout it refuses is left out of layouts.")
        ) from error
    shape = getattr(given, "shape", None)
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)) or (shape is not None and not len(shape)):
        raise CollateError(explain(where, f"a {type(given).__name__}", RULE, "Return a list, with one list a sample."))
    rows = list(given)
    if len(rows) != len(samples):
        raise CollateError(explain(where, f"{len(rows)} answers to {len(samples)} samples", RULE, "Return one a sample."))
    found = [_numbers(f"{where}, sample {n}", row) for n, row in enumerate(rows)]
    _check_form(where, found, [len(ids) - 1 for ids in samples])
    return [x.double() for x in found]


def _numbers(where: str, row: Any) -> Tensor:
    if isinstance(row, (list, tuple)) and any(x is None for x in row):
        raise CollateError(explain(where, f"None at place {list(row).index(None)}", RULE, _REMEDY))
    return host_tensor(where, row)


def _check_form(where: str, found: Sequence[Tensor], lengths: Sequence[int]) -> None:
    """Raise for what is no log-probabilities; lengths that are all there in another order are judged, not refused."""
    turned = all(x.ndim == 1 for x in found) and sorted(map(len, found)) == sorted(lengths)
    bad = [(n, shape_of(x)) for n, (x, L) in enumerate(zip(found, lengths)) if not turned and tuple(x.shape) != (L,)]
    if bad:
        raise CollateError(explain_rows(where, [(n, f"{x}, not [{lengths[n]}]") for n, x in bad], RULE, _REMEDY))
    above = [(n, f"values up to {float(x.max()):.3g}") for n, x in enumerate(found) if _is_above(x)]
    if above:
        rule = "A log-probability is at most 0, rounding aside."
        raise CollateError(explain_rows(where, above, rule, "Return log_softmax of the logits: no loss, no probability."))


def _is_above(x: Tensor) -> bool:
    return bool(len(x)) and bool(x.max() > 0.5 or x.sum() > 0)
