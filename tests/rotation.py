"""One seed for all that is drawn: examples, the producers' batches, and what the quick run takes of many."""

import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

SEED = int(os.environ["COLLATE_NPU_SEED"])
"""conftest chooses one where none is given, before anything is imported that reads it."""
PROFILE = os.environ["HYPOTHESIS_PROFILE"]
NIGHTLY = bool({"COLLATE_NPU_NIGHTLY", "COLLATE_NPU_CELLS"} & os.environ.keys())
"""All is run: at night, and where the cells of the page of stacks are recorded."""
SHARE = float(os.environ.get("COLLATE_NPU_SHARE", "1"))
"""What part of all tests a session runs that runs others' tests once more, on older releases."""
MODELS = float(os.environ.get("COLLATE_NPU_MODELS", "1"))
"""What part of those that run models, where others are all run."""


def some(cases: Sequence[Any], take: int) -> list[Any]:
    """A few of many under the fast profile, others with each seed; else all."""
    return [cases[n] for n in sorted(_taken(cases, take))] if PROFILE == "fast" else list(cases)


def part(cases: Sequence[Any], take: int) -> list[Any]:
    """So many of the cases, others with each seed; all at night."""
    return list(cases) if NIGHTLY else [cases[n] for n in sorted(_taken(cases, take))]


def examples(few: int) -> settings:
    """So many examples of a test whose models take long, under the fast profile."""
    return settings(max_examples=few) if PROFILE == "fast" else settings()


def of_the_night(item: pytest.Item) -> bool:
    """Is it left to the night: what is marked `nightly` but for a thirtieth, most of what is `long`, what is more than
    the session's share, and of `models` than theirs; others with each seed.

    Tests with one word in `long("word")` share a fixture that takes long: they run together.
    """
    if NIGHTLY:
        return False
    long = item.get_closest_marker("long")
    word = long.args[0] if long and long.args else item.nodeid
    drawn = SHARE / 30 if item.get_closest_marker("nightly") else SHARE / 4 if long else SHARE
    drawn *= MODELS if item.get_closest_marker("models") and not long else 1
    return random.Random(f"{SEED} {word}").random() > drawn


def rotating(cases: Iterable[Any], take: int = 1, slow: int | None = None) -> list[Any]:
    """Parameters of which the quick run takes a few, others with each seed. Of the rest so many are marked slow (all where
    none is said), and what is left nightly."""
    cases = list(cases)
    turn = _taken(cases, len(cases))
    quick, nights = turn[:take], turn[len(turn) if slow is None else take + slow :]
    marks = {n: pytest.mark.nightly if n in nights else pytest.mark.slow for n in turn if n not in quick}
    return [_marked(case, marks[n]) if n in marks else case for n, case in enumerate(cases)]


def _taken(cases: Sequence[Any], take: int) -> list[int]:
    return random.Random(SEED).sample(range(len(cases)), min(take, len(cases)))


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
