"""Patterns: names, sizes, and one prefix for each sequence."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collate_npu import CollateError, Pattern


def test_names_that_need_no_size():
    assert Pattern.of("causal").kind == "causal"
    assert Pattern.of("bidirectional").kind == "bidirectional"
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
    assert Pattern.prefix(length).prefixes(num_sequences) == (length,) * num_sequences


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5))
def test_several_prefixes_are_one_for_each_sequence(lengths):
    assert Pattern.prefix(lengths).prefixes(len(lengths)) == tuple(lengths)
    with pytest.raises(CollateError, match=f"{len(lengths)} lengths"):
        Pattern.prefix(lengths).prefixes(len(lengths) + 1)


def test_other_patterns_have_no_prefix():
    assert Pattern.sliding(4).prefixes(3) == (0, 0, 0)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Pattern.of("sliding"), "Pattern.sliding(window)"),
        (lambda: Pattern.of("Causal"), "'Causal'"),
        (lambda: Pattern.sliding(0), "window: got 0"),
        (lambda: Pattern.chunked(-1), "chunk size: got -1"),
        (lambda: Pattern.prefix(-1), "prefix: got (-1,)"),
        (lambda: Pattern.prefix([]), "prefix: got ()"),
    ],
)
def test_patterns_without_a_meaning_are_refused(build, told):
    with pytest.raises(CollateError) as raised:
        build()
    assert told in str(raised.value)
