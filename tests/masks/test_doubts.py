"""Doubts: each other reading that is looked for, from what a matrix shows alone; the pictures are in test_evidence."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collate_npu import AmbiguousMaskError, Pattern, Segments, dense
from collate_npu.masks.doubts import (
    refuse_chunks,
    refuse_gaps,
    refuse_inverted,
    refuse_unmasked_rows,
    refuse_visible_padding,
)
from collate_npu.masks.polarity import MaskValues
from collate_npu.masks.square import Square

CAUSAL = Pattern.of("causal")


def shown(segments, **facts):
    B, S = segments.shape
    plain = {
        "real": segments.keep.numpy(),
        "filler": np.zeros((B, S), bool),
        "reach": np.full(B, 1),
        "sees_future": np.zeros(B, bool),
        "sees_all": np.zeros(B, bool),
        "last_sees_all": np.zeros(B, bool),
        "live_padding": np.ones(B, bool),
    }
    return SimpleNamespace(**(plain | facts))


def test_gaps_wider_than_any_query_looks_back():
    segments = Segments([[1, 1, 0, 2, 2]])
    with pytest.raises(AmbiguousMaskError, match="tokens 1 and 3 that do not meet"):
        refuse_gaps(shown(segments), segments, None)
    refuse_gaps(shown(segments, reach=np.array([2])), segments, None)
    refuse_gaps(shown(segments, sees_future=np.array([True])), segments, None)
    refuse_gaps(shown(segments), segments, CAUSAL)


def test_rows_that_see_everything_where_empty_rows_are_unmasked():
    segments = Segments.from_lengths([3, 3])
    every = np.array([True, False])
    prefix = Pattern.prefix(1)
    refuse_unmasked_rows(shown(segments, sees_all=every), CAUSAL, declared=False, unmasked_rows=False)
    with pytest.raises(AmbiguousMaskError, match="row 0: got rows that all see everything"):
        refuse_unmasked_rows(shown(segments, sees_all=every), CAUSAL, declared=False, unmasked_rows=True)
    with pytest.raises(AmbiguousMaskError, match="row 0: got rows that all see everything"):
        refuse_unmasked_rows(shown(segments, sees_all=every), prefix, declared=False, unmasked_rows=False)
    refuse_unmasked_rows(shown(segments, sees_all=every), prefix, declared=True, unmasked_rows=False)
    with pytest.raises(AmbiguousMaskError, match="row 0: got a last row that sees everything"):
        refuse_unmasked_rows(shown(segments, last_sees_all=every), CAUSAL, declared=False, unmasked_rows=True)


def test_last_rows_that_see_everything():
    segments = Segments.from_lengths([2, 3])
    filler = np.array([[False, False, True], [False] * 3])
    with pytest.raises(AmbiguousMaskError, match="row 0: got last rows that see everything"):
        refuse_unmasked_rows(shown(segments, filler=filler), CAUSAL, declared=False, unmasked_rows=False)
    refuse_unmasked_rows(shown(segments, filler=filler), CAUSAL, declared=False, unmasked_rows=True)


def test_sequences_that_may_be_padding():
    segments = Segments([[1, 1, 2], [1, 1, 1]])
    with pytest.raises(AmbiguousMaskError, match="row 0: got sequences of 2, 1 tokens"):
        refuse_visible_padding(shown(segments), segments)
    unseen = Segments([[1, 1, 2], [1, 1, 0]])
    refuse_visible_padding(shown(unseen), unseen)


def test_sequences_that_end_on_multiples_of_a_chunk():
    segments = Segments([[1, 1, 2, 2, 0]])
    blocked = shown(segments, live_padding=np.zeros(1, bool))
    with pytest.raises(AmbiguousMaskError, match="one sequence a row under chunked attention of 2"):
        refuse_chunks(blocked, segments, CAUSAL)
    refuse_chunks(shown(segments), segments, CAUSAL)  # the tail belongs to the last, which is longer than a chunk
    refuse_chunks(blocked, segments, Pattern.sliding(1))


def test_padding_that_attends_padding_beside_single_tokens():
    keep = np.array([[False, False, False, True, True, True]])
    full = dense(Segments.from_keep(keep)) | torch.eye(6, dtype=torch.bool)
    square = Square(MaskValues(full, "keep"), "keep", 1)
    with pytest.raises(AmbiguousMaskError, match="3 real tokens that attend themselves alone"):
        refuse_inverted(square, Segments([[1, 2, 3, 0, 0, 0]]))
    refuse_inverted(square, Segments([[1, 1, 1, 0, 0, 0]]))
    refuse_inverted(square, Segments([[0, 0, 0, 1, 2, 0]]))
