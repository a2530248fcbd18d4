"""twinkle-kit 0.5.1's processor on rows as its template emits them, on a machine without a card."""

from types import SimpleNamespace

import pytest
from twinkle import Platform
from twinkle.processor import base

from collate_npu.integrations import twinkle


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    """twinkle knows GPU, NPU and MPS; tensors go to the CPU here, and the device's name is what a test says."""
    monkeypatch.setattr(Platform, "get_local_device", staticmethod(lambda *_, **__: "cpu"))
    monkeypatch.setattr(Platform, "device_prefix", staticmethod(lambda *_, **__: "cuda"))


@pytest.fixture
def npu(monkeypatch):
    monkeypatch.setattr(Platform, "device_prefix", staticmethod(lambda *_, **__: "npu"))


def grid(tp=1, cp=1, rank=0):
    return SimpleNamespace(
        tp_world_size=tp, cp_world_size=cp, cp_rank=rank, tp_rank=0, sequence_parallel=tp > 1, has_dim=lambda _: False
    )


def processor(mesh=None, *, ours=True, needs=True, **settings):
    made = base.InputProcessor(**{"framework": "megatron", **settings})
    made.device_mesh = mesh
    if ours:
        twinkle.install(made, needs_mask_2d=needs)
    return made


def feature(length, start=1, mask=None, positions=None):
    """What twinkle's template emits for one sample: labels are shifted already."""
    ids = list(range(start, start + length))
    return {
        "input_ids": ids,
        "labels": [*ids[1:], -100],
        "completion_mask": [1] * length,
        "attention_mask": [1] * length if mask is None else mask,
        "position_ids": list(range(length)) if positions is None else positions,
    }


def features(lengths):
    return [feature(length, 10 * (b + 1)) for b, length in enumerate(lengths)]
