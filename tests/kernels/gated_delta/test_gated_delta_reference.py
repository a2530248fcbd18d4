"""The references of rule and convolution: against torch's and transformers' own, and by their laws."""

import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from rule_inputs import HV, K, V, rule_inputs
from torch.nn.functional import conv1d, silu

OFFSETS = [0, 3, 73, 73, 74, 138, 203]


def gradients(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


def assert_same_gradients(out, other, inputs):
    assert max((x - y).abs().max() for x, y in zip(gradients(out, inputs), gradients(other, inputs))) < 1e-5


@pytest.mark.models
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
def test_it_is_transformers_own_rule_forward_and_backward(name, norm, T):
    models = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if len(inspect.signature(inspect.unwrap(models.torch_recurrent_gated_delta_rule)).parameters) < 9:
        pytest.skip("before 5.15 heads are repeated by the layer")
    inputs = [x.requires_grad_() for x in rule_inputs(2, T)]
    q, k, v, g, beta = inputs
    if not norm:
        k.data /= k.data.norm(dim=-1, keepdim=True)  # keys as long as 2 make any rule explode
    theirs = inspect.unwrap(getattr(models, name))
    out, state = theirs(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=norm)
    mine, final = reference_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=norm)
    assert (out - mine).abs().max() < 1e-5
    assert (state - final).abs().max() < 1e-5
    assert_same_gradients(out, mine, inputs)


def test_a_sequence_among_others_is_as_alone_with_its_own_state_and_an_empty_one_keeps_it():
    inputs, states = rule_inputs(1, OFFSETS[-1]), torch.randn(len(OFFSETS) - 1, HV, K, V)
    more = {"initial_state": states, "output_final_state": True}
    out, final = reference_gated_delta_rule(*inputs, cu_seqlens=OFFSETS, **more)
    for n, (start, end) in enumerate(pairwise(OFFSETS)):
        if start == end:
            assert torch.equal(final[n], states[n])
            continue
        own = more | {"initial_state": states[n : n + 1]}
        one, state = reference_gated_delta_rule(*(x[:, start:end] for x in inputs), **own)
        torch.testing.assert_close(out[:, start:end], one)
        torch.testing.assert_close(final[n : n + 1], state)
    assert (out - reference_gated_delta_rule(*inputs)[0]).abs().max() > 0.1  # the control: without boundaries


@given(st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=20)
def test_a_state_handed_on_is_one_run(first, second):
    inputs = rule_inputs(1, first + second, dtype=torch.float64)
    whole, end = reference_gated_delta_rule(*inputs, output_final_state=True)
    out, state = reference_gated_delta_rule(*(x[:, :first] for x in inputs), output_final_state=True)
    rest, last = reference_gated_delta_rule(*(x[:, first:] for x in inputs), initial_state=state, output_final_state=True)
    assert torch.allclose(torch.cat([out, rest], 1), whole)
    assert torch.allclose(last, end)


def test_what_no_sequence_covers_is_not_a_number_and_spoils_gradients():
    """As in kernels that leave it unwritten: the layers behind multiply it by zero, which is NaN."""
    inputs = [x.requires_grad_() for x in rule_inputs(1, 8)]
    rule, _ = reference_gated_delta_rule(*inputs, cu_seqlens=[0, 3, 5])
    for out in (rule, reference_causal_conv1d(*taps(), cu_seqlens=[0, 5])):
        assert out[:, 5:].isnan().all()
        assert not out[:, :5].isnan().any()
    weight = torch.ones(V, requires_grad=True)
    (rule @ weight)[:, :5].sum().backward()
    assert weight.grad.isnan().all()


def test_each_channel_of_a_key_decays_by_its_own_gate():
    """Of keys that have one channel alone, its gate is that of the head."""
    q, k, v, _, beta = rule_inputs(2, 5)
    gates = -torch.rand(2, 5, HV, K, generator=torch.Generator().manual_seed(0))
    for channel, one in enumerate(torch.eye(K)):
        out, of_head = (reference_gated_delta_rule(q * one, k * one, v, g, beta)[0] for g in (gates, gates[..., channel]))
        torch.testing.assert_close(out, of_head)


def test_float64_is_computed_in_float64_and_low_precision_comes_back_as_it_came():
    assert reference_gated_delta_rule(*(x.bfloat16() for x in rule_inputs(1, 5)))[0].dtype == torch.bfloat16
    q, k, v = torch.randn(3, 1, 1, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    out = reference_gated_delta_rule(q, k, v, zero, zero + 1)[0]
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) / 2 * v, atol=1e-15, rtol=0)


# --- the convolution

ENDS = [0, 3, 4, 9]
NUMBERS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2]], dtype=torch.int32)


def taps(B=1, T=9, D=5, W=4):
    """x, weight and bias."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=draw).requires_grad_() for shape in ((B, T, D), (D, W), (D,))]


def by_torch(x, weight, bias, activation="silu"):
    D, W = weight.shape
    out = conv1d(x.mT, weight[:, None], bias, padding=W - 1, groups=D)[..., : x.shape[1]].mT
    return silu(out) if activation else out


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_without_boundaries_it_is_torchs_forward_and_backward(W, activation):
    tensors = taps(B=2, W=W)
    mine, theirs = reference_causal_conv1d(*tensors, activation), by_torch(*tensors, activation)
    assert (mine - theirs).abs().max() < 1e-5
    assert_same_gradients(mine, theirs, tensors)


@pytest.mark.parametrize("boundary", [{"cu_seqlens": ENDS}, {"seq_idx": NUMBERS}])
def test_a_convolved_sequence_among_others_is_as_alone(boundary):
    x, weight, bias = taps()
    out = reference_causal_conv1d(x, weight, bias, "silu", **boundary)
    alone = torch.cat([by_torch(x[:, a:b], weight, bias) for a, b in pairwise(ENDS)], 1)
    assert (out - alone).abs().max() < 1e-6
    assert (out - by_torch(x, weight, bias)).abs().max() > 0.1


def test_only_equality_of_numbers_counts_so_equal_neighbours_leak():
    """As in causal-conv1d: 7 7 7 2 7 ... leaks over the one token between, 5 5 5 2 9 ... does not."""
    right = reference_causal_conv1d(*taps(), seq_idx=NUMBERS)
    others, again = torch.tensor([[5, 5, 5, 2, 9, 9, 9, 9, 9]]), torch.tensor([[7, 7, 7, 2, 7, 7, 7, 7, 7]])
    assert torch.equal(right, reference_causal_conv1d(*taps(), seq_idx=others))
    assert (right - reference_causal_conv1d(*taps(), seq_idx=again)).abs().max() > 0.1


def test_the_inputs_before_a_sequence_are_its_state():
    x, weight, bias = taps(B=2, T=12)
    whole = reference_causal_conv1d(x, weight, bias, "silu")
    state = x[:, 1:4].mT
    assert (reference_causal_conv1d(x[:, 4:], weight, bias, "silu", initial_state=state) - whole[:, 4:]).abs().max() < 1e-6
    states = torch.stack([torch.zeros_like(state[0]), state[0], x[0, 8:11].mT])
    packed = reference_causal_conv1d(x[:1], weight, bias, "silu", cu_seqlens=[0, 4, 11, 12], initial_state=states)
    assert (packed - whole[:1]).abs().max() < 1e-6
