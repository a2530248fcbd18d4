"""megatron-core 0.19's own Gated DeltaNet on flat rows: its resolver, its permutation, its whole layer.

Real functions and real models on the offsets of `packed_seq_params`, against what the Segments say, on one rank and on two
and four Gloo processes. fla's kernels and TransformerEngine's are stand-ins (megatron_world.py).
"""

from importlib.metadata import version
from typing import Any

import pytest

if int(version("megatron-core").split(".")[1]) < 19:
    pytest.skip("megatron-core 0.18 is the first whose Gated DeltaNet takes flat rows, and 0.19 cuts them otherwise",
                allow_module_level=True)  # fmt: skip

import megatron_world  # noqa: F401 (before megatron, which asks for triton)
import torch
from hypothesis import given, settings, strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net.common import _build_thd_cp_a2a_perm, _GDNBase
from megatron_world import PAD, gaps, hybrid, outcome, samples

from collate_npu import PaddingCollator, Segments
from collate_npu.integrations.megatron import gpt_batch, packed_seq_params
from collate_npu.integrations.swift import number_sequences
from collate_npu.parallel import ContextParallel, pad_documents, split_tensor

NEEDS = ("megatron",)
EXACT, IMPORTS = 1e-4, 120
lengths_of = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def resolved(params, width, size):
    """What the layer makes of the offsets, queries and keys alike."""
    sides = [
        _GDNBase._resolve_cu_seqlens(
            None, getattr(params, f"cu_seqlens_{side}_padded"), getattr(params, f"cu_seqlens_{side}"), width, side, size
        )
        for side in ("q", "kv")
    ]
    assert torch.equal(*sides)
    return sides[0]


def shared_out(lengths: list[int], size: int) -> tuple[Segments, ContextParallel]:
    """The Segments of a flat row whose sequences are padded for so many ranks."""
    cp = ContextParallel(size, 0).for_documents()
    row = {"input_ids": torch.zeros(1, sum(lengths), dtype=torch.long)}
    row["cu_seqlens"] = Segments.from_lengths([lengths]).cu_seqlens
    return pad_documents(row, cp)[1], cp


@given(lengths=lengths_of, size=st.sampled_from([1, 2, 4]))
@settings(max_examples=60)
def test_the_layers_sequences_are_those_of_the_segments_with_the_padding_behind_each(lengths, size):
    truth, cp = shared_out(lengths, size)
    width = truth.shape[1]
    params = packed_seq_params(truth, context_parallel=cp)
    offsets = resolved(params, width, size)
    starts = [start for _, start, _ in truth.spans]
    assert offsets.tolist() == [*starts, width]
    assert offsets.dtype == torch.int32
    assert (params.total_tokens, params.max_seqlen_q) == (width, int(offsets.diff().max()))
    assert isinstance(params.max_seqlen_q, int)


@given(lengths=lengths_of, size=st.sampled_from([2, 4]))
@settings(max_examples=60)
def test_its_permutation_puts_what_the_ranks_hold_back_in_the_order_of_the_row(lengths, size):
    truth, cp = shared_out(lengths, size)
    width = truth.shape[1]
    offsets = resolved(packed_seq_params(truth, context_parallel=cp), width, size)
    index, inverse = _build_thd_cp_a2a_perm(offsets, size, width)
    places = torch.arange(width)
    held = torch.cat([split_tensor(places, cp.with_rank(rank), dim=0, cu_seqlens=offsets) for rank in range(size)])
    assert held[index].tolist() == list(range(width))
    assert places[inverse].tolist() == held.tolist()


@given(lengths=lengths_of, tail=st.integers(0, 5))
@settings(max_examples=60)
def test_mambas_sequence_numbers_change_where_the_segments_do(lengths, tail):
    """`__post_init__` makes them of the physical offsets and `total_tokens`; no token is left without one."""
    truth = Segments.from_lengths([lengths], sum(lengths) + tail)
    numbers = packed_seq_params(truth).seq_idx
    assert (numbers.dtype, tuple(numbers.shape)) == (torch.int32, truth.shape)
    assert torch.equal(numbers[truth.keep], truth.ids[truth.keep] - 1)
    assert (numbers[0, sum(lengths) :] == len(lengths) - 1).all()


def test_upstream_numbers_more_tokens_than_there_are_where_the_offsets_end_later():
    """Why `total_tokens` is always where the offsets end: 7 numbers for 5 tokens, without an error."""
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert PackedSeqParams(cu_seqlens_q=offsets, total_tokens=5).seq_idx.shape == (1, 7)
    late = PackedSeqParams(cu_seqlens_q=offsets)
    late.total_tokens = 7  # as ms-swift 4.6.0 sets it (megatron/utils/utils.py:272)
    assert late.seq_idx is None
    number_sequences(late)
    assert late.seq_idx.tolist() == [[0, 0, 0, 1, 1, 1, 1]]


CASES = {
    "one-token sequences": ([1, 5, 1, 1, 3, 2], 1),
    "a tail": ([6, 3, 4], 8),
    "odd lengths": ([5, 3, 7, 1, 9], 1),
    "one sequence": ([7], 1),
    "rows padded right": ([5, 11, 1, 7], 16),
}
"""Lengths, and what the width is padded to."""


def run(case: str) -> dict[str, Any]:
    """The outcome of a flat row or of padded rows, and its width."""
    (lengths, multiple), flat, model = CASES[case], "rows" not in case, hybrid()
    collate = PaddingCollator(pad_token_id=PAD, padding_free=flat, pad_to_multiple_of=multiple)
    inputs, truth = gpt_batch(collate(samples(*lengths)), model, padding_free=flat)
    return {**outcome(model, (inputs, truth)), "width": truth.shape[1]}


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_rows_that_ranks_share_equal_samples_alone(pool, case):
    """Each sequence of a flat row is padded to what the ranks share out."""
    model, one = hybrid(), PaddingCollator(pad_token_id=PAD)
    alone = outcome(model, *(gpt_batch(one([row]), model) for row in samples(*CASES[case][0])))
    for found in pool("test_megatron_gated_delta.run", case, seconds=IMPORTS):
        assert found["width"] % (2 * pool.size) == 0
        apart = gaps(found, alone)
        assert max(apart.values()) <= EXACT, apart
