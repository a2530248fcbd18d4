"""Signs: round blocks, honest shares, and what an encoding can print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collate_npu.tools.show.signs import ASCII, block_for, percent, printable, share_of, string_of


@pytest.mark.parametrize(("width", "cells", "block"), [(8, 64, 1), (65, 64, 2), (4096, 64, 64), (4096, 11, 384), (0, 4, 1)])
def test_blocks_are_round_numbers(width, cells, block):
    assert block_for(width, cells) == block


@given(st.integers(1, 10000), st.integers(1, 200))
def test_blocks_fit(width, cells):
    assert -(-width // block_for(width, cells)) <= cells


@pytest.mark.parametrize(("share", "told"), [(0, "0%"), (1e-9, "1%"), (0.5, "50%"), (0.999, "99%"), (1, "100%")])
def test_none_and_all_are_told_from_almost(share, told):
    assert percent(share) == told


@given(st.floats(0, 1))
def test_a_bar_says_what_the_number_says(share):
    text = string_of(share_of(share, "padding"))
    assert text.count("█") + text.count("░") == 6
    assert abs(text.count("█") / 6 - share) <= 1 / 12 + 1e-9


def test_what_an_encoding_can_print():
    assert printable("utf-8")
    assert not printable("ascii")
    assert not printable("gbk")  # it has one of the signs, and not the other
    assert all(chr(sign).translate(ASCII).isascii() for sign in ASCII)
