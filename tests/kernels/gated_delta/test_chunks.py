"""Chunk tables: equal to their definition, and enough to find the sequences again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collate_npu.kernels.gated_delta import chunk_indices, chunk_offsets
from collate_npu.kernels.gated_delta.chunks import cumsum_block

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=8)
CHUNKS = st.sampled_from((16, 32, 64, 128))


@given(LENGTHS, CHUNKS)
def test_a_table_is_its_definition(lengths, chunk):
    """A row for each chunk that begins inside a sequence: its sequence, and how many chunks of it stand before."""
    offsets = [0, *np.cumsum(lengths).tolist()]
    expected = [[n, start // chunk] for n, length in enumerate(lengths) for start in range(0, length, chunk)]
    assert chunk_indices(offsets, chunk).tolist() == expected
    firsts = [expected.index([n, 0]) for n in range(len(lengths))]
    assert chunk_offsets(offsets, chunk).tolist() == [*firsts, len(expected)]
    assert len(expected) == sum(math.ceil(length / chunk) for length in lengths)


@pytest.mark.parametrize(("chunk", "chunks"), [(16, 6), (32, 4), (64, 3), (128, 2)])
def test_chunks_begin_again_at_each_sequence(chunk, chunks):
    """73 tokens in chunks of 64 are two, of lengths 3 and 70 they are three."""
    assert len(chunk_indices([0, 3, 73], chunk)) == chunks


def test_the_sequence_is_named_by_its_place_in_the_offsets():
    """An empty one has no chunk and keeps its number (fla #909)."""
    assert chunk_indices([0, 3, 3, 73], 64).tolist() == [[0, 0], [2, 0], [2, 1]]


@pytest.mark.parametrize(("chunk", "block"), [(16, 8192), (32, 4096), (64, 2048), (128, 1024)])
def test_the_cumsum_counts_in_blocks_of_its_own(chunk, block):
    assert cumsum_block(chunk) == block
