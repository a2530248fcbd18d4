"""Features: what samples tell of themselves, every value beside its token whatever held it, and what is no batch."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, PaddingCollator
from collate_npu.keys import KEYS, TOKENS
from collate_npu.masks.batch_reader import segments_from_batch

OURS = {"keys": {**KEYS, "mine": TOKENS}}


def collate(features, **settings):
    return PaddingCollator(pad_token_id=0, **settings)(features)


@pytest.mark.parametrize(
    ("feature", "ids"),
    [
        ({"attention_mask": [True, False, True]}, [1, 0, 1]),
        ({"attention_mask": torch.tensor([1.0, 0.0, 1.0])}, [1, 0, 1]),
        ({"attention_mask_2d": np.array([0, 1, 1])}, [0, 1, 1]),
        ({"seq_lengths": torch.tensor([3])}, [1, 1, 1]),
        ({"seq_lengths": 3}, [1, 1, 1]),
        ({"seq_lengths": [2, 1], "attention_mask": [1, 0, 1]}, [1, 0, 2]),
        ({"seq_lengths": [2, 1], "attention_mask": [1, 1, 2]}, [1, 1, 2]),
        ({"seq_lengths": [2, 1], "attention_mask": [1, 0, 2]}, [1, 0, 2]),
        ({"attention_mask": [1, 1, 0], "attention_mask_2d": [1, 1, 0]}, [1, 1, 0]),
    ],
)
def test_a_sample_s_own_truth(feature, ids):
    assert segments_from_batch(collate([{"input_ids": [5, 5, 5], **feature}])).ids.tolist() == [ids]


ARRAYS = (np.int32, np.uint8, np.float16, np.float32, np.bool_)


@given(strategies.sided(), st.sampled_from(ARRAYS), st.sampled_from([(), (2,), (3, 2)]))
def test_arrays_and_tensors_keep_their_dtype_and_their_trailing_dimensions(segments, dtype, trailing):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 2, (n, *trailing)).astype(dtype) for n in segments.row_lengths]
    side = "left" if segments.padding_side == "left" else "right"
    for held in (rows, [torch.from_numpy(row) for row in rows]):
        features = [{"input_ids": [1] * len(row), "mine": row} for row in held]
        batch = collate(features, padding_side=side, attention_mask="2d", **OURS)
        mine, keep = batch["mine"], batch["attention_mask_2d"]
        assert mine.dtype == torch.from_numpy(rows[0]).dtype
        assert np.array_equal(mine[keep].numpy(), np.concatenate(rows))
        assert not mine[~keep].any()


WHOLE = ([1, 0], (True, False), np.array([1, 0], np.int8), torch.tensor([1, 0], dtype=torch.int32), [np.int64(1), 0])


@pytest.mark.parametrize(
    ("key", "row", "found", "dtype"),
    [
        *(("labels", row, [1, 0], torch.int64) for row in WHOLE if np.asarray(row).dtype != bool),
        *(
            ("mine", row, [1.5, 1], torch.float32)
            for row in (torch.tensor([1.5, 1]).bfloat16(), np.array([1.5, 1]), [1.5, 1])
        ),
        ("mine", [True, False], [1, 0], torch.bool),
        ("mine", [2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)], torch.int64),
        ("mine", torch.ones(2, requires_grad=True), [1, 1], torch.float32),
        ("input_ids", np.array([1, 2**63 - 1], np.uint64), [1, 2**63 - 1], torch.int64),
    ],
)
def test_the_dtype_of_a_key(key, row, found, dtype):
    batch = collate([{"input_ids": [1, 2], key: row}], **OURS)
    assert (batch[key].tolist(), batch[key].dtype, batch[key].requires_grad) == ([found], dtype, False)


def test_samples_may_hold_their_rows_each_in_another_way():
    rows = [[1.5], np.array([2.5]), torch.tensor([3.5]), (4,)]
    found = collate([{"input_ids": [1], "mine": row} for row in rows], **OURS)["mine"]
    assert (found.tolist(), found.dtype) == ([[1.5], [2.5], [3.5], [4.0]], torch.float32)


# --- refusals


def tokens(*lengths, **columns):
    return [{"input_ids": [1] * n, **{key: column[b] for key, column in columns.items()}} for b, n in enumerate(lengths)]


def mine(*rows):
    return [{"input_ids": [1] * len(row), "mine": row} for row in rows]


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ([], "features: got no samples"),
        ([[7]], "features: 1 bad row.\n  row 0: got a list"),
        ([{"tokens": [1]}], "torch.utils.data.default_collate"),
        ([{"x": 1}], "input_ids: got samples with x."),
        ([{"prompt_ids": [1], "chosen_ids": [2]}], "Wrap the collator that makes rows of these columns"),
        ([{"text": "a"}], "Tokenise first: [tokenizer(text)"),
        ([{"input_ids": [1]}, {"x": 1}], "input_ids: 1 bad row.\n  row 1: got nothing"),
        ([{"input_ids": "text"}], "row 0: got str of 4"),
        ([{"input_ids": 3}, {"input_ids": torch.zeros(1, 2)}], "row 0: got int\n  row 1: got float32 [1, 2]"),
        (tokens(2, 2, x=[1, None]), "x: 1 bad row.\n  row 1: got nothing"),
        (tokens(2, 3, 2, labels=[[1], [1] * 3, [1] * 3]), "row 0: got 1 values beside 2 input_ids\n  row 2: got 3 values"),
        (tokens(2, 2, attention_mask=[[1], [1, 1, 1]]), "row 0: got 1 values beside 2 input_ids\n  row 1: got 3 values"),
        (tokens(2, 2, attention_mask=[[[1, 1]], 1]), "row 0: got 2 dimensions\n  row 1: got 0 dimensions"),
        (tokens(2, 2, attention_mask=[[0, -1], [0.5, 1]]), "row 0: got values [-1, 0]\n  row 1: got values [0.5, 1.0]"),
        (tokens(2, attention_mask=[[float("nan"), 1.0]]), "row 0: got values [1.0, nan]"),
        (tokens(2, attention_mask=[[np.ones(2), np.ones(2)]]), "row 0: got 2 dimensions"),
        (tokens(2, 2, seq_lengths=[[1, 2], [3]]), "row 0: got [1, 2], which sum to 3\n  row 1: got [3], which sum to 3"),
        (
            tokens(2, 2, attention_mask=[[1, 1], [1, 1]], attention_mask_2d=[[1, 1], [1, 0]]),
            "row 1: got 2 real tokens, not 1",
        ),
        (tokens(2, seq_lengths=[[-1, 3]]), "seq_lengths: 1 bad row"),
        (tokens(2, seq_lengths=[[0.5, 1.5]]), "seq_lengths: 1 bad row"),
        (tokens(4, seq_lengths=[[2, 2]], attention_mask=[[1, 2, 2, 2]]), "row 0: got sequences of [2, 2], not [1, 3]"),
        (tokens(3, seq_lengths=[[3]], attention_mask=[[1, 2, 2]]), "row 0: got sequences of [3], not [1, 2]"),
        (tokens(2, 3, labels=[[0.5], [0.5, 1.0]]), "row 0: got 1 numbers\n  row 1: got 2 numbers"),
        (tokens(2, 2, position_ids=[np.zeros((3, 2)), np.zeros((2, 2))]), "row 0: got shape [3, 2] beside 2 input_ids"),
        (tokens(3, routed_experts=[np.zeros((2, 1, 1))]), "A rollout has no routes for its last token"),
        (tokens(2, labels=[[1, 2]], label=[1]), "labels: 1 bad row"),
        (tokens(2, 2, loss_scale=[1.5, [1.0, 1.0]]), "loss_scale: 1 bad row.\n  row 0: got 1.5"),
        (tokens(2, 2, 2, labels=[1, "a", {"class": 3}]), "labels: 2 bad rows.\n  row 1: got a str\n  row 2: got a dict"),
        (tokens(2, labels=[[True, False]]), "np.where(learned, input_ids, -100)"),
        # what is no number
        ([{"input_ids": row} for row in ([1], [1, 2.5], ["a"])], "row 1: got 2.5 at token 1\n  row 2: got 'a'"),
        ([{"input_ids": row} for row in ([2**63], [None])], "row 0: got 9223372036854775808 at token 0\n  row 1: got None"),
        ([{"input_ids": np.array([2**63], np.uint64)}], "whole numbers"),
        (mine([1, 2], [[1], [2]]), "row 1: got values of shape [1]"),
        (mine(np.zeros((2, 3)), np.zeros((2, 4))), "row 1: got values of shape [4]"),
        (mine([1], ["a", "b"]), "row 1: got <U1 [2] starting ['a', 'b']"),
        (mine([[1], [1, 2]], [1]), "row 0: got lists of unequal length"),
        (tokens(2, 2, pixel_values=[torch.ones(2, 3), torch.ones(2, 4)]), "row 1: got float32 [2, 4]"),
        *(([{"input_ids": [1], "attention_mask": x}], "row 0: got no tokens") for x in ([0], np.zeros(1), torch.zeros(1))),
        *(
            ([{"input_ids": row} for row in (*before, np.array([True]))], f"row {len(before)}: got values that are true")
            for before in ([], [[1, 2]], [np.array([1, 2])])
        ),
        # no batch of samples
        (np.zeros(2, [("input_ids", np.int64)]), "features: got a ndarray"),
        ({"input_ids": [1, 2, 3]}, "input_ids: "),
        ({"input_ids": [[1], [2]], "labels": [[1]]}, "Every column has one entry"),
        ({"input_ids": [[1], [2]], "label": 3}, "label"),
        ({"input_ids": []}, "no samples"),
        ({}, "no samples"),
        ("text", "a str"),
        ((sample for sample in ({"input_ids": [1]},)), "a generator"),
        ([{"input_ids": [1]}, 3], "row 1: got an int"),
    ],
)
def test_refusals_name_key_and_rows(features, told):
    with pytest.raises(CollateError) as raised:
        collate(features() if callable(features) else features, **OURS)
    assert told in str(raised.value)
