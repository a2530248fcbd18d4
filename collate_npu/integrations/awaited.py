"""Awaited: something of ours runs as soon as a module is imported, and nothing is imported for that.

A finder stands first in `sys.meta_path`, finds that module as the others do, and lets its loader go on with ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def once_imported(name: str, then: Callable[[], None], *, before: Callable[[], object] = bool) -> None:
    """Run `then()` as soon as this module is imported: now, or behind its own code, which `before()` precedes. Twice is
    once."""
    if name in sys.modules:
        then()
    elif not any(isinstance(finder, _Awaited) and (finder.name, finder.then) == (name, then) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited(name, then, before))


class _Awaited(MetaPathFinder):
    """Finds one module."""

    def __init__(self, name: str, then: Callable[[], None], before: Callable[[], object]) -> None:
        self.name, self.then, self.before = name, then, before

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of that module, whose loader then goes on with ours; None for every other."""
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def with_ours(module: ModuleType) -> None:
                self.before()
                execute(module)
                self.then()

            spec.loader.exec_module = with_ours  # type: ignore[method-assign]
        return spec
