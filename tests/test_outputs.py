"""Outputs: what padding may hold. What the way back gives: laws and test_numerics.py; what it refuses: test_refusals.py."""

import pytest
import torch

from collate_npu import CollateError, Segments, repad, unpad
from collate_npu.outputs import ignore_first_labels, shift_labels
from collate_npu.parallel import pad_documents

TOKENS, LABELS = Segments.from_lengths([3, 5]), torch.arange(10).view(2, 5)
HELD = [(torch.uint8, -100), (torch.bool, -100), (torch.bool, 2), (torch.int64, 0.5), (torch.uint8, 256), (torch.int8, 128),
        (torch.int32, float("nan")), (torch.int64, 2**63), (torch.int8, torch.tensor(300))]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value"), HELD, ids=str)
def test_padding_holds_no_value_that_the_dtype_has_not(dtype, value):
    """uint8 would make class 156 of -100, bool True, and whole numbers 0 of 0.5."""
    x = (LABELS % 2).to(dtype)
    with pytest.raises(CollateError, match=r"fill: got .*x.long"):
        repad(unpad(x, TOKENS), TOKENS, fill=value)
    if value == -100:
        row = {"input_ids": LABELS[:1], "labels": x[:1], "cu_seqlens": [0, 3, 5]}
        calls = (lambda: shift_labels(x), lambda: ignore_first_labels(x, TOKENS), lambda: pad_documents(row, multiple=4))
        for call in calls:
            with pytest.raises(CollateError, match="which has no such value"):
                call()
        assert (ignore_first_labels(x.long(), TOKENS)[~TOKENS.keep] == -100).all()  # the remedy
    for right in (1, torch.tensor(1)):
        assert (repad(unpad(x, TOKENS), TOKENS, fill=right)[~TOKENS.keep] == 1).all()
