"""What real producers emit is shown as it is: masks, rows, labels, tokens, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, Segments
from collate_npu.masks import dense
from collate_npu.masks.find import segments_from_batch
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.show.attention import Cell
from collate_npu.tools.show.sheet import Tokens, _are_numbers, escaped, labels_of, row_of_numbers, sheet_of

LINES = ["hi", "a longer line", "中文"]


def tokenized(**settings):
    pytest.importorskip("transformers")
    tokenizer = byte_tokenizer(pad_is_eos=False, **settings)
    return tokenizer, [dict(tokenizer(line)) for line in LINES]


def batch_of(truth, mask):
    return {"input_ids": truth.ids, "attention_mask_2d": truth.keep, "attention_mask": mask}


def cells_of(panel):
    return np.stack([square.grid(1).cells for square in panel.squares]).tolist()


def cells(truth):
    """Of causal attention."""
    return dense(truth)[:, 0].long().tolist()


@pytest.mark.models
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_language_modelling(side):
    tokenizer, features = tokenized(padding_side=side)
    from transformers import DataCollatorForLanguageModeling

    batch = dict(DataCollatorForLanguageModeling(tokenizer, mlm=False)(features))
    sheet = sheet_of(batch, tokenizer=tokenizer)
    rows, attends = sheet.panels
    assert rows.ids.tolist() == batch["attention_mask"].tolist()
    assert (rows.labels == np.where(rows.ids, Cell.COUNTED, 0)).all()
    assert cells_of(attends) == cells(Segments.from_keep(batch["attention_mask"]))
    assert sheet.tokens.text(0, rows.ids[0].nonzero()[0].tolist()) == "hi"


@pytest.mark.models
def test_transformers_flat_rows():
    _, features = tokenized()
    from transformers import DataCollatorWithFlattening

    batch = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features))
    rows, attends = sheet_of(batch).panels
    assert rows.labels[0].tolist().count(Cell.IGNORED) == len(LINES)
    assert cells_of(attends) == cells(Segments.from_lengths([[len(feature["input_ids"]) for feature in features]]))


@pytest.mark.parametrize("lengths", [[[3, 2], [4]], [[5], [5]]])
def test_megatron_masks_of_documents(lengths):
    """Megatron-LM's own (utils.py get_ltor_masks_and_position_ids): a triangle, one block a document, True = blocked."""
    truth = Segments.from_lengths(lengths, width=5)
    keep = torch.tril(torch.ones(2, 1, 5, 5)).bool()
    for b, start, _ in truth.spans:
        keep[b, 0, start:, :start] = False
    _, came = sheet_of({"tokens": truth.ids, "attention_mask": ~keep, "segment_ids": truth.ids}).panels
    assert came.facts == "bool [2, 1, 5, 5], True is blocked"
    real = truth.array > 0  # padded queries are what Megatron left there
    assert (np.array(cells_of(came))[real] == keep[:, 0].numpy()[real]).all()


def test_a_mutated_batch_shows_its_place_and_its_refusal():
    truth = Segments.from_lengths([5, 8], side="left")
    batch = batch_of(truth, dense(truth, polarity="masked"))
    batch["attention_mask"][1, 0, 6, 2] = True
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    refused, rows, came = sheet_of(batch).panels
    assert refused.refused == str(error.value)
    assert rows.ids.tolist() == truth.ids.tolist()
    assert [square.b for square in came.squares] == [1, 0]
    assert np.argwhere(np.array(cells_of(came)) >= Cell.TOO_MUCH).tolist() == [[0, 6, 2]]
    assert came.squares[0].grid(4).cells.tolist() == [[Cell.PART, Cell.BLOCKED], [Cell.TOO_LITTLE, Cell.PART]]


def test_labels():
    truth = Segments.from_lengths([2, 3], side="left")
    labels = torch.tensor([[4, -100, 0], [-100, 6, 7]])
    kinds = [[Cell.ON_PADDING, Cell.IGNORED, Cell.COUNTED], [Cell.IGNORED, Cell.COUNTED, Cell.COUNTED]]
    assert labels_of({"labels": labels}, truth).tolist() == kinds
    for none in ({"labels": torch.tensor([0, 1])}, {"labels": labels.float()}, {}):
        assert labels_of(none, truth) is None


def test_what_cannot_be_drawn_is_the_refusal_alone():
    (refused,) = sheet_of({"input_ids": torch.ones(2, 3, dtype=torch.long)}).panels
    assert "No key says which tokens are padding" in refused.refused
    refused, rows, came = sheet_of(batch_of(Segments.from_lengths([2, 3]), dense(Segments.from_lengths([4, 4])))).panels
    assert refused.refused  # and a mask for another width as it stands
    assert (came.squares[0].shape, rows.ids.shape) == ((4, 4), (2, 3))
    refused, rows = sheet_of(batch_of(Segments.from_lengths([2, 3]), torch.ones(1, 2, 1, 3, 3))).panels
    assert (bool(refused.refused), rows.ids.shape) == (True, (2, 3))
    refused, rows = sheet_of({"input_ids": torch.ones(2, 3), "attention_mask_2d": torch.ones(2, 4)}).panels
    assert (bool(refused.refused), rows.ids.shape) == (True, (2, 4))


def test_squares_that_rows_or_heads_share_and_masks_that_are_no_tensors():
    truth = Segments.from_lengths([4, 4])
    heads = dense(truth).repeat(1, 2, 1, 1)
    heads[:, 1] = False
    for mask in (dense(truth)[0, 0], dense(truth).numpy(), heads):
        assert cells_of(sheet_of(batch_of(truth, mask)).panels[-1]) == cells(truth)
    refused, _, came = sheet_of(batch_of(truth, heads)).panels
    assert "not the same for every head" in refused.refused
    assert came.facts.endswith("any of its 2 heads")
    blind = dense(truth)[0, 0].clone()
    blind[1, 0] = False
    for mask in (blind, blind[None], blind[None, None], blind.expand(2, 1, 4, 4)):
        assert len(sheet_of(batch_of(truth, mask)).panels[-1].squares) == 2
    (rows,) = sheet_of(truth.keep.tolist()).panels
    assert rows.ids.tolist() == truth.ids.tolist()
    for mask in (dense(truth).numpy(), dense(truth)[:, 0]):
        came, found = sheet_of(mask).panels
        assert (cells_of(came), found.derived) == (cells(truth), True)
    rows, refused = sheet_of(torch.tensor([[0.5, 1]])).panels
    assert rows.ids.tolist() == [[1, 1]]


def test_rows_of_a_mask_alone_are_named_and_a_tokenizer_is_one():
    keep = Segments.from_lengths([2, 3]).keep
    for b in (0, 1):
        assert not sheet_of(keep, row=b).panels[0].derived
    with pytest.raises(CollateError, match="The rows are 0 to 1"):
        sheet_of(keep, row=2)
    with pytest.raises(CollateError, match="decode"):
        sheet_of({"input_ids": keep.long(), "attention_mask_2d": keep}, tokenizer="gpt2")


@given(st.text())
def test_nothing_that_is_printed_moves_the_cursor(text):
    assert all(letter.isprintable() or letter == "\u200d" for letter in escaped(text))


def test_spaces_and_lines_are_seen_and_what_is_no_text_by_itself_is_its_id():
    assert [escaped(text) for text in (" the", "a b ", "\n", "\t", "  ")] == ["·the", "a b·", "\\n", "\\t", "··"]
    texts = {(7,): "seven", (8,): "\ufffd", (9,): "", (7, 8): "seven \n", (0,): "none", (-1,): "the last"}
    read = Tokens(lambda numbers: texts[tuple(numbers)], torch.tensor([[7, 8, 9, 0, -1]]))
    assert [read.one(0, s) for s in range(5)] == ["seven", "#8", "#9", "none", "#-1"]
    assert read.text(0, [0, 1]) == "seven \\n"


@pytest.mark.parametrize(
    ("values", "are"),
    [
        ([[1, 9]], True),
        ([[1, 2]], False),
        ([[1.0, 9.0]], False),
        ([[1j, 9j]], False),
        ([[True, False]], False),
        ([1, 9], False),
    ],
    ids=str,
)
def test_what_is_taken_for_token_ids(values, are):
    assert _are_numbers(torch.tensor(values)) == are


@pytest.mark.parametrize(
    ("columns", "said"),
    [(29, "10 11 12 13 14 15 16 17 18 19"), (28, "10 11 12 13 ... 16 17 18 19"), (15, "10 11 ... 18 19"), (14, "10 ... 19"),
     (6, " ... "), (4, " ... "), (2, " ... ")],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_shown_from_both_ends(columns, said):
    assert row_of_numbers(np.arange(10, 20), columns) == said
    assert row_of_numbers(np.array([7, 8]), 2) == " ... "
