"""What the package keeps for the next batch has an end: a thousand other batches, and no cache holds more than it may."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.groups import long

WARM, MORE = 300, 1000
MOST = 256
"""Entries of one cache."""


@pytest.fixture(autouse=True)
def found_by_gc():
    """What is frozen is not among its objects."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_no_cache_of_the_package_grows_without_a_bound():
    batches = long.Batches(seed=1)
    for _ in range(WARM):
        batches.step()
    before = long.held()
    for _ in range(MORE):
        batches.step()
    assert long.grown(before) == {}
    assert max(most for _, most in before.values() if most) <= MOST
    assert {name.split(".")[1] for name in before} >= {"segments", "errors"}
