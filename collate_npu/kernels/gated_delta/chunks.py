"""Chunk tables: which piece of which sequence each program of a chunked kernel computes.

Chunks start again at every sequence, so there are sum(ceil(length / C)) of them, not ceil(T / C). Lengths 3 and 70 in
chunks of 64::

    ■■■|■■■■ ... ■■|■■■■■■     chunk_indices (0, 0) (1, 0) (1, 1)     chunk_offsets 0 1 3

The first number is the sequence's place in the offsets: builders that count non-empty sequences alone name the wrong one
as soon as an empty one stands before it (fla <= 0.5.0; fla #909), so nothing here takes an empty sequence.
Legend: N sequences, C tokens a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collate_npu.host import Array


def chunk_counts(offsets: Sequence[int], chunk_size: int) -> Array:
    """int64 `[N]`: chunks of each sequence, the last one may be short."""
    return -(-np.diff(np.asarray(offsets, np.int64)) // chunk_size)


def chunk_indices(offsets: Sequence[int], chunk_size: int) -> Array:
    """int64 `[chunks, 2]`: `(sequence, chunk within it)`, in the order of the tokens (fla 0.5.2 ops/utils/index.py:156).

    >>> chunk_indices([0, 3, 70], 64)
    array([[0, 0],
           [1, 0],
           [1, 1]])
    """
    counts_N = chunk_counts(offsets, chunk_size)
    sequence = np.repeat(np.arange(len(counts_N)), counts_N)
    first = np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
    return np.stack([sequence, np.arange(len(sequence)) - first], axis=1)


def chunk_offsets(offsets: Sequence[int], chunk_size: int) -> Array:
    """int64 `[N + 1]`: the number of the first chunk of each sequence, and of all chunks."""
    return np.concatenate([[0], np.cumsum(chunk_counts(offsets, chunk_size))]).astype(np.int64)


def cumsum_block(chunk_size: int) -> int:
    """Tokens a block of `npu_chunk_local_cumsum`, whose table is another one than that of its siblings.

    2**17 / chunk_size, rounded up to a power of two: 2048 for 64, 1024 for 128 (flash-linear-attention-npu 17e24fd,
    chunk_local_cumsum_tiling.cpp:275).
    """
    return 1 << (-(-(1 << 17) // chunk_size) - 1).bit_length()
