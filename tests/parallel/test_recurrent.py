"""Layouts for recurrent layers: the check says yes exactly where a scheme puts the tokens in order; offsets stay whole."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.parallel import (
    ContextParallel,
    RecurrentScheme,
    check_recurrent_split,
    pad_documents,
    split_batch,
    split_tensor,
)
from collate_npu.parallel.layout import Layout

SCHEMES, LAYOUTS = get_args(RecurrentScheme), get_args(Layout)
ALL_SLICES = ("state_passing", "head_exchange")
UNSERVED = (("state_passing", False), ("row_zigzag", True))


def gathered(cp, offsets):
    """The tokens of all ranks, one rank behind the other: what an exchange of heads puts together."""
    places = torch.arange(offsets[-1])
    return torch.cat([split_tensor(places, cp.with_rank(rank), dim=0, cu_seqlens=offsets) for rank in range(cp.size)])


def undone(tokens, offsets, size):
    """As Megatron undoes zigzag in each sequence, from the definition: a rank holds its chunks r and 2 * size - 1 - r."""
    share, places = offsets[-1] // size, []
    for start, stop in pairwise(offsets):
        half = (stop - start) // (2 * size)
        for chunk in range(2 * size):
            rank, second = min(chunk, 2 * size - 1 - chunk), chunk >= size
            first = rank * share + start // size + second * half
            places += range(first, first + half)
    return tokens[places]


def in_order(scheme, cp, offsets):
    tokens = gathered(cp, offsets)
    if scheme not in ALL_SLICES:
        tokens = undone(tokens, [0, offsets[-1]] if scheme == "row_zigzag" else offsets, cp.size)
    return torch.equal(tokens, torch.arange(offsets[-1]))


@st.composite
def shared_rows(draw):
    size = draw(st.sampled_from([2, 3, 4]))
    layout = draw(st.sampled_from(LAYOUTS))
    lengths = [n * 2 * size for n in draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))]
    return ContextParallel(size, 0, layout=layout), lengths


SERVED = [(scheme, flat) for scheme in SCHEMES for flat in (True, False) if (scheme, flat) not in UNSERVED]


@given(shared_rows(), st.sampled_from(SERVED))
@example((ContextParallel(2, 0, layout="zigzag"), [8, 8]), ("head_exchange_zigzag", True))
def test_rows_pass_exactly_where_the_scheme_puts_their_tokens_in_order(row, served):
    (cp, lengths), (scheme, flat) = row, served
    segments = Segments.from_lengths([lengths] if flat else lengths)
    offsets = [0, *np.cumsum(lengths).tolist()] if flat else [0, segments.shape[1]]
    if in_order(scheme, cp, offsets):
        check_recurrent_split(cp, scheme, segments, padding_free=flat)
        return
    words = "put tokens in order only from the layout '"
    with pytest.raises(UnsupportedFormError, match=f"layout: got '{cp.layout}'.* {words}") as refused:
        check_recurrent_split(cp, scheme, segments, padding_free=flat)
    right = replace(cp, layout=str(refused.value).split(words)[1].split("'")[0])
    assert in_order(scheme, right, offsets)
    check_recurrent_split(right, scheme, segments, padding_free=flat)  # the remedy
    split_batch({"input_ids": torch.zeros(segments.shape)}, right, segments=segments)


def test_what_no_layout_serves():
    cp, segments = ContextParallel(2, 0, layout="contiguous"), Segments.from_lengths([[8, 8]])
    with pytest.raises(UnsupportedFormError, match="padding_free=True: one flat row"):
        check_recurrent_split(cp, "state_passing", segments)
    with pytest.raises(UnsupportedFormError, match=r"row_zigzag .* Give each sequence its own row"):
        check_recurrent_split(cp, "row_zigzag", segments, padding_free=True)
    with pytest.raises(CollateError, match="It is one of state_passing"):
        check_recurrent_split(cp, "zigzag", segments)
    with pytest.raises(CollateError, match=r"A flat row is \[1, S\]"):
        check_recurrent_split(cp, "head_exchange", Segments.from_lengths([4, 4]), padding_free=True)
    check_recurrent_split(ContextParallel(1, 0), "state_passing", segments)  # nothing is shared


@pytest.mark.parametrize("lengths", [[6, 6], [10, 2], [2, 4]])
def test_a_sequence_that_divides_by_the_ranks_but_not_by_twice_them_is_refused(lengths):
    """megatron-core 0.19.2 lets 6 + 6 pass on two ranks, and makes an index with -5 ... -11 of it (common.py:466, 565)."""
    cp, segments = ContextParallel(2, 0, layout="document_zigzag"), Segments.from_lengths([lengths])
    with pytest.raises(CollateError, match="multiple of 4"):
        check_recurrent_split(cp, "head_exchange_zigzag", segments, padding_free=True)
    held = {"input_ids": torch.ones(segments.shape), "cu_seqlens": segments.cu_seqlens}
    batch, padded = pad_documents(held, cp)  # the remedy
    offsets = gated_delta_kwargs(padded, kernel="megatron")["cu_seqlens_q_padded"]
    check_recurrent_split(cp, "head_exchange_zigzag", padded, padding_free=True, offsets=offsets)
    assert torch.equal(offsets, batch["cu_seqlens_padded"])  # it is split by what the kernel is given
    own = gated_delta_kwargs(padded, kernel="fla_cp")["cu_seqlens"]
    if len(own) > len(offsets):  # the padding as sequences of its own, which zigzag cannot share out
        with pytest.raises(CollateError, match="pad_documents"):
            check_recurrent_split(cp, "head_exchange_zigzag", padded, padding_free=True, offsets=own)


@pytest.mark.parametrize(
    ("scheme", "layout", "tp"), [("head_exchange", "ulysses", 1), ("head_exchange_zigzag", "zigzag", 2)]
)
def test_ranks_share_out_both_kinds_of_heads(scheme, layout, tp):
    cp, segments = ContextParallel(2, 0, layout=layout, tensor_parallel=tp), Segments.from_lengths([8, 8])
    check_recurrent_split(cp, scheme, segments, heads=(2 * tp, 4 * tp))
    for heads in ((2 * tp, 2 * tp + 1), (tp, 4 * tp)):
        with pytest.raises(CollateError, match=f"heads: got .* shared out over {2 * tp}"):
            check_recurrent_split(cp, scheme, segments, heads=heads)
    flat = Segments.from_lengths([[16]])
    slices = ContextParallel(2, 0, layout="contiguous")
    check_recurrent_split(slices, "state_passing", flat, padding_free=True, heads=(1, 3))  # it exchanges no heads


def test_the_halo_of_the_convolution_comes_from_one_rank():
    cp = ContextParallel(4, 0, layout="contiguous")
    with pytest.raises(CollateError, match=r"reads only the previous rank\. .* at least 12 tokens"):
        check_recurrent_split(cp, "state_passing", Segments.from_lengths([[5, 3]]), padding_free=True)
    check_recurrent_split(cp, "state_passing", Segments.from_lengths([[5, 3]], width=12), padding_free=True)
    check_recurrent_split(cp, "state_passing", Segments.from_lengths([[5, 3]]), padding_free=True, conv_width=3)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 5, 8], ""),
        ([0, 5, 5, 7, 8], ""),  # an empty sequence, the tail one of its own
        ([0, 8], "row 1: got tokens 5 to 6"),
        ([0, 3, 5, 8], "row 0: got tokens 0 to 4"),
        ([0, 4], "and the last offset is its end"),  # a rank's own
        ([0, 2, 4], "and the last offset is its end"),
        ([5, 8], "0 first"),  # ends
        ([5, 2], "0 first"),  # lengths
        ([0, 5, 7], "the tail counted"),
        ([0, 5, 3, 8], "never falling"),
    ],
)
def test_offsets_are_those_of_the_whole_row(offsets, said):
    cp, segments = ContextParallel(2, 0, layout="contiguous"), Segments.from_lengths([[5, 2]], width=8)
    if not said:
        check_recurrent_split(cp, "state_passing", segments, padding_free=True, offsets=offsets)
        return
    with pytest.raises(CollateError, match=said):
        check_recurrent_split(cp, "state_passing", segments, padding_free=True, offsets=offsets)
    check_recurrent_split(cp, "state_passing", segments, padding_free=True)  # the remedy: leave them out
