"""What real producers emit is shown as it is: masks, rows, labels, tokens, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Segments, dense
from collate_npu.masks.find import segments_from_batch
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.show.attention import Cell
from collate_npu.tools.show.sheet import COUNTED, IGNORED, ON_PADDING, labels_of, sheet_of

LINES = ["hi", "a longer line", "中文"]


def tokenized(**settings):
    pytest.importorskip("transformers")
    tokenizer = byte_tokenizer(pad_is_eos=False, **settings)
    return tokenizer, [dict(tokenizer(line)) for line in LINES]


def megatron(truth):
    """Megatron-LM's own (utils.py get_ltor_masks_and_position_ids): a triangle, one block a document, True = blocked."""
    B, S = truth.shape
    mask = torch.tril(torch.ones(B, 1, S, S))
    for b, start, _ in truth.spans:
        mask[b, 0, start:, :start] = 0
    return {"tokens": truth.ids, "attention_mask": mask < 0.5, "segment_ids": truth.ids}


def cells_of(panel):
    return np.stack([square.grid(1).cells for square in panel.squares])


@pytest.mark.models
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_language_modelling(side):
    tokenizer, features = tokenized(padding_side=side)
    from transformers import DataCollatorForLanguageModeling

    batch = dict(DataCollatorForLanguageModeling(tokenizer, mlm=False)(features))
    rows, attends = sheet_of(batch, tokenizer=tokenizer).panels
    assert rows.rows.ids.tolist() == batch["attention_mask"].tolist()
    assert (rows.rows.labels == np.where(rows.rows.ids, COUNTED, 0)).all()
    assert cells_of(attends).tolist() == dense(Segments.from_keep(batch["attention_mask"]))[:, 0].long().tolist()
    assert sheet_of(batch, tokenizer=tokenizer).tokens.text(0, rows.rows.ids[0].nonzero()[0].tolist()) == "hi"


@pytest.mark.models
def test_transformers_flat_rows():
    _, features = tokenized()
    from transformers import DataCollatorWithFlattening

    batch = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features))
    rows, attends = sheet_of(batch).panels
    assert [len(feature["input_ids"]) for feature in features] == np.bincount(rows.rows.ids[0])[1:].tolist()
    assert rows.rows.labels[0].tolist().count(IGNORED) == len(LINES)
    assert cells_of(attends).sum() == sum(n * (n + 1) // 2 for n in np.bincount(rows.rows.ids[0])[1:].tolist())


@pytest.mark.models
def test_trl_preference_pairs():
    pytest.importorskip("trl")
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    pairs = [{"prompt_ids": [5, 6], "chosen_ids": [7] * n, "rejected_ids": [8]} for n in (1, 4)]
    batch = dict(DataCollatorForPreference(pad_token_id=9)(pairs))
    (rows, *_) = sheet_of(batch).panels
    assert rows.rows.ids.tolist() == batch["attention_mask"].tolist()


@pytest.mark.parametrize("lengths", [[[3, 2], [4]], [[5], [5]]])
def test_megatron_masks_of_documents(lengths):
    truth = Segments.from_lengths(lengths, width=5)
    batch = megatron(truth)
    _, came = sheet_of(batch).panels
    assert came.facts == "bool [2, 1, 5, 5], True is blocked"
    keep = ~batch["attention_mask"][:, 0]
    real = torch.from_numpy(truth.array > 0)  # padded queries are what Megatron left there
    assert (torch.from_numpy(cells_of(came))[real] == keep[real].long()).all()


def test_a_mutated_batch_shows_its_place_and_its_refusal():
    pytest.importorskip("transformers")
    batch = PaddingCollator(pad_token_id=0, padding_side="left", consumer="megatron", model_type="qwen3_next")(
        [{"input_ids": [1] * n} for n in (5, 8)]
    )
    batch["attention_mask"][1, 0, 6, 2] = True
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    refused, rows, came = sheet_of(batch).panels
    assert refused.refused == str(error.value)
    assert rows.rows.ids.tolist() == batch["attention_mask_2d"].long().tolist()
    assert [square.b for square in came.squares] == [1, 0]
    assert np.argwhere(cells_of(came) >= Cell.TOO_MUCH).tolist() == [[0, 6, 2]]
    assert came.squares[0].grid(4).cells.tolist() == [[Cell.PART, Cell.BLOCKED], [Cell.TOO_LITTLE, Cell.PART]]


@pytest.mark.parametrize("row", [0, 1])
def test_squares_of_one_row_alone(row):
    truth = Segments.from_lengths([2, 3])
    (came, _) = sheet_of(dense(truth), row=row).panels
    assert [square.b for square in came.squares] == [row]


def test_labels():
    truth = Segments.from_lengths([2, 3], side="left")
    labels = torch.tensor([[4, -100, 5], [-100, 6, 7]])
    assert labels_of({"labels": labels}, truth).tolist() == [[ON_PADDING, IGNORED, COUNTED], [IGNORED, COUNTED, COUNTED]]
    assert labels_of({"labels": torch.tensor([0, 1])}, truth) is None
    assert labels_of({"labels": labels.float()}, truth) is None
    assert labels_of({}, truth) is None


def test_where_nothing_says_what_is_padding_there_is_the_refusal_alone():
    (refused,) = sheet_of({"input_ids": torch.ones(2, 3, dtype=torch.long)}).panels
    assert "No key says which tokens are padding" in refused.refused


def test_a_mask_for_another_width_is_refused_and_drawn():
    truth = Segments.from_lengths([2, 3])
    refused, rows, came = sheet_of({"input_ids": truth.ids, "attention_mask_2d": truth.keep,
                                    "attention_mask": dense(Segments.from_lengths([4, 4]))}).panels  # fmt: skip
    assert refused.refused
    assert came.squares[0].shape == (4, 4)
    assert rows.rows.ids.shape == (2, 3)


def test_a_square_that_all_rows_share_and_masks_that_are_no_tensors():
    truth = Segments.from_lengths([4, 4])
    shared = {"input_ids": truth.ids, "attention_mask_2d": truth.keep, "attention_mask": dense(truth)[0, 0]}
    _, came = sheet_of(shared).panels
    assert cells_of(came).tolist() == dense(truth)[:, 0].long().tolist()
    (rows,) = sheet_of(truth.keep.tolist()).panels
    assert rows.rows.ids.tolist() == truth.ids.tolist()
    (came, _) = sheet_of(dense(truth).numpy()).panels
    assert cells_of(came).tolist() == dense(truth)[:, 0].long().tolist()


def test_heads_that_differ_are_drawn_as_one_and_named():
    truth = Segments.from_lengths([4])
    heads = dense(truth).repeat(1, 2, 1, 1)
    heads[0, 1] = False
    refused, _, came = sheet_of({"input_ids": truth.ids, "attention_mask_2d": truth.keep, "attention_mask": heads}).panels
    assert "not the same for every head" in refused.refused
    assert came.facts.endswith("any of its 2 heads")
    assert cells_of(came).tolist() == dense(truth)[:, 0].long().tolist()


def test_a_mask_that_is_right_by_itself_is_held_against_the_rest_of_its_batch():
    truth = Segments.from_lengths([3, 4], side="left")
    other = dense(Segments.from_lengths([4, 4]))
    came = sheet_of({"input_ids": truth.ids, "attention_mask_2d": truth.keep, "attention_mask": other}).panels[-1]
    assert came.squares[0].grid(1).cells[1:, 0].tolist() == [Cell.TOO_MUCH] * 3
    assert [square.grid(1).wrong for square in came.squares] == [3, 0]
