"""Laws of what is drawn: a square is the dense mask, no square is built whole, and no text moves the cursor. What is wrong
in a mask, each polarity, consumer and rank: test_drawn."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("rich")
from hypothesis import given, strategies as st
from strategies import attentions, free

from collate_npu import Pattern, Segments
from collate_npu.masks import dense
from collate_npu.tools.sheet import SIGNS, Cell, attention_of, escaped, one_owner, sheet_of
from collate_npu.tools.show import lines

BLOCKS = st.integers(1, 9)


def batch_of(truth):
    return {"input_ids": truth.ids, "attention_mask_2d": truth.keep, "segment_ids": truth.ids}


def kinds(square, block):
    """Full, partial and empty blocks, from the dense mask alone."""
    Q, K = square.shape
    parts = [[square[q : q + block, k : k + block] for k in range(0, K, block)] for q in range(0, Q, block)]
    return [[Cell.WHOLE if x.all() else Cell.PART if x.any() else Cell.BLOCKED for x in row] for row in parts]


@given(attentions(), BLOCKS)
def test_blocks_are_those_of_the_dense_mask(attention, block):
    truth, pattern = attention
    full, ought = dense(truth, pattern=pattern), dense(truth, pattern=Pattern.sliding(1))
    for b, ids in enumerate(truth.array):
        square, differ = attention_of(truth, b, pattern=pattern), full[b, 0] & ~ought[b, 0]
        cells, wrong = replace(square, ought=lambda q, k, b=b: ought[b, 0, q:k].numpy()).fold(block)
        plain, none = square.fold(block)
        assert plain.tolist() == kinds(full[b, 0], block)
        assert ((cells == Cell.TOO_MUCH) == (np.array(kinds(differ, block)) != Cell.BLOCKED)).all()
        assert (none, wrong) == (0, differ.sum() + (~full[b, 0] & ought[b, 0]).sum())
        held = [set(ids[s : s + block].tolist()) - {0} for s in range(0, len(ids), block)]
        assert one_owner(ids, block).tolist() == [next(iter(one)) if len(one) == 1 else 0 for one in held]


@given(free(rows=4, width=30), st.integers(20, 200))
def test_no_line_is_wider_than_the_terminal(truth, width):
    assert max(len("".join(text for text, _ in line).rstrip()) for line in lines(sheet_of(truth), width)) <= width


def test_eight_rows_of_4096_build_no_square():
    sheet = sheet_of(Segments.from_lengths([4096, 3000, 100, 2000, 4000, 4096, 10, 7], side="left"))
    tracemalloc.start()
    assert len(lines(sheet, 120)) <= 75
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096 * 4096 / 2


@given(st.text())
def test_a_token_moves_no_cursor(text):
    assert all(letter.isprintable() or letter == "\u200d" for letter in escaped(text))
    assert (len({sign for sign, *_ in SIGNS.values()}), set(SIGNS)) == (len(Cell), set(Cell))


def test_spaces_and_lines_are_seen():
    assert [escaped(text) for text in (" the", "a b ", "\n", "\t", "  ")] == ["·the", "a b·", "\\n", "\\t", "··"]
