"""What is drawn of a square is what the dense mask says, whole and folded, and nothing of its size is built."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import attentions, free, segments

from collate_npu import Segments, dense
from collate_npu.masks.patterns import CAUSAL
from collate_npu.tools.show.attention import Cell, attention_of, compared, row_grid

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
        assert drawn.grid(1).cells.tolist() == dense(truth, rows=queries)[b, 0].long().tolist()
        assert [drawn.place(q) for q in range(len(queries))] == queries.tolist()


@given(segments(), BLOCKS)
def test_a_cell_has_the_colour_of_a_sequence_where_it_holds_it_alone(truth, block):
    for b, ids in enumerate(truth.ids.tolist()):
        parts = [ids[s : s + block] for s in range(0, len(ids), block)]
        alone = [part[0] if len(set(part)) == 1 else None for part in parts]
        several = [len({i for i in part if i}) > 1 for part in parts]
        owner = attention_of(truth, b).grid(block).owner[0].tolist()
        assert all(one is None or one == held for one, held in zip(alone, owner))
        assert not any(held for many, held in zip(several, owner) if many)


@given(segments(), BLOCKS)
def test_rows_of_a_batch(truth, block):
    for ids in truth.array:
        grid = row_grid(ids, block)
        assert grid.cells.tolist() == [kinds(torch.from_numpy(ids > 0)[None], block)[0]]
        assert grid.share == pytest.approx(float((ids == 0).mean()))


def test_what_another_rank_holds_counts_for_nothing():
    grid = row_grid(np.array([1, 1, 0, 0], np.int32), 1, np.array([True, False, True, False]))
    assert grid.cells.tolist() == [[Cell.WHOLE, Cell.ELSEWHERE, Cell.BLOCKED, Cell.ELSEWHERE]]
    assert grid.share == 0.5


def test_every_place_that_is_wrong_is_counted_and_outputs_at_padding_are_not():
    truth, claimed = Segments.from_lengths([4], width=5), Segments.from_lengths([[2, 2]], width=5)
    grid = compared(attention_of(claimed, 0), truth, CAUSAL).grid(1)
    assert grid.wrong == 4
    assert (grid.cells[2:4, :2] == Cell.TOO_LITTLE).all()
    assert (grid.cells[4] < Cell.TOO_MUCH).all()


def test_a_long_row_is_folded_without_a_square_of_its_size():
    truth = Segments.from_lengths([4096, 3000], side="left")
    tracemalloc.start()
    grid = attention_of(truth, 1).grid(256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grid.cells.shape == (16, 16)
    assert peak < 4096 * 4096 / 2
