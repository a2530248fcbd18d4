"""verl 0.9.1's processes: who installs ours in each of them, and when. `python test_verl_workers.py OUT` is one."""

import os
import sys
from multiprocessing import get_context
from typing import Any

import pytest
from processes import found_by, write

NEEDS = ("verl", "megatron")

PLUGIN = "collate_npu.integrations.verl.plugin"


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Both at once: each takes a while to import verl."""
    variants = ({"VERL_USE_EXTERNAL_MODULES": PLUGIN}, {})
    return dict(zip(("named", "late"), found_by("test_verl_workers", tmp_path_factory.mktemp("told"), variants=variants)))


def test_the_plugin_waits_until_verl_imports_its_megatron_functions(processes):
    """By then verl has imported MindSpeed (workers/engine/__init__.py:54-65)."""
    told = {"megatron before": False, "taken first": True, "ours": [True] * 5}
    assert processes["named"] == {**told, "afterwards": [False] * 2, "spawned": True}


def test_without_it_nothing_is_installed_and_named_late_it_still_reaches_every_module_of_verl(processes):
    """As `external_lib` of a model config may be; only what a module outside verl took before stays verl's own."""
    before, late = processes["late"]
    assert before == {"megatron before": False, "taken first": False, "ours": [False] * 5}
    assert late == {"taken first": False, "ours": [True] * 5}


# --- what a fresh process has of verl's Megatron functions: `wraps` leaves `__wrapped__` on ours

_TAKEN: dict[str, Any] = {}


def ours() -> dict[str, Any]:
    """Of a name taken by itself first, and of verl's modules."""
    from verl.models.mcore.util import preprocess_bshd_engine as taken_first

    first = _TAKEN.setdefault("first", taken_first)
    return {"taken first": hasattr(first, "__wrapped__"), "ours": [hasattr(each, "__wrapped__") for each in _functions()]}


def _functions() -> list[Any]:
    from verl.models.mcore import model_forward, registry, util

    return [
        model_forward.preprocess_bshd_engine, registry.model_forward_gen, registry.gptmodel_forward_model_engine,
        util.postprocess_bshd_engine, registry.fused_forward_model_engine,
    ]  # fmt: skip


def spawned() -> bool:
    """In a spawned process: is ours in place as soon as verl's Megatron functions can be taken?"""
    import verl  # noqa: F401
    from verl.models.mcore.registry import get_mcore_engine_forward_fn

    return hasattr(get_mcore_engine_forward_fn(type("Config", (), {"architectures": ["Qwen3ForCausalLM"]})), "__wrapped__")


def named() -> dict[str, Any]:
    sys.modules["megatron"] = None  # type: ignore[assignment]  # a process without Megatron imports verl as before
    import verl  # noqa: F401

    del sys.modules["megatron"]
    told = {"megatron before": "megatron.core" in sys.modules, **ours()}
    from collate_npu.integrations import verl as engine

    engine.uninstall()
    told |= {"afterwards": [hasattr(each, "__wrapped__") for each in _functions()[:2]]}
    with get_context("spawn").Pool(1) as pool:
        return told | {"spawned": pool.apply(spawned)}


def late() -> list[Any]:
    import verl  # noqa: F401

    told = {"megatron before": "megatron.core" in sys.modules, **ours()}
    from verl.utils.import_utils import import_external_libs

    import_external_libs([PLUGIN])
    return [told, ours()]


if __name__ == "__main__":
    write(named() if "VERL_USE_EXTERNAL_MODULES" in os.environ else late())
