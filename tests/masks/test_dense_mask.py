"""A square mask read in blocks is the mask, in every dtype, polarity and layout; any stretch of query rows that is written,
of rows cut into many sequences, is that stretch of the whole."""

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import Segments
from collate_npu.masks import dense, dense_mask
from collate_npu.masks.dense_mask import MaskValues, Square, fill_rows, regions_of

WRITTEN = [("keep", None), ("masked", None), ("keep", torch.int64), ("masked", torch.uint8), ("masked", torch.float16)]
BIASES = [("bias", torch.float32), ("bias", torch.bfloat16), ("bias", torch.float16), ("bias", torch.float64)]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(dense_mask, "BLOCK", 24)


@given(strategies.attentions(), st.sampled_from(WRITTEN + BIASES), st.sampled_from(["plain", "turned", "heads", "expanded"]))
def test_what_is_read_is_the_mask(attention, written, layout):
    segments, pattern = attention
    B, S = segments.shape
    truth = dense(segments, pattern=pattern)
    full = dense(segments, pattern=pattern, polarity=written[0], dtype=written[1])
    if layout == "turned":
        full = full.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "heads":
        full = full.repeat(1, 2, 1, 1)
    elif layout == "expanded":
        full = full.expand(-1, 3, -1, -1)
    square = Square(MaskValues(full, None if written[0] == "bias" else written[0]), written[0], B)
    truth = truth[:, 0].numpy()
    for b in range(B):
        for low, high in square.blocks():
            assert (square.rows(b, low, high) == truth[b, low:high]).all()
            assert ((square.raw_rows(b, low, high) == square.attends) == truth[b, low:high]).all()
    assert [high for _, high in square.blocks()][-1] == S
    assert all((high - low) * S <= max(24, S) for low, high in square.blocks())
    assert (square.diagonal() == truth.diagonal(axis1=1, axis2=2)).all()
    assert (square.column(S - 1) == truth[:, :, S - 1]).all()


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
