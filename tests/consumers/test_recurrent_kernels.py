"""Which functions the recurrent layers of a real model call, as they stand in this process."""

import inspect
from types import MethodType

import pytest
import torch

pytest.importorskip("transformers")

from recurrent_oracle import reference_kernels

from collate_npu import adapt
from collate_npu.consumers.recurrent import boundaries_unread_reason, kernel_calls
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import tiny_model

pytestmark = pytest.mark.models
NEWER = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="before 5.19 kernels are resolved in other ways")
CALLED = {
    "qwen3_next": {"causal_conv1d_fn": "causal_conv1d", "chunk_gated_delta_rule": "fla"},
    "lfm2": {"causal_conv1d_fn": "causal_conv1d"},
    "jamba": {"causal_conv1d_fn": "causal_conv1d", "selective_scan_fn": "mamba_ssm"},
    "qwen3": {},
}


@NEWER
@pytest.mark.parametrize("name", CALLED)
def test_the_calls_of_a_flat_row(name):
    model = tiny_model(name, vocab_size=99)
    found = {call.kernel: call.package for call in kernel_calls(model)}
    steps = {kernel for kernel in found if "update" in kernel or "fused_recurrent" in kernel}
    assert {kernel: found[kernel] for kernel in found.keys() - steps} == CALLED[name]


@NEWER
def test_each_missing_kernel_is_named_with_its_package():
    model = tiny_model("bamba", vocab_size=99)
    assert boundaries_unread_reason(model) == (
        "mamba_split_conv1d_scan_combined is plain torch, without the package mamba_ssm; "
        "causal_conv1d_fn is plain torch, without the package causal_conv1d; "
        "mamba_chunk_scan_combined is plain torch, without the package mamba_ssm"
    )
    with reference_kernels(model):
        assert boundaries_unread_reason(model) == ""


@NEWER
def test_an_adapted_model_says_how_each_kernel_keeps_sequences_apart():
    by_hand = "{} is plain torch, without the package {}: arithmetic".format
    found = [by_hand("causal_conv1d_fn", "causal_conv1d"), by_hand("mamba_chunk_scan_combined", "mamba_ssm")]
    for name, said in (("falcon_h1", "; ".join(found)), ("qwen3", "")):
        with adapt(tiny_model(name, vocab_size=99)) as adapted:
            assert adapted.packed == said


class Wrapped(torch.nn.Module):
    """As DDP and FSDP hold a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@NEWER
def test_wrappers_of_the_model_and_of_its_layers_do_not_hide_them():
    model = tiny_model("qwen3_next", vocab_size=99)
    plain = [call.kernel for call in kernel_calls(model)]
    assert [call.kernel for call in kernel_calls(Wrapped(torch.compile(model)))] == plain
    for layer in model.model.layers:
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None:
            mixer.forward = torch.compile(mixer.forward, backend="eager")
    assert [call.kernel for call in kernel_calls(model)] == plain
    accelerate = pytest.importorskip("accelerate")
    for layer in model.modules():
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    assert [call.kernel for call in kernel_calls(model)] == plain


# --- with the package `kernels`, a function is a module, whose forward use_kernels=True replaces


def as_kernels_does(function):
    """kernels 0.17 layer/layer.py `_create_func_module`."""
    func = function

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


def deaf(self, hidden_states, weight, bias=None, activation=None, **kwargs):
    return hidden_states


def reads(self, hidden_states, weight, bias=None, activation=None, **kwargs):
    return hidden_states, kwargs.pop("seq_idx", None)


@NEWER
def test_a_kernel_of_the_hub_reads_what_its_forward_names(monkeypatch):
    model = tiny_model("lfm2", vocab_size=99)
    scope = inspect.unwrap(type(model.model.layers[0].conv).forward).__globals__
    held = scope["causal_conv1d_fn"]
    while hasattr(held, "__collate_npu__"):  # another test left a model of the family adapted
        held = held.__collate_npu__
        monkeypatch.setitem(scope, "causal_conv1d_fn", held)
    if not isinstance(held, torch.nn.Module):
        held = as_kernels_does(held)
        monkeypatch.setitem(scope, "causal_conv1d_fn", held)
    assert boundaries_unread_reason(model) == "causal_conv1d_fn is plain torch, without the package causal_conv1d"
    with reference_kernels(model):
        assert boundaries_unread_reason(model) == ""
    held.forward = MethodType(reads, held)
    assert boundaries_unread_reason(model) == ""
    held.forward = MethodType(deaf, held)
    assert boundaries_unread_reason(model) == "causal_conv1d_fn of the hub does not read seq_idx"
    held.forward = MethodType(type(held).forward, held)  # there is no such kernel for this device
    assert "is plain torch" in boundaries_unread_reason(model)
