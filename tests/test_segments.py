"""Segments: every reading agrees with a count done by hand on the ids, and every constructor has its inverse."""

import pickle

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, Segments
from collate_npu.segments import positions_match


def sequences(row):
    """Lengths of the sequences of one row of ids, counted slowly."""
    return tuple(row.count(n) for n in range(1, max(row, default=0) + 1))


# --- laws


@given(strategies.segment_ids())
def test_readings_are_those_counted_by_hand(ids):
    segments = Segments(torch.tensor(ids))
    lengths = [sequences(row) for row in ids]
    flat = [n for row in lengths for n in row]
    assert segments.ids.tolist() == ids
    assert segments.ids.dtype == torch.int32
    assert segments.keep.tolist() == [[n > 0 for n in row] for row in ids]
    assert segments.keep.dtype == torch.bool
    assert segments.lengths == tuple(lengths)
    assert segments.row_lengths == tuple(map(sum, lengths))
    assert segments.num_sequences == len(flat)
    assert segments.num_tokens == sum(flat)
    assert segments.max_length == max(flat, default=0)
    assert segments.cu_seqlens_host == tuple(sum(flat[:n]) for n in range(len(flat) + 1))
    assert segments.cu_seqlens.tolist() == list(segments.cu_seqlens_host)
    assert segments.cu_seqlens.dtype == torch.int32
    assert segments.indices.tolist() == [i for i, n in enumerate(n for row in ids for n in row) if n]
    assert segments.packed == any(len(row) > 1 for row in lengths)
    assert segments.empty_rows == tuple(b for b, row in enumerate(lengths) if not row)
    assert segments.shape == (len(ids), len(ids[0]))


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
    by_ids = Segments(Segments.from_lengths(rows, width, side).ids)
    for name in order:
        one, other = getattr(by_lengths, name), getattr(by_ids, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
    assert by_lengths == by_ids


@given(strategies.segment_ids())
def test_spans_hold_exactly_the_tokens_of_their_sequence(ids):
    segments = Segments(torch.tensor(ids))
    found = []
    for b, row in enumerate(ids):
        for n in range(1, max(row) + 1):
            at = [i for i, label in enumerate(row) if label == n]
            found.append((b, at[0], at[-1] + 1))
    assert segments.spans == tuple(found)


@given(strategies.segment_ids())
def test_positions_count_real_tokens_of_their_own_sequence(ids):
    segments = Segments(torch.tensor(ids))
    assert segments.position_ids.dtype == torch.int64
    for row, positions in zip(ids, segments.position_ids.tolist()):
        if not any(row):
            continue  # nobody reads the positions of a row of padding
        last, seen = None, {}
        for label, position in zip(row, positions):
            if label:
                last = seen[label] = seen.get(label, -1) + 1
            elif last is not None:
                last += 1
            assert position == (0 if last is None else last)


@given(strategies.segment_ids())
def test_padding_side_is_the_place_of_padding(ids):
    keeps = [[n > 0 for n in row] for row in ids]
    right = all(row == sorted(row, reverse=True) for row in keeps)
    left = all(row == sorted(row) for row in keeps)
    full = all(map(all, keeps))
    empty_row_left = left and not all(row[-1] for row in keeps)  # a row of padding alone is padded on the right
    side = Segments(torch.tensor(ids)).padding_side
    assert side == ("none" if full else "right" if right else "left" if left and not empty_row_left else "mixed")


@given(strategies.sided() | strategies.free(packed=False))
def test_from_keep_is_the_inverse_of_keep(segments):
    for keep in (segments.keep, segments.keep.long(), segments.keep.tolist(), segments.keep.to(torch.uint8).numpy()):
        assert Segments.from_keep(keep) == segments


@given(strategies.segment_ids(), st.permutations([3, 9, 1, 40, 2, 8, 11, 5]))
def test_from_ids_renumbers_any_labels(ids, labels):
    other = [[labels[n - 1] if n else 0 for n in row] for row in ids]
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert Segments.from_ids(torch.tensor(other, dtype=dtype)).ids.tolist() == ids


@given(strategies.packed_lengths(rows=1), st.integers(0, 3))
def test_from_cu_seqlens_is_the_inverse_of_cu_seqlens(lengths, extra):
    segments = Segments.from_lengths(lengths, sum(lengths[0]) + extra)
    for offsets in (segments.cu_seqlens, segments.cu_seqlens_host, list(segments.cu_seqlens_host)):
        assert Segments.from_cu_seqlens(offsets, segments.shape[1]) == segments


@given(strategies.packed_lengths(rows=1))
def test_from_position_ids_is_the_inverse_of_position_ids(lengths):
    segments = Segments.from_lengths(lengths)
    assert Segments.from_position_ids(segments.position_ids) == segments


@given(strategies.packed_lengths(), st.integers(0, 3), strategies.sides())
def test_from_lengths_lays_rows_out_to_its_side(lengths, extra, side):
    width = max(map(sum, lengths)) + extra
    expected = []
    for row in lengths:
        real = [n for n, length in enumerate(row, start=1) for _ in range(length)]
        gap = [0] * (width - len(real))
        expected.append(real + gap if side == "right" else gap + real)
    assert Segments.from_lengths(lengths, width, side).ids.tolist() == expected


@given(strategies.segment_ids())
def test_segments_survive_pickling(ids):
    segments = Segments(torch.tensor(ids))
    _ = segments.keep, segments.position_ids
    assert pickle.loads(pickle.dumps(segments)) == segments


# --- examples


def test_sequences_of_no_tokens_leave_no_trace():
    assert Segments.from_lengths([[0, 2, 0, 1], [0]]).ids.tolist() == [[1, 1, 2], [0, 0, 0]]
    assert Segments.from_lengths([]).shape == (0, 0)
    assert Segments.from_cu_seqlens([0, 0, 2, 2, 3]).ids.tolist() == [[1, 1, 2]]
    assert Segments.from_cu_seqlens([0]).shape == (1, 0)


@pytest.mark.parametrize("offsets", [[0.0, 3.0, 5.0], [[0, 3, 5]], [[0, 3, 5, -1]], [[0, 3, 5, -1, -1]]])
def test_offsets_may_be_floats_or_one_row_filled_at_its_end(offsets):
    assert Segments.from_cu_seqlens(torch.tensor(offsets)).lengths == ((3, 2),)


def test_lengths_may_be_a_table():
    assert Segments.from_lengths(np.array([[3, 2], [4, 0]])).lengths == ((3, 2), (4,))


@pytest.mark.parametrize(
    ("lengths", "side"), [([3, 5], "left"), ([3, 5], "right"), ([[2, 3], [4]], "right"), ([0, 2], "right")]
)
def test_positions_are_known_again(lengths, side):
    segments = Segments.from_lengths(lengths, width=6, side=side)
    right = segments.position_ids.numpy()
    assert positions_match(segments, right)
    right[-1, -1] += 1
    assert not positions_match(segments, right)


def test_labels_of_one_token_a_row():
    assert Segments.from_ids([[7], [7]]).ids.tolist() == [[1], [1]]


@pytest.mark.parametrize("ids", [np.zeros((0, 0)), np.zeros((0, 4)), np.zeros((3, 0)), np.zeros((2, 3))])
def test_batches_of_nothing(ids):
    segments = Segments.from_ids(ids.astype(np.int64))
    assert segments.shape == ids.shape
    assert (segments.num_tokens, segments.max_length, segments.longest_span, segments.spans) == (0, 0, 0, ())
    assert segments.cu_seqlens_host == (0,)
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


def test_the_ids_of_bool_and_wide_tensors():
    assert Segments(torch.tensor([[True, False]])).ids.dtype == torch.int32
    assert Segments.from_ids(torch.tensor([[1, 1, 2]], dtype=torch.int8)).lengths == ((2, 1),)


def test_labels_beyond_32_bits_stay_labels():
    assert Segments.from_ids(torch.tensor([[2**32, 2**32, 1]])).lengths == ((2, 1),)


# --- refusals


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Segments(torch.tensor([[1, 3]])), "row 0: got ids [1, 3]"),
        (lambda: Segments(torch.tensor([[1, 1], [2, 1]])), "row 1: got ids [2, 1]"),
        (lambda: Segments(torch.tensor([[1, 2, 0, 1], [1, 2, 0, 2]])), "1 bad row.\n  row 0: got ids [1, 2, 0, 1]"),
        (lambda: Segments(torch.tensor([[1.0, 1.0]])), "segment ids: got float32 [1, 2]"),
        (lambda: Segments(torch.tensor([1, 1])), "segment ids: got int64 [2]"),
        (lambda: Segments.from_ids([[1, 2, 1], [1, 1, 1], [5, 0, 3]][:2]), "row 0: got ids [1, 2, 1]"),
        (lambda: Segments.from_ids([[0, 0, -1], [0, 1, 1]]), "1 bad row.\n  row 0: got the id -1"),
        (lambda: Segments.from_lengths([3, -1]), "row 1: got lengths [-1]"),
        (lambda: Segments.from_lengths([3, 9, [4, 4]], width=7), "row 1: got lengths [9]\n  row 2: got lengths [4, 4]"),
        (lambda: Segments.from_lengths([3], side="middle"), "side: got 'middle'"),
        (lambda: Segments.from_keep([[1, 2]]), "Segments.from_ids"),
        (lambda: Segments.from_keep([[0.5, 1.0]]), "keep: got float64 [1, 2] with values 0.5, 1.0"),
        (lambda: Segments.from_keep([1, 0]), "keep: got int64 [2]"),
        (lambda: Segments.from_cu_seqlens([3, 8]), "no leading 0"),
        (lambda: Segments.from_cu_seqlens([0, 5, 3]), "[0, 5, 3]"),
        (lambda: Segments.from_cu_seqlens([]), "cu_seqlens: got []"),
        (lambda: Segments.from_cu_seqlens([0, 2.5]), "[0.0, 2.5]"),
        (lambda: Segments.from_cu_seqlens([[-1]]), "cu_seqlens: got [-1]"),
        (lambda: Segments.from_cu_seqlens([[0, 3], [0, 2]]), "[[0, 3], [0, 2]]"),
        (lambda: Segments.from_lengths(np.ones((1, 2, 2), int)), "lengths: got int64 [1, 2, 2]"),
        (lambda: Segments.from_cu_seqlens([0, 9], width=8), "row 0: got lengths [9]"),
        (lambda: Segments.from_position_ids([0, 1, 2]), "position_ids: got int64 [3]"),
    ],
)
def test_what_is_no_segmentation_is_refused(build, told):
    with pytest.raises(CollateError) as raised:
        build()
    assert told in str(raised.value)


@given(strategies.segments())
def test_padding_is_counted_over_all_places(segments):
    assert segments.num_padding == int((segments.ids == 0).sum())
    assert segments.padding_share == segments.num_padding / segments.ids.numel()
    assert Segments.from_lengths([[]], 0).padding_share == 0


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3], [3, 0], [0, 0, 2]])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_without_tokens_counts_none(lengths, side):
    """Beside others, alone, on either side: padding before the first token is at position 0."""
    segments = Segments.from_lengths(lengths, width=4, side=side)
    assert not segments.position_ids[[n == 0 for n in lengths]].any()
