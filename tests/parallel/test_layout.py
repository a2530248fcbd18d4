"""Laws of the layouts: the ranks' rows are a partition of the row, and each layout is the one its name says."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import example, given, strategies as st

from collate_npu import CollateError
from collate_npu.parallel import BLOCKS, ContextParallel, query_rows, token_rows, token_runs
from collate_npu.parallel.layout import Layout

LAYOUTS = get_args(Layout)


@st.composite
def places(draw, layouts=LAYOUTS):
    """A place in a group, a width it can share out, and the offsets of documents that it can share out, too."""
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    layout = draw(st.sampled_from(layouts))
    ulysses = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])) if "ring" in layout else 1
    cp = ContextParallel(
        size, draw(st.integers(0, size - 1)), layout=layout, ulysses=ulysses, tensor_parallel=draw(st.integers(1, 3))
    )
    lengths = [cp.document_multiple * n for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
    lengths[-1] += -sum(lengths) % cp.multiple
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return cp, offsets[-1], offsets


def by_hand(cp: ContextParallel, S: int, offsets: list[int]) -> list[int]:
    """The same rows by definition: documents, chunks of the rank, then the Ulysses share."""
    inner = cp.size if cp.layout == "ulysses" else cp.ulysses
    ring, at = cp.size // inner, cp.rank // inner
    bounds = list(pairwise(offsets)) if cp.documents else [(0, S)]
    held: list[int] = []
    for start, stop in bounds:
        row = list(range(start, stop))
        if "contiguous" in cp.layout or cp.layout == "ulysses" or ring == 1:
            n = len(row) // ring
            held += row[at * n : (at + 1) * n]
        else:
            n = len(row) // (2 * ring)
            chunks = [row[i * n : (i + 1) * n] for i in range(2 * ring)]
            held += chunks[at] + chunks[2 * ring - 1 - at]
    share = len(held) // inner
    return held[(cp.rank % inner) * share : (cp.rank % inner + 1) * share]


@given(places())
@example((ContextParallel(4, 0, layout="ulysses_ring", ulysses=2), 8, [0, 8]))
def test_rows_are_those_of_the_definition_in_few_runs(case):
    cp, S, offsets = case
    runs = token_runs(S, cp, offsets)
    assert token_rows(S, cp, offsets).tolist() == by_hand(cp, S, offsets)
    assert [n for start, stop in runs for n in range(start, stop)] == by_hand(cp, S, offsets)
    assert all(a[1] != b[0] for a, b in pairwise(runs))
    assert all(start < stop for start, stop in runs)
    assert cp.documents or len(runs) <= 2


@given(places())
def test_query_rows_hold_the_tokens_of_every_ulysses_rank_of_the_ring(case):
    cp, S, offsets = case
    inner = cp.ulysses_size
    ring = [cp.with_rank(cp.rank // inner * inner + n) for n in range(inner)]
    together = torch.cat([token_rows(S, place, offsets) for place in ring])
    assert query_rows(S, cp, offsets).tolist() == together.tolist()


# --- multiples ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({"size": 1}, 1),
        ({"size": 4}, 8),
        ({"size": 4, "tensor_parallel": 2}, 16),
        ({"size": 2, "tensor_parallel": 4}, 16),  # lcm(4, 2 * 2) = 4 would leave a rank 2 tokens for 4 tp ranks
        ({"size": 4, "layout": "ulysses", "tensor_parallel": 2}, 8),
        ({"size": 4, "layout": "ulysses_ring", "ulysses": 2}, 4),
        ({"size": 6, "layout": "ulysses_ring", "ulysses": 3}, 12),
        ({"size": 2, "block": BLOCKS["fp8"]}, 32),
        ({"size": 2, "tensor_parallel": 2, "block": BLOCKS["blockwise"]}, 512),
        ({"size": 2, "layout": "contiguous", "block": BLOCKS["blockwise"]}, 256),
    ],
)
def test_multiples(settings, multiple):
    assert ContextParallel(rank=0, **settings).multiple == multiple


@given(places(), st.sampled_from([1, 16, 32, 128]))
def test_the_multiple_leaves_every_tensor_parallel_rank_whole_blocks(case, block):
    cp = replace(case[0], block=block)
    S = cp.multiple
    assert S % (cp.size * cp.tensor_parallel * block) == cp.min_multiple % (cp.size * block) == 0
    assert len(token_rows(S, cp, [0, S])) * cp.size == S


@given(places(), st.integers(1, 300))
def test_widths_that_do_not_divide_are_refused_with_the_width_to_pad_to(case, extra):
    cp, S, _ = case
    assert cp.multiple % cp.min_multiple == 0
    if (S + extra) % cp.min_multiple:
        with pytest.raises(CollateError, match=f"multiple of {cp.min_multiple} ") as error:
            token_rows(S + extra, cp, [0, S + extra])
        to = int(str(error.value).split("Pad to ")[1].split(":")[0])
        assert to % cp.multiple == 0
        assert S + extra < to < S + extra + cp.multiple


def test_documents_that_do_not_divide_are_all_named():
    cp = ContextParallel(2, 0, layout="document_zigzag")
    with pytest.raises(CollateError, match="2 bad rows") as error:
        token_rows(16, cp, [0, 3, 7, 16])
    assert "row 0: got 3 tokens" in str(error.value)
    assert "row 2: got 9 tokens" in str(error.value)
    assert "multiple of 4" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "product"),
    [
        ({}, "(2 * 2 ranks)"),
        ({"tensor_parallel": 4}, "multiple of 8 (2 * 2 ranks, 2 * 4 tp)"),
        ({"layout": "contiguous", "tensor_parallel": 2, "block": 2}, "(2 ranks, 2 * 2 tp, 2 * 2 block)"),
    ],
)
def test_the_multiple_is_told_with_what_makes_it(settings, product):
    with pytest.raises(CollateError, match=re.escape(product)):
        token_rows(7, ContextParallel(2, 0, **settings))


# --- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 2, "rank": 2}, "count from 0 to 1"),
        ({"size": 2, "rank": -1}, "count from 0 to 1"),
        ({"size": 0, "rank": 0}, "a whole number, at least 1"),
        ({"size": 2, "rank": 0, "tensor_parallel": 0}, "a whole number, at least 1"),
        ({"size": 2, "rank": 0, "block": 0}, "a whole number, at least 1"),
        ({"size": 2, "rank": 0, "layout": "ring"}, "Layouts are 'zigzag'"),
        ({"size": 2, "rank": 0, "mask_2d": "split"}, "'local'"),
        ({"size": 4, "rank": 0, "layout": "ulysses_ring", "ulysses": 3}, "divides the 4 ranks"),
        ({"size": 4, "rank": 0, "layout": "zigzag", "ulysses": 2}, "'\\*ulysses_ring'"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(CollateError, match=words):
        ContextParallel(**settings)
