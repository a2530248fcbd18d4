"""Fill: any stretch of query rows, of rows cut into many sequences, is that stretch of the whole."""

from __future__ import annotations

import numpy as np
import strategies
from hypothesis import given, strategies as st

from collate_npu import Segments
from collate_npu.masks import dense
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
