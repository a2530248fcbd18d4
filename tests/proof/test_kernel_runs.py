"""Installed operators called with our arguments: what is right passes, and each planted fault of an operator is found.

`npu_fusion_attention` needs a card: in its place stands our reference, under its signature, with one fault at a time.
"""

import pytest
import torch
from torch import Tensor

from collate_npu.kernels.fusion_attention import reference_fusion_attention, triangle
from collate_npu.proof import kernel_rows, kernel_runs
from collate_npu.proof.kernel_rows import KERNELS, TRUTHS
from collate_npu.proof.kernel_runs import of_kernel, runs
from collate_npu.proof.measure import FLOOR, MARGIN, TIMES

FUSION, FUSION_V3 = (next(k for k in KERNELS if k.name == f"torch_npu.npu_fusion_attention{v}") for v in ("", "_v3"))
SDPA = next(k for k in KERNELS if k.name.endswith("scaled_dot_product_attention"))
RULE = next(k for k in KERNELS if k.name == "transformers.torch_chunk_gated_delta_rule")


def run_on_cpu(kernel, function, names=(), forms=None, dtype=torch.float32):
    """Of the truths with these names, or of all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_runs, "TRUTHS", [truth for truth in TRUTHS if not names or truth.name in names])
        found = list(of_kernel(kernel, function, device="cpu", dtype=dtype))
    return [run for run in found if forms is None or run.form.startswith(forms)]


def states(found):
    return {run.state for run in found}


# --- what is right


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [FUSION, FUSION_V3], ids=lambda kernel: kernel.name)
def test_the_operator_as_its_documents_have_it_is_right_in_every_layout_and_mode(kernel):
    found = run_on_cpu(kernel, reference_fusion_attention)
    assert states(found) == {"right"}, [run for run in found if run.state != "right"]
    modes = {run.form.partition("mode ")[2] for run in found}
    assert modes == {"0", "0, empty rows", "1", "1, empty rows", "2", "3", "4", "5", "6"}
    assert {run.form.partition(",")[0] for run in found} == {"BSND", "BNSD", "BSH", "SBH", "TND"}


def test_torchs_own_attention_is_right_in_both_dtypes():
    few = ("padded left", "packed rows", "window, padded left", "an empty row", "one token")
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        found = run_on_cpu(SDPA, SDPA.function("cpu"), few, dtype=dtype)
        assert states(found) == {"right"}
        assert max(run.passes for run in found) < most


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


# --- one fault at a time


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


def polarity_inverted(*args, **kwargs):
    if kwargs.get("sparse_mode", 0) in (0, 1, 5) and kwargs.get("atten_mask") is not None:
        kwargs["atten_mask"] = ~kwargs["atten_mask"]
    return reference_fusion_attention(*args, **kwargs)


def boundaries_ignored(*args, **kwargs):
    if kwargs["input_layout"] == "TND" and kwargs.get("sparse_mode") != 6:
        kwargs["actual_seq_qlen"] = kwargs["actual_seq_kvlen"] = [len(args[0])]
    return reference_fusion_attention(*args, **kwargs)


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
    polarity_inverted: {"padded left", "window, padded left", "prefix, padded left", "full attention"},
    boundaries_ignored: {"padded left", "packed rows", "window, packed", "no padding"},
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


def test_the_words_name_what_is_wrong():
    (run,) = run_on_cpu(FUSION, backward_wrong, ["padded right"], "BNSD")
    assert (run.note, run.forward < run.passes < 1e-5 < run.backward) == ("v of real tokens", True)
    assert run.form == "BNSD, mode 3"


def spoilt_at_padding(query, *args, **kwargs):
    """A gradient that nobody would look at, until it is added to a parameter's."""
    query.register_hook(lambda grad: grad.index_fill(1, torch.tensor(0), torch.nan))
    return reference_fusion_attention(query, *args, **kwargs)


def test_a_gradient_at_padding_is_finite():
    (run,) = run_on_cpu(FUSION, spoilt_at_padding, ["window, padded left"], "BSND")
    assert run.state == "wrong"
    assert run.note == "q of real tokens; not finite at padding: gradients of q"  # the longest row begins there
    (run,) = run_on_cpu(RULE, lambda q, k, v, g, beta: (q * spoilt(k) + v[..., :1] * 0,), ["padded on both sides"])
    assert "not finite at padding: gradients of k" in run.note


def test_a_gradient_at_padding_alone_is_enough():
    def spoils(query, *args, **kwargs):
        query.register_hook(lambda grad: grad.index_fill(0, torch.tensor(1), torch.nan))
        return reference_fusion_attention(query, *args, **kwargs)

    (run,) = run_on_cpu(FUSION, spoils, ["an empty row"], "BSND, mode 3")
    assert (run.state, run.note) == ("wrong", "not finite at padding: gradients of q")


def spoilt(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad.index_fill(1, torch.tensor(0), torch.nan))
    return x


def test_numbers_that_are_no_numbers_are_wrong():
    (run,) = run_on_cpu(SDPA, lambda q, k, v, **_: q * torch.nan, ["one token"], "dense, keep")
    assert (run.state, run.forward != run.forward, run.backward != run.backward) == ("wrong", True, True)


def test_what_an_operator_raises_is_said_and_what_we_refuse_is_not_its_fault():
    def refuses(*_, **__):
        raise RuntimeError("aclnn: 161002\nand a page of it")

    found = run_on_cpu(FUSION, refuses, ["padded left", "window, packed"], "TND")
    assert {(run.state, run.note) for run in found} == {("raised", "RuntimeError: aclnn: 161002")}
    (run,) = run_on_cpu(RULE, refuses, ["packed rows"])
    assert (run.state, "keep one sequence a row apart" in run.note) == ("refused", True)


def test_an_output_of_another_shape_is_its_fault():
    found = run_on_cpu(FUSION, lambda query, *_, **__: (query[:, :-1],), ["padded left"], "BSND")
    assert states(found) == {"raised"}


def test_arguments_of_ours_that_break_the_contract_are_wrong_and_the_operator_is_not_called(monkeypatch):
    def inverted(*args, **kwargs):
        return (given := fusion_attention_kwargs(*args, **kwargs)) | {"atten_mask": ~given["atten_mask"]}

    fusion_attention_kwargs = kernel_rows.fusion_attention_kwargs
    monkeypatch.setattr(kernel_rows, "fusion_attention_kwargs", inverted)
    (run,) = run_on_cpu(FUSION, pytest.fail, ["padded right"], "BSH")
    assert run.state == "wrong"
    assert run.note.startswith("[compressed-contents]")


def test_on_a_card_float32_is_rounded_to_ten_bits_and_on_a_cpu_not(monkeypatch):
    def rounded(query, key, value, *args, **kwargs):
        return reference_fusion_attention(query.half().float(), key.half().float(), value.half().float(), *args, **kwargs)

    assert states(run_on_cpu(FUSION, rounded, ["packed rows"])) == {"wrong"}
    told = [kernel_runs._rounded_to(torch.float32, device) for device in ("cpu", "npu", "cuda:1")]
    assert told == [torch.float32, torch.float16, torch.float16]
    assert kernel_runs._rounded_to(torch.bfloat16, "npu") == torch.bfloat16
    monkeypatch.setattr(kernel_runs, "_rounded_to", lambda *_: torch.float16)
    found = run_on_cpu(FUSION, rounded, ["packed rows"])
    assert states(found) == {"right"}
    assert 1e-3 < found[0].passes < 1e-2


def test_where_the_noise_is_as_large_as_what_is_wrong_nothing_is_proved(monkeypatch):
    """A device that pretends: its product of two matrices is zero, and so is everything else."""
    monkeypatch.setattr(kernel_runs, "product_error", lambda like: 1.0)
    found = run_on_cpu(SDPA, lambda q, k, v, **_: (q + k.repeat(1, 2, 1, 1) + v.repeat(1, 2, 1, 1)) * 0, ["one token"])
    assert states(found) == {"cannot tell"}


@pytest.mark.parametrize(("share", "state"), [(0.99, "right"), (1.01, "cannot tell")])
def test_what_is_right_proves_something_where_zeros_would_not_pass_by_a_margin(share, state, monkeypatch):
    monkeypatch.setattr(kernel_runs, "product_error", lambda like: share / (MARGIN * TIMES * FLOOR))
    assert states(run_on_cpu(SDPA, SDPA.function("cpu"), ["one token"])) == {state}


def test_few_are_the_truths_that_show_most():
    found = runs([SDPA], device="cpu", dtype=torch.float32, dry=True, few=True)
    assert {run.truth for run in found} == {truth.name for truth in TRUTHS if truth.few}
    for also in ([], [SDPA.name]):
        found = runs([SDPA], device="cpu", dtype=torch.float32, dry=True, few=True, also=also)
        assert {run.version.endswith(", interpreted") for run in found} == {bool(also)}


def test_what_is_not_installed_or_does_not_run_here_is_listed():
    absent = [k for k in KERNELS if k.package in ("mamba_ssm", "torch_npu") or k.name == "torch.varlen_attn"]
    found = {run.operator: run for run in runs(absent, device="cuda", dtype=torch.float32)}
    assert found["torch.varlen_attn"].note == "it takes bfloat16, float16"
    assert found[FUSION.name].note == "it runs on npu"
    assert found["mamba_ssm.mamba_chunk_scan_combined"].state == "not installed"
