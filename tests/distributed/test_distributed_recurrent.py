"""Recurrent layers whose row is shared out: each stack's way is right on the layout we name for it, and no other passes.

Every case runs between real processes, with our split, our offsets and our gather; `recurrent_work` is the net. Distances
are of logits and of the gradients of all weights, embedding included, in parts of the largest.
"""

from __future__ import annotations

import pytest
import recurrent_work as work

FLAT = [5, 1, 19, 3, 9, 2]
"""Sequences over several ranks, shorter than the convolution, at a rank's border, and a tail of padding."""
EVEN = [16, 8, 24]
"""Any layout can share these out."""
ROWS = [9, 16, 3]


@pytest.mark.parametrize(
    ("scheme", "layout", "lengths", "padding_free"),
    [
        ("state_passing", "contiguous", FLAT, True),
        ("state_passing", "ulysses", [37], True),
        ("head_exchange", "ulysses", FLAT, True),
        ("head_exchange", "contiguous", ROWS, False),
        ("head_exchange_zigzag", "document_zigzag", FLAT, True),
        ("head_exchange_zigzag", "zigzag", ROWS, False),
        ("head_exchange_zigzag", "zigzag", [48], True),
        ("row_zigzag", "zigzag", ROWS, False),
    ],
)
def test_on_its_layout_a_scheme_is_one_process_and_each_sequence_alone(pool, scheme, layout, lengths, padding_free):
    for found in pool(work.measure, scheme, layout, lengths, padding_free):
        assert found["refused"] == ""
        assert found["one"] < 1e-12
        assert found["alone"] < 1e-12


@pytest.mark.parametrize(
    ("scheme", "layout", "lengths", "wrong", "said"),
    [
        ("state_passing", "zigzag", [48], "", "layout: got 'zigzag'"),
        ("state_passing", "document_zigzag", EVEN, "", "layout: got 'document_zigzag'"),
        ("state_passing", "document_contiguous", EVEN, "", "layout: got 'document_contiguous'"),
        ("state_passing", "contiguous", FLAT, "own", "offsets"),
        ("state_passing", "contiguous", FLAT, "one sequence", "none stands inside it"),
        ("head_exchange", "document_zigzag", EVEN, "", "layout: got 'document_zigzag'"),
        ("head_exchange", "ulysses", FLAT, "own", "Offsets are of the whole row"),
        ("head_exchange", "ulysses", FLAT, "one sequence", "A sequence begins at an offset"),
        ("head_exchange_zigzag", "contiguous", EVEN, "", "layout: got 'contiguous'"),
        ("head_exchange_zigzag", "contiguous", ROWS, "", "layout: got 'contiguous'"),
        ("head_exchange_zigzag", "ulysses", ROWS, "", "layout: got 'ulysses'"),
        ("head_exchange_zigzag", "document_zigzag", FLAT, "one sequence", "A sequence begins at an offset"),
        ("row_zigzag", "document_zigzag", EVEN, "", "got a flat row"),
        ("row_zigzag", "contiguous", ROWS, "", "layout: got 'contiguous'"),
    ],
)
def test_what_we_refuse_is_computed_wrongly_in_silence(pool, scheme, layout, lengths, wrong, said):
    padding_free = lengths is not ROWS
    found = pool(work.measure, scheme, layout, lengths, padding_free, wrong, lengths is EVEN)
    assert all(said in each["refused"] for each in found), found
    assert all(each["one"] > 0.05 and each["alone"] > 0.05 for each in found), found
