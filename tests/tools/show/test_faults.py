"""A mask as it came: read by its polarity, and where it is refused the very places that are wrong."""

import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from strategies import segments, sided

from collate_npu import CollateError, Pattern, Segments
from collate_npu.masks import dense
from collate_npu.masks.find import segments_from_batch
from collate_npu.tools.show.attention import Cell
from collate_npu.tools.show.faults import keys_of_mask, squares_of_mask

POLARITIES = st.sampled_from(["keep", "masked", "bias"])


def marked(attentions):
    return [np.argwhere(attention.grid(1).cells >= Cell.TOO_MUCH).tolist() for attention in attentions]


@given(segments(), POLARITIES)
def test_every_polarity_is_drawn_as_the_truth(truth, polarity):
    assume(truth.num_tokens)
    drawn, _ = squares_of_mask(dense(truth, polarity=polarity), truth.shape[0], truth)
    assert [attention.grid(1).cells.tolist() for attention in drawn] == dense(truth)[:, 0].long().tolist()


@given(sided(rows=3, shortest=4, longest=9), st.sampled_from(["keep", "masked"]), st.data())
def test_one_place_turned_around_is_the_one_place_marked(truth, polarity, data):
    """Beside a 2D mask, which says what is real."""
    b, start, end = data.draw(st.sampled_from(truth.spans))
    q, k = data.draw(st.integers(start, end - 1)), data.draw(st.integers(0, truth.shape[1] - 1))
    full = dense(truth, polarity=polarity)
    full[b, 0, q, k] = ~full[b, 0, q, k]
    batch = {"input_ids": truth.ids, "attention_mask_2d": truth.keep, "attention_mask": full}
    try:
        segments_from_batch(batch)
        assume(False)  # of no consequence, in a row of few tokens
    except CollateError as error:
        assume(not re.search(r"(sliding|prefix)\(|bidirectional", str(error)))  # it is the mask of another pattern
    drawn, _ = squares_of_mask(full, truth.shape[0], truth)
    assert drawn[0].b == b  # the row that is wrong stands first
    assert marked(drawn) == [[[q, k]], *[[]] * (truth.shape[0] - 1)]
    expected = Cell.TOO_LITTLE if dense(truth)[b, 0, q, k] else Cell.TOO_MUCH
    assert drawn[0].grid(1).cells[q, k] == expected


@pytest.mark.parametrize("polarity", ["keep", "masked", "bias"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [[5, 8], [8, 8]])
def test_a_mask_alone_is_held_against_its_own_tokens(polarity, side, lengths):
    truth = Segments.from_lengths(lengths, side=side)
    full = dense(truth, polarity=polarity)
    b, start, _ = truth.spans[0]
    full[b, 0, start + 3, start + 1] = full[b, 0, start, -1] if side == "right" else full[b, 0, 0, -1]
    drawn, read = squares_of_mask(full, 2, None)
    assert read == polarity
    assert marked(drawn) == [[[start + 3, start + 1]], []]


def test_what_is_marked_and_what_is_not():
    """The keys in which two masks differ, where outputs are read; not another pattern by itself."""
    full = dense(Segments.from_lengths([2, 3]))
    assert marked(squares_of_mask(full, 2, Segments.from_lengths([3, 3]))[0]) == [[[2, 2]], []]
    assert marked(squares_of_mask(full, 2, Segments.from_lengths([1, 3]))[0]) == [[], []]
    sliding = dense(Segments.from_lengths([6, 9], side="left"), pattern=Pattern.sliding(3))
    for truth in (None, Segments.from_lengths([6, 9], side="left")):
        assert marked(squares_of_mask(sliding, 2, truth)[0]) == [[], []]
    one = dense(Segments.from_lengths([1], width=2, side="left"), polarity="masked")
    assert squares_of_mask(one, 1, None)[1] == "masked"  # the other way round one place is wrong


def test_what_no_mask_holds_is_drawn_all_the_same():
    odd = torch.tril(torch.full((1, 1, 3, 3), 0.5))
    drawn, read = squares_of_mask(odd, 1, None)
    assert read == "keep"
    assert (drawn[0].grid(1).cells == np.tril(np.ones((3, 3)))).all()
    odd[0, 0, 2, 0] = float("nan")
    assert squares_of_mask(odd, 1, None)[0]
    assert keys_of_mask(torch.tensor([[0, 0, 0], [0, 1, 1]])).tolist() == [[False] * 3, [False, True, True]]
    assert keys_of_mask(torch.tensor([[0.0, -1e9, -1e9]])).tolist() == [[True, False, False]]
