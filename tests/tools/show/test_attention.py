"""What is drawn of a square is what the dense mask says, whole and folded, and nothing of its size is built."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from strategies import attentions, free, segments

from collate_npu import Pattern, Segments
from collate_npu.masks import dense
from collate_npu.masks.forms import open_empty_rows
from collate_npu.tools.show.attention import COLOURS, SIGNS, Cell, attention_of, block_for, row_grid, sign_of

BLOCKS = st.integers(1, 9)


def kinds(square, block):
    """Full, partial and empty blocks, from the dense mask alone."""
    Q, K = square.shape
    parts = [[square[q : q + block, k : k + block] for k in range(0, K, block)] for q in range(0, Q, block)]
    return [[Cell.WHOLE if x.all() else Cell.PART if x.any() else Cell.BLOCKED for x in row] for row in parts]


@given(attentions(), BLOCKS)
def test_blocks_are_those_of_the_dense_mask(attention, block):
    truth, pattern = attention
    full = dense(truth, pattern=pattern)
    for b in range(truth.shape[0]):
        grid = attention_of(truth, b, pattern=pattern).grid(block)
        assert grid.cells.tolist() == kinds(full[b, 0], block)
        assert grid.share == pytest.approx(1 - full[b, 0].float().mean().item())
        assert grid.wrong == 0


@given(free(), st.data())
def test_some_queries_alone(truth, data):
    queries = torch.tensor(data.draw(st.lists(st.integers(0, truth.shape[1] - 1), min_size=1, max_size=6)))
    for b in range(truth.shape[0]):
        drawn = attention_of(truth, b, queries=queries)
        assert torch.equal(torch.from_numpy(drawn.rows(0, len(queries))), dense(truth, rows=queries)[b, 0])
        assert drawn.queries.tolist() == queries.tolist()


@given(free())
def test_queries_that_see_no_key_may_see_themselves(truth):
    opened = ~open_empty_rows(dense(truth, polarity="masked"))
    for b in range(truth.shape[0]):
        square = attention_of(truth, b, opened=True)
        assert square.grid(1).cells.tolist() == opened[b, 0].long().tolist()


@given(free(), BLOCKS)
def test_places_that_ought_to_be_otherwise_are_counted(truth, block):
    ought = attention_of(truth, 0, pattern=Pattern.sliding(1))
    drawn = replace(attention_of(truth, 0), ought=ought.rows).grid(block)
    differ = (dense(truth) & ~dense(truth, pattern=Pattern.sliding(1)))[0, 0]
    assert drawn.wrong == differ.sum()
    assert ((drawn.cells == Cell.TOO_MUCH) == (np.array(kinds(differ, block)) != Cell.BLOCKED)).all()


@given(segments(), BLOCKS)
def test_rows_and_owners(truth, block):
    """A cell has the colour of a sequence where it holds that one alone."""
    for b, ids in enumerate(truth.array):
        grid = row_grid(ids, block)
        assert grid.cells.tolist() == [kinds(torch.from_numpy(ids > 0)[None], block)[0]]
        assert grid.share == pytest.approx(float((ids == 0).mean()))
        held = [set(ids[s : s + block].tolist()) - {0} for s in range(0, len(ids), block)]
        owners = [next(iter(one)) if len(one) == 1 else 0 for one in held]
        assert grid.owner.tolist() == attention_of(truth, b).grid(block).owner.tolist() == owners


def test_a_number_or_a_sign_says_what_a_colour_says():
    truth = Segments.from_lengths([[1, 1]], width=3)
    assert row_grid(truth.array[0], 1).signs(0, numbered=True) == [("1", COLOURS[0]), ("2", COLOURS[1]), ("⬚", "dim")]
    assert row_grid(truth.array[0], 3).signs(0, numbered=True) == [("◧", "")]
    assert sign_of(Cell.TOO_MUCH, 1) == ("+", "bold red")
    assert [sign_of(Cell.WHOLE, n, True)[0] for n in (9, 10, 19)] == ["9", "1", "1"]
    assert set(SIGNS) == set(Cell)
    assert len({sign for sign, *_ in SIGNS.values()}) == len(Cell)


@pytest.mark.parametrize(
    ("width", "cells", "block"),
    [(8, 64, 1), (65, 64, 2), (4096, 64, 64), (4096, 11, 384), (0, 4, 1), (65, 1, 128), (129, 1, 192)],
)
def test_blocks_are_round_numbers(width, cells, block):
    assert block_for(width, cells) == block


@given(st.integers(1, 10000), st.integers(1, 200))
def test_blocks_fit(width, cells):
    assert -(-width // block_for(width, cells)) <= cells
