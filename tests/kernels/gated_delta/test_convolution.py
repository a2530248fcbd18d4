"""The reference convolution: against torch's and transformers' own, and by its boundaries."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import conv1d, silu

from collate_npu import CollateError, UnsupportedFormError
from collate_npu.kernels.gated_delta import reference_causal_conv1d

OFFSETS = [0, 3, 4, 9]
NUMBERS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2]], dtype=torch.int32)


def inputs(B=1, T=9, D=5, W=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draw).requires_grad_() for shape in ((B, T, D), (D, W), (D,))]


def by_torch(x, weight, bias, activation="silu"):
    D, W = weight.shape
    out = conv1d(x.mT, weight[:, None], bias, padding=W - 1, groups=D)[..., : x.shape[1]].mT
    return silu(out) if activation else out


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_without_boundaries_it_is_torchs_forward_and_backward(W, activation):
    tensors = inputs(B=2, W=W)
    mine, theirs = reference_causal_conv1d(*tensors, activation), by_torch(*tensors, activation)
    weights = torch.randn(mine.shape)
    assert (mine - theirs).abs().max() < 1e-5
    grads = (torch.autograd.grad((out * weights).sum(), tensors) for out in (mine, theirs))
    assert max((a - b).abs().max() for a, b in zip(*grads)) < 1e-5


@pytest.mark.parametrize("boundary", [{"cu_seqlens": OFFSETS}, {"seq_idx": NUMBERS}])
def test_a_sequence_among_others_is_as_alone(boundary):
    x, weight, bias = inputs()
    out = reference_causal_conv1d(x, weight, bias, "silu", **boundary)
    alone = torch.cat([by_torch(x[:, a:b], weight, bias) for a, b in pairwise(OFFSETS)], 1)
    assert (out - alone).abs().max() < 1e-6
    assert (out - by_torch(x, weight, bias)).abs().max() > 0.1


def test_only_equality_of_numbers_counts_so_equal_neighbours_leak():
    """As in causal-conv1d: 7 7 7 2 7 ... leaks over the one token between, 5 5 5 2 9 ... does not."""
    x, weight, bias = inputs()
    right = reference_causal_conv1d(x, weight, bias, seq_idx=NUMBERS)
    others = torch.tensor([[5, 5, 5, 2, 9, 9, 9, 9, 9]])
    again = torch.tensor([[7, 7, 7, 2, 7, 7, 7, 7, 7]])
    assert torch.equal(right, reference_causal_conv1d(x, weight, bias, seq_idx=others))
    assert (right - reference_causal_conv1d(x, weight, bias, seq_idx=again)).abs().max() > 0.1


def test_the_inputs_before_a_sequence_are_its_state():
    x, weight, bias = inputs(T=12)
    whole = reference_causal_conv1d(x, weight, bias, "silu")
    state = x[:, 1:4].mT
    assert (reference_causal_conv1d(x[:, 4:], weight, bias, "silu", initial_state=state) - whole[:, 4:]).abs().max() < 1e-6
    both = torch.cat([torch.zeros_like(state), state])
    packed = reference_causal_conv1d(x, weight, bias, "silu", cu_seqlens=[0, 4, 12], initial_state=both)
    assert (packed - whole).abs().max() < 1e-6


def test_what_no_sequence_covers_is_not_a_number():
    out = reference_causal_conv1d(*inputs(), cu_seqlens=[0, 3])
    assert out[:, 3:].isnan().all()
    assert not out[:, :3].isnan().any()


def test_refusals():
    x, weight, bias = inputs()
    with pytest.raises(UnsupportedFormError, match="channels last"):
        reference_causal_conv1d(x.mT, weight, bias)
    with pytest.raises(UnsupportedFormError, match="one kind of boundary"):
        reference_causal_conv1d(x, weight, bias, seq_idx=NUMBERS, cu_seqlens=OFFSETS)
    with pytest.raises(UnsupportedFormError, match="one kind of boundary"):
        reference_causal_conv1d(x, weight, bias, seq_idx=NUMBERS[0])
    with pytest.raises(CollateError, match="activation"):
        reference_causal_conv1d(x, weight, bias, "gelu")
