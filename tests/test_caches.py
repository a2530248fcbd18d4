"""What the package keeps for the next batch has an end: a thousand other batches, and no cache holds more than it may."""

import gc
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

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


def test_a_cache_that_grows_is_named(monkeypatch):
    """Of a module, of a class, and of a function."""
    module = ModuleType("collate_npu.grows")
    module.kept, module.Held = {}, type("Held", (), {"seen": set(), "__module__": module.__name__})
    module.found = lru_cache(maxsize=None)(lambda n: n)
    module.found.__module__, module.found.__qualname__ = module.__name__, "found"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = long.held()
    module.kept[1], module.Held.seen = [1], {1}
    module.found(1)
    assert sorted(long.grown(before)) == [f"collate_npu.grows.{name}" for name in ("Held.seen", "found", "kept")]
