"""Kernel runs: what is right passes, and each planted fault of an operator is found; what each sequence gives alone.

A function on the CPU stands for each operator that needs a card, with its signature, and computes by its arguments alone;
without boundaries it is wrong. Our reference stands for `npu_fusion_attention`, with one fault at a time.
"""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from collate_npu.kernels.fusion_attention import reference_fusion_attention, triangle
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.proof import kernel_runs, measure
from collate_npu.proof.kernel_runs import KERNELS, TRUTHS, expected, of_kernel, runs, token_errors
from collate_npu.proof.measure import FLOOR, MARGIN, TIMES

pytestmark = pytest.mark.long

BY_NAME = {kernel.name.rpartition(".")[2]: kernel for kernel in KERNELS if not kernel.name.endswith("_v3")}
TRUTH = {truth.name: truth for truth in TRUTHS}
FUSION, FUSION_V3 = (next(k for k in KERNELS if k.name == f"torch_npu.npu_fusion_attention{v}") for v in ("", "_v3"))
SDPA, RULE = BY_NAME["scaled_dot_product_attention"], BY_NAME["torch_chunk_gated_delta_rule"]


def run_on_cpu(kernel, function, names=(), forms=None, dtype=torch.float32):
    """Of the truths with these names, or of all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_runs, "TRUTHS", [truth for truth in TRUTHS if not names or truth.name in names])
        found = list(of_kernel(kernel, function, device="cpu", dtype=dtype))
    return [run for run in found if forms is None or run.form.startswith(forms)]


def states(found):
    return {run.state for run in found}


def states_by_truth(name, function, truths):
    found = run_on_cpu(BY_NAME[name], function, truths, dtype=BY_NAME[name].dtypes[0])
    return {run.truth: run.state for run in found}


# --- each row: the operator gets what it needs


def attend(q, k, v, ends, window):
    """`[T, heads, D]` of each sequence by itself, in a window of tokens before and after."""
    outs = []
    assert min(window) >= -1
    for a, b in pairwise(ends.tolist()):
        at = torch.arange(b - a)
        off = at[None] - at[:, None]
        keep = (off >= -window[0] if window[0] >= 0 else off == off) & (off <= window[1] if window[1] >= 0 else off == off)
        parts = (x[a:b].transpose(0, 1) for x in (q, k, v))
        outs.append(scaled_dot_product_attention(*parts, attn_mask=keep, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def varlen_attn(query, key, value, *, cu_seq_q, cu_seq_k, max_q, max_k, window_size):
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert query.shape == key.shape
    assert max_q == max_k == int(cu_seq_q.diff().max())
    return attend(query, key, value, cu_seq_q, window_size)


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
    assert causal == (window_size[1] == 0)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return attend(q, k, v, cu_seqlens_q, window_size)


def rule(q, k, v, *, g, beta, cu_seqlens, cu_seqlens_cpu=None):
    return reference_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)


def fla_convolution(x, *, weight, bias, activation, cu_seqlens, cu_seqlens_cpu):
    return reference_causal_conv1d(x, weight, bias, activation, cu_seqlens=cu_seqlens), None


def causal_conv1d_fn(x, *, weight, bias, seq_idx, activation):
    return reference_causal_conv1d(x.transpose(1, 2), weight, bias, activation, seq_idx).transpose(1, 2)


def npu_causal_conv1d(x, weight, bias, conv_states, *, query_start_loc, activation_mode):
    assert not activation_mode
    assert conv_states.shape == (len(query_start_loc) - 1, len(weight) - 1, x.shape[-1])
    return reference_causal_conv1d(x[None], weight.T, bias, cu_seqlens=query_start_loc)[0]


def npu_chunk_gated_delta_rule(query, key, value, *, beta, initial_state, actual_seq_lengths, scale, g):
    ends = [0, *actual_seq_lengths.cumsum(0).tolist()]
    x = (each[None] for each in (query, key, value, g, beta))
    return reference_gated_delta_rule(*x, scale=scale, initial_state=initial_state, cu_seqlens=ends)[0][0], initial_state


STAND_INS = {
    "varlen_attn": varlen_attn, "flash_attn_varlen_func": flash_attn_varlen_func, "chunk_gated_delta_rule": rule,
    "chunk_kda": rule, "causal_conv1d": fla_convolution,
    "causal_conv1d_fn": causal_conv1d_fn, "npu_causal_conv1d": npu_causal_conv1d,
    "npu_chunk_gated_delta_rule": npu_chunk_gated_delta_rule,
}  # fmt: skip
LOST = {
    "cu_seqlens": lambda x: x[[0, -1]], "cu_seq_q": lambda x: x[[0, -1]], "cu_seqlens_q": lambda x: x[[0, -1]],
    "seq_idx": torch.zeros_like, "query_start_loc": lambda x: (x[0], x[-1]),
    "actual_seq_lengths": lambda x: x.sum(0, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", STAND_INS)
def test_each_row_hands_over_what_the_operator_needs(name):
    truths = ("padded left", "an empty row", "packed rows", "one flat row and its tail", "window, packed", "full attention")
    found = states_by_truth(name, STAND_INS[name], truths)
    assert found == dict.fromkeys(truths[: 4 if BY_NAME[name].problem.recurrent else 6], "right")


@pytest.mark.parametrize("name", STAND_INS)
def test_an_operator_that_does_not_look_at_its_boundaries_is_wrong(name):
    def blind(*args, **kwargs):
        lost = {key: LOST[key](value) for key, value in kwargs.items() if key in LOST}
        assert lost
        lost |= {"cu_seq_k": lost["cu_seq_q"]} if "cu_seq_q" in lost else {}
        longest = {key: len(args[0]) for key in ("max_q", "max_k", "max_seqlen_q", "max_seqlen_k") if key in kwargs}
        state = {"initial_state": kwargs["initial_state"][:1]} if "initial_state" in kwargs else {}
        args = [*args[:3], args[3][:1]] if "query_start_loc" in lost else args
        return STAND_INS[name](*args, **kwargs | lost | longest | state)

    found = states_by_truth(name, blind, ("packed rows", "one token"))
    assert found == {"packed rows": "wrong", "one token": "right"}


@pytest.mark.parametrize(
    ("name", "truths"),
    [
        ("flash_attn_varlen_func", ("prefix", "chunks")),
        ("torch_chunk_gated_delta_rule", ("packed rows", "one flat row and its tail")),
    ],
)
def test_what_an_operator_cannot_be_told_is_refused(name, truths):
    assert states_by_truth(name, pytest.fail, truths) == dict.fromkeys(truths, "refused")


def test_the_operator_itself_is_called_compiled_where_it_is_meant_to_be():
    flex = BY_NAME["flex_attention"]
    assert flex.function("cpu") is flex_attention
    assert flex.function("cuda") is not flex_attention
    assert SDPA.function("cuda") is scaled_dot_product_attention
    pytest.importorskip("transformers")
    assert not hasattr(RULE.function("cpu"), "__wrapped__"), "else it gives way to fla's"


# --- what is right, and one fault at a time


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [FUSION, FUSION_V3], ids=lambda kernel: kernel.name)
def test_the_operator_as_its_documents_have_it_is_right_in_every_layout_and_mode(kernel):
    found = run_on_cpu(kernel, reference_fusion_attention)
    assert states(found) == {"right"}, [run for run in found if run.state != "right"]
    modes = {run.form.partition("mode ")[2] for run in found}
    assert modes == {"0", "0, empty rows", "1", "1, empty rows", "2", "3", "4", "5", "6"}
    assert {run.form.partition(",")[0] for run in found} == {"BSND", "BNSD", "BSH", "SBH", "TND"}


def test_transformers_plain_rule_is_right_by_its_mask():
    """Padding on the left adds to the sums of decays: float32 loses more beside it, and that is noise too."""
    pytest.importorskip("transformers")
    found = run_on_cpu(RULE, RULE.function("cpu"), ["padded left", "an empty row, padded left", "packed rows"])
    assert [run.state for run in found] == ["right", "refused", "right"]


def test_a_card_that_is_not_there_leaves_a_listing_that_keeps_every_contract():
    found = list(runs(KERNELS, device="npu", dtype=torch.bfloat16, dry=True))
    assert states(found) == {"would run", "refused", "not here"}
    assert {run.operator for run in found if run.state == "refused"} == {RULE.name}
    assert sum(run.operator == FUSION.name for run in found) > 100


def band_ignored(*args, **kwargs):
    if kwargs.get("sparse_mode") == 4:
        kwargs |= {"sparse_mode": 3, "pre_tockens": 2**31 - 1, "next_tockens": 2**31 - 1}
    return reference_fusion_attention(*args, **kwargs)


def prefix_ignored(*args, **kwargs):
    if kwargs.get("sparse_mode") == 6:
        kwargs |= {"sparse_mode": 3, "prefix": None, "atten_mask": triangle()}
    return reference_fusion_attention(*args, **kwargs)


def empty_rows_divided_by_nothing(*args, **kwargs):
    """As 0 / 0: `inner_precise` is not looked at."""
    out, *rest = reference_fusion_attention(*args, **kwargs)
    if kwargs.get("inner_precise") != 2 or kwargs["input_layout"] != "BSND":
        return out, *rest
    empty = kwargs["atten_mask"].all(-1).transpose(1, 2)[..., None]
    return torch.where(empty, out * torch.nan, out), *rest


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


def backward_wrong(query, key, value, *args, **kwargs):
    return reference_fusion_attention(query, key, Scaled.apply(value), *args, **kwargs)


FAULTS = {
    band_ignored: {"window", "window, packed", "window, padded left"},
    prefix_ignored: {"prefix", "prefix, packed", "prefix, padded left"},
    empty_rows_divided_by_nothing: {"padded left", "an empty row, padded left", "window, padded left", "full attention"},
    backward_wrong: {"padded right", "packed rows"},
}
"""The truths on each of which it shows, in one form at least."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_operator_is_found(fault):
    found = run_on_cpu(FUSION, fault, FAULTS[fault])
    assert states(found) <= {"right", "wrong"}
    wrong = {run.truth for run in found if run.state == "wrong"}
    assert wrong == FAULTS[fault]
    assert states(run_on_cpu(FUSION, reference_fusion_attention, FAULTS[fault])) == {"right"}


def spoils(query, *args, **kwargs):
    query.register_hook(lambda grad: grad.index_fill(0, torch.tensor(1), torch.nan))
    return reference_fusion_attention(query, *args, **kwargs)


def refuses(*_, **__):
    raise RuntimeError("aclnn: 161002\nand a page of it")


SAID = {
    "one input's gradient": (backward_wrong, "padded right", "BNSD, mode 3", "wrong", "v of real tokens"),
    "at padding alone": (spoils, "an empty row", "BSND, mode 3", "wrong", "not finite at padding: gradients of q"),
    "no numbers": (lambda q, *_, **__: (q * torch.nan,), "one token", "BSND, mode 3", "wrong", "out, "),
    "an error": (refuses, "padded left", "TND, mode 3", "raised", "RuntimeError: aclnn: 161002"),
    "another shape": (lambda q, *_, **__: (q[:, :-1],), "padded right", "BSND, mode 3", "raised", "output: got float32"),
}


@pytest.mark.parametrize("name", SAID)
def test_the_words_name_what_is_wrong(name):
    function, truth, form, state, note = SAID[name]
    (run,) = [each for each in run_on_cpu(FUSION, function, [truth]) if each.form == form]
    assert (run.state, run.note.startswith(note)) == (state, True)
    if name == "one input's gradient":
        assert run.forward < run.passes < 1e-5 < run.backward


def test_arguments_of_ours_that_break_the_contract_are_wrong_and_the_operator_is_not_called(monkeypatch):
    def inverted(*args, **kwargs):
        return (given := fusion_attention_kwargs(*args, **kwargs)) | {"atten_mask": ~given["atten_mask"]}

    fusion_attention_kwargs = kernel_runs.fusion_attention_kwargs
    monkeypatch.setattr(kernel_runs, "fusion_attention_kwargs", inverted)
    (run,) = run_on_cpu(FUSION, pytest.fail, ["padded right"], "BSH")
    assert run.state == "wrong"
    assert run.note.startswith("[compressed-contents]")


def test_on_a_card_float32_is_rounded_to_ten_bits_and_on_a_cpu_not(monkeypatch):
    def rounded(query, key, value, *args, **kwargs):
        return reference_fusion_attention(query.half().float(), key.half().float(), value.half().float(), *args, **kwargs)

    assert states(run_on_cpu(FUSION, rounded, ["packed rows"])) == {"wrong"}
    monkeypatch.setattr(kernel_runs, "_rounded_to", lambda *_: torch.float16)
    found = run_on_cpu(FUSION, rounded, ["packed rows"])
    assert states(found) == {"right"}
    assert 1e-3 < found[0].passes < 1e-2


@pytest.mark.parametrize(("share", "state"), [(0.99, "right"), (1.01, "cannot tell")])
def test_what_is_right_proves_something_where_zeros_would_not_pass_by_a_margin(share, state, monkeypatch):
    monkeypatch.setattr(measure, "product_error", lambda like: share / (MARGIN * TIMES * FLOOR))
    assert states(run_on_cpu(SDPA, SDPA.function("cpu"), ["one token"])) == {state}


def test_what_is_not_installed_or_does_not_run_here_is_listed():
    absent = [k for k in KERNELS if k.package in ("flash_attn", "torch_npu") or k.name == "torch.varlen_attn"]
    found = {run.operator: run for run in runs(absent, device="cuda", dtype=torch.float32)}
    assert found["torch.varlen_attn"].note == "it takes bfloat16, float16"
    assert found[FUSION.name].note == "it runs on npu"
    assert found["flash_attn.flash_attn_varlen_func"].state == "not installed"


# --- what each sequence gives alone


@pytest.mark.parametrize(
    "problem", {kernel.problem.name: kernel.problem for kernel in KERNELS}.values(), ids=lambda x: x.name
)
def test_noise_is_that_of_the_dtype_and_padding_takes_no_part(problem):
    truth = TRUTH["padded on both sides"]
    (right, wide), (_, narrow) = (expected(problem, truth, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert 0 < max(wide.values()) < 1e-5
    assert 1e-3 < max(narrow.values()) < 0.1
    assert not right["out"][~truth.segments.keep].any()
    grads = [x for name, x in right.items() if name in ("q", "k", "v", "x", "g")]
    assert all(x[truth.segments.keep].any() and not x[~truth.segments.keep].any() for x in grads)


ONES, OFF = torch.ones(1, 140, 4), torch.zeros(1, 140, 4)


def at(place, value):
    return ONES.index_fill(1, torch.tensor(place), value)


@pytest.mark.parametrize(
    ("mine", "right", "error"),
    [
        ({"x": at(65, 0.0)}, {"x": ONES}, {"x": 1.0}),  # one wrong token counts whole
        ({"x": at(65, torch.nan)}, {"x": ONES}, {"x": torch.nan}),
        ({"x": at(139, torch.nan)}, {"x": ONES}, {"x": 0.0}),  # padding
        ({"weight": at([0], 0.0)[0, :4]}, {"weight": ONES[0, :4]}, {"weight": 0.5}),  # tokens share it: one whole
        ({"q": ONES * 1e-6, "v": ONES}, {"q": OFF, "v": ONES}, {"q": 1e-6, "v": 0.0}),  # the others say what is small
    ],
)
def test_the_error_of_tokens(mine, right, error):
    found = token_errors(TRUTH["one flat row and its tail"].segments, mine, right)
    assert found == pytest.approx(error, nan_ok=True)
