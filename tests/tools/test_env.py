"""The environment report: what is found, and the hazards of combinations that are not installed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import collate_npu
from collate_npu.tools import env

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    packages: dict[str, str] = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(env, "_version", lambda name: packages.get(name, ""))
    for name in env.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return packages


def hazards():
    return " ".join(env.environment().hazards)


def test_what_is_here():
    found = env.environment()
    assert found.packages["torch"]
    assert found.devices
    assert found.system.split()[0] in ("Linux", "Darwin", "Windows")


def test_nothing_special_is_no_hazard(installed):
    installed["transformers"] = "5.23.0"
    assert hazards() == ""


def test_torch_npu_without_cann_is_explained(installed, monkeypatch):
    installed["torch_npu"] = "2.13.0"
    monkeypatch.setattr(
        env, "_npu", lambda packages, torch_fails: "torch_npu does not load: libhccl.so: cannot open shared object file"
    )
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in hazards()
    assert "libhccl.so" in env.environment().npu


def test_a_broken_pair_is_named(installed, monkeypatch):
    installed["torch_npu"] = "2.7.1"
    monkeypatch.setattr(env, "_npu", lambda packages, torch_fails: "torch_npu loads")
    assert "torch 2.13.0+cpu and torch_npu 2.7.1 are not a pair" in hazards()


@pytest.mark.parametrize(
    "pair", [("2.7.1", "2.7.1.post2"), ("2.6.0+cpu", "2.6.0"), ("2.13.0", "2.13.0"), ("2.9.1", "2.9.0")]
)
def test_pairs_of_one_minor_release(installed, monkeypatch, pair):
    installed["torch"], installed["torch_npu"] = pair
    monkeypatch.setattr(env, "_npu", lambda packages, torch_fails: "torch_npu loads")
    assert hazards() == ""


BROKEN = {
    "torch": "raise RuntimeError('Failed to load the backend extension: torch_npu.') from ImportError('libhccl.so: gone')",
    "torch_npu": "raise ImportError('libhccl.so: gone')",
}


@pytest.fixture
def without_torch(tmp_path):
    """Runs the command line where `import torch` raises, as it does beside torch_npu without CANN."""
    for name, line in BROKEN.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line, encoding="utf-8")
        (tmp_path / f"{name}-2.13.0.dist-info").mkdir()
        (tmp_path / f"{name}-2.13.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 2.13.0\n", encoding="utf-8")

    def run(*args):
        path = os.pathsep.join([str(tmp_path), str(Path(collate_npu.__file__).parents[1])])
        command = [sys.executable, "-m", "collate_npu", *args]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=120)

    return run


def test_env_explains_a_torch_that_does_not_load(without_torch):
    pytest.importorskip("typer")
    done = without_torch("env")
    assert done.returncode == 0, done.stderr
    why = "Failed to load the backend extension: torch_npu. (ImportError: libhccl.so: gone)"
    assert f"- devices: not known: torch does not load: RuntimeError: {why}" in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU, or source CANN's set_env.sh" in done.stdout


@pytest.mark.parametrize("args", [["audit"], ["show", "--lengths", "3,5"]])
def test_other_commands_end_with_one_line(without_torch, args):
    pytest.importorskip("typer")
    done = without_torch(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "torch does not load: RuntimeError" in done.stderr
    assert "collate-npu env" in done.stderr


def test_a_missing_torch_is_a_hazard(installed, monkeypatch):
    del installed["torch"]
    monkeypatch.setattr(env, "_why_not", lambda package: f"ModuleNotFoundError: No module named {package!r}")
    assert "torch is not installed" in hazards()


def test_mindspeeds_start_order_is_a_hazard(installed, monkeypatch):
    import types

    installed["mindspeed"] = "0.16.0"
    assert "`import mindspeed.megatron_adaptor` first" in hazards()
    assert "start_problem() says in the training process" in hazards()
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setattr("collate_npu.consumers.mindspeed.installed", lambda: True)
    assert "its adaptor has not run: `import mindspeed.megatron_adaptor` first" in hazards()


def test_a_device_that_cannot_be_asked_is_a_finding(monkeypatch):
    import torch

    def raises():
        raise RuntimeError("aclInit, error code 507008")

    monkeypatch.setattr(torch.cuda, "is_available", raises)
    assert env.environment().devices == "not known: RuntimeError: aclInit, error code 507008"


def test_fla_on_a_cpu_is_a_hazard(installed, monkeypatch):
    installed |= {"triton": "3.7.1", "flash-linear-attention": "0.6.0"}
    monkeypatch.setattr(env, "_devices", lambda: "cpu only")
    assert "fail on a CPU" in hazards()
    monkeypatch.setattr(env, "_devices", lambda: "cuda x 1")
    assert "fail on a CPU" not in hazards()


def test_old_transformers_are_named(installed):
    installed["transformers"] = "5.14.1"
    assert "mended in 5.15" in hazards()


def test_what_each_gated_delta_net_of_mcore_bridge_cannot_do(installed, monkeypatch):
    installed |= {"transformers": "5.19.0", "mcore-bridge": "1.6.5", "megatron-core": "0.16.1"}
    assert "No Gated DeltaNet of mcore-bridge 1.6.5 reads attention_mask_2d: call integrations.swift.install()" in hazards()
    assert "megatron-core 0.16.1 has no context parallelism" in hazards()
    assert "USE_MCORE_GDN" not in hazards()
    installed["megatron-core"] = "0.18.0"
    assert "context parallelism" not in hazards()
    for off in ("0", "false"):
        monkeypatch.setenv("USE_MCORE_GDN", off)
        assert (
            "no context parallelism, and with transformers 5.13 or newer (here 5.19.0) no Qwen3-Next without that install"
            in hazards()
        )
        assert "Unset it." in hazards()


def test_sparse_mode_two_is_named(installed, monkeypatch):
    installed |= {"torch_npu": "2.13.0"}
    monkeypatch.setattr(env, "_npu", lambda packages, torch_fails: "torch_npu loads")
    monkeypatch.setenv("NPU_FA2_SPARSE_MODE", "2")
    assert "top left" in hazards()


@pytest.mark.parametrize("file", sorted((ROOT / "collate_npu" / "integrations").rglob("*.py")), ids=lambda file: file.stem)
def test_every_trainer_is_listed_and_installed_in_the_version_it_names(file):
    named = re.search(r'^PACKAGE, TESTED = "(.*)", "(.*)"$', file.read_text(encoding="utf-8"), flags=re.M)
    if named is None:
        pytest.skip("no trainer of its own")
    assert named[1] in env.PACKAGES
    assert f'"{named[1]}=={named[2]}"' in (ROOT / "noxfile.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("on", [True, False])
def test_rounding_of_an_npu_is_told_as_it_is_set(installed, monkeypatch, on):
    import types

    import torch

    installed |= {"torch_npu": "2.13.0"}
    monkeypatch.setattr(env, "_npu", lambda packages, torch_fails: "torch_npu loads")
    npu = types.SimpleNamespace(matmul=types.SimpleNamespace(allow_hf32=False), conv=types.SimpleNamespace(allow_hf32=on))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(env, "_devices", lambda: "npu x 1")
    found = env.environment()
    assert found.settings == {"torch.npu.matmul.allow_hf32": "False", "torch.npu.conv.allow_hf32": str(on)}
    assert ("HF32 rounds float32 products to ten bits (torch.npu.conv.allow_hf32)" in hazards()) == on


def test_rounding_of_a_gpu_is_told_as_it_is_set(installed, monkeypatch):
    monkeypatch.setattr(env, "_devices", lambda: "cuda x 1")
    assert set(env.environment().settings) == {"torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"}
    monkeypatch.setattr(env, "_read", lambda torch, name: "matmul" in name)
    assert env.environment().settings["torch.backends.cudnn.allow_tf32"] == "False"
    assert "TF32 rounds float32 products to ten bits (torch.backends.cuda.matmul.allow_tf32)" in hazards()
    monkeypatch.setattr(env, "_devices", lambda: "cpu only")
    assert hazards() == ""
    assert env.environment().settings == {}


def test_known_faults_of_recurrent_kernels_are_hazards(installed):
    installed |= {"flash-linear-attention": "0.5.0", "fla-core": "0.5.0"}
    assert "flash-linear-attention 0.5.0: chunk tables go wrong after an empty sequence (#909)" in hazards()
    assert env.environment().packages["fla-core"] == "0.5.0"


@pytest.mark.parametrize("name", ["flash-linear-attention", "fla-core"])
def test_kernels_without_a_card_are_a_hazard(installed, monkeypatch, name):
    monkeypatch.setattr(env, "_devices", lambda: "cpu only")
    installed |= {"triton": "3.7.0", name: "0.5.2"}
    assert "which fail on a CPU. Uninstall them here." in hazards()
