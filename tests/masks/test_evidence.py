"""Evidence: what one square matrix shows, and which other readings are looked for. Pictures, True = ■."""

from __future__ import annotations

import numpy as np
import pytest

from collate_npu import AmbiguousMaskError, Pattern, Segments, dense
from collate_npu.masks.evidence import UnexplainedError, read_square


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
    assert ids_of(RIGHT_FILLED) == [[1, 1, 0, 0]]


def test_holes_stay_holes():
    assert ids_of(HOLE) == [[1, 0, 1, 1]]


def test_a_gap_is_two_sequences_or_a_window():
    with pytest.raises(AmbiguousMaskError, match="tokens 1 and 3 that do not meet"):
        ids_of(GAP)
    assert ids_of(GAP, pattern=Pattern.of("causal")) == [[1, 1, 0, 2, 2]]


def test_a_token_that_attends_only_itself_may_be_forced_padding():
    with pytest.raises(AmbiguousMaskError, match=r"tokens \[2\] that attend only themselves"):
        ids_of(LONE)
    assert ids_of(LONE, prove=False) == [[1, 1, 2]]
    assert ids_of(LONE_BESIDE_UNFORCED, pattern=Pattern.of("causal")) == [[1, 1, 2, 0]]


def test_a_truth_says_which_lone_tokens_are_padding():
    keep = np.array([[True, True, False]])
    assert ids_of(LONE, keep_BS=keep) == [[1, 1, 0]]
    with pytest.raises(UnexplainedError) as raised:
        ids_of(HOLE, keep_BS=np.ones((1, 4), bool))
    assert raised.value.rows == [(0, "3 real tokens where the 2D mask has 4")]


def test_columns_and_diagonal_must_agree():
    with pytest.raises(UnexplainedError) as raised:
        ids_of(LOST_DIAGONAL)
    assert raised.value.rows == [(0, "key 1 is attended by other tokens, but token 1 does not attend itself")]


def test_a_matrix_of_no_pattern_is_unexplained():
    with pytest.raises(UnexplainedError) as raised:
        ids_of(LONELY_ROW)
    assert raised.value.rows[0][0] == 0
    assert "rows that are not those of" in raised.value.rows[0][1]


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
    matrix = dense(segments, pattern=Pattern.prefix((2, 0, 4)))[:, 0].numpy()
    assert read_square(matrix) == segments


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
