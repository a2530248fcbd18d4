"""What each sequence gives alone, how far rounding moves it, and how far a wrong token is away."""

import pytest
import torch

from collate_npu.kernels.gated_delta import reference_gated_delta_rule
from collate_npu.masks.forms import dense
from collate_npu.proof.kernel_rows import (
    ATTENTION,
    CONVOLUTION,
    HEADS,
    KDA,
    KEY_HEADS,
    RULE,
    SCAN,
    TRUTHS,
    D,
    _summed,
    apart,
    expected,
    in_dtype,
)

BY_NAME = {truth.name: truth for truth in TRUTHS}
PROBLEMS = [ATTENTION, RULE, KDA, CONVOLUTION, SCAN]


@pytest.mark.parametrize("truth", [t for t in TRUTHS if t.segments.array.size < 200], ids=lambda truth: truth.name)
def test_attention_alone_is_attention_under_the_dense_mask(truth):
    x, keep = ATTENTION.draw(truth.segments), dense(truth.segments, pattern=truth.pattern)
    k, v = (x[name].repeat_interleave(HEADS // KEY_HEADS, 2).transpose(1, 2) for name in "kv")
    scores = (x["q"].transpose(1, 2) @ k.transpose(2, 3) * D**-0.5).masked_fill(~keep, -torch.inf)
    out = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)
    found = expected(ATTENTION, truth, torch.float64)
    assert apart(truth.segments, {"out": out}, {"out": found.out})["out"] < 1e-12


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_noise_is_that_of_the_dtype_and_padding_takes_no_part(problem):
    truth = BY_NAME["padded on both sides"]
    wide, narrow = (expected(problem, truth, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert 0 < max(wide.noise.values()) < 1e-5
    assert 1e-3 < max(narrow.noise.values()) < 0.1
    assert not wide.out[~truth.segments.keep].any()
    grads = [x for name, x in wide.gradients.items() if name in ("q", "k", "v", "x", "g")]
    assert all(x[truth.segments.keep].any() and not x[~truth.segments.keep].any() for x in grads)


def test_one_wrong_token_counts_whole_and_what_is_no_number_stays_none():
    truth = BY_NAME["one flat row and its tail"]
    right = torch.ones(*truth.segments.shape, 4)
    wrong = right.clone()
    wrong[0, 65] = 0
    assert apart(truth.segments, {"x": wrong}, {"x": right}) == {"x": 1.0}
    wrong[0, 65], wrong[0, 139] = torch.nan, 1.0
    assert apart(truth.segments, {"x": wrong}, {"x": right})["x"] != 1.0
    wrong[0, 65], wrong[0, 139] = 1.0, torch.nan  # padding
    assert apart(truth.segments, {"x": wrong}, {"x": right}) == {"x": 0.0}


def test_an_input_that_all_tokens_share_is_one_whole():
    segments, weight = BY_NAME["one token"].segments, torch.ones(4, 4)
    assert apart(segments, {"weight": weight * torch.tensor([[0], [1], [1], [1]])}, {"weight": weight}) == {"weight": 0.5}


def test_where_the_right_one_is_zero_the_others_say_what_is_small():
    truth, x = BY_NAME["one token"], torch.ones(1, 1, 4)
    assert apart(truth.segments, {"q": x * 1e-6, "v": x}, {"q": x * 0, "v": x}) == pytest.approx({"q": 1e-6, "v": 0.0})


def test_kda_with_one_decay_for_all_channels_is_the_rule():
    x = {name: each.float() for name, each in KDA.draw(BY_NAME["no padding"].segments).items()}
    one = x["g"][..., :1]
    rows = [
        reference_gated_delta_rule(x["q"], x["k"], x["v"], g, x["beta"])[0] for g in (one[..., 0], one.expand_as(x["g"]))
    ]
    assert torch.allclose(*rows, atol=1e-6)
    assert not torch.allclose(rows[0], reference_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0], atol=1e-2)


def test_each_channel_of_kda_decays_by_itself():
    x = KDA.draw(BY_NAME["no padding"].segments)
    q, k, v, g, beta = (x[name][:1, :2] for name in ("q", "k", "v", "g", "beta"))
    beta = beta * torch.tensor([1.0, 0.0], dtype=torch.float64)[:, None]  # the second token writes nothing
    out = reference_gated_delta_rule(q, k, v, g, beta)[0][0, 1]
    seen = (q[0, 1] * g[0, 1].exp() * k[0, 0]).sum(-1) * beta[0, 0] * D**-0.5
    assert torch.allclose(out, seen[:, None] * v[0, 0])


def test_decays_stay_in_float32():
    drawn = in_dtype(RULE.draw(BY_NAME["one token"].segments), torch.bfloat16)
    assert {name for name, x in drawn.items() if x.dtype == torch.float32} == {"g"}


def test_keys_are_of_length_one_and_decays_are_summed_in_chunks():
    drawn = RULE.draw(BY_NAME["padded left"].segments)
    torch.testing.assert_close(drawn["k"].norm(dim=-1), torch.ones_like(drawn["k"][..., 0]))
    g = -torch.rand(1, 4096, 2, dtype=torch.float64)
    assert 0 < (_summed({"g": g})["g"] - g).abs().max() < 1e-5


def test_the_scan_is_a_sum_over_what_came_before():
    x = SCAN.draw(BY_NAME["one token"].segments) | {}
    drawn = {name: (each if name == "A" else each.repeat(1, 3, *[1] * (each.ndim - 2))) for name, each in x.items()}
    out = SCAN.alone(drawn, torch.arange(3), 0, BY_NAME["one token"].pattern)
    decay = (x["dt"][0, 0] * x["A"]).exp()[:, None]
    once = x["dt"][0, 0][:, None] * x["x"][0, 0] * (x["B"][0, 0, 0] * x["C"][0, 0, 0]).sum()
    assert torch.allclose(out[0], torch.stack([once, once * (1 + decay), once * (1 + decay + decay**2)]))
