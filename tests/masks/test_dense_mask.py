"""A square mask read in blocks is the mask, in every dtype, polarity and layout; numbers that mean nothing are refused."""

import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError
from collate_npu.errors import AmbiguousMaskError, PolarityError
from collate_npu.masks import dense, dense_mask
from collate_npu.masks.dense_mask import MaskValues, Square

WRITTEN = [("keep", None), ("masked", None), ("keep", torch.int64), ("masked", torch.uint8), ("masked", torch.float16)]
BIASES = [("bias", torch.float32), ("bias", torch.bfloat16), ("bias", torch.float16), ("bias", torch.float64)]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(dense_mask, "BLOCK", 24)


@given(strategies.attentions(), st.sampled_from(WRITTEN + BIASES), st.sampled_from(["plain", "turned", "heads", "expanded"]))
def test_what_is_read_is_the_mask(attention, written, layout):
    segments, pattern = attention
    B, S = segments.shape
    truth = dense(segments, pattern=pattern)
    full = dense(segments, pattern=pattern, polarity=written[0], dtype=written[1])
    if layout == "turned":
        full = full.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "heads":
        full = full.repeat(1, 2, 1, 1)
    elif layout == "expanded":
        full = full.expand(-1, 3, -1, -1)
    square = Square(MaskValues(full, None if written[0] == "bias" else written[0]), written[0], B)
    truth = truth[:, 0].numpy()
    for b in range(B):
        for low, high in square.blocks:
            assert (square.rows(b, low, high) == truth[b, low:high]).all()
            assert ((square.raw_rows(b, low, high) == square.attends) == truth[b, low:high]).all()
    assert [high for _, high in square.blocks][-1] == S
    assert all((high - low) * S <= max(24, S) for low, high in square.blocks)
    assert (square.diagonal() == truth.diagonal(axis1=1, axis2=2)).all()
    assert (square.column(S - 1) == truth[:, :, S - 1]).all()


# --- numbers of every dtype under each polarity


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
