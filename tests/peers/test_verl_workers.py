"""verl 0.9.1's processes: who installs ours in each of them, and when."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NEEDS = ("verl", "megatron")

PLUGIN = "collate_npu.integrations.verl.plugin"
PATH = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])


def started(code, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env={**environment, "PYTHONPATH": PATH, **variables}, **pipes)


def printed(process):
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, out[-2000:] + error[-4000:]
    return out.splitlines()


# --- what a fresh process has of verl's Megatron functions: `wraps` leaves `__wrapped__` on ours


def ours() -> dict[str, Any]:
    """Of a name taken by itself first, and of verl's modules."""
    from verl.models.mcore.util import preprocess_bshd_engine as taken_first

    first = _TAKEN.setdefault("first", taken_first)
    return {"taken first": hasattr(first, "__wrapped__"), "ours": [hasattr(each, "__wrapped__") for each in _functions()]}


_TAKEN: dict[str, Any] = {}


def _functions() -> list[Any]:
    from verl.models.mcore import model_forward, registry, util

    return [
        model_forward.preprocess_bshd_engine, registry.model_forward_gen, registry.gptmodel_forward_model_engine,
        util.postprocess_bshd_engine, registry.fused_forward_model_engine,
    ]  # fmt: skip


def afterwards() -> list[bool]:
    """The same of two, when ours is uninstalled."""
    from collate_npu.integrations import verl as engine

    engine.uninstall()
    return [hasattr(each, "__wrapped__") for each in _functions()[:2]]


def asked() -> bool:
    """In a spawned process: is ours in place as soon as verl's Megatron functions can be taken?"""
    import verl  # noqa: F401
    from verl.models.mcore.registry import get_mcore_engine_forward_fn

    return hasattr(get_mcore_engine_forward_fn(type("Config", (), {"architectures": ["Qwen3ForCausalLM"]})), "__wrapped__")


NAMED = """if True:
    import json, multiprocessing, sys
    from test_verl_workers import afterwards, asked, ours
    if __name__ == "__main__":
        sys.modules["megatron"] = None  # a process without Megatron imports verl as before
        import verl
        del sys.modules["megatron"]
        told = {"megatron before": "megatron.core" in sys.modules, **ours(), "afterwards": afterwards()}
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(json.dumps({**told, "spawned": pool.apply(asked)}))
"""
LATE = f"""if True:
    import json, sys
    import verl
    from test_verl_workers import ours
    told = {{"megatron before": "megatron.core" in sys.modules, **ours()}}
    from verl.utils.import_utils import import_external_libs
    import_external_libs(["{PLUGIN}"])
    print(json.dumps([told, ours()]))
"""
MINDSPEED = {"__init__": "", "megatron_adaptor": "import sys\nprint('adaptor', 'megatron.core' in sys.modules)\n"}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Both at once: each takes a while to import verl. The one has a MindSpeed, which says when its adaptor runs."""
    folder = tmp_path_factory.mktemp("stand-in")
    (folder / "mindspeed").mkdir()
    for name, text in MINDSPEED.items():
        (folder / "mindspeed" / f"{name}.py").write_text(text)
    named = started(NAMED, VERL_USE_EXTERNAL_MODULES=PLUGIN, PYTHONPATH=os.pathsep.join([str(folder), PATH]))
    return {"named": named, "late": started(LATE)}


def test_the_plugin_waits_until_verl_imports_its_megatron_functions(processes):
    """MindSpeed must be imported before Megatron (workers/engine/__init__.py:54-65): the plugin starts it then."""
    *before, said = printed(processes["named"])
    assert next(line for line in before if line.startswith("adaptor")) == "adaptor False"
    told = json.loads(said)
    assert told.pop("spawned"), "a spawned process has ours too"
    assert told == {"megatron before": False, "taken first": True, "ours": [True] * 5, "afterwards": [False] * 2}


def test_without_it_nothing_is_installed_and_named_late_it_still_reaches_every_module_of_verl(processes):
    """As `external_lib` of a model config may be; only what a module outside verl took before stays verl's own."""
    before, late = json.loads(printed(processes["late"])[-1])
    assert before == {"megatron before": False, "taken first": False, "ours": [False] * 5}
    assert late == {"taken first": False, "ours": [True] * 5}
