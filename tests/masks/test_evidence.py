"""Evidence: extents read off the rows or guessed and compared, they are those of the matrix."""

import pytest
import strategies
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from collate_npu.masks import dense, square as square_module
from collate_npu.masks.polarity import MaskValues
from collate_npu.masks.readings import Shown, all_extents, fillers, read_rows
from collate_npu.masks.square import Square


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(square_module, "BLOCK", 24)


def slowly(attends_BQK):
    """`(first, last, some, full)` by a loop."""
    told = []
    for rows in attends_BQK.tolist():
        for q, row in enumerate(rows):
            at = [k for k, attends in enumerate(row) if attends]
            told.append((min(at, default=q), max(at, default=q), bool(at), all(row)))
    return told


def told(extents):
    columns = (extents.first, extents.last, extents.some, extents.full)
    return list(zip(*(column.reshape(-1).tolist() for column in columns)))


def square_of(attends_BQK):
    return Square(MaskValues(torch.from_numpy(attends_BQK), "keep"), "keep", len(attends_BQK))


matrices = st.tuples(st.integers(1, 3), st.integers(1, 17)).flatmap(
    lambda shape: arrays.arrays(bool, (*shape, shape[1]), fill=st.nothing())
)


@given(matrices, st.booleans(), st.data())
def test_rows_that_are_read(attends_BQK, known, data):
    counts_BS = data.draw(arrays.arrays(bool, attends_BQK.shape[:2])) if known else None
    extents, used_BK = all_extents(square_of(attends_BQK), counts_BS)
    for b, used_K in enumerate(used_BK):
        counts_Q = counts_BS[b] if known else ~attends_BQK[b].all(axis=1)
        assert used_K.tolist() == attends_BQK[b][counts_Q].any(axis=0).tolist()
    assert told(extents) == slowly(attends_BQK)


@given(strategies.segments(), st.sampled_from(["keys", "keys and queries", "filled"]), st.booleans(), st.data())
def test_extents_that_are_guessed_and_corrected(segments, padding, flipped, data):
    """Those of causal masks, whatever padding attends, and of masks that are not quite: the same as those read."""
    attends_BQK, real_BS = dense(segments)[:, 0].numpy(), segments.keep.numpy()
    if padding != "keys":
        attends_BQK &= real_BS[:, :, None]
    if padding == "filled":
        attends_BQK |= ~attends_BQK.any(axis=2, keepdims=True)
    if flipped:
        at = tuple(data.draw(st.integers(0, n - 1)) for n in attends_BQK.shape)
        attends_BQK[at] = ~attends_BQK[at]
    square = square_of(attends_BQK)
    guess = Shown(square, square.diagonal(), None)
    odd = 0
    for b in range(len(attends_BQK)):
        for low, high in guess.odd_blocks(b):
            read_rows(square, b, low, high, guess.extents)
            odd += 1
    assert told(guess.extents) == slowly(attends_BQK)
    causal_BQK = dense(guess.segments)[:, 0].numpy()
    assert (attends_BQK == causal_BQK)[guess.proved & guess.real].all()
    if not flipped and padding != "filled":
        assert odd == 0
        assert guess.segments == segments
        assert guess.proved[guess.real].all()


@given(arrays.arrays(bool, st.tuples(st.integers(1, 3), st.integers(1, 4))))
def test_rows_that_attend_everything_while_others_do_not(full_BQ):
    for full, found in zip(full_BQ.tolist(), fillers(full_BQ).tolist()):
        lone_last = full[-1] and not any(full[:-1])
        assert found == ([False] * len(full) if all(full) or lone_last else full)
