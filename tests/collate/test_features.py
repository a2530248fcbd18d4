"""Features: which keys are per token, how long samples are, and what is real in them."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given

from collate_npu import CollateError, PaddingCollator
from collate_npu.collate.features import read_features, sample_segment_ids
from collate_npu.keys import KEYS, SAMPLE, TOKENS


def kinds(*features):
    return read_features(features).kinds


@given(strategies.features())
def test_samples_are_read_as_they_tell(features):
    samples = read_features(features)
    truth = [strategies.own_ids(feature) for feature in features]
    assert samples.lengths == [len(feature["input_ids"]) for feature in features]
    assert set(samples.columns) == {"input_ids", "labels", "loss_scale"}
    assert set(samples.kinds.values()) == {"tokens"}
    if samples.segment_ids is None:
        assert all(set(ids) <= {1} for ids in truth)
    else:
        assert [row.tolist() for row in samples.segment_ids] == truth


# --- kinds of keys


@pytest.mark.parametrize("lengths", [(2, 2), (3, 3), (3, 2), (3,), (2, 3, 3)])
@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("labels", [0.0, 1.0, 0.0], "targets"),
        ("labels", [0] * 8 + [0.5], "targets"),
        ("vector", [0.5, 1.0, 0.0], "sample"),
        ("position_ids", np.zeros((3, 3), int), "axes"),
        ("position_ids", [[0, 1, 2]] * 3, "axes"),
        ("pixel_values", np.zeros((3, 4, 4)), "vision"),
        ("image_sizes", [4, 4, 4], "vision"),
        ("image_grid_thw", [1, 2, 2], "vision"),
    ],
)
def test_what_a_key_is_does_not_depend_on_the_lengths_of_a_batch(key, value, kind, lengths):
    """Three classes, three axes, three channels, in batches whose rows have three tokens or not."""
    rows = [{"input_ids": [1] * n, key: value if kind != "axes" else np.asarray(value)[:, :1].repeat(n, 1)} for n in lengths]
    assert kinds(*rows)[key] == kind


def test_keys_nobody_listed_are_listed_by_the_caller():
    rows = [{"input_ids": [1, 2], "x": [1.0, 2.0]}, {"input_ids": [1], "x": [3.0]}]
    arrays = [row | {"x": np.array(row["x"])} for row in rows]
    for held in (rows, rows[::-1], arrays):
        with pytest.raises(CollateError, match=r"x: 2 bad rows(.|\n)*keys=\{\*\*KEYS, 'x': TOKENS\}"):
            kinds(*held)
    assert kinds(*(row | {"x": np.array(row["x"]).astype(str)} for row in rows))["x"] == "sample"
    assert read_features(rows, keys={**KEYS, "x": TOKENS}).kinds["x"] == "tokens"
    assert read_features(rows, keys={**KEYS, "x": SAMPLE}).kinds["x"] == "sample"
    assert kinds({"input_ids": [1, 2], "x": [1.0, 2.0]}, {"input_ids": [1], "x": [3.0, 4.0]})["x"] == "sample"


@pytest.mark.parametrize("value", [["a", "b"], "ab", {"a": 1, "b": 2}, 3, np.array(["a", "b"]), [None, None]])
def test_what_is_no_row_of_numbers_is_a_value(value):
    assert kinds({"input_ids": [1, 2], "x": value})["x"] == "sample"


def test_a_key_may_be_missing_in_every_sample_and_one_of_vision_in_some():
    columns = read_features([{"input_ids": [1], "x": None}, {"input_ids": [1], "pixel_values": torch.zeros(1)}]).columns
    assert "x" not in columns
    assert columns["pixel_values"][0] is None


# --- truth


@pytest.mark.parametrize(
    ("feature", "ids"),
    [
        ({"attention_mask": [1, 1, 0]}, [1, 1, 0]),
        ({"attention_mask": [True, False, True]}, [1, 0, 1]),
        ({"attention_mask": torch.tensor([1.0, 0.0, 1.0])}, [1, 0, 1]),
        ({"attention_mask_2d": np.array([0, 1, 1])}, [0, 1, 1]),
        ({"attention_mask": [1, 2, 0]}, [1, 2, 0]),
        ({"seq_lengths": [2, 1]}, [1, 1, 2]),
        ({"seq_lengths": torch.tensor([3])}, [1, 1, 1]),
        ({"seq_lengths": 3}, [1, 1, 1]),
        ({"seq_lengths": [0, 3]}, [1, 1, 1]),
        ({"seq_lengths": [2, 1], "attention_mask": [1, 0, 1]}, [1, 0, 2]),
        ({"seq_lengths": [2, 1], "attention_mask": [1, 1, 2]}, [1, 1, 2]),
        ({"seq_lengths": [2, 1], "attention_mask": [1, 0, 2]}, [1, 0, 2]),
        ({"attention_mask": [1, 1, 0], "attention_mask_2d": [1, 1, 0]}, [1, 1, 0]),
    ],
)
def test_a_sample_s_own_truth(feature, ids):
    (found,) = read_features([{"input_ids": [5, 5, 5], **feature}]).segment_ids
    assert found.tolist() == ids


MASKED = {"input_ids": [5, 5, 5], "attention_mask": [1, 1, 0], "seq_lengths": [1, 2]}


@pytest.mark.parametrize(
    ("features", "ids"),
    [
        ([MASKED, {"input_ids": [6, 6, 6], "seq_lengths": [1, 2]}, {"input_ids": [7, 7]}], [[1, 2, 0], [1, 2, 2], [1, 1]]),
        ([{"input_ids": [5, 5], "seq_lengths": 2}], [[1, 1]]),
        ([{"input_ids": [5, 5], "attention_mask": [[1, 0], [1, 1]]}], None),  # the inner collator's to lay out
        ([[MASKED, MASKED], [MASKED]], [[1, 2, 0, 3, 4, 0], [1, 2, 0]]),
        ([[MASKED, {"text": "a"}]], None),
        ([[{"text": "a"}]], None),
    ],
)
def test_samples_that_another_collator_pads_may_each_tell_something_else(features, ids):
    found = sample_segment_ids(features)[1]
    assert (found and [row.tolist() for row in found]) == ids


def test_ids_of_samples_that_another_collator_pads_are_whole_numbers():
    with pytest.raises(CollateError, match=r"got 1\.5 at token 0"):
        sample_segment_ids([{"input_ids": [1.5]}])


def test_rows_without_tokens_are_allowed_if_asked():
    features = [{"input_ids": []}, {"input_ids": [1]}]
    assert read_features(features, allow_empty=True).lengths == [0, 1]
    masked = [[{"input_ids": [1], "attention_mask": made([0])}] for made in (list, np.array, torch.tensor)]
    for one in masked:
        assert read_features(one, allow_empty=True).segment_ids[0].tolist() == [0]
    for bad in (features, *masked):
        with pytest.raises(CollateError, match="row 0: got no tokens"):
            read_features(bad)


# --- refusals


def tokens(*lengths, **columns):
    return [{"input_ids": [1] * n, **{key: column[b] for key, column in columns.items()}} for b, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ([], "features: got no samples"),
        ([[7]], "features: 1 bad row.\n  row 0: got a list"),
        ([{"tokens": [1]}], "torch.utils.data.default_collate"),
        ([{"x": 1}], "input_ids: got samples of x."),
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
            "attention_mask_2d: 1 bad row.\n  row 1: got another mask than attention_mask",
        ),
        (tokens(2, seq_lengths=[[-1, 3]]), "seq_lengths: 1 bad row"),
        (tokens(2, seq_lengths=[[0.5, 1.5]]), "seq_lengths: 1 bad row"),
        (tokens(4, seq_lengths=[[2, 2]], attention_mask=[[1, 2, 2, 2]]), "row 0: got other sequences than attention_mask"),
        (tokens(3, seq_lengths=[[3]], attention_mask=[[1, 2, 2]]), "row 0: got other sequences than attention_mask"),
        ([{"input_ids": [1, 2]}, {"input_ids": torch.zeros(1, 2)}], "input_ids: 1 bad row.\n  row 1: got float32 [1, 2]"),
        (tokens(2, 3, labels=[[0.5], [0.5, 1.0]]), "row 0: got 1 numbers\n  row 1: got 2 numbers"),
        (tokens(2, 2, position_ids=[np.zeros((3, 2)), np.zeros((2, 2))]), "row 0: got shape [3, 2] beside 2 input_ids"),
        (tokens(3, routed_experts=[np.zeros((2, 1, 1))]), "A rollout routes all but its last token"),
        (tokens(2, labels=[[1, 2]], label=[1]), "labels: 1 bad row"),
        (tokens(2, loss_scale=[[1.0]]), "loss_scale: 1 bad row"),
        (tokens(2, 2, loss_scale=[1.5, [1.0, 1.0]]), "loss_scale: 1 bad row.\n  row 0: got 1.5"),
        (tokens(2, 2, labels=[1, "a"]), "labels: 1 bad row.\n  row 1: got a str"),
        (tokens(2, position_ids=[[0, 1, 2]]), "position_ids: 1 bad row"),
    ],
)
def test_refusals_name_key_and_rows(features, told):
    with pytest.raises(CollateError) as raised:
        read_features(features)
    assert told in str(raised.value)


@pytest.mark.parametrize("made", [list, np.array, torch.tensor])
def test_ids_that_are_true_or_false_are_no_ids(made):
    for before in ([], [[1, 2]], [np.array([1, 2])]):
        with pytest.raises(CollateError, match=f"row {len(before)}: got values that are true(.|\n)*the ids"):
            read_features([{"input_ids": row} for row in (*before, made([True, False]))])


def test_flat_tokens_may_have_a_sample_of_none():
    samples = {"input_ids": [5, 6], "seq_lengths": [2, 0]}
    assert read_features(samples, allow_empty=True).lengths == [2, 0]
    with pytest.raises(CollateError, match="Count the tokens"):
        read_features({"input_ids": [5, 6], "seq_lengths": [3, -1]})


def test_a_structured_array_is_a_batch_of_columns():
    rows = np.zeros(2, [("input_ids", np.int64, (3,)), ("labels", np.int64, (3,))])
    rows["input_ids"] = rows["labels"] = [[1, 2, 3], [4, 5, 6]]
    assert PaddingCollator(pad_token_id=0)(rows)["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
