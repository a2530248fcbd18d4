"""Start: Ascend's adaptors patch Megatron, and have to do so before anybody takes its functions and classes.

MindSpeed's puts stand-ins for TransformerEngine and about a hundred functions in place, each in its own module and, under
the same name, wherever a loaded module has it (patch_utils.py:108-131 of 0.16.0; alike in 2.3.0 to 0.18.0). What was taken
before under another name, subclassed, or decided (`HAVE_TE`) stays as it was, without an error.

MegatronAdaptor does the same without MindSpeed, in `import megatron_adaptor` (ms-swift pull request 10087). Its source could
not be read. Its list of patches has the same form: MindSpeed's own test of both says so, test_third_party_feature_and_
manager_patch_without_affecting_ma. Where a release keeps none, the order of imports tells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from collate_npu.consumers.mindspeed import installed

_ADAPTORS = {
    "mindspeed": ("mindspeed.megatron_adaptor", "mindspeed.patch_utils", "MindSpeedPatchesManager"),
    "megatron_adaptor": ("megatron_adaptor", "megatron_adaptor.patches.patch_manager", "PatchesManager"),
}
"""By package: what to import, and which class of which module keeps the list."""
_FIRST = "`import {}` first, right after torch: before megatron, mcore_bridge, transformer_engine and their users"
_TE_FLAGS = ("megatron.core.extensions.transformer_engine", "megatron.core.models.gpt.gpt_layer_specs")
"""Modules whose `HAVE_TE` is True where the adaptor came first (megatron-core 0.16.1 under MindSpeed 0.16.0, run)."""
_OWN = (
    "megatron", "mindspeed", "mindspeed_llm", "mindspeed_mm", "megatron_adaptor", "transformer_engine",
    "transformer_engine_npu", "torch", "torch_npu", "collate_npu",
)  # fmt: skip
"""Packages that may hold an original: they are patched from inside, or hold it on purpose."""
_LISTED = 5


def adaptors() -> list[str]:
    """The modules to import of the adaptors that are installed."""
    return [adaptor for package, (adaptor, _, _) in _ADAPTORS.items() if installed(package)]


def start_problem() -> str:
    """What is wrong with the start of Ascend's patches in this process, and what to do; "" where nothing is, or neither
    MindSpeed nor MegatronAdaptor is installed. Of two that are installed one suffices.

    Imports nothing, and costs one look at every name of every loaded module (0.2 s).

    >>> start_problem()  # Megatron is not imported here
    ''
    """
    here = [package for package in _ADAPTORS if installed(package)]
    if "megatron.core" not in sys.modules or not here:
        return ""
    ran = [package for package in here if _patches(package) or _first(package)]
    if not ran:
        return f"Megatron is imported, {here[0]} is installed, and its adaptor has not run before it: {_first_of(here[0])}."
    replaced = {id(patch.orig_func): name for package in ran for name, patch in _patches(package).items()}
    asked = _TE_FLAGS if "mindspeed" in ran else ()  # MegatronAdaptor makes no transformer_engine
    flags = [name for name in asked if getattr(sys.modules.get(name), "HAVE_TE", True) is False]
    late = [*(f"{name} found no transformer_engine" for name in flags), *_held(replaced)]
    more = f" and {len(late) - _LISTED} more" if len(late) > _LISTED else ""
    told = f"The adaptor of {ran[0]} ran too late: {'; '.join(late[:_LISTED])}{more}. {_first_of(ran[0])}."
    return told if late else ""


def _patches(package: str) -> dict[str, Any]:
    """What it has replaced, by name."""
    _, module, manager = _ADAPTORS[package]
    listed = dict(getattr(getattr(sys.modules.get(module), manager, None), "patches_info", {}))
    applied = {name: each for name, each in listed.items() if each.is_applied and each.orig_func is not None}
    return {name: each for name, each in applied.items() if each.orig_func is not each.final_patch_func}


def _first(package: str) -> bool:
    """Was something of an adaptor without a list imported before Megatron was? `sys.modules` is in the order in which
    imports ended."""
    adaptor, listed, _ = _ADAPTORS[package]
    order = [name for name in sys.modules if name == "megatron.core" or name.partition(".")[0] == package]
    return adaptor in order and listed not in order and order[0] != "megatron.core"


def _first_of(package: str) -> str:
    return _FIRST.format(_ADAPTORS[package][0])


def _held(replaced: dict[int, str]) -> Iterator[str]:
    """Names in the modules of others that still are, or derive from, what MindSpeed has replaced in Megatron."""
    megatron = {key: name for key, name in replaced.items() if name.split(".")[0] in ("megatron", "transformer_engine")}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] not in _OWN:
            for name, value in list(vars(module).items()):
                defined_here = isinstance(value, type) and value.__module__ == module.__name__
                lineage = value.__mro__ if defined_here else (value,)
                if found := next((megatron[id(one)] for one in lineage if id(one) in megatron), ""):
                    yield f"{module.__name__}.{name} holds the original of {found}"
