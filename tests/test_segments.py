"""Segments: every reading agrees with a count done by hand on the ids, and every constructor has its inverse."""

import pickle

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import Segments


@given(strategies.segment_ids())
def test_readings_are_those_counted_by_hand(ids):
    segments, found = Segments(torch.tensor(ids)), oracle.sequences(ids)
    lengths = tuple(tuple(len(places) for b, places in found if b == row) for row in range(len(ids)))
    flat, real = oracle.lengths(ids), [n > 0 for row in ids for n in row]
    expected = {
        "ids": ids,
        "keep": oracle.keep(ids),
        "shape": (len(ids), len(ids[0])),
        "lengths": lengths,
        "row_lengths": tuple(map(sum, lengths)),
        "sequence_lengths": tuple(flat),
        "num_sequences": len(flat),
        "num_tokens": sum(flat),
        "num_padding": real.count(False),
        "padding_share": real.count(False) / len(real),
        "max_length": max(flat, default=0),
        "cu_seqlens": oracle.offsets(flat),
        "cu_seqlens_host": tuple(oracle.offsets(flat)),
        "indices": [place for place, token in enumerate(real) if token],
        "spans": tuple((b, places[0], places[-1] + 1) for b, places in found),
        "position_ids": [oracle.positions(row) for row in ids],
        "padding_side": oracle.side(ids),
        "packed": any(len(row) > 1 for row in lengths),
        "empty_rows": tuple(b for b, row in enumerate(lengths) if not row),
    }
    for name, value in expected.items():
        held = getattr(segments, name)
        assert (held.tolist() if isinstance(held, torch.Tensor) else held) == value, name
    dtypes = [getattr(segments, name).dtype for name in ("ids", "cu_seqlens", "keep", "position_ids")]
    assert dtypes == [torch.int32, torch.int32, torch.bool, torch.int64]


READINGS = (
    "lengths", "sequence_lengths", "row_lengths", "empty_rows", "shape", "keep", "num_sequences", "num_tokens", "max_length",
    "num_padding", "cu_seqlens_host", "indices", "last_indices", "position_ids", "padding_side", "packed", "longest_span",
    "hole_rows", "spans", "ids",
)  # fmt: skip


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from(["left", "right"]),
    st.permutations(READINGS),
)
def test_rows_known_by_their_lengths_read_as_those_known_by_their_ids(rows, room, side, order):
    """Whatever is asked for first."""
    width = max(map(sum, rows)) + room
    by_lengths = Segments.from_lengths(rows, width, side)
    numbered = [[n for n, length in enumerate(filter(None, row), start=1) for _ in range(length)] for row in rows]
    by_ids = Segments([oracle.padded(row, width, 0, side) for row in numbered] if width else torch.zeros(len(rows), 0).int())
    for name in order:
        one, other = getattr(by_lengths, name), getattr(by_ids, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
    assert by_lengths == by_ids == pickle.loads(pickle.dumps(by_lengths))


def test_sequences_of_no_tokens_leave_no_trace():
    assert Segments.from_lengths([[0, 2, 0, 1], [0]]).ids.tolist() == [[1, 1, 2], [0, 0, 0]]
    assert Segments.from_lengths([]).shape == (0, 0)
    assert Segments.from_cu_seqlens([0, 0, 2, 2, 3]).ids.tolist() == [[1, 1, 2]]
    assert Segments.from_cu_seqlens([0]).shape == (1, 0)


@pytest.mark.parametrize("offsets", [[0.0, 3.0, 5.0], [[0, 3, 5]], [[0, 3, 5, -1]], [[0, 3, 5, -1, -1]]])
def test_offsets_may_be_floats_or_one_row_filled_at_its_end(offsets):
    assert Segments.from_cu_seqlens(torch.tensor(offsets)).lengths == ((3, 2),)


@pytest.mark.parametrize("ids", [np.zeros((0, 0)), np.zeros((0, 4)), np.zeros((3, 0)), np.zeros((2, 3))])
def test_batches_of_nothing(ids):
    segments = Segments.from_ids(ids.astype(np.int64))
    assert segments.shape == ids.shape
    assert (segments.num_tokens, segments.max_length, segments.longest_span, segments.spans) == (0, 0, 0, ())
    assert segments.cu_seqlens_host == (0,)
    assert segments.padding_share == float(ids.size > 0)
    assert segments.lengths == ((),) * len(ids)
    assert segments.position_ids.shape == segments.keep.shape == ids.shape
    assert segments.empty_rows == tuple(range(len(ids)))


def test_equality_and_repr():
    segments = Segments.from_lengths([[3, 2], [5]], side="left")
    assert segments == Segments.from_ids([[1, 1, 1, 2, 2], [8, 8, 8, 8, 8]])
    assert segments != Segments.from_lengths([5, 5])
    assert segments != "segments"
    assert repr(segments) == "Segments(B=2, S=5, lengths=[3+2, 5], padding='none')"
    assert repr(Segments.from_lengths([0, 1])) == "Segments(B=2, S=1, lengths=[0, 1], padding='right')"
    assert f"lengths=[{', '.join('1' * 8)}]" in repr(Segments.from_lengths([1] * 8))
    assert f"lengths=[{', '.join('1' * 8)}, ...]" in repr(Segments.from_lengths([1] * 9))
    with pytest.raises(TypeError):
        hash(segments)


def test_segments_are_frozen():
    with pytest.raises(AttributeError):
        Segments.from_lengths([3]).ids = torch.zeros(1, 3)
    for segments in (Segments.from_lengths([3]), Segments([[1, 1]]), Segments.from_ids([[1, 2]])):
        assert not segments.array.flags.writeable
