"""Patterns: their fast fills, how far they reach, and what one declares of itself."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import strategies
from hypothesis import given, strategies as st

from collate_npu import CollateError, Pattern
from collate_npu.masks.patterns import Bidirectional, Prefix


@given(st.data())
def test_the_fast_fill_of_every_pattern_is_its_definition(data):
    """`attends` is what a pattern is; a `fill` of its own only writes the same faster, wherever the block begins."""
    pattern = data.draw(strategies.patterns(2))
    Q, K, q0, n = (data.draw(st.integers(low, 9)) for low in (0, 0, -4, 0))
    filled, defined = np.zeros((Q, K), bool), np.zeros((Q, K), bool)
    pattern.fill(filled, q0, n % 2, True, False)
    Pattern.fill(pattern, defined, q0, n % 2, True, False)
    assert np.array_equal(filled, defined)


@pytest.mark.parametrize("width", [64, 65, 128, 129])
@pytest.mark.parametrize("pattern", [Pattern.of("causal"), Pattern.chunked(48)])
def test_a_wide_fill_is_the_definition_too(pattern, width):
    filled, defined = np.zeros((2, width, width), bool)
    pattern.fill(filled, 0, 0, True, False)
    Pattern.fill(pattern, defined, 0, 0, True, False)
    assert np.array_equal(filled, defined)


@given(st.data())
def test_a_pattern_reaches_further_where_it_is_not_plain_causal(data):
    pattern, longest = data.draw(strategies.patterns(1)), data.draw(st.integers(0, 9))
    block = np.zeros((longest, longest), bool)
    pattern.fill(block, 0, 0, True, False)
    more = not np.array_equal(block, np.tri(longest, dtype=bool))
    assert pattern.reaches(longest) == more or (pattern.reaches(longest) and isinstance(pattern, (Bidirectional, Prefix)))


def declaring(attends, **facts):
    """A pattern of one definition that declares these facts."""
    return dataclass(frozen=True)(type("Ours", (Pattern,), {"name": "ours", "attends": attends, **facts}))


CAUSALLY, EVERY_SECOND = (lambda self, q, k, n: k <= q), (lambda self, q, k, n: (k <= q) & ((q - k) % 2 == 0))
LAST_SEES_ALL = lambda self, q, k, n: (k <= q) & (q // 24 == k // 24)  # noqa: E731 - of the tokens that are looked at


@pytest.mark.parametrize(
    ("attends", "facts", "rule"),
    [
        (lambda self, q, k, n: k < q, {}, "got a token that does not attend itself"),
        (lambda self, q, k, n: k <= q + 1, {}, "got causal=True. A token attends a later one"),
        (EVERY_SECOND, {}, "got cuts=False. A token does not attend the one before it"),
        (EVERY_SECOND, {"cuts": True, "settles": True}, "got settles=True. Queries behind the last token"),
        (LAST_SEES_ALL, {"cuts": True, "settles": True}, "got settles=True. Queries behind the last token"),
    ],
)
def test_what_a_pattern_declares_is_compared_with_its_definition(attends, facts, rule):
    with pytest.raises(CollateError, match=re.escape(rule)):
        declaring(attends, **facts)()


def test_what_is_declared_rightly_passes():
    assert declaring(CAUSALLY)().causal
    assert declaring(CAUSALLY, settles=True)().settles
    assert declaring(EVERY_SECOND, cuts=True)().cuts
    with pytest.raises(NotImplementedError):
        declaring(Pattern.attends)()
