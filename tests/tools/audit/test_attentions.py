"""Attention by name: what is unknown or does not run here is refused with the reason, what is registered is audited."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.testing import tiny_model
from collate_npu.tools.audit import attentions
from collate_npu.tools.audit.attentions import check_attentions, check_is_run, import_plugins, named
from collate_npu.tools.audit.handover import OTHERS, OURS, Subject, others_on

pytestmark = pytest.mark.models


def test_names_are_taken_once_and_both_means_two():
    assert named([]) == named(["both"]) == ["sdpa", "eager"]
    assert named(["eager", "flash_attention_2", "both"]) == ["eager", "flash_attention_2", "sdpa"]


@pytest.mark.parametrize(
    ("name", "device", "said"),
    [
        ("flash_attention_2", "cpu", "run on a card"),
        ("kernels-community/flash-attn2", "cpu", "run on a card"),
        ("flash_attention_2", "meta", "does not run there: ImportError"),
        ("flash_attention_3", "meta", "does not run there: ImportError"),
        ("flex_attention", "cpu", "Add --no-gradients"),
        ("sdp", "cpu", r"Did you mean sdpa\?"),
        ("mine", "cpu", "what a --plugin registers"),
        ("owner/kernel", "cpu", "does not run there"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(monkeypatch, name, device, said):
    if name == "owner/kernel":  # no look on the hub from a test
        monkeypatch.setattr("collate_npu.testing.tiny_model", lambda *a, **k: exec("raise OSError('no such kernel')"))
    with pytest.raises(CollateError, match=said):
        check_attentions([name], device, torch.float32, gradients=True)


def test_what_runs_passes():
    check_attentions(["sdpa", "eager"], "cpu", torch.bfloat16, gradients=True)
    check_attentions(["flex_attention"], "cpu", torch.float32, gradients=False)


def test_a_kernel_that_fails_only_when_it_is_called_is_refused(monkeypatch):
    def broken(*args, **kwargs):
        model = tiny_model(*args, **{**kwargs, "attn_implementation": "sdpa"})
        model.forward = lambda **kwargs: exec("raise RuntimeError('only Ampere GPUs or newer')")
        return model

    monkeypatch.setattr("collate_npu.testing.tiny_model", broken)
    monkeypatch.setattr(attentions, "_check_known", lambda name: None)
    with pytest.raises(CollateError, match="only Ampere GPUs"):
        check_attentions(["mine"], "cpu", torch.float32, gradients=True)


def test_a_plugin_that_does_not_load_is_refused():
    with pytest.raises(CollateError, match=r"no_such_module .*PYTHONPATH"):
        import_plugins(["no_such_module"])


def test_a_model_that_runs_another_attention_was_not_audited_with_the_one_named():
    def runs(name, **fields):
        return SimpleNamespace(config=SimpleNamespace(_attn_implementation=name, **fields))

    heads = {"num_attention_heads": 2}
    with pytest.raises(ValueError, match="runs eager in the place of sdpa"):
        check_is_run(runs("eager", **heads), "sdpa")
    check_is_run(runs("kernels-community/flash-attn2", **heads), "flash_attention_2")
    check_is_run(runs("sdpa"), "eager")  # no attention at all


@pytest.mark.usefixtures("newest_transformers")
def test_no_dense_mask_goes_to_attention_that_does_not_read_one():
    """On a card a dense mask in the place of a 2D one makes a flash kernel read past its tensors."""
    features = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    model = tiny_model("qwen3", vocab_size=8)
    for name in ("flash_attention_2", "kernels-community/flash-attn2", "mine"):
        model.config._attn_implementation = name
        subject = Subject(name="", model=model, attn_implementation=name, side="left", pad_token_id=7)
        assert others_on(name) == ["None"]
        for column, way in OURS.items():
            mask = way(subject, features)["attention_mask"]
            masks = mask.values() if isinstance(mask, dict) else [mask]
            assert all(each.ndim == 2 for each in masks), (name, column)
    assert others_on("sdpa") == others_on("eager") == list(OTHERS)
