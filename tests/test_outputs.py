"""Outputs: what the way back refuses, and what padding may hold. What it gives: tests/test_laws.py, test_numerics.py."""

import pytest
import torch

from collate_npu import CollateError, Segments, last_token, repad, unpad
from collate_npu.outputs import ignore_first_labels, per_sequence, shift_labels, to_nested
from collate_npu.parallel import pad_documents


@pytest.mark.parametrize("verb", [unpad, last_token, per_sequence, to_nested])
def test_a_shard_is_not_the_output(verb):
    with pytest.raises(CollateError, match=r"output: got float32 \[2, 3, 8\].*\[2, 5\].*gather_sequence"):
        verb(torch.zeros(2, 3, 8), Segments.from_lengths([3, 5]))


def test_repad_takes_what_unpad_gave():
    with pytest.raises(CollateError, match=r"repad: got float32 \[7\].*8 real tokens"):
        repad(torch.zeros(7), Segments.from_lengths([3, 5]))

    with pytest.raises(CollateError, match="fill: got 1000"):
        repad(torch.zeros(8, dtype=torch.int8), Segments.from_lengths([3, 5]), fill=1000)


@pytest.mark.parametrize("verb", [shift_labels, ignore_first_labels])
@pytest.mark.parametrize("shape", [(2, 4), (2,), (2, 5, 1)])
def test_labels_of_another_shape(verb, shape):
    with pytest.raises(CollateError, match=r"labels: got int64 .*the batch is \[2, 5\].*Pad them with the tokens"):
        verb(torch.zeros(shape, dtype=torch.long), Segments.from_lengths([3, 5]))
    with pytest.raises(CollateError, match="ignore_index"):
        verb(torch.zeros(2, 5), Segments.from_lengths([3, 5]), ignore_index=-(1 << 63) - 1)
    with pytest.raises(CollateError, match="labels: got float8"):
        verb(torch.zeros(2, 5).to(torch.float8_e5m2), Segments.from_lengths([3, 5]))
    assert verb(torch.zeros(2, 5).half(), Segments.from_lengths([3, 5])).dtype == torch.float16


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
        for call in (
            lambda: shift_labels(x),
            lambda: ignore_first_labels(x, TOKENS),
            lambda: pad_documents(row, multiple=4),
        ):
            with pytest.raises(CollateError, match="which has no such value"):
                call()
        assert (ignore_first_labels(x.long(), TOKENS)[~TOKENS.keep] == -100).all()  # the remedy
    for right in (1, torch.tensor(1)):
        assert (repad(unpad(x, TOKENS), TOKENS, fill=right)[~TOKENS.keep] == 1).all()
