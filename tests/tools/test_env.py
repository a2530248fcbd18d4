"""The environment report: what is found, and the hazards of combinations that are not installed here."""

from __future__ import annotations

import pytest

from collate_npu.tools import env


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
    monkeypatch.setattr(env, "_npu", lambda packages: "torch_npu does not load: libhccl.so: cannot open shared object file")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in hazards()
    assert "libhccl.so" in env.environment().npu


def test_a_broken_pair_is_named(installed, monkeypatch):
    installed["torch_npu"] = "2.7.1"
    monkeypatch.setattr(env, "_npu", lambda packages: "torch_npu loads")
    assert "torch 2.13.0+cpu and torch_npu 2.7.1 are not a pair" in hazards()


def test_fla_on_a_cpu_is_a_hazard(installed, monkeypatch):
    installed |= {"triton": "3.7.1", "flash-linear-attention": "0.6.0"}
    monkeypatch.setattr(env, "_devices", lambda: "cpu only")
    assert "fail on a CPU" in hazards()
    monkeypatch.setattr(env, "_devices", lambda: "cuda x 1")
    assert hazards() == ""


def test_old_transformers_and_megatron_gdn(installed, monkeypatch):
    installed |= {"transformers": "5.14.1", "mcore-bridge": "1.6.5"}
    assert "mended in 5.15" in hazards()
    assert "USE_MCORE_GDN=0" in hazards()
    monkeypatch.setenv("USE_MCORE_GDN", "0")
    assert "USE_MCORE_GDN" not in hazards()


def test_sparse_mode_two_is_named(installed, monkeypatch):
    installed |= {"torch_npu": "2.13.0"}
    monkeypatch.setattr(env, "_npu", lambda packages: "torch_npu loads")
    monkeypatch.setenv("NPU_FA2_SPARSE_MODE", "2")
    assert "top left" in hazards()
