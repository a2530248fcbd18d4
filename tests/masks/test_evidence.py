"""Evidence: what one square matrix shows, and which other readings are looked for. Pictures, True = ■."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collate_npu import AmbiguousMaskError, Pattern, Segments, dense
from collate_npu.masks import evidence
from collate_npu.masks.evidence import Known
from collate_npu.masks.polarity import MaskValues
from collate_npu.masks.proof import UnexplainedError
from collate_npu.masks.square import Square


def square(attends_BQK):
    return Square(MaskValues(torch.from_numpy(np.ascontiguousarray(attends_BQK)), "keep"), "keep", len(attends_BQK))


def read_square(attends_BQK, **known):
    return evidence.read_square(square(attends_BQK), Known(**known)).segments


def drawn(text):
    return np.array([[char == "■" for char in line.split()] for line in text.strip().splitlines()])[None]


def ids_of(text, **settings):
    return read_square(drawn(text), **settings).ids.tolist()


LEFT_FILLED = """
■ ■ ■ ■
■ ■ ■ ■
⬚ ⬚ ■ ⬚
⬚ ⬚ ■ ■"""
RIGHT_FILLED = """
■ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚
■ ■ ■ ■
■ ■ ■ ■"""
HOLE = """
■ ⬚ ⬚ ⬚
■ ⬚ ⬚ ⬚
■ ⬚ ■ ⬚
■ ⬚ ■ ■"""
GAP = """
■ ⬚ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ■ ⬚
⬚ ⬚ ⬚ ■ ■"""
LONE = """
■ ⬚ ⬚
■ ■ ⬚
⬚ ⬚ ■"""
LONE_BESIDE_UNFORCED = """
■ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚
⬚ ⬚ ■ ⬚
⬚ ⬚ ⬚ ⬚"""
LOST_DIAGONAL = """
■ ⬚ ⬚
■ ⬚ ⬚
■ ■ ■"""
LONELY_ROW = """
■ ⬚ ⬚
■ ■ ⬚
■ ⬚ ■"""


def test_rows_that_see_everything_are_no_evidence():
    assert ids_of(LEFT_FILLED) == [[0, 0, 1, 1]]
    assert ids_of(RIGHT_FILLED, unmasked_rows=True) == [[1, 1, 0, 0]]
    with pytest.raises(AmbiguousMaskError, match="last rows that see everything"):
        ids_of(RIGHT_FILLED)  # or an image block: real tokens that attend to both sides


def test_holes_stay_holes():
    assert ids_of(HOLE) == [[1, 0, 1, 1]]


def test_a_gap_is_two_sequences_or_a_window():
    with pytest.raises(AmbiguousMaskError, match="tokens 1 and 3 that do not meet"):
        ids_of(GAP)
    assert ids_of(GAP, pattern=Pattern.of("causal")) == [[1, 1, 0, 2, 2]]


def test_a_token_that_attends_only_itself_may_be_forced_padding():
    with pytest.raises(AmbiguousMaskError, match="sequences of 2, 1 tokens"):
        ids_of(LONE)
    assert ids_of(LONE, prove=False) == [[1, 1, 2]]
    assert ids_of(LONE_BESIDE_UNFORCED, pattern=Pattern.of("causal")) == [[1, 1, 2, 0]]


def test_a_truth_says_which_lone_tokens_are_padding():
    keep = np.array([[True, True, False]])
    assert ids_of(LONE, keep=keep) == [[1, 1, 0]]
    with pytest.raises(UnexplainedError) as raised:
        ids_of(HOLE, keep=np.ones((1, 4), bool))
    assert raised.value.rows == [(0, "3 real tokens where the 2D mask has 4")]


def test_columns_and_diagonal_must_agree():
    with pytest.raises(UnexplainedError) as raised:
        ids_of(LOST_DIAGONAL)
    assert raised.value.rows == [(0, "key 1 is attended by other tokens, but token 1 is padding or does not attend itself")]


def test_a_matrix_of_no_pattern_is_unexplained():
    with pytest.raises(UnexplainedError) as raised:
        ids_of(LONELY_ROW)
    assert raised.value.rows[0][0] == 0
    assert raised.value.rows[0][1] == "rows that no pattern gives"


def test_all_rows_without_explanation_are_named():
    batch = np.concatenate([drawn(LOST_DIAGONAL), np.tri(3, dtype=bool)[None], drawn(LOST_DIAGONAL)])
    with pytest.raises(UnexplainedError) as raised:
        read_square(batch)
    assert [row for row, _ in raised.value.rows] == [0, 2]


def test_one_pattern_explains_the_whole_batch():
    """Rows of different windows: each is a pattern, together they are none that a model has."""
    rows = [dense(Segments.from_lengths([4]), pattern=Pattern.sliding(w))[0].numpy() for w in (2, 4)]
    with pytest.raises(UnexplainedError) as raised:
        read_square(np.concatenate(rows))
    assert [row for row, _ in raised.value.rows] == [0]


def test_prefixes_are_read_off_each_sequence():
    segments = Segments.from_lengths([[3, 4], [5]])
    prefixes = Pattern.prefix((2, 0, 4))
    matrix = dense(segments, pattern=prefixes)[:, 0].numpy()
    assert read_square(matrix) == segments
    reading = evidence.read_square(square(matrix), Known(segments=segments))
    assert (reading.segments, reading.pattern) == (segments, prefixes)


def test_a_single_full_last_row_is_an_ordinary_causal_row():
    assert read_square(np.tri(3, dtype=bool)[None]) == Segments.from_lengths([3])


def test_a_producer_of_unmasked_rows_makes_a_full_last_row_doubtful():
    with pytest.raises(AmbiguousMaskError, match="a last row that sees everything"):
        read_square(np.tri(3, dtype=bool)[None], unmasked_rows=True)
    left = np.concatenate([drawn(LEFT_FILLED), np.tri(4, dtype=bool)[None]])
    assert read_square(left).ids.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    right = np.concatenate([drawn(RIGHT_FILLED), np.tri(4, dtype=bool)[None]])
    with pytest.raises(AmbiguousMaskError, match="row 1: got a last row that sees everything"):
        read_square(right)


def test_every_doubtful_row_is_named():
    batch = np.concatenate([drawn(LONE), np.tri(3, dtype=bool)[None], drawn(LONE)])
    with pytest.raises(AmbiguousMaskError) as raised:
        read_square(batch)
    assert "row 0: " in str(raised.value)
    assert "row 2: " in str(raised.value)
    assert "row 1: " not in str(raised.value)


# --- what is known beside the matrix


def test_known_segments_are_compared_at_real_queries_alone():
    """Padding that attends padding, as a document of its own, is no contradiction; a real query that does is one."""
    segments = Segments([[1, 1, 2, 2, 0, 0]])
    document = dense(Segments([[1, 1, 2, 2, 3, 3]]))[:, 0].numpy()
    assert evidence.read_square(square(document), Known(segments=segments)).pattern == Pattern.of("causal")
    assert read_square(document, keep=segments.keep.numpy(), pattern=Pattern.of("causal")) == segments
    with pytest.raises(UnexplainedError):
        evidence.read_square(square(dense(Segments([[1, 1, 1, 1, 0, 0]]))[:, 0].numpy()), Known(segments=segments))


def test_a_declared_pattern_that_does_not_fit_names_the_one_that_would():
    segments = Segments.from_lengths([5])
    matrix = dense(segments, pattern=Pattern.sliding(2))[:, 0].numpy()
    for known in (Known(pattern=Pattern.of("causal")), Known(segments=segments, pattern=Pattern.of("causal"))):
        with pytest.raises(UnexplainedError) as raised:
            evidence.read_square(square(matrix), known)
        assert raised.value.instead == Pattern.sliding(2)


def test_a_hole_wider_than_a_declared_window_is_one_sequence_or_two():
    matrix = dense(Segments([[1, 1, 0, 0, 1, 1]]), pattern=Pattern.sliding(2))[:, 0].numpy()
    with pytest.raises(AmbiguousMaskError, match="tokens 1 and 4 that do not meet"):
        evidence.read_square(square(matrix), Known(pattern=Pattern.sliding(2)))
    narrow = dense(Segments([[1, 1, 0, 1, 1]]), pattern=Pattern.sliding(3))[:, 0].numpy()
    assert read_square(narrow, pattern=Pattern.sliding(3)) == Segments([[1, 1, 0, 1, 1]])


def test_one_row_that_sees_everything_among_causal_rows_is_not_read_as_real():
    batch = np.concatenate([dense(Segments([[1, 1, 1, 0]]))[0].numpy(), np.ones((1, 4, 4), bool)])
    with pytest.raises(AmbiguousMaskError, match="row 1: got rows that all see everything"):
        read_square(batch)


def test_a_2d_mask_turned_around_is_not_a_row_of_single_tokens():
    """Padding with a forced diagonal: turned around, it looks like sequences of one token beside padding."""
    keep = np.array([[False, False, False, True, True, True]])
    matrix = dense(Segments.from_keep(keep))[:, 0].numpy() | np.eye(6, dtype=bool)
    assert read_square(matrix, keep=keep) == Segments.from_keep(keep)
    with pytest.raises(AmbiguousMaskError, match="turned around"):
        read_square(matrix, keep=~keep)
