"""Fill: any stretch of query rows, of rows cut into many sequences, is that stretch of the whole."""

from __future__ import annotations

import numpy as np
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st

from collate_npu import Segments, dense
from collate_npu.masks.fill import fill_rows, regions_of


@given(strategies.attentions(), st.data())
def test_a_stretch_of_rows_is_that_of_the_whole(attention, data):
    segments, pattern = attention
    S = segments.shape[1]
    low, high = sorted(data.draw(st.tuples(st.integers(0, S), st.integers(0, S))))
    whole = dense(segments, pattern=pattern)[:, 0].numpy()
    for b, regions in enumerate(regions_of(segments)):
        rows = np.full((high - low, S), 7, np.int8)
        fill_rows(rows, low, regions, pattern, 1, 0)
        assert (rows == whole[b, low:high]).all()


@given(strategies.segments())
def test_every_query_belongs_to_one_sequence(segments):
    for b, regions in enumerate(regions_of(segments)):
        queries = [q for region in regions for q in range(region.first, region.last)]
        assert queries == (list(range(segments.shape[1])) if b not in segments.empty_rows else [])
        for region in regions:
            held = segments.array[b, region.start : region.end]
            assert (held == 0).any() == (region.holes is not None)
            assert region.holes is None or ((held == 0) == region.holes).all()


def test_only_the_sequences_of_a_stretch_are_written():
    """Of thousands of sequences of a token, a stretch of rows touches its own: work does not grow with the others."""
    (regions,) = regions_of(Segments.from_lengths([[1] * 4000]))
    written = []

    class Counting:
        causal, settles = True, False

        def fill(self, block_QK, q0, n, allowed, forbidden):
            written.append(n)
            block_QK[:] = allowed

    fill_rows(np.zeros((8, 4000), bool), 2000, regions, Counting(), True, False)
    assert written == list(range(2000, 2008))


def test_the_tail_of_right_padding_is_one_copy_of_the_last_row():
    keep_QK = dense(Segments.from_lengths([3], 6))[0, 0]
    assert torch.equal(keep_QK[3:], keep_QK[2].repeat(3, 1))
