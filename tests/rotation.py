"""One seed for all that is drawn: examples, the producers' batches, and what the quick run takes of many."""

import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

SEED = int(os.environ["COLLATE_NPU_SEED"])
"""conftest chooses one where none is given, before anything is imported that reads it."""
PROFILE = os.environ["HYPOTHESIS_PROFILE"]


def some(cases: Sequence[Any], take: int) -> list[Any]:
    """A few of many under the fast profile, others with each seed; else all."""
    return [cases[n] for n in _taken(cases, take)] if PROFILE == "fast" else list(cases)


def rotating(cases: Iterable[Any], take: int = 1) -> list[Any]:
    """Parameters of which the quick run takes a few, others with each seed: the rest is marked slow."""
    cases = list(cases)
    taken = _taken(cases, take)
    return [case if n in taken else _slow(case) for n, case in enumerate(cases)]


def _taken(cases: Sequence[Any], take: int) -> list[int]:
    return sorted(random.Random(SEED).sample(range(len(cases)), min(take, len(cases))))


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
