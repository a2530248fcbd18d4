"""What a command line names is checked before any model is built, and refused with the reason."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import tiny_model
from collate_npu.tools.audit.candidates import build, candidates, check_attention, check_is_run, resolved_kernels

pytestmark = pytest.mark.models


def test_names_are_taken_as_they_are_and_the_default_leaves_out_what_cannot_be_tested():
    assert candidates(["rwkv"], ["eager"]) == ([("rwkv", "eager")], {})
    chosen, excluded = candidates([], ["eager"])
    assert "rwkv (eager)" in excluded
    assert ("qwen3_next", "eager") in chosen


@pytest.mark.parametrize(
    ("name", "device", "said"),
    [
        ("flash_attention_2", "cpu", r"\(ImportError: .* does not run there"),
        ("sdp", "cpu", r"Did you mean sdpa\?"),
        ("mine", "cpu", "Name one of them"),
        ("owner/kernel", "cpu", r"\(RuntimeError: only Ampere GPUs\)"),
    ],
)
def test_attention_that_cannot_run_is_refused_with_the_reason(monkeypatch, name, device, said):
    """A kernel may fail only when it is called."""

    def broken(*args, **kwargs):
        model = tiny_model(*args, **{**kwargs, "attn_implementation": "sdpa"})
        model.forward = lambda **kwargs: exec("raise RuntimeError('only Ampere GPUs')")
        return model

    if name == "owner/kernel":  # no look on the hub from a test
        monkeypatch.setattr("collate_npu.tools.audit.candidates.tiny_model", broken)
    with pytest.raises(CollateError, match=said):
        check_attention(name, device, torch.float32)


@pytest.mark.parametrize(("name", "shared"), [("llama", True), ("bert", False)])
def test_a_language_model_is_padded_with_its_end_as_most_checkpoints_are(name, shared):
    how = {"tokenizer": None, "device": "cpu", "dtype": torch.float32, "seed": 0, "trust": False, "largest_id": 5}
    _, reader, pad_token_id = build(name, "sdpa", **how)
    assert pad_token_id == reader.pad_token_id
    assert (pad_token_id == reader.eos_token_id) == shared


def test_a_model_that_runs_another_attention_was_not_audited_with_the_one_named():
    def runs(name, **fields):
        return SimpleNamespace(config=SimpleNamespace(_attn_implementation=name, **fields))

    heads = {"num_attention_heads": 2}
    with pytest.raises(ValueError, match="runs eager in the place of sdpa"):
        check_is_run(runs("eager", **heads), "sdpa")
    check_is_run(runs("kernels-community/flash-attn2", **heads), "flash_attention_2")
    check_is_run(runs("sdpa"), "eager")  # no attention at all


@pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="an older transformers does not say")
def test_where_each_function_comes_from():
    assert resolved_kernels(tiny_model("qwen3_next", vocab_size=8))["causal_conv1d_fn"] == "torch"
    assert resolved_kernels(tiny_model("llama", vocab_size=8)) == resolved_kernels(torch.nn.Linear(1, 1)) == {}
