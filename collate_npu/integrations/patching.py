"""Patching: a trainer's function replaced, wherever it was imported to, and given back exactly.

A patch is in place while at least one holder holds it; twice is once, so a plugin file may run again. What somebody else
patched over ours stays as it is, and ours then calls the original. `in_place` tells whether ours was replaced, and the
next install mends it. A release of the trainer that was not tested is warned of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import getattr_static
from types import ModuleType
from typing import Any

from collate_npu.integrations import trainers
from collate_npu.releases import say_outside

_ABSENT = globals().get("_ABSENT", object())  # loaded again, it is still the one that the table holds
"""The owner has no such name of its own: it inherits it."""


@dataclass(eq=False, slots=True)
class _Patch:
    """One function in place of another; `before` is what the owner itself holds, a `staticmethod` as such."""

    owner: Any
    name: str
    ours: Callable[..., Any]
    original: Callable[..., Any]
    before: Any
    everywhere: str
    wrapped: Any = None
    holders: set[str] = field(default_factory=set)


_TABLE: list[_Patch] = globals().get("_TABLE", [])  # loaded again, it still knows what is in place


def patch(holder: str, owner: Any, name: str, ours: Callable[..., Any], *, everywhere: str = "") -> None:
    """Let `owner.name(...)` run `ours(original, ...)`, until `release(holder)`.

    `everywhere` names a package: each module of it that imported the function, under whatever name, gets ours too.
    Raises `AttributeError` where the owner has no such function.
    """
    for known in _TABLE:
        if (known.owner, known.name, known.ours) == (owner, name, ours):
            known.holders.add(holder)
            if _lost(known):
                _put(known)
            return
    _warn_of_releases(holder, owner)
    made = _Patch(owner, name, ours, getattr(owner, name), None, everywhere)
    made.holders.add(holder)

    @wraps(made.original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ours(made.original, *args, **kwargs) if made.holders else made.original(*args, **kwargs)

    wrapped.__collate_npu_patch__ = made  # type: ignore[attr-defined]
    made.wrapped = wrapped
    _put(made)
    _TABLE.append(made)


def _warn_of_releases(holder: str, owner: Any) -> None:
    """Warn once if a release was not tested: of the package that installs, and of the one that is patched."""
    home = str(getattr(owner, "__module__", None) or getattr(owner, "__name__", "")).partition(".")[0].replace("_", "-")
    for package, tested in trainers().values():
        if package in (holder, home):
            say_outside(package, tested)


def _put(made: _Patch) -> None:
    """Set the wrapper in place of what the owner has now, and wherever else that was imported."""
    made.original, made.before = getattr(made.owner, made.name), vars(made.owner).get(made.name, _ABSENT)
    wrapped = _function(made.wrapped)
    wrapped.__wrapped__ = made.original
    static = isinstance(getattr_static(made.owner, made.name, None), staticmethod)
    made.wrapped = staticmethod(wrapped) if static else wrapped
    setattr(made.owner, made.name, made.wrapped)
    _rebind(made.everywhere, made.original, wrapped)


def _lost(made: _Patch) -> bool:
    """True if what the owner has now does not lead to ours: by `__wrapped__`, by its closure, or by a global that it names?
    After `importlib.reload` it does not; nor where MindSpeed's `repatch` has put its own there, made of what it found at
    first (0.16.0 patch_utils.py:108-131). A stranger's patch over ours does."""
    ours, todo, seen = _function(made.wrapped), [vars(made.owner).get(made.name)], set()
    while todo:
        now = _function(todo.pop())
        names = getattr(getattr(now, "__code__", None), "co_names", ())
        if now is ours or any(_function(now.__globals__.get(name)) is ours for name in names):
            return False
        if callable(now) and id(now) not in seen:
            seen.add(id(now))
            todo += [getattr(now, "__wrapped__", None), getattr(now, "func", None)]
            for cell in getattr(now, "__closure__", None) or ():
                with suppress(ValueError):  # an empty one
                    todo.append(cell.cell_contents)
    return True


def release(holder: str) -> None:
    """Take this holder off each patch. One that nobody holds is undone, the last one first."""
    for made in reversed(_TABLE[:]):
        made.holders.discard(holder)
        if not made.holders:
            _TABLE.remove(made)
            _strip(made.owner, made.name)
            _rebind(made.everywhere, _function(made.wrapped), _lowest(made).original)


def in_place(ours: Callable[..., Any]) -> bool:
    """True if this replacement is in place anywhere and still called. Another `install` mends what somebody replaced."""
    return any(made.ours == ours and not _lost(made) for made in _TABLE)


def _strip(owner: Any, name: str) -> None:
    """Remove our own unused wrappers from the top; foreign wrappers, and what is below them, stay."""
    made = _patch_of(vars(owner).get(name))
    if made is None or made.holders:
        return
    before = _lowest(made).before
    delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)


def _lowest(made: _Patch) -> _Patch:
    """The lowest of the wrappers below this one that nobody holds."""
    while (below := _patch_of(made.before)) is not None and not below.holders:
        made = below
    return made


def _patch_of(held: Any) -> _Patch | None:
    """The patch whose wrapper this is. A stranger's `functools.wraps` copies our mark, and is no wrapper of ours."""
    made = getattr(_function(held), "__collate_npu_patch__", None)
    return made if made is not None and made.wrapped is held else None


def _rebind(package: str, old: Any, new: Any) -> None:
    """Replace `old` by `new` in the modules of the package. Only `vars` is read: a lazy module imports on any other look."""
    for key, module in list(sys.modules.items()) if package else ():
        if module is not None and (key == package or key.startswith(f"{package}.")):
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)


def _function(held: Any) -> Any:
    return held.__func__ if isinstance(held, staticmethod) else held


# --- what waits for an import


def once_imported(name: str, then: Callable[[], None], *, before: Callable[[], object] = bool) -> None:
    """Run `then()` as soon as this module is imported: now, or behind its own code, which `before()` precedes. Twice is
    once."""
    if name in sys.modules:
        then()
    elif not any(isinstance(finder, _ImportHook) and (finder.name, finder.then) == (name, then) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook(name, then, before))


class _ImportHook(MetaPathFinder):
    """Finds one module, and runs `then` after its code."""

    def __init__(self, name: str, then: Callable[[], None], before: Callable[[], object]) -> None:
        self.name, self.then, self.before = name, then, before

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of that module, with a loader that runs `before` and `then` around its code; None for every other."""
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
