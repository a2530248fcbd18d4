"""What a dataloader gives torchtitan's trainer."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.torchtitan import TitanCollator, trainer_batch

INNER = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
ROWS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9, 1, 2, 3], "labels": [8, 9, 1, 2, 3]}]
PACKED = {"input_ids": [4, 5, 0, 6, 7, 8], "labels": [4, 5, 0, 6, 7, 8], "attention_mask": [1, 1, 0, 2, 2, 2]}
HOLES = {**PACKED, "attention_mask": [1, 1, 0, 1, 2, 2]}


def test_padded_rows():
    collator = pickle.loads(pickle.dumps(TitanCollator(INNER, extra={"special_tokens": {"image_id": 3}})))
    input_dict, labels = collator(ROWS)
    assert input_dict.pop("special_tokens") == {"image_id": 3}
    assert {key: value.tolist() for key, value in input_dict.items()} == {
        "input": [[0, 0, 5, 6, 7], [8, 9, 1, 2, 3]],
        "positions": [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]],
    }
    assert labels.tolist() == [[-100, -100, 6, 7, -100], [9, 1, 2, 3, -100]]


def test_packed_rows_predict_inside_a_sequence():
    input_dict, labels = TitanCollator(INNER)([PACKED])
    assert input_dict["positions"].tolist() == [[0, 1, 0, 0, 1, 2]]
    assert labels.tolist() == [[5, -100, -100, 7, 8, -100]]


def test_labels_that_are_shifted_stay():
    batch = {"input_ids": torch.tensor([[5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    shifted = torch.tensor([[6, 7, 9]])
    assert trainer_batch({**batch, "shift_labels": shifted})[1].tolist() == [[6, 7, -100]]


def test_positions_tell_of_no_hole_but_segment_ids_do():
    with pytest.raises(UnsupportedFormError, match=r"(?s)row 0: got holes.*segment_ids=True"):
        TitanCollator(INNER)([HOLES])
    input_dict, labels = TitanCollator(INNER, segment_ids=True)([HOLES])
    assert input_dict["segment_ids"].tolist() == [[1, 1, 0, 1, 2, 2]]
    assert input_dict["segment_ids"].dtype == torch.int32
    assert input_dict["positions"].tolist() == [[0, 1, 0, 2, 0, 1]]
    assert labels.tolist() == [[5, -100, -100, -100, 8, -100]]


def test_what_the_model_would_be_called_with_is_refused():
    rows = [{**row, "loss_scale": [1.0] * len(row["input_ids"])} for row in ROWS]
    with pytest.raises(UnsupportedFormError, match=r"(?s)got loss_scale.*extra="):
        TitanCollator(INNER)(rows)
    dense = SimpleNamespace(layer_types=["full_attention"])
    for_the_model = {"pad_token_id": 0, "consumer": "torchtitan", "model": dense}
    with pytest.raises(UnsupportedFormError, match=r"(?s)got attention_masks.*without consumer="):
        TitanCollator(PaddingCollator(**for_the_model))(ROWS)


def test_a_batch_without_labels_is_refused():
    batch = {"input_ids": torch.tensor([[5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises(CollateError, match=r"labels: got NoneType.*carry labels"):
        trainer_batch(batch)
    labels = trainer_batch({**batch, "labels": batch["input_ids"]}, Segments.from_lengths([2], 3))[1]
    assert labels.tolist() == [[6, -100, -100]]
