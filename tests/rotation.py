"""One seed for all that is drawn: examples, the producers' batches, and the cases that a commit runs of many.

A commit runs some cases of each test function: all, or n of those marked `draws(n)`, or some of those marked `models`,
others with each seed. A session that runs others' tests once more, or beside other software, draws a part of them, its
COLLATE_NPU_SHARE; tests with one word in `together("word")` share what takes long, and run all or none. The night runs all.
"""

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

SEED = int(os.environ["COLLATE_NPU_SEED"])
"""conftest chooses one where none is given, before anything is imported that reads it."""
PROFILE = os.environ["HYPOTHESIS_PROFILE"]
NIGHTLY = bool({"COLLATE_NPU_NIGHTLY", "COLLATE_NPU_CELLS"} & os.environ.keys())
"""All is run: at night, and where the cells of the page of stacks are recorded."""
SHARE = float(os.environ.get("COLLATE_NPU_SHARE", "1"))
"""The chance of a test function in this session."""
OF_MODELS, _ALL = 2 if SHARE == 1 else 1, 1 << 30
"""Cases of a test that builds models, where its mark says no other number; one where a part of the functions runs."""


def of_this_run(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What is not left to the night, in order."""
    if NIGHTLY:
        return [*items]
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    chances = {name: random.Random(f"{SEED} {_word(cases[0], name)}").random() for name, cases in functions.items()}
    least = min(chances.values(), default=0.0)  # a draw leaves one
    taken = {
        item
        for name, cases in functions.items()
        if chances[name] <= max(SHARE, least)
        for item in random.Random(f"{SEED} {name}").sample(cases, min(_most(cases[0]), len(cases)))
    }
    return [item for item in items if item in taken]


def _word(item: pytest.Item, name: str) -> str:
    mark = item.get_closest_marker("together")
    return str(mark.args[0]) if mark else name


def _most(item: pytest.Item) -> int:
    mark = item.get_closest_marker("draws")
    if mark:
        return int(mark.args[0])
    return _ALL if item.get_closest_marker("models") is None else OF_MODELS


def told(items: Sequence[pytest.Item], taken: Sequence[pytest.Item]) -> list[str]:
    """The table of what was left to the draw: kind, items, those that run, the chance of a test and of a case."""
    lines = ["left to the draw: kind, items, run now, chance of a test, of a case"]
    share = 1.0 if NIGHTLY else SHARE
    for kind, drawn in (("tests with all their cases", False), ("tests with some of them", True)):
        whole, run = ([item for item in each if (_most(item) < _ALL) == drawn] for each in (items, taken))
        lines += [f"  {kind}: {len(whole):,}, {len(run):,}, {share:g}, {len(run) / len(whole):.2f}"] if whole else []
    return lines


def some(cases: Sequence[Any], take: int) -> list[Any]:
    """So many of the cases, others with each seed; all at night."""
    if NIGHTLY:
        return [*cases]
    return [cases[n] for n in sorted(random.Random(SEED).sample(range(len(cases)), min(take, len(cases))))]


def examples(few: int) -> settings:
    """So many examples of a test whose models take long, under the fast profile."""
    return settings(max_examples=few) if PROFILE == "fast" else settings()
