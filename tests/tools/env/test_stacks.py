"""What each stack would run here is asked of the stack, and what is refused of its consumer."""

from __future__ import annotations

import pytest

from collate_npu.tools.env import stacks

pytest.importorskip("transformers")
pytestmark = pytest.mark.models


def with_packages(monkeypatch, *names):
    monkeypatch.setattr(stacks, "installed", lambda: dict.fromkeys(names, "1.0"))


def test_transformers_tells_what_it_resolved():
    found = stacks.runs()
    assert found["transformers, attention"].startswith("sdpa, eager; not here: flash_attention_2")
    if stacks.transformers_version() >= (5, 19):
        assert "chunk_gated_delta_rule: plain torch" in found["transformers, Gated DeltaNet"]


def test_reference_kernels_are_told_as_what_they_are(monkeypatch):
    from collate_npu.testing import reference_kernels

    if stacks.transformers_version() < (5, 20):
        pytest.skip("5.20 is the first release that asks for boundaries")
    model = stacks._qwen3_next()
    monkeypatch.setattr(stacks, "_qwen3_next", lambda: model)
    flat = "flat rows (padding_free=True)"
    assert "chunk_gated_delta_rule is plain torch" in stacks.routes()["transformers"][flat]
    with reference_kernels(model):
        assert "chunk_gated_delta_rule: collate_npu" in stacks.runs()["transformers, Gated DeltaNet"]
        assert stacks.routes()["transformers"][flat] == ""


def test_what_a_stack_refuses_is_its_consumers_refusal(monkeypatch):
    with_packages(monkeypatch, "transformers", "megatron-core", "transformer-engine", "verl", "torchtitan")
    found = stacks.routes()
    assert set(found) == {"transformers", "megatron", "transformer_engine", "verl", "torchtitan"}
    assert found["megatron"]["padded left"] == ""
    assert "read no dense mask" in found["transformer_engine"]["padded left"]
    assert "A recurrent layer carries its state" in found["megatron"]["several sequences in a row"]
    with_packages(monkeypatch, "verl", "torch_npu")
    assert "padded left" in stacks.routes()["verl_npu"]


def test_kernels_that_are_missing_are_named(monkeypatch):
    with_packages(monkeypatch, "megatron-core")
    assert "without flash-linear-attention" in stacks.runs()["Megatron-core, Gated DeltaNet"]
    with_packages(monkeypatch, "megatron-core", "fla-core")
    assert stacks.runs()["Megatron-core, Gated DeltaNet"] == "flash-linear-attention"


def test_one_stack_that_raises_leaves_the_others(monkeypatch):
    def raises():
        raise OSError("half there")

    monkeypatch.setattr(stacks, "_qwen3_next", raises)
    monkeypatch.setattr(stacks, "transformers_version", lambda: (5, 23))
    found = stacks.runs()
    assert found["transformers, Gated DeltaNet"] == "not known: OSError: half there"
    assert found["transformers, attention"].startswith("sdpa")
