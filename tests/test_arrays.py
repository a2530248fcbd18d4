"""Rows: what arrays show of their rows, against a slow count place by place."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st
from torch.nn.attention.bias import causal_lower_right

from collate_npu import CollateError, Segments, arrays
from collate_npu.arrays import host_array, host_tensor, once
from collate_npu.segments import renumber, sequence_starts, side_around, side_of


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
    with np.errstate(all="raise"):
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.float64])
def test_others_stay_as_they_are(dtype):
    assert host_tensor("x", torch.ones(2, dtype=dtype).to_sparse()).dtype == dtype


@pytest.mark.parametrize("array", [np.arange(3, dtype=">i4"), np.ones((2, 2), ">f8"), np.arange(6).reshape(2, 3)[:, ::-1]])
def test_of_bytes_or_places_in_another_order_torch_gets_a_copy(array):
    assert torch.from_numpy(host_array("x", array)).tolist() == array.tolist()


def test_a_tensor_by_name_only_is_refused():
    with pytest.raises(CollateError, match="CausalBias"):
        host_tensor("x", causal_lower_right(2, 2))
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(CollateError, match="a nested NestedTensor"):
        host_tensor("x", jagged)


DOORS = {
    "ids": Segments,
    "from_ids": Segments.from_ids,
    "from_keep": Segments.from_keep,
    "from_position_ids": lambda x: Segments.from_position_ids(np.cumsum(x, axis=1) - 1),
    "from_lengths": lambda x: Segments.from_lengths([x.shape[1]] * len(x)),
    "a sparse tensor": lambda x: host_tensor("x", torch.tensor(x).to_sparse()),
}


@pytest.mark.parametrize("door", DOORS)
def test_more_places_than_offsets_count_are_refused(door, monkeypatch):
    monkeypatch.setattr(arrays, "MOST_PLACES", 6)
    DOORS[door](np.ones((2, 3), int))
    with pytest.raises(CollateError, match="got 7 places"):
        DOORS[door](np.ones((1, 7), int))


def test_two_objects_are_asked_at_once():
    """One lock for all objects of a class, as functools has it before 3.12, ends in two threads that wait for each other."""

    class Held:
        meet = threading.Barrier(2)

        @once
        def value(self):
            return self.meet.wait(timeout=20) in (0, 1)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda held: held.value, (Held(), Held()))) == [True, True]
