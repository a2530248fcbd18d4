"""Numbers of every dtype mean True = attends under one polarity, or are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError
from collate_npu.errors import AmbiguousMaskError, PolarityError
from collate_npu.masks.dense_mask import MaskValues, blocks

KEEP = torch.tensor([[[[True, False], [True, True]]]])
INTS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS])
@pytest.mark.parametrize("polarity", ["keep", "masked"])
def test_ones_and_zeros_of_any_dtype(dtype, polarity):
    written = (KEEP if polarity == "keep" else ~KEEP).to(dtype)
    assert torch.equal(torch.from_numpy(MaskValues(written, polarity).read(polarity)), KEEP)


@given(st.sampled_from(FLOATS), st.sampled_from(["min", "-inf", "-1e4"]), st.floats(-100, 0))
def test_biases_block_whatever_is_added_to_them(dtype, fill, added):
    value = {"min": torch.finfo(dtype).min, "-inf": -torch.inf, "-1e4": -1e4}[fill]
    blocked = max(value + added, torch.finfo(dtype).min) if fill != "-inf" else value
    written = torch.where(KEEP, torch.tensor(added), torch.tensor(blocked, dtype=torch.float64)).to(dtype)
    values = MaskValues(written, None)
    assert values.declared == "bias"
    assert torch.equal(torch.from_numpy(values.read("bias")), KEEP)


@pytest.mark.parametrize(
    ("written", "declared", "error", "told"),
    [
        (torch.where(KEEP, 0.0, torch.nan), None, CollateError, "NaN"),
        (torch.where(KEEP, torch.inf, -torch.inf), None, CollateError, r"\+inf"),
        (torch.where(KEEP, 0, -10000), None, CollateError, "An additive mask is a float tensor"),
        (torch.where(KEEP, 0.0, -100.0), None, AmbiguousMaskError, "No value blocks for certain"),
        (torch.where(KEEP, 0.0, -6000.0), None, AmbiguousMaskError, "No value blocks for certain"),
        (torch.where(KEEP, 2, 0), None, CollateError, "packing ids"),
        (torch.where(KEEP, 0.0, -1e9), "keep", PolarityError, "It is additive"),
        (KEEP, "bias", PolarityError, "A bias is a float tensor"),
        (KEEP.float(), "bias", PolarityError, "blocks nothing"),
        (KEEP, "additive", CollateError, "three polarities"),
    ],
)
def test_numbers_that_mean_nothing_certain(written, declared, error, told):
    with pytest.raises(error, match=told):
        MaskValues(written, declared)


@pytest.mark.parametrize(
    ("written", "declared", "attends", "valued"),
    [
        ([0, -9984], None, [True, False], False),
        ([0, -5000], "bias", [True, False], False),
        ([0, -5000, -1e4], None, [True, False, False], False),  # half-way is blocked
        ([0, -4999, -1e4], None, [True, True, False], True),
        ([0, -100, -torch.inf], None, [True, True, False], True),
        ([0, -6e4, -torch.inf], None, [True, False, False], False),
        ([0, -2.5e4, -6e4, -torch.inf], None, [True, True, False, False], True),
    ],
)
def test_where_a_bias_begins_to_block(written, declared, attends, valued):
    values = MaskValues(torch.tensor([written]).float(), declared)
    assert (values.declared, values.read("bias").tolist(), values.valued) == ("bias", [attends], valued)


def test_a_mask_of_nothing_holds_no_number_but_0():
    assert MaskValues(torch.zeros(2, 0), None).range == (0, 0)


@pytest.mark.parametrize("most", [1, 3, 7, 10, 35])
def test_blocks_are_all_of_an_array_and_no_larger_than_asked(most):
    grid = np.arange(35).reshape(5, 7)
    for array in (grid, grid.T, np.broadcast_to(grid[:, :1], (5, 7)), np.array(3)):
        parts = list(blocks(array, most))
        assert np.array_equal(np.unique(np.concatenate([part.ravel() for part in parts])), np.unique(array))
        assert max(part.size for part in parts) <= most
    assert [part.size for part in blocks(np.broadcast_to(grid[0], (5, 7)), 35)] == [7]  # what repeats comes once


def test_a_block_is_an_eighth_of_an_array_unless_that_is_small():
    assert [[part.size for part in blocks(np.zeros((1 << n, 1)))] for n in (12, 13, 16)] == [[4096], [4096] * 2, [8192] * 8]
