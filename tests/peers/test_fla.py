"""fla's released kernels: our arguments give them each sequence as alone, and what they take wrongly in silence.

The Triton kernels run on a CPU in Triton's interpreter: their real code, forward and backward, without a card's rounding,
races and memory. So do those for Ascend, in a run of their own (0.5.2's: 0.6.0's call `extract_slice`, which only
triton-ascend has). Legend: T tokens, H heads, K head size, D channels, W taps.
"""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("fla_interpreted", reason="fla and triton are what is tested")
from fla.modules.convolution import causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.utils import index
from fla_interpreted import ASCEND, LAUNCHED

from collate_npu import PaddingCollator, Segments, adapt
from collate_npu.consumers import probe
from collate_npu.kernels.gated_delta import (
    chunk_indices,
    chunk_offsets,
    gated_delta_kwargs,
    reference_causal_conv1d,
    reference_gated_delta_rule,
)
from collate_npu.releases import installed, numbers
from collate_npu.testing import tiny_model

H, HV, K, V, D, W = 1, 2, 16, 16, 8, 4
PACKINGS = [
    Segments.from_lengths([[3, 70]]),
    Segments.from_lengths([[64, 1, 65, 2]], width=140),
    Segments.from_ids([[0, 0, 1, 1, 1, 0, 2, 2, 2, 2, 3, 0]]),
    Segments.from_lengths([[5], [17, 1], [33]], side="left"),
]


def rule_inputs(T, B=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, T, H, K, generator=draw) for _ in range(2))
    v = torch.randn(B, T, HV, V, generator=draw)
    g, beta = (torch.rand(B, T, HV, generator=draw) for _ in range(2))
    return [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, -g, beta)]


def conv_inputs(T, B=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draw).requires_grad_() for shape in ((B, T, D), (D, W), (D,))]


def convolve(x, weight, bias, **boundary):
    out = causal_conv1d(x, weight, bias, activation="silu", backend="triton", **boundary)
    return out[0] if isinstance(out, tuple) else out


def apart(mine, theirs, inputs, rows=slice(None)):
    """The largest difference, of the outputs or of any gradient; infinite where one is not a number."""
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1))[:, rows]
    grads = (torch.autograd.grad((out[:, rows] * weights).sum(), inputs, retain_graph=True) for out in (mine, theirs))
    pairs = [(mine[:, rows], theirs[:, rows]), *zip(*grads)]
    return max(float((x - y).detach().abs().max().nan_to_num(nan=torch.inf)) for x, y in pairs)


# --- the references are fla's own


@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("naive", [naive_recurrent_gated_delta_rule, naive_chunk_gated_delta_rule])
def test_the_reference_is_flas_naive_rule(naive, T):
    q, k, v, g, beta = inputs = rule_inputs(T, B=2)
    k = k.repeat_interleave(HV // H, 2)
    theirs, state = naive(q.repeat_interleave(HV // H, 2), k, v, beta=beta, g=g, output_final_state=True)
    mine, final = reference_gated_delta_rule(*inputs, output_final_state=True)
    assert apart(mine, theirs, inputs) < 1e-5
    assert (state - final).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_tables_are_flas_own(chunk):
    for offsets in ([0, 3, 73], [0, 64, 65, 130, 132, 140], [0, 3, 3, 73]):
        held = torch.tensor(offsets)
        assert index.prepare_chunk_indices(held, chunk).tolist() == chunk_indices(offsets, chunk).tolist()
        assert index.prepare_chunk_offsets(held, chunk).tolist() == chunk_offsets(offsets, chunk).tolist()


# --- our arguments


@pytest.mark.parametrize("segments", PACKINGS, ids=repr)
@pytest.mark.parametrize(("chunk", "tables"), [(64, False), (64, True), (32, True), (16, False)])
def test_the_rule_on_our_arguments_computes_each_sequence_as_alone(segments, chunk, tables):
    kwargs = gated_delta_kwargs(segments, kernel="fla", chunk_size=chunk, tables=tables)
    T = int(kwargs["cu_seqlens"][-1])
    inputs = rule_inputs(T)
    theirs, _ = chunk_gated_delta_rule(*inputs, **kwargs, chunk_size=chunk)
    ends = kwargs["cu_seqlens"].tolist()
    parts = [[x[:, a:b] for x in inputs] for a, b in pairwise(ends)]
    alone = torch.cat([reference_gated_delta_rule(*part)[0] for part in parts], 1)
    assert apart(alone, theirs, inputs) < 1e-5
    assert segments.num_sequences == 1 or apart(reference_gated_delta_rule(*inputs)[0], theirs, inputs) > 1e-2


@pytest.mark.parametrize("segments", PACKINGS, ids=repr)
@pytest.mark.parametrize("tables", [False, True])
def test_the_convolution_on_our_arguments_computes_each_sequence_as_alone(segments, tables):
    kwargs = gated_delta_kwargs(segments, kernel="fla_conv", chunk_size=32, tables=tables)
    inputs = conv_inputs(int(kwargs["cu_seqlens"][-1]))
    ends = kwargs["cu_seqlens"].tolist()
    theirs = convolve(*inputs, **kwargs)
    alone = [reference_causal_conv1d(inputs[0][:, a:b], *inputs[1:], "silu") for a, b in pairwise(ends)]
    assert apart(torch.cat(alone, 1), theirs, inputs) < 1e-5


@pytest.mark.parametrize("segments", PACKINGS[::3], ids=repr)
def test_kda_on_our_arguments_computes_each_sequence_as_alone(segments):
    kwargs = gated_delta_kwargs(segments, kernel="fla")
    ends = kwargs["cu_seqlens"].tolist()
    q, k, v, _, beta = rule_inputs(ends[-1])
    held = [x.detach().repeat_interleave(HV // x.shape[2], 2).requires_grad_() for x in (q, k, v, beta)]
    held.append((-0.2 * torch.rand(held[0].shape, generator=torch.Generator().manual_seed(2))).requires_grad_())

    def run(rule, a=0, b=None, **kwargs):
        q, k, v, beta, g = (x[:, a:b] for x in held)
        return rule(q, k, v, g=g, beta=beta, **kwargs)[0]

    theirs, alone = run(chunk_kda, **kwargs), torch.cat([run(naive_recurrent_kda, *each) for each in pairwise(ends)], 1)
    assert apart(alone, theirs, held) < 1e-5
    assert apart(alone, run(chunk_kda), held) > 1e-2


@pytest.mark.parametrize("offsets", [[0, 3, 3, 73], [0, 0, 3, 73], [0, 3, 73, 73]], ids=str)
def test_empty_sequences_change_nothing_since_0_5_1(offsets):
    """Outputs, gradients and final states; before, the table named the wrong sequence (fla #909)."""
    inputs, taps, held = rule_inputs(73), conv_inputs(73), torch.tensor(offsets)
    theirs, states = chunk_gated_delta_rule(*inputs, cu_seqlens=held, output_final_state=True)
    mine, finals = reference_gated_delta_rule(*inputs, cu_seqlens=held, output_final_state=True)
    assert apart(mine, theirs, inputs) < 1e-5
    assert (states - finals).abs().max() < 1e-5
    convolved = reference_causal_conv1d(*taps, "silu", cu_seqlens=held)
    assert apart(convolved, convolve(*taps, cu_seqlens=held), taps) < 1e-5


# --- what they take in silence


def rule_error(T, truth=(0, 3, 73), **kwargs):
    """Of real tokens, when the rule is called with these boundaries in place of `truth`."""
    inputs = rule_inputs(T)
    theirs, _ = chunk_gated_delta_rule(*inputs, **kwargs)
    mine, _ = reference_gated_delta_rule(*inputs, cu_seqlens=(*truth, *([T] if truth[-1] < T else [])))
    return apart(mine, theirs, inputs)


OFFSETS = torch.tensor([0, 3, 73])
SILENT = {
    "lengths": {"cu_seqlens": torch.tensor([3, 70])},
    "last below T": {"cu_seqlens": torch.tensor([0, 3])},
    "no boundaries": {},
}
"""Calls whose fault stays inside the row. A host copy of other offsets writes outside of it, and the process dies."""


@pytest.mark.parametrize("name", SILENT)
def test_the_rule_takes_these_without_a_word(name):
    assert rule_error(73, **SILENT[name]) > 1e-2


def test_the_rule_takes_any_keyword():
    assert rule_error(73, cu_seqlens=OFFSETS, attention_mask=OFFSETS) < 1e-5


@pytest.mark.skipif(numbers(installed("fla")) >= (0, 6), reason="0.6.0 computes by the table: another one ends the process")
def test_the_rule_drops_a_table():
    """It builds its own (0.5.2 ops/gated_delta_rule/chunk.py:289-291): `chunk_indices` is for the functions below it."""
    assert rule_error(73, cu_seqlens=OFFSETS, chunk_indices=torch.tensor([[0, 0], [5, 9]])) < 1e-5


def test_what_no_sequence_covers_is_left_as_the_memory_was():
    """Seven rows of slack: nothing is written there, and what was in the buffer is whatever it was."""
    inputs, empty, seen = rule_inputs(80), torch.empty_like, []
    for held in (torch.nan, 5.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty_like", lambda *a, held=held, **k: empty(*a, **k).fill_(held))
            out, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=OFFSETS)
        seen.append(out[:, 73:].detach().nan_to_num(nan=-1))
    assert not torch.equal(*seen)


@pytest.mark.skipif(ASCEND, reason="it builds its own")
def test_the_convolution_takes_another_blocks_table_without_a_word():
    """It works in blocks of 64: a table in 128 leaves every other block out, one in 32 names blocks that are not there."""
    inputs, offsets = conv_inputs(203), torch.tensor([0, 3, 203])
    right = reference_causal_conv1d(*inputs, "silu", cu_seqlens=offsets)
    tables = [torch.tensor(chunk_indices([0, 3, 203], block)) for block in (32, 64, 128)]
    errors = [apart(right, convolve(*inputs, cu_seqlens=offsets, chunk_indices=table), inputs) for table in tables]
    assert max(errors[:2]) < 1e-4
    assert errors[2] > 1e-2


def test_the_convolutions_weight_has_a_wrong_gradient_where_rows_and_offsets_meet(monkeypatch):
    """fla #955: offsets over two rows; the output is right. The gradient sums memory that nobody wrote: here NaN."""
    new_empty = torch.Tensor.new_empty

    def unwritten(*args, **kwargs):
        made = new_empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", unwritten)
    inputs = conv_inputs(73, B=2)
    theirs, mine = convolve(*inputs, cu_seqlens=torch.tensor([0, 73, 146])), reference_causal_conv1d(*inputs, "silu")
    assert (theirs - mine).abs().max() < 1e-5
    assert apart(mine, theirs, inputs) > 1


def test_offsets_refilled_in_place_keep_the_old_table():
    """Tables are remembered by the identity of the offsets (fla utils/_decorators.py): ours are always new."""
    held = torch.tensor([0, 3, 73])
    first = index.prepare_chunk_indices(held, 64)
    held.copy_(torch.tensor([0, 70, 73]))
    assert torch.equal(index.prepare_chunk_indices(held, 64), first)
    fresh = [gated_delta_kwargs(PACKINGS[0], kernel="fla")["cu_seqlens"] for _ in range(2)]
    assert fresh[0] is not fresh[1]


# --- which kernels run

FOR_ASCEND = {"causal_conv1d_fwd_kernel", "causal_conv1d_bwd_dx_kernel"}
FOR_ASCEND |= {"chunk_gated_delta_rule_fwd_kernel_h_blockdim64_npu", "chunk_bwd_kernel_dqkwg_npu"}


def test_an_adapted_model_packs_with_them(monkeypatch):
    """Of a family that no other test of this process imports: transformers looks for causal-conv1d at an import."""
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 1)  # for the interpreter's sake
    monkeypatch.setitem(probe._FAMILY, "qwen3_5_moe_text", heads)
    samples = [{"input_ids": ids, "labels": ids} for ids in ([5, 9, 2, 77, 3, 8], [7], [40, 41, 42, 43, 44, 41, 200])]
    model = tiny_model("qwen3_5_moe_text", vocab_size=257)
    with adapt(model):
        alone = [
            model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0]
            for row in (torch.tensor([each["input_ids"]]) for each in samples)
        ]
        LAUNCHED.clear()
        found = model(**PaddingCollator(pad_token_id=256, model=model, padding_free=True)(samples))
        found.loss.backward()
    assert (found.logits[0] - torch.cat(alone)).abs().max() < 1e-4
    assert LAUNCHED >= FOR_ASCEND if ASCEND else not LAUNCHED
