"""What transformers would run here is asked of it."""

import pytest

from collate_npu import releases
from collate_npu.releases import KERNELS_TOLD
from collate_npu.tools import env

utils = pytest.importorskip("transformers").utils
pytestmark = pytest.mark.models


def test_transformers_tells_what_it_resolved():
    found = env.runs()
    assert found["transformers, attention"].startswith("sdpa, eager")
    if KERNELS_TOLD.holds():
        assert "chunk_gated_delta_rule: plain torch" in found["transformers, Gated DeltaNet"]


def test_each_flash_attention_that_is_here_is_named(monkeypatch):
    for n in (2, 3, 4):
        monkeypatch.setattr(utils, f"is_flash_attn_{n}_available", lambda: True, raising=False)
    flash = [name for name in env.runs()["transformers, attention"].split(", ") if name.startswith("flash_attention_")]
    assert flash[:3] == ["flash_attention_2", "flash_attention_3", "flash_attention_4"]


def test_one_stack_that_raises_leaves_the_others(monkeypatch):
    def raises(*_, **__):
        raise OSError("half there")

    monkeypatch.setattr("collate_npu.testing.tiny_model", raises)
    monkeypatch.setitem(releases._FOUND, "transformers", "5.23.0")
    found = env.runs()
    assert found["transformers, Gated DeltaNet"] == "not known: OSError: half there"
    assert found["transformers, attention"].startswith("sdpa")
