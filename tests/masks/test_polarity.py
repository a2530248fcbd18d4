"""Numbers of every dtype mean True = attends under one polarity, or are refused."""

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError
from collate_npu.errors import AmbiguousMaskError, PolarityError
from collate_npu.masks.polarity import MaskValues

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
