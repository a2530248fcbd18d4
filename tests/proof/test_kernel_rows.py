"""Rows: how each operator is called. A function on the CPU stands for each that needs a card, with its signature, and
computes by its arguments alone; told nothing of boundaries it is wrong."""

from dataclasses import replace
from functools import wraps
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from collate_npu import Segments
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.proof import kernel_rows, kernel_runs
from collate_npu.proof.kernel_rows import KERNELS, SCAN, TRUTHS

BY_NAME = {kernel.name.rpartition(".")[2]: kernel for kernel in KERNELS}


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


def varlen_attn(query, key, value, *, cu_seq_q, cu_seq_k, max_q, max_k, window_size, enable_gqa):
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert enable_gqa
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


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, *, seq_idx):
    assert chunk_size.bit_count() == 1
    ends = [0, *(1 + seq_idx[0].diff().nonzero().flatten()).tolist(), x.shape[1]]
    each = [{"x": x[:, a:b], "dt": dt[:, a:b], "A": A, "B": B[:, a:b], "C": C[:, a:b]} for a, b in pairwise(ends)]
    return torch.cat([SCAN.alone(part, torch.arange(1), 0, TRUTHS[0].pattern) for part in each], 1)


STAND_INS = {
    "varlen_attn": varlen_attn, "flash_attn_varlen_func": flash_attn_varlen_func, "chunk_gated_delta_rule": rule,
    "fused_recurrent_gated_delta_rule": rule, "chunk_kda": rule, "causal_conv1d": fla_convolution,
    "causal_conv1d_fn": causal_conv1d_fn, "npu_causal_conv1d": npu_causal_conv1d,
    "npu_chunk_gated_delta_rule": npu_chunk_gated_delta_rule, "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
}  # fmt: skip
LOST = {
    "cu_seqlens": lambda x: x[[0, -1]], "cu_seq_q": lambda x: x[[0, -1]], "cu_seqlens_q": lambda x: x[[0, -1]],
    "seq_idx": torch.zeros_like, "query_start_loc": lambda x: (x[0], x[-1]),
    "actual_seq_lengths": lambda x: x.sum(0, keepdim=True),
}  # fmt: skip


def results(name, function, truths):
    kernel = BY_NAME[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_runs, "TRUTHS", [truth for truth in TRUTHS if truth.name in truths])
        found = kernel_runs.of_kernel(kernel, function, device="cpu", dtype=kernel.dtypes[0])
        return {run.truth: run for run in found}


@pytest.mark.parametrize("name", STAND_INS)
def test_each_row_hands_over_what_the_operator_needs(name):
    truths = ("padded left", "an empty row", "packed rows", "one flat row and its tail", "window, packed", "full attention")
    found = results(name, STAND_INS[name], truths)
    assert {truth: run.state for truth, run in found.items()} == dict.fromkeys(found, "right"), found
    assert len(found) == (6 if not BY_NAME[name].problem.recurrent else 4)
    assert all((run.backward is None) == (not BY_NAME[name].backward) for run in found.values())


@pytest.mark.parametrize("name", STAND_INS)
def test_an_operator_that_does_not_look_at_its_boundaries_is_wrong(name):
    def blind(*args, **kwargs):
        lost = {key: LOST[key](value) for key, value in kwargs.items() if key in LOST}
        assert lost
        lost |= {"cu_seq_k": lost["cu_seq_q"]} if "cu_seq_q" in lost else {}
        longest = {
            key: sum(args[0].shape[:1]) for key in ("max_q", "max_k", "max_seqlen_q", "max_seqlen_k") if key in kwargs
        }
        state = {"initial_state": kwargs["initial_state"][:1]} if "initial_state" in kwargs else {}
        args = [*args[:3], args[3][:1]] if "query_start_loc" in lost else args
        return STAND_INS[name](*args, **kwargs | lost | longest | state)

    found = results(name, blind, ("packed rows", "one token"))
    assert {truth: run.state for truth, run in found.items()} == {"packed rows": "wrong", "one token": "right"}, found


@pytest.mark.parametrize(
    ("name", "truths"),
    [
        ("flash_attn_varlen_func", ("prefix", "chunks")),
        ("torch_chunk_gated_delta_rule", ("packed rows", "one flat row and its tail")),
    ],
)
def test_what_an_operator_cannot_be_told_is_refused(name, truths):
    found = results(name, pytest.fail, truths)
    assert {truth: run.state for truth, run in found.items()} == dict.fromkeys(truths, "refused")


def test_a_tail_is_padding_behind_one_row():
    sides = [("right", [3, 2]), ("left", [3]), ("right", [[3, 2]])]
    truths = [replace(TRUTHS[0], segments=Segments.from_lengths(lengths, side=side, width=6)) for side, lengths in sides]
    assert [*map(kernel_rows._has_tail, truths)] == [False, False, True]


def test_the_operator_itself_is_called_compiled_where_it_is_meant_to_be(monkeypatch):
    flex, plain = BY_NAME["flex_attention"], BY_NAME["scaled_dot_product_attention"]
    assert flex.function("cpu") is flex_attention
    assert flex.function("cuda") is not flex_attention
    assert plain.function("cuda") is scaled_dot_product_attention
    around = wraps(rule)(lambda *args: None)
    monkeypatch.setattr(kernel_rows, "import_module", lambda name: SimpleNamespace(rule=around))
    found = {package: replace(plain, name="rule", module=package).function("cpu") for package in ("fla", "transformers")}
    assert found == {"fla": around, "transformers": rule}
