"""Patching: replaces a trainer's function, wherever it was imported, and gives it back exactly.

A replacement stays until its last holder releases it. A second `patch` by one holder changes nothing, so a plugin file may
run again. If somebody else has patched over ours, their patch stays, and a released wrapper below it calls the original.
`in_place` says whether ours is still called; the next `patch` mends it. A release of the trainer that was not tested gives
a warning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from inspect import getattr_static
from types import FunctionType
from typing import Any

import torch.distributed as dist

from collate_npu.integrations import trainers
from collate_npu.parallel import gloo_group
from collate_npu.releases import say_outside


class _Patch:
    """The wrapper of a function. It runs the replacements, the last one first; `replacements` says who holds each."""

    def __init__(self, owner: Any, name: str, everywhere: str) -> None:
        self.owner, self.name, self.everywhere = owner, name, everywhere
        self.replacements: dict[Callable[..., Any], set[str]] = {}
        self.wrapper: Any = None

    def put(self) -> None:
        """Set a new wrapper in place of what the owner has now, wherever that was imported; a lost one lets through."""
        self.inherits, self.before = self.name not in vars(self.owner), vars(self.owner).get(self.name)
        original = self.original = getattr(self.owner, self.name)

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = original
            for ours in self.replacements if wrapper is self.wrapper else ():
                call = partial(ours, call)
            return call(*args, **kwargs)

        lost, self.wrapper = self.wrapper, wrapper
        static = isinstance(getattr_static(self.owner, self.name, None), staticmethod)
        setattr(self.owner, self.name, staticmethod(wrapper) if static else wrapper)
        _rebind(self.everywhere, (original, lost or original), wrapper)

    def take_off(self) -> None:
        """Give the owner and the modules their function back. Below another's patch the wrapper stays, and calls it."""
        if _function(vars(self.owner).get(self.name)) is self.wrapper:
            delattr(self.owner, self.name) if self.inherits else setattr(self.owner, self.name, self.before)
        _rebind(self.everywhere, (self.wrapper,), self.original)

    def lost(self) -> bool:
        """True if no `__wrapped__`, closure or global is seen to lead from the owner's function to ours: after a reload, and
        after MindSpeed's `repatch`, which wraps the function that it met first (0.16.0 patch_utils.py:108-131)."""
        todo, seen = [vars(self.owner).get(self.name)], set()
        while todo:
            now = _function(todo.pop())
            names = getattr(getattr(now, "__code__", None), "co_names", ())
            if now is self.wrapper or any(_function(now.__globals__.get(name)) is self.wrapper for name in names):
                return False
            if callable(now) and id(now) not in seen:
                seen.add(id(now))
                todo += [getattr(now, "__wrapped__", None), getattr(now, "func", None)]
                for cell in getattr(now, "__closure__", None) or ():
                    with suppress(ValueError):  # an empty one
                        todo.append(cell.cell_contents)
        return True


_TABLE: list[_Patch] = globals().get("_TABLE", [])  # loaded again, it still knows what is in place


def patch(holder: str, owner: Any, name: str, ours: Callable[..., Any], *, everywhere: str = "") -> None:
    """Let `owner.name(...)` run `ours(original, ...)`, until `release(holder)`. Each module of the package `everywhere` that
    imported the function, under whatever name, gets ours too. Raises `AttributeError` if the owner has no such function."""
    made = next((known for known in _TABLE if (known.owner, known.name) == (owner, name)), None)
    if made is None:
        made = _Patch(owner, name, everywhere)
        _warn_of_releases(holder, owner)
    if not made.replacements or made.lost():
        made.put()
    if made not in _TABLE:
        _TABLE.append(made)
    made.replacements.setdefault(ours, set()).add(holder)


def _warn_of_releases(holder: str, owner: Any) -> None:
    """Warn once if a release was not tested: of the package that installs, and of the one that is patched."""
    home = str(getattr(owner, "__module__", None) or getattr(owner, "__name__", "")).partition(".")[0].replace("_", "-")
    for package, tested in trainers().items():
        if package in (holder, home):
            say_outside(package, tested)


def release(holder: str) -> None:
    """Take this holder off each replacement. A function that nobody replaces is given back."""
    for made in reversed(_TABLE[:]):
        left = {ours: holders - {holder} for ours, holders in made.replacements.items()}
        made.replacements = {ours: holders for ours, holders in left.items() if holders}
        if not made.replacements:
            _TABLE.remove(made)
            made.take_off()


def in_place(ours: Callable[..., Any]) -> bool:
    """True if this replacement is in place anywhere and still called. Another `install` mends what somebody replaced."""
    return any(ours in made.replacements and not made.lost() for made in _TABLE)


def _rebind(package: str, old: tuple[Any, ...], new: Any) -> None:
    """Replace each `old` by `new` in modules of the package. Only `vars` is read: `getattr` makes a lazy module import."""
    for key, module in list(sys.modules.items()) if package else ():
        if module is not None and (key == package or key.startswith(f"{package}.")):
            for name in [name for name, value in vars(module).items() if any(value is each for each in old)]:
                setattr(module, name, new)


def _function(held: Any) -> Any:
    return held.__func__ if isinstance(held, staticmethod) else held


def with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of the function, which reads these names in place of its module's. All other code keeps those."""
    held = function.__defaults__, function.__closure__
    made = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, *held)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# --- gathers of trainers on an NPU


def gather_by_gloo(original: Callable[..., Any], values: Any, value: Any, group: Any = None) -> Any:
    """Gather Python objects through Gloo, in place of `torch.distributed.all_gather_object`, which uses device memory on
    HCCL. ms-swift gathers metrics (4.6.0 trainers/trainer.py:108), and twinkle (0.5.1 utils/framework.py:60)."""
    ranks = dist.group.WORLD if group is None else group
    member = dist.get_rank(ranks) >= 0
    return original(values, value, group=gloo_group(ranks) if member else ranks)
