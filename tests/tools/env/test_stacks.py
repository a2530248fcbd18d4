"""What each stack would run here is asked of the stack, and what is refused of its consumer."""

import pytest

from collate_npu import releases
from collate_npu.releases import KERNELS_TOLD
from collate_npu.tools.env import stacks

utils = pytest.importorskip("transformers").utils
pytestmark = pytest.mark.models


def with_packages(monkeypatch, *names):
    """These alone are installed."""
    monkeypatch.setattr(releases, "_FOUND", {})
    monkeypatch.setattr(releases, "_read", dict.fromkeys(names, "1000.0").get)


def test_transformers_tells_what_it_resolved():
    found = stacks.runs()
    assert found["transformers, attention"].startswith("sdpa, eager")
    if KERNELS_TOLD.holds():
        assert "chunk_gated_delta_rule: plain torch" in found["transformers, Gated DeltaNet"]


def test_each_flash_attention_that_is_here_is_named(monkeypatch):
    for n in (2, 3, 4):
        monkeypatch.setattr(utils, f"is_flash_attn_{n}_available", lambda: True, raising=False)
    flash = [name for name in stacks.runs()["transformers, attention"].split(", ") if name.startswith("flash_attention_")]
    assert flash[:3] == ["flash_attention_2", "flash_attention_3", "flash_attention_4"]


def test_what_a_stack_refuses_is_its_consumers_refusal(monkeypatch):
    with_packages(monkeypatch, "transformers", "megatron-core", "transformer-engine", "verl", "torchtitan")
    found = stacks.refused()
    assert set(found) == {"transformers", "megatron", "transformer_engine", "verl", "torchtitan"}
    assert found["megatron"]["padded left"] == ""
    assert "Pass model=" not in str(found["transformers"])
    assert "read no dense mask" in found["transformer_engine"]["padded left"]
    assert "A recurrent layer carries its state" in found["megatron"]["several sequences in a row"]
    with_packages(monkeypatch, "verl", "torch_npu")
    assert "padded left" in stacks.refused()["verl_npu"]


def test_one_stack_that_raises_leaves_the_others(monkeypatch):
    def raises(*_, **__):
        raise OSError("half there")

    monkeypatch.setattr(stacks, "tiny_model", raises)
    monkeypatch.setitem(releases._FOUND, "transformers", "5.23.0")
    found = stacks.runs()
    assert found["transformers, Gated DeltaNet"] == "not known: OSError: half there"
    assert found["transformers, attention"].startswith("sdpa")
