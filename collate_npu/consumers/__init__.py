"""Consumers: who reads a batch, in which form, and the adapter that hands it over."""

from __future__ import annotations

import sys
from types import ModuleType

from collate_npu.errors import moved


def retire_module(name: str) -> None:
    """Let `import name` find a module that is gone, whose names `errors.moved` looks up with a warning."""
    sys.modules[name] = retired = ModuleType(name)
    retired.__getattr__ = lambda key: moved(name, key)  # type: ignore[method-assign]


retire_module(f"{__name__}.consumer")
