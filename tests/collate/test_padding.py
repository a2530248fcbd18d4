"""Padding: every value lands where its token does, whatever held it, and nothing that is no number becomes one."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, arrays, unpad
from collate_npu.collate import padding
from collate_npu.collate.padding import concatenate_values, stack_values
from collate_npu.keys import KEYS, SAMPLE


def pad_rows(key, rows, **settings):
    return padding.pad_rows(key, rows, whole=KEYS.get(key, SAMPLE).whole, **settings)


whole_rows = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), min_size=1, max_size=4)
float_rows = st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=6), min_size=1, max_size=4)


def expected(rows, width, side, fill):
    return [row + [fill] * (width - len(row)) if side == "right" else [fill] * (width - len(row)) + row for row in rows]


@given(
    whole_rows, strategies.sides(), st.integers(0, 3), st.sampled_from([0, -100, 7]), st.sampled_from(["input_ids", "mine"])
)
def test_ints_of_64_bits_from_lists(rows, side, extra, fill, key):
    width = max(map(len, rows)) + extra
    padded = pad_rows(key, rows, width=width, side=side, fill=fill)
    assert padded.dtype == torch.int64
    assert padded.tolist() == expected(rows, width, side, fill)


@given(float_rows, strategies.sides(), st.integers(0, 3))
def test_floats_from_lists_are_float32(rows, side, extra):
    width = max(map(len, rows)) + extra
    padded = pad_rows("loss_scale", rows, width=width, side=side, fill=0.5)
    assert padded.dtype == (torch.float32 if any(rows) else torch.int64)
    assert padded.tolist() == expected(rows, width, side, 0.5 if any(rows) else 0)


@given(
    strategies.sided(),
    st.sampled_from([np.int32, np.uint8, np.float16, np.float32, np.bool_]),
    st.sampled_from([(), (2,), (3, 2)]),
)
def test_arrays_and_tensors_keep_their_dtype_and_their_trailing_dimensions(segments, dtype, trailing):
    lengths, (_, S) = segments.row_lengths, segments.shape
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 2, (n, *trailing)).astype(dtype) for n in lengths]
    side = "left" if segments.padding_side == "left" else "right"
    for held in (rows, [torch.from_numpy(row) for row in rows]):
        padded = pad_rows("routed_experts", held, width=S, side=side)
        assert padded.shape == (*segments.shape, *trailing)
        assert padded.dtype == torch.from_numpy(rows[0]).dtype
        assert np.array_equal(unpad(padded, segments).numpy(), np.concatenate(rows))
        assert not padded[~segments.keep].any()


def test_whole_number_keys_are_int64_whatever_held_them():
    for row in ([1, 0], (True, False), np.array([1, 0], np.int8), torch.tensor([1, 0], dtype=torch.int32), [np.int64(1), 0]):
        padded = pad_rows("labels", [row], width=3, fill=-100)
        assert padded.dtype == torch.int64
        assert padded.tolist() == [[1, 0, -100]]


def test_dtypes_of_other_keys():
    assert pad_rows("x", [torch.tensor([1.5], dtype=torch.bfloat16)], width=1).dtype == torch.float32
    assert pad_rows("x", [np.array([1.5])], width=1).dtype == torch.float32
    assert pad_rows("x", [[1], [1.5]], width=1).tolist() == [[1.0], [1.5]]
    assert pad_rows("x", [[True], [False]], width=2).dtype == torch.bool
    assert pad_rows("x", [[], []], width=2).tolist() == [[0, 0], [0, 0]]
    assert pad_rows("x", [np.zeros((0, 4)), np.ones((2, 4))], width=2).shape == (2, 2, 4)
    assert not pad_rows("x", [torch.ones(2, requires_grad=True)], width=3).requires_grad


@pytest.mark.parametrize(
    ("rows", "right", "left"),
    [
        ([[1, 2], [3]], [[1, 2, 2], [3, 3, 3]], [[1, 1, 2], [2, 2, 3]]),
        ([[], [5]], [[5, 5, 5], [5, 5, 5]], [[0, 0, 0], [0, 0, 5]]),
    ],
)
@pytest.mark.parametrize("made", [list, lambda row: np.array(row, np.int64)])
def test_padding_may_hold_what_the_token_beside_it_does(rows, right, left, made):
    held = [made(row) for row in rows]
    for side, told in (("right", right), ("left", left)):
        assert padding.pad_rows("routed_experts", held, width=3, side=side, fill="last", whole=True).tolist() == told


def test_a_batch_has_at_most_so_many_places(monkeypatch):
    for module in (arrays, padding):
        monkeypatch.setattr(module, "MOST_PLACES", 3)
    assert pad_rows("x", [[1]], width=3).shape == (1, 3)
    with pytest.raises(CollateError, match="4 places"):
        pad_rows("x", [[1]], width=4)


# --- refusals


@pytest.mark.parametrize(
    ("key", "rows", "told"),
    [
        ("input_ids", [[1], [1, 2.5], ["a"]], "row 1: got 2.5 at token 1\n  row 2: got 'a' at token 0"),
        ("input_ids", [[1.5], np.array([1.5])], "row 0: got 1.5 at token 0\n  row 1: got float64 [1]"),
        ("input_ids", [[2**63], [None]], "row 0: got 9223372036854775808 at token 0\n  row 1: got None at token 0"),
        (
            "input_ids",
            [np.array([1.5]), torch.tensor([1.0])],
            "row 0: got float64 [1] starting [1.5]\n  row 1: got float32 [1]",
        ),
        ("labels", [[1, 2], [[1], [2]]], "row 1: got values of shape [1]"),
        ("x", [[1, 2], [[1], [2]]], "row 1: got values of shape [1]"),
        ("x", [np.zeros((2, 3)), np.zeros((2, 4))], "row 1: got values of shape [4]"),
        ("x", [np.zeros(2), np.zeros((2, 1))], "row 1: got values of shape [1]"),
        ("x", [[1], ["a", "b"]], "row 1: got <U1 [2] starting ['a', 'b']"),
        ("x", [[[1], [1, 2]], [1]], "row 0: got nested lists of unequal length"),
        ("labels", [[[1], [1, 2]], [1]], "row 0: got nested lists of unequal length"),
    ],
)
def test_what_is_no_number_is_refused(key, rows, told):
    with pytest.raises(CollateError) as raised:
        pad_rows(key, rows, width=9)
    assert str(raised.value).startswith(f"{key}: ")
    assert told in str(raised.value)


# --- values that are not per token


def test_one_number_a_sample_becomes_a_vector():
    assert stack_values([1, np.int64(2), torch.tensor(3)]).tolist() == [1, 2, 3]
    assert stack_values([0.5, 1]).tolist() == [0.5, 1.0]
    assert stack_values([True, False]).dtype == torch.bool
    assert stack_values(["a", "b"]) == ["a", "b"]
    assert stack_values([1, "b"]) == [1, "b"]
    assert stack_values([[1], [1, 2]]) == [[1], [1, 2]]


def test_vision_values_join_on_their_first_dimension():
    joined = concatenate_values("pixel_values", [torch.ones(2, 3), None, np.zeros((1, 3), np.float32)])
    assert joined.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    with pytest.raises(CollateError, match=r"pixel_values: 2 bad rows[\s\S]*row 2: got float32 \[2, 4\]"):
        concatenate_values("pixel_values", [None, torch.ones(2, 3), torch.ones(2, 4)])


def test_the_largest_number_of_int64_is_one_and_the_next_is_none():
    largest = np.array([2**63 - 1], np.uint64)
    assert padding.pad_rows("input_ids", [largest], width=1, whole=True).tolist() == [[2**63 - 1]]
    with pytest.raises(CollateError, match="whole numbers"):
        padding.pad_rows("input_ids", [largest + np.uint64(1)], width=1, whole=True)


@pytest.mark.parametrize("fill", [1 << 63, -(1 << 63), "0", None])
def test_padding_holds_a_number_of_64_bits(fill):
    with pytest.raises(CollateError, match="at most 64 bits"):
        pad_rows("input_ids", [[1], [1, 2]], width=2, fill=fill)
