"""A square mask read in blocks is the mask, in every dtype, polarity and layout; what a pattern gives, beside it."""

from __future__ import annotations

import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import Pattern
from collate_npu.masks import dense, square as square_module
from collate_npu.masks.polarity import MaskValues
from collate_npu.masks.square import Square

WRITTEN = [("keep", None), ("masked", None), ("keep", torch.int64), ("masked", torch.uint8), ("masked", torch.float16)]
BIASES = [("bias", torch.float32), ("bias", torch.bfloat16), ("bias", torch.float16), ("bias", torch.float64)]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(square_module, "BLOCK", 24)


@given(strategies.attentions(), st.sampled_from(WRITTEN + BIASES), st.sampled_from(["plain", "turned", "heads", "expanded"]))
def test_what_is_read_is_the_mask(attention, written, layout):
    segments, pattern = attention
    B, S = segments.shape
    truth = dense(segments, pattern=pattern)
    full = dense(segments, pattern=pattern, polarity=written[0], dtype=written[1])
    if layout == "turned":
        full = full.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "heads":
        none = dense(segments, pattern=Pattern.sliding(1), polarity=written[0], dtype=written[1])
        full, truth = torch.cat([none, full], 1), truth | dense(segments, pattern=Pattern.sliding(1))
    elif layout == "expanded":
        full = full.expand(-1, 3, -1, -1)
    square = Square(MaskValues(full, None if written[0] == "bias" else written[0]), written[0], B)
    truth = truth[:, 0].numpy()
    for b in range(B):
        for low, high in square.blocks():
            assert (square.rows(b, low, high) == truth[b, low:high]).all()
            assert ((square.raw_rows(b, low, high) == square.attends) == truth[b, low:high]).all()
    assert [high for _, high in square.blocks()][-1] == S
    assert (square.diagonal() == truth.diagonal(axis1=1, axis2=2)).all()
    assert (square.column(S - 1) == truth[:, :, S - 1]).all()
