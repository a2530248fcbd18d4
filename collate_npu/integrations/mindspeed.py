"""MindSpeed's start: its adaptor has to patch before anybody takes Megatron's functions and classes.

`import mindspeed.megatron_adaptor` puts stand-ins for TransformerEngine and about a hundred functions in place, each in its
own module and, under the same name, wherever a loaded module has it (patch_utils.py:108-131 of 0.16.0; alike in 2.3.0 to
0.18.0). What was taken before under another name, subclassed, or decided (`HAVE_TE`) stays as it was, without an error.
`start_problem` says what is wrong; it imports nothing, and costs one look at every name of every loaded module (0.2 s).
`start` is for code of ours that imports Megatron before the trainer does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from collate_npu.consumers import mindspeed

ADAPTOR, MANAGER = "mindspeed.megatron_adaptor", "mindspeed.patch_utils"
TE_FLAGS = ("megatron.core.extensions.transformer_engine", "megatron.core.models.gpt.gpt_layer_specs")
"""Modules whose `HAVE_TE` is True where the adaptor came first (megatron-core 0.16.1 under MindSpeed 0.16.0, run)."""
FIRST = f"`import {ADAPTOR}` first, right after torch: before megatron, mcore_bridge, transformer_engine and their users"
_OWN = (
    "megatron",
    "mindspeed",
    "mindspeed_llm",
    "megatron_adaptor",
    "transformer_engine",
    "torch",
    "torch_npu",
    "collate_npu",
)
"""Packages that may hold an original: they are patched from inside, or hold it on purpose."""
_LISTED = 5


def start_problem() -> str:
    """What is wrong with MindSpeed's start in this process, and what to do; "" where nothing is.

    Nothing is wrong where MindSpeed is not installed, or where Megatron is not imported yet.

    >>> start_problem()  # Megatron is not imported here
    ''
    """
    if "megatron.core" not in sys.modules or not mindspeed.installed():
        return ""
    patches = _applied()
    if not patches:
        return f"Megatron is imported, MindSpeed is installed, and its adaptor has not run: {FIRST}."
    late = [*_without_te(), *_held(patches)]
    if not late:
        return ""
    more = f" and {len(late) - _LISTED} more" if len(late) > _LISTED else ""
    return f"MindSpeed's adaptor ran too late: {'; '.join(late[:_LISTED])}{more}. {FIRST}."


def start() -> None:
    """Let the adaptor patch now, where MindSpeed is installed and Megatron is not imported yet.

    Nothing where the adaptor does not load, as in a driver process without CANN; verl passes over it there in the same way
    (verl 0.9.1 workers/engine/__init__.py:54-60).
    """
    if mindspeed.installed() and "megatron.core" not in sys.modules:
        with suppress(ImportError):
            import_module(ADAPTOR)


def _applied() -> dict[int, str]:
    """The names that MindSpeed has replaced, by id of what stood there before."""
    manager = getattr(sys.modules.get(MANAGER), "MindSpeedPatchesManager", None)
    patches = dict(getattr(manager, "patches_info", {}))
    return {
        id(patch.orig_func): name
        for name, patch in patches.items()
        if patch.is_applied and patch.orig_func is not None and patch.orig_func is not patch.final_patch_func
    }


def _without_te() -> Iterator[str]:
    for name in TE_FLAGS:
        if getattr(sys.modules.get(name), "HAVE_TE", True) is False:
            yield f"{name} found no transformer_engine"


def _held(patches: dict[int, str]) -> Iterator[str]:
    """Names in the modules of others that still are, or derive from, what MindSpeed has replaced in Megatron."""
    megatron = {key: name for key, name in patches.items() if name.split(".")[0] in ("megatron", "transformer_engine")}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] not in _OWN:
            for name, value in list(vars(module).items()):
                if replaced := next((megatron[id(one)] for one in _lineage(value, module) if id(one) in megatron), ""):
                    yield f"{module.__name__}.{name} holds the original of {replaced}"


def _lineage(value: Any, module: ModuleType) -> tuple[Any, ...]:
    """The value, and the bases of a class that this very module defines."""
    defined_here = isinstance(value, type) and value.__module__ == module.__name__
    return value.__mro__ if defined_here else (value,)
