"""Rows: what arrays show of their rows, against a slow count place by place."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, Segments
from collate_npu.arrays import host_array, host_tensor, once, renumber, sequence_starts, side_around, side_of


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2), st.sampled_from(["right", "left"]))
def test_the_side_around_lengths_is_that_of_the_mask(lengths, room, side):
    width = max(lengths, default=0) + room
    keep = np.array([[k < n if side == "right" else k >= width - n for k in range(width)] for n in lengths], bool)
    assert side_around(lengths, width, side) == side_of(keep.reshape(len(lengths), width))


def positions(row):
    """One token after another; padding after a token counts on from it."""
    counts, out, last = {}, [], None
    for label in row:
        if label:
            last = counts[label] = counts.get(label, -1) + 1
        elif last is not None:
            last += 1
        out.append(0 if last is None else last)
    return out


@given(strategies.segment_ids())
def test_positions_of_rows_with_holes(ids):
    assert Segments(ids).position_ids.tolist() == [positions(row) for row in ids]


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=3))
def test_labels_are_numbered_in_order_and_none_comes_back(rows):
    orders = [list(dict.fromkeys(n for n in row if n)) for row in rows]
    runs = [[n for k, n in enumerate(real) if not k or n != real[k - 1]] for real in ([n for n in row if n] for row in rows)]
    if orders == runs:
        numbered = [[order.index(n) + 1 if n else 0 for n in row] for row, order in zip(rows, orders)]
        assert renumber(np.array(rows)).tolist() == numbered
    else:
        with pytest.raises(CollateError, match="does not come back"):
            renumber(np.array(rows))


@given(strategies.segment_ids())
def test_sequences_begin_where_positions_restart(ids):
    counted = np.array([positions(row) for row in ids])
    keep = np.array(ids) > 0
    starts, counts = sequence_starts(counted, keep)
    previous = [[next((m for m in reversed(row[:k]) if m), 0) for k in range(len(row))] for row in ids]
    firsts = [[n > 0 and n != m for n, m in zip(row, before)] for row, before in zip(ids, previous)]
    assert starts.tolist() == firsts
    assert counts.all()


def test_numbers_that_wrapped_around_are_refused():
    assert host_array("x", np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]
    assert host_array("x", np.array([255], np.uint8)).dtype == np.uint8
    with pytest.raises(CollateError, match="it wrapped around"):
        host_array("x", np.array([2**63], np.uint64))


@pytest.mark.parametrize(("dtype", "read"), [(torch.float8_e5m2, torch.float32), (torch.uint16, torch.int64)])
def test_types_that_torch_computes_little_with_are_read_as_wider_ones(dtype, read):
    assert host_tensor("x", torch.tensor([1, 2]).to(dtype)).dtype == read


def test_two_objects_are_asked_at_once():
    """One lock for all objects of a class, as functools has it before 3.12, ends in two threads that wait for each other."""

    class Held:
        meet = threading.Barrier(2)

        @once
        def value(self):
            return self.meet.wait(timeout=20) in (0, 1)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda held: held.value, (Held(), Held()))) == [True, True]
