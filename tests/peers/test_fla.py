"""fla's released kernels: our arguments give them each sequence as alone, and what they take wrongly in silence.

The Triton kernels run on a CPU in Triton's interpreter: their real code, forward and backward, without a card's rounding,
races and memory. So do those for Ascend, in a run of their own (0.5.2's: 0.6.0's call `extract_slice`, which only
triton-ascend has). The interpreter takes a second for a few chunks of one head: shapes are the smallest that have a
sequence of several chunks beside one that ends inside a chunk. Legend: T tokens, H heads, K head size, D channels, W taps.
"""

import sys
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from rotation import some

pytest.importorskip("fla_interpreted", reason="fla and triton are what is tested")
import fla_interpreted
from fla.modules.convolution import causal_conv1d
from fla.ops.cp import build_cp_context
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.utils import index
from fla_interpreted import ASCEND, LAUNCHED
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule

from benchmarks.operators import KERNELS, TRUTHS, of_kernel
from collate_npu import CollateError, ContextParallel, PaddingCollator, Segments, adapt, gather_sequence, split_batch
from collate_npu.consumers import tiny_models
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.releases import installed, numbers
from collate_npu.testing import tiny_model

K, V, D, W = 16, 16, 8, 4
PACKINGS = {
    "flat": Segments.from_lengths([[3, 70]]),
    "tail": Segments.from_lengths([[16, 1, 17, 2]], width=40),
    "padding between": Segments.from_ids([[0, 0, 1, 1, 1, 0, 2, 2, 2, 2, 3, 0]]),
    "rows padded left": Segments.from_lengths([[5], [17, 1], [33]], side="left"),
}
CALLS = ["flat", *some([name for name in PACKINGS if name != "flat"], 1)]
"""A packing, and one more with each seed."""


def rule_inputs(T, B=1, H=1, HV=1):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, T, H, K, generator=draw) for _ in range(2))
    v = torch.randn(B, T, HV, V, generator=draw)
    g, beta = (torch.rand(B, T, HV, generator=draw) for _ in range(2))
    return [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, -g, beta)]


def conv_inputs(T, B=1):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=draw).requires_grad_() for shape in ((B, T, D), (D, W), (D,))]


def convolve(x, weight, bias, **boundary):
    out = causal_conv1d(x, weight, bias, activation="silu", backend="triton", **boundary)
    return out[0] if isinstance(out, tuple) else out


def apart(mine, theirs, inputs):
    """The largest difference, of the outputs or of any gradient; infinite where one is not a number."""
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1))
    grads = (torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (mine, theirs))
    return largest([(mine, theirs), *zip(*grads)])


def largest(pairs):
    return max(float((x - y).detach().abs().max().nan_to_num(nan=torch.inf)) for x, y in pairs)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("naive", [naive_recurrent_gated_delta_rule, naive_chunk_gated_delta_rule])
def test_the_reference_is_flas_naive_rule(naive, T):
    q, k, v, g, beta = inputs = rule_inputs(T, B=2, HV=2)
    k = k.repeat_interleave(2, 2)
    theirs, state = naive(q.repeat_interleave(2, 2), k, v, beta=beta, g=g, output_final_state=True)
    mine, final = reference_gated_delta_rule(*inputs, output_final_state=True)
    assert apart(mine, theirs, inputs) < 1e-5
    assert (state - final).abs().max() < 1e-5


def test_the_table_of_fla_npu_is_flas_own():
    for lengths in ([3, 70], [64, 1, 65, 2, 8]):
        kwargs = gated_delta_kwargs(Segments.from_lengths([lengths]), kernel="fla_npu")
        held = torch.tensor(kwargs["cu_seqlens"])
        assert index.prepare_chunk_indices(held, 64).flatten().tolist() == [*kwargs["chunk_indices"]]


@pytest.mark.parametrize("packing", CALLS)
def test_the_rule_on_our_arguments_computes_each_sequence_as_alone(packing):
    kwargs = gated_delta_kwargs(PACKINGS[packing], kernel="fla")
    ends = kwargs["cu_seqlens"].tolist()
    inputs = rule_inputs(ends[-1])
    theirs, _ = chunk_gated_delta_rule(*inputs, **kwargs)
    parts = [[x[:, a:b] for x in inputs] for a, b in pairwise(ends)]
    alone = torch.cat([reference_gated_delta_rule(*part)[0] for part in parts], 1)
    assert apart(alone, theirs, inputs) < 1e-5
    assert apart(reference_gated_delta_rule(*inputs)[0], theirs, inputs) > 1e-2


@pytest.mark.parametrize("packing", CALLS)
def test_the_convolution_on_our_arguments_computes_each_sequence_as_alone(packing):
    kwargs = gated_delta_kwargs(PACKINGS[packing], kernel="fla_conv")
    ends = kwargs["cu_seqlens"].tolist()
    inputs = conv_inputs(ends[-1])
    alone = [reference_causal_conv1d(inputs[0][:, a:b], *inputs[1:], "silu") for a, b in pairwise(ends)]
    assert apart(torch.cat(alone, 1), convolve(*inputs, **kwargs), inputs) < 1e-5


def test_kda_on_our_arguments_computes_each_sequence_as_alone():
    kwargs = gated_delta_kwargs(Segments.from_lengths([[3, 17]]), kernel="fla")
    ends = kwargs["cu_seqlens"].tolist()
    q, k, v, _, beta = rule_inputs(ends[-1])
    g = (-0.2 * torch.rand(q.shape, generator=torch.Generator().manual_seed(2))).requires_grad_()
    inputs = [q, k, v, g, beta]
    parts = [[x[:, a:b] for x in inputs] for a, b in pairwise(ends)]
    alone = torch.cat([naive_recurrent_kda(*part)[0] for part in parts], 1)
    assert apart(alone, chunk_kda(*inputs, **kwargs)[0], inputs) < 1e-5


def test_empty_sequences_change_nothing_since_0_5_1():
    """Outputs, gradients and final states; before, the table named the wrong sequence (fla #909)."""
    inputs, taps, held = rule_inputs(20, HV=2), conv_inputs(20), torch.tensor([0, 0, 3, 3, 20, 20])
    theirs, states = chunk_gated_delta_rule(*inputs, cu_seqlens=held, output_final_state=True)
    mine, finals = reference_gated_delta_rule(*inputs, cu_seqlens=held, output_final_state=True)
    assert apart(mine, theirs, inputs) < 1e-5
    assert (states - finals).abs().max() < 1e-5
    convolved = reference_causal_conv1d(*taps, "silu", cu_seqlens=held)
    assert apart(convolved, convolve(*taps, cu_seqlens=held), taps) < 1e-5


def rule_error(**kwargs):
    """Of the tokens of two sequences, when the rule is called with these boundaries."""
    inputs = rule_inputs(20)
    theirs, _ = chunk_gated_delta_rule(*inputs, **kwargs)
    return apart(reference_gated_delta_rule(*inputs, cu_seqlens=(0, 3, 20))[0], theirs, inputs)


OFFSETS = torch.tensor([0, 3, 20])
SILENT = {"no boundaries": {}, "lengths": {"cu_seqlens": torch.tensor([3, 17])}}
SILENT["last below T"] = {"cu_seqlens": torch.tensor([0, 3])}
"""Calls whose fault stays inside the row. A host copy of other offsets writes outside of it, and the process dies."""


@pytest.mark.parametrize("name", SILENT)
def test_the_rule_takes_these_without_a_word(name):
    assert rule_error(**SILENT[name]) > 1e-2


def test_the_rule_takes_any_keyword():
    assert rule_error(cu_seqlens=OFFSETS, attention_mask=OFFSETS) < 1e-5


@pytest.mark.skipif(numbers(installed("fla")) >= (0, 6), reason="0.6.0 computes by the table: another one ends the process")
def test_the_rule_drops_a_table():
    """It builds its own (0.5.2 ops/gated_delta_rule/chunk.py:289-291): `chunk_indices` is for the functions below it."""
    assert rule_error(cu_seqlens=OFFSETS, chunk_indices=torch.tensor([[0, 0], [5, 9]])) < 1e-5


def test_what_no_sequence_covers_is_left_as_the_memory_was():
    """Seven rows of slack: nothing is written there, and what was in the buffer is whatever it was."""
    inputs, empty, seen = rule_inputs(27), torch.empty_like, []
    for held in (torch.nan, 5.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty_like", lambda *a, held=held, **k: empty(*a, **k).fill_(held))
            out, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=OFFSETS)
        seen.append(out[:, 20:].detach().nan_to_num(nan=-1))
    assert not torch.equal(*seen)


@pytest.mark.skipif(ASCEND, reason="it builds its own")
def test_the_convolution_takes_another_blocks_table_without_a_word():
    """It works in blocks of 64: a table in 128 leaves every other block out, one in 32 names blocks that are not there."""
    inputs, offsets = conv_inputs(133), torch.tensor([0, 3, 133])
    right = reference_causal_conv1d(*inputs, "silu", cu_seqlens=offsets)
    tables = [index.prepare_chunk_indices(offsets.clone(), block) for block in (32, 64, 128)]
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
    fresh = [gated_delta_kwargs(PACKINGS["flat"], kernel="fla")["cu_seqlens"] for _ in range(2)]
    assert fresh[0] is not fresh[1]


FOR_ASCEND = {"causal_conv1d_fwd_kernel", "causal_conv1d_bwd_dx_kernel"}
FOR_ASCEND |= {"chunk_gated_delta_rule_fwd_kernel_h_blockdim64_npu", "chunk_bwd_kernel_dqkwg_npu"}


@pytest.mark.together("fla under transformers")
def test_an_adapted_model_packs_with_them(monkeypatch):
    """Of a family that no other test of this process imports: transformers looks for causal-conv1d at an import. The
    adapter's probe is 32 forwards."""
    small = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 1)  # for the interpreter's sake
    small |= {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    monkeypatch.setitem(tiny_models._FAMILY, "qwen3_5_moe_text", small)
    samples = [{"input_ids": ids, "labels": ids} for ids in ([5, 9, 2, 77, 3, 8], [40, 41, 42, 43, 44, 41, 200])]
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


# --- the runs of `nox -s card`, with fla's kernels in the place of a card's


@pytest.mark.parametrize("operator", some(["fla.causal_conv1d", "fla.chunk_gated_delta_rule"], 1))
def test_flas_own_kernels_are_right_on_our_arguments(operator):
    (kernel,) = (each for each in KERNELS if each.name == operator)
    truths = [each for each in TRUTHS if each.name in ("padded left", "packed rows", "one flat row and its tail")]
    runs = [*of_kernel(kernel, kernel.function("cpu"), device="cpu", dtype=torch.float32, truths=truths)]
    assert {run.state for run in runs} == {"right"}, runs
    assert all(run.forward is not None and run.backward is not None for run in runs)


# --- fla's context parallelism on two Gloo ranks, with our split, our offsets and our way back; one process is the truth

NAMES = ("query", "key", "value", "g", "beta", "x")
SHARED = {
    "packed": Segments.from_lengths([[3, 70, 55]]),
    "tail": Segments.from_lengths([[9, 1, 20]], width=32),
    "one": Segments.from_lengths([48]),
}
"""A sequence lies over the ranks' border in each."""
ZIGZAG = numbers(installed("fla")) >= (0, 6)


def drawn(T):
    inputs = [x.detach() for x in (*rule_inputs(T), *conv_inputs(T)[:2])]
    return dict(zip(NAMES, inputs)), inputs[-1]


def loss(outs):
    return sum((out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum() for out in outs)


def one_process(segments):
    batch, taps = drawn(segments.shape[1])
    inputs = {name: x.requires_grad_() for name, x in batch.items()}
    taps.requires_grad_()
    offsets = gated_delta_kwargs(segments, kernel="fla")["cu_seqlens"]
    rule, _ = reference_gated_delta_rule(*(inputs[name] for name in NAMES[:5]), cu_seqlens=offsets)
    outs = rule, reference_causal_conv1d(inputs["x"], taps, None, "silu", cu_seqlens=offsets)
    loss(outs).backward()
    return outs, {name: x.grad for name, x in inputs.items()} | {"taps": taps.grad}


def on_both(segments, cp, offsets, **layout):
    """Gathered outputs, and the gradients of this rank's inputs gathered, of the weights summed."""
    batch, taps = drawn(segments.shape[1])
    inputs = {name: x.requires_grad_() for name, x in split_batch(batch, cp, segments=segments).items()}
    taps.requires_grad_()
    context = build_cp_context(offsets, group=cp.group, conv1d_kernel_size=W, **layout)
    rule, _ = chunk_gated_delta_rule(*(inputs[name] for name in NAMES[:5]), cp_context=context)
    out = causal_conv1d(inputs["x"], taps, activation="silu", cp_context=context)
    outs = [gather_sequence(x, cp, segments) for x in (rule, out[0] if isinstance(out, tuple) else out)]
    loss(outs).backward()
    dist.all_reduce(taps.grad)
    grads = {name: gather_sequence(x.grad, cp, segments) for name, x in inputs.items()}
    return outs, grads | {"taps": taps.grad}


def error(found, expected):
    return largest([*zip(found[0], expected[0]), *((found[1][name], expected[1][name]) for name in found[1])])


def start() -> None:
    """What a rank of a CPU needs: fla's kernels in the interpreter, no question for a card, and Gloo's way to gather."""
    fla_interpreted.count_in_triton()
    for module in list(sys.modules.values()):  # 0.6.0 asks for a card
        if module.__name__.startswith("fla.ops.cp") and hasattr(module, "_check_cp_device"):
            module._check_cp_device = lambda device: None
    flat_gather = dist.all_gather_into_tensor
    # Gloo wants the sizes of the parts, NCCL only their number of elements
    dist.all_gather_into_tensor = lambda out, part, **said: flat_gather(out.view(-1, *part.shape[1:]), part, **said)


def on_rank():
    start()
    right = ContextParallel.from_group(dist.group.WORLD, layout="contiguous")
    zigzag = ContextParallel.from_group(dist.group.WORLD, layout="zigzag")
    found = {}
    for name, segments in SHARED.items():
        offsets, expected = gated_delta_kwargs(segments, kernel="fla_cp")["cu_seqlens"], one_process(segments)
        found[name] = error(on_both(segments, right, offsets), expected)
        if ZIGZAG:
            found[f"{name}, in zigzag"] = error(on_both(segments, zigzag, offsets, layout="zigzag"), expected)
    if ZIGZAG:
        found["contiguous as zigzag"] = error(on_both(segments, right, offsets, layout="zigzag"), expected)
    found["zigzag slices"] = error(on_both(segments, zigzag, offsets), expected)
    tail = SHARED["tail"]
    found["one sequence made up"] = error(on_both(tail, right, torch.tensor([0, 32])), one_process(tail))
    with suppress(ValueError):
        odd = build_cp_context(torch.tensor([0, 3, 73]), group=dist.group.WORLD, conv1d_kernel_size=W)
        found["odd"] = 2 * int(odd.cu_seqlens[-1])
    try:
        split_batch(drawn(73)[0], right, segments=PACKINGS["flat"])
    except CollateError as refused:
        found["refused"] = str(refused)
    return found


@pytest.mark.together("fla on two ranks")
@pytest.mark.skipif(ASCEND, reason="the same code")
def test_our_split_and_offsets_are_exact_on_two_ranks_and_others_are_wrong_in_silence(ranks):
    """Outputs, gradients of the inputs and of the weights."""
    found = ranks(2)("test_fla.on_rank", seconds=400)[1]
    for name in SHARED:
        assert found[name] < 2e-5, name
        assert not ZIGZAG or found[f"{name}, in zigzag"] < 2e-5, name
    for name in ("zigzag slices", "one sequence made up", *["contiguous as zigzag"] * ZIGZAG):
        assert found[name] > 0.1, name
    # 72 of 73 (0.5.2 ops/cp/context.py:84)
    assert found.get("odd") == (72 if numbers(installed("fla")) < (0, 6) else None)
    assert "73" in found["refused"]
