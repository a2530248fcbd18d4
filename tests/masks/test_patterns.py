"""Patterns: names, sizes, and one prefix for each sequence."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from collate_npu import CollateError, Pattern


def test_names_that_need_no_size():
    assert Pattern.of("causal").name == "causal"
    assert Pattern.of("bidirectional").name == "bidirectional"
    sliding = Pattern.sliding(3)
    assert Pattern.of(sliding) is sliding


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (Pattern.of("causal"), "causal"),
        (Pattern.sliding(4), "sliding(4)"),
        (Pattern.chunked(2), "chunked(2)"),
        (Pattern.prefix(3), "prefix(3)"),
        (Pattern.prefix((1, 2)), "prefix(1, 2)"),
    ],
)
def test_a_pattern_prints_what_it_is(pattern, text):
    assert str(pattern) == text
    assert pickle.loads(pickle.dumps(pattern)) == pattern


@given(st.integers(0, 9), st.integers(0, 5))
def test_one_prefix_serves_all_sequences(length, num_sequences):
    assert Pattern.prefix(length).of_each(num_sequences) == (length,) * num_sequences


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5))
def test_several_prefixes_are_one_for_each_sequence(lengths):
    assert Pattern.prefix(lengths).of_each(len(lengths)) == tuple(lengths)
    with pytest.raises(CollateError, match=f"{len(lengths)} lengths"):
        Pattern.prefix(lengths).of_each(len(lengths) + 1)


@given(st.data())
def test_the_fast_fill_of_every_pattern_is_its_definition(data):
    """`attends` is what a pattern is; a `fill` of its own only writes the same faster, wherever the block begins."""
    pattern = data.draw(strategies.patterns(2))
    Q, K, q0, n = (data.draw(st.integers(low, 9)) for low in (0, 0, -4, 0))
    filled, defined = np.zeros((Q, K), bool), np.zeros((Q, K), bool)
    pattern.fill(filled, q0, n % 2, True, False)
    Pattern.fill(pattern, defined, q0, n % 2, True, False)
    assert np.array_equal(filled, defined)


@given(st.data())
def test_a_pattern_that_reaches_no_further_is_plain_causal(data):
    pattern, longest = data.draw(strategies.patterns(1)), data.draw(st.integers(0, 9))
    block = np.zeros((longest, longest), bool)
    pattern.fill(block, 0, 0, True, False)
    assert pattern.reaches(longest) or np.array_equal(block, np.tri(longest, dtype=bool))


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Pattern.of("sliding"), "Pattern.sliding(window)"),
        (lambda: Pattern.of("Causal"), "'Causal'"),
        (lambda: Pattern.sliding(0), "window: got 0"),
        (lambda: Pattern.chunked(-1), "chunk size: got -1"),
        (lambda: Pattern.prefix(-1), "prefix: got [-1]"),
        (lambda: Pattern.prefix([]), "prefix: got []"),
    ],
)
def test_patterns_without_a_meaning_are_refused(build, told):
    with pytest.raises(CollateError) as raised:
        build()
    assert told in str(raised.value)
