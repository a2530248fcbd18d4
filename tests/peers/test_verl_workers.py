"""verl 0.9.1's processes: who installs ours in each of them, when, and what a user types for Ray's workers."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

if any(find_spec(name) is None for name in ("verl", "megatron", "ray")):
    pytest.skip("verl 0.9.1, megatron-core 0.16.1 and ray are not installed (nox -s peers_misc)", allow_module_level=True)

PLUGIN = "collate_npu.integrations.verl.plugin"
HERE = Path(__file__).parent
SHARED = {
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
}  # fmt: skip


def started(*arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "VERL_USE_EXTERNAL_MODULES"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env={**environment, **SHARED, **variables}, **pipes)


def printed(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, out[-2000:] + error[-4000:]
    return out.splitlines()[-1]


FRESH = """if True:
    import sys, json
    {first}
    told = {{"megatron before": "megatron.core" in sys.modules}}
    from verl.models.mcore.util import preprocess_bshd_engine as taken_first
    from verl.models.mcore import model_forward, model_forward_fused, registry, util
    {late}
    import verl.models.mcore.util
    functions = [getattr(module, name) for module, name in (
        (model_forward, "preprocess_bshd_engine"), (util, "preprocess_bshd"), (registry, "gptmodel_forward_model_engine"),
        (registry, "model_forward_gen"), (registry, "fused_forward_model_engine"))]
    told["taken first"] = hasattr(taken_first, "__wrapped__")
    told["ours"] = [hasattr(function, "__wrapped__") for function in functions]
    from collate_npu.integrations.verl import engine
    engine.uninstall()
    told["afterwards"] = [hasattr(getattr(m, n), "__wrapped__") for m, n in (
        (model_forward, "preprocess_bshd_engine"), (registry, "model_forward_gen"))]
    print(json.dumps(told))
"""
SPAWNED = """if True:
    import multiprocessing
    from test_verl_workers import asked
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(asked))
"""
HIDDEN = "import sys; sys.modules['megatron'] = None; import verl; print('verl' in sys.modules)"


def asked():
    """In a spawned process: is ours in place as soon as verl's Megatron functions can be taken?"""
    import verl  # noqa: F401
    from verl.models.mcore.registry import get_mcore_engine_forward_fn

    return hasattr(get_mcore_engine_forward_fn(type("Config", (), {"architectures": ["Qwen3ForCausalLM"]})), "__wrapped__")


@pytest.fixture(scope="module")
def processes():
    """All of them at once: each takes a while to import verl."""
    late = FRESH.format(first="import verl", late=f"import {PLUGIN}")
    without = FRESH.format(first="import verl", late="")
    named = {"VERL_USE_EXTERNAL_MODULES": PLUGIN}
    return {
        "named": started("-c", without, **named), "not named": started("-c", without), "named late": started("-c", late),
        "spawned": started("-c", SPAWNED, **named), "no megatron": started("-c", HIDDEN, **named),
    }  # fmt: skip


def test_the_plugin_waits_until_verl_imports_its_megatron_functions(processes):
    """MindSpeed must be imported before Megatron: the plugin imports neither."""
    said = json.loads(printed(processes["named"]))
    assert said == {"megatron before": False, "taken first": True, "ours": [True] * 5, "afterwards": [False] * 2}


def test_without_it_nothing_is_installed(processes):
    said = json.loads(printed(processes["not named"]))
    assert said == {"megatron before": False, "taken first": False, "ours": [False] * 5, "afterwards": [False] * 2}


def test_named_late_it_still_reaches_every_module_of_verl(processes):
    """As `external_lib` of a model config may be; only what a module outside verl took before stays verl's own."""
    said = json.loads(printed(processes["named late"]))
    assert said["ours"] == [True] * 5
    assert said["taken first"] is False


def test_a_spawned_process_has_ours_too(processes):
    assert printed(processes["spawned"]) == "True"


def test_a_process_without_megatron_imports_verl_as_before(processes):
    assert printed(processes["no megatron"]) == "True"


@contextmanager
def cluster():
    """Ray as an administrator started it: before the job, without the job's variables. It ends with its process."""
    code = (
        "import ray; print(ray.init(num_cpus=4, include_dashboard=False).address_info['gcs_address'], flush=True); input()"
    )
    process = started("-c", code)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate("\n", timeout=60)


def test_ray_workers_of_verls_own_run_ppo(tmp_path):
    """Exported where the job is started, the variable reaches no worker of a cluster that stands; both settings do."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    ways = {
        "runtime_env": f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES={PLUGIN}",
        "external_lib": f"actor_rollout_ref.model.external_lib={PLUGIN}",
    }
    running = []
    with cluster() as address:
        for way, setting in ways.items():
            shared = [f"actor_rollout_ref.model.path={tmp_path}", f"trainer.default_local_dir={tmp_path / way}", setting]
            exported = {"VERL_USE_EXTERNAL_MODULES": PLUGIN} if way == "external_lib" else {}
            running.append(started(str(HERE / "verl_ray_work.py"), *shared, RAY_ADDRESS=address, **exported))
        for process in running:
            printed(process)
    named, external = (json.loads((tmp_path / way).read_text()) for way in ways)
    assert named == {"by the environment": True, "megatron before": False, "ours": [True] * 3}
    assert external == {"by the environment": False, "megatron before": False, "ours": [True] * 3}
