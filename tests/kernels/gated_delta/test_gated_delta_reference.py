"""The reference rule: against transformers' own torch rules, and by its laws."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_inputs import HV, K, V, rule_inputs

from collate_npu import CollateError, UnsupportedFormError
from collate_npu.kernels.gated_delta import reference_gated_delta_rule

LENGTHS = [3, 70, 1, 64, 65]
OFFSETS = [0, 3, 73, 74, 138, 203]


def gradients(out, inputs):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


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
    assert max((x - y).abs().max() for x, y in zip(gradients(out, inputs), gradients(mine, inputs))) < 1e-5


def test_a_sequence_among_others_is_as_alone_with_its_state():
    inputs = rule_inputs(1, OFFSETS[-1])
    out, final = reference_gated_delta_rule(*inputs, cu_seqlens=OFFSETS, output_final_state=True)
    for n, (start, end) in enumerate(pairwise(OFFSETS)):
        one, state = reference_gated_delta_rule(*(x[:, start:end] for x in inputs), output_final_state=True)
        assert torch.equal(out[:, start:end], one)
        assert torch.equal(final[n : n + 1], state)
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


def test_each_sequence_begins_with_its_own_state_and_an_empty_one_keeps_it():
    inputs, states = rule_inputs(1, 5), torch.randn(3, HV, K, V)
    out, final = reference_gated_delta_rule(*inputs, cu_seqlens=[0, 2, 2, 5], initial_state=states, output_final_state=True)
    alone = [
        reference_gated_delta_rule(*(x[:, a:b] for x in inputs), initial_state=states[n : n + 1], output_final_state=True)
        for n, a, b in ((0, 0, 2), (2, 2, 5))
    ]
    assert torch.allclose(out, torch.cat([x for x, _ in alone], 1))
    assert torch.allclose(final, torch.cat([alone[0][1], states[1:2], alone[1][1]]))


def test_what_no_sequence_covers_is_not_a_number_and_spoils_gradients():
    """As in kernels that leave it unwritten: the layers behind multiply it by zero, which is NaN."""
    inputs = [x.requires_grad_() for x in rule_inputs(1, 8)]
    out, _ = reference_gated_delta_rule(*inputs, cu_seqlens=[0, 3, 5])
    assert out[:, 5:].isnan().all()
    assert not out[:, :5].isnan().any()
    weight = torch.ones(V, requires_grad=True)
    (out @ weight)[:, :5].sum().backward()
    assert weight.grad.isnan().all()


@pytest.mark.parametrize("offsets", [[3, 70], [0, 40, 8], [0, 74], [0]])
def test_offsets_that_mean_no_sequences_are_refused(offsets):
    with pytest.raises(CollateError, match="cu_seqlens"):
        reference_gated_delta_rule(*rule_inputs(1, 73), cu_seqlens=offsets)


def test_shapes_that_kernels_refuse_are_refused():
    q, k, v, g, beta = rule_inputs(2, 5)
    with pytest.raises(CollateError, match="2 rows"):
        reference_gated_delta_rule(q, k, v, g, beta, cu_seqlens=[0, 5])
    for wrong in (
        (q.mT, k.mT, v, g, beta),
        (q, k, v, g[..., :1], beta),
        (q, k, v[:, :, :1].repeat(1, 1, 3, 1)[:, :4], g, beta),
    ):
        with pytest.raises(UnsupportedFormError, match="tokens before the heads"):
            reference_gated_delta_rule(*wrong)
    with pytest.raises(UnsupportedFormError, match="One state a sequence"):
        reference_gated_delta_rule(q, k, v, g, beta, initial_state=torch.zeros(1, HV, K, V))


def test_low_precision_comes_back_as_it_came():
    inputs = [x.bfloat16() for x in rule_inputs(1, 5)]
    assert reference_gated_delta_rule(*inputs)[0].dtype == torch.bfloat16
