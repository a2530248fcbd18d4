"""What the process of a probe answers, of torch and its cards."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from collate_npu.tools.env import answers, environment


def of_torch():
    return answers.here(["torch"])["torch"]


def test_what_is_here():
    found = of_torch()
    assert found["devices"]
    assert set(found["rounding"].values()) <= {True, False}


def test_a_device_that_cannot_be_asked_is_a_finding(monkeypatch):
    def raises():
        raise RuntimeError("aclInit, error code 507008")

    monkeypatch.setattr(torch.cuda, "is_available", raises)
    assert of_torch()["devices"] == "not known: RuntimeError: aclInit, error code 507008"


@pytest.mark.parametrize("on", [True, False])
def test_rounding_of_an_npu_is_told_as_it_is_set_in_this_process(monkeypatch, on):
    npu = types.SimpleNamespace(
        matmul=types.SimpleNamespace(allow_hf32=False),
        conv=types.SimpleNamespace(allow_hf32=on),
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: "Ascend910B1",
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    found = environment()
    assert "npu x 2 (Ascend910B1)" in found.devices
    assert found.settings["torch.npu.conv.allow_hf32"] == str(on)
    assert any("HF32 rounds" in hazard for hazard in found.hazards) == on


def test_rounding_of_a_gpu_is_told_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = of_torch()
    assert found["devices"].startswith("cuda x 1")
    assert set(found["rounding"]) == {"torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not any("cuda" in name for name in of_torch()["rounding"])


def test_mindspeeds_start_order_is_told(monkeypatch):
    asked = answers.here(["mindspeed"])["mindspeed"]["start"]
    assert "`import mindspeed.megatron_adaptor` first" in asked
    assert "start_problem() says in the training process" in asked
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setattr("collate_npu.consumers.mindspeed.installed", lambda: True)
    late = answers.here(["mindspeed"])["mindspeed"]["start"]
    assert "its adaptor has not run: `import mindspeed.megatron_adaptor` first" in late
