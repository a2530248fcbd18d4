"""Split: each key by its rule, nothing guessed, and the whole back from the shards (with other ranks: tests/distributed)."""

from __future__ import annotations

import pytest
import torch

from collate_npu import CollateError, Segments
from collate_npu.errors import AmbiguousMaskError, UnsupportedFormError
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel, gather_sequence, pad_documents, query_rows, split_batch

# --- dense masks ----------------------------------------------------------------------------------------------------------


def test_masks_of_other_shapes():
    S = 8
    cp = ContextParallel(2, 0)
    square = torch.ones(S, S, dtype=torch.bool).tril()
    rows = query_rows(S, cp)
    for whole in (square, square.expand(3, S, S), square.expand(3, 2, S, S), square[None, None]):
        shard = split_batch({"input_ids": torch.zeros(3, S), "attention_mask": whole}, cp)["attention_mask"]
        assert torch.equal(shard, whole[..., rows, :])
    keys = torch.ones(3, 1, 1, S)
    assert split_batch({"input_ids": torch.zeros(3, S), "attention_mask": keys}, cp)["attention_mask"] is keys


def test_a_mapping_of_masks_is_split_entry_by_entry():
    segments = Segments.from_lengths([5, 8], width=8)
    masks = {"full_attention": dense(segments), "linear_attention": segments.keep, "sliding_attention": None}
    shard = split_batch({"input_ids": torch.zeros(2, 8), "attention_mask": masks}, ContextParallel(2, 1))["attention_mask"]
    assert shard["full_attention"].shape == (2, 1, 4, 8)
    assert torch.equal(shard["linear_attention"], segments.keep[:, 2:6])
    assert shard["sliding_attention"] is None


IDS, SQUARE = torch.zeros(2, 8), torch.zeros(8, 8)


@pytest.mark.parametrize(
    ("batch", "segments", "error", "words"),
    [
        ({"attention_mask": torch.ones(2, 1, 4, 8)}, None, CollateError, "8 query rows and 8 keys"),  # another's rows
        ({"attention_mask": object()}, None, UnsupportedFormError, "create_cp_block_mask"),
        ({"input_ids": SQUARE, "attention_mask": SQUARE}, None, AmbiguousMaskError, "as many rows as tokens"),
        *(({"x": torch.zeros(n)}, None, CollateError, "per token if its shape begins") for n in ((8, 2), (3, 2, 8), (8,))),
        ({"labels": torch.zeros(4)}, None, CollateError, "labels"),
        *(({"position_ids": torch.arange(n)}, None, CollateError, "position_ids") for n in (7, 8)),
        ({"loss_scale": IDS.to_sparse()}, None, CollateError, "loss_scale: got sparse_coo"),
        ({}, Segments.from_lengths([4, 4]), CollateError, r"segments: got \[2, 4\]"),
        ({"input_ids": None, "x": IDS}, None, CollateError, "The width is read from"),
    ],
)
def test_what_does_not_fit_is_refused(batch, segments, error, words):
    with pytest.raises(error, match=words):
        split_batch({"input_ids": IDS} | batch, ContextParallel(2, 0), segments=segments)


def test_what_fits_by_its_shape():
    cp, labels = ContextParallel(2, 0), torch.tensor([0, 1])
    assert split_batch({"input_ids": IDS, "x": torch.zeros(2, 8, 3)}, cp)["x"].shape == (2, 4, 3)
    assert split_batch({"input_ids": IDS, "x": torch.zeros(2, 5)}, cp)["x"].shape == (2, 5)
    assert split_batch({"input_ids": IDS, "labels": labels}, cp)["labels"] is labels
    assert split_batch({"x": IDS}, cp, segments=Segments.from_lengths([4, 8]))["x"].shape == (2, 4)
    assert split_batch({"input_ids": SQUARE, "attention_mask": SQUARE.long()}, cp)["attention_mask"].shape == (8, 4)
    assert split_batch({"input_ids": IDS, "attention_mask": IDS}, cp)["attention_mask"].shape == (2, 4)
    assert split_batch({"input_ids": IDS[:1], "position_ids": torch.arange(8)}, cp)["position_ids"].tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize(("key", "shape"), [("inputs_embeds", (2, 8, 3)), ("position_ids", (3, 2, 8)), ("labels", (2, 8))])
def test_rows_and_width_are_read_off_any_key_of_tokens(key, shape):
    segments = Segments.from_lengths([4, 8])
    shard = split_batch({key: torch.zeros(shape)}, ContextParallel(2, 0), segments=segments)
    assert shard[key].shape == tuple(4 if n == 8 else n for n in shape)


def test_a_packed_row_is_not_cut_across_documents():
    batch = {"input_ids": torch.zeros(1, 16), "cu_seq_lens_q": torch.tensor([0, 8, 16])}
    cp = ContextParallel(2, 0)
    with pytest.raises(UnsupportedFormError, match="for_documents"):
        split_batch(batch, cp)
    assert split_batch(batch, cp.for_documents())["input_ids"].shape == (1, 8)
    for whole in (ContextParallel(2, 0, layout="contiguous"), ContextParallel(1, 0)):
        assert split_batch(batch, whole)["input_ids"].shape == (1, 16 // whole.size)


def test_documents_come_in_one_flat_row():
    cp = ContextParallel(2, 0, layout="document_zigzag")
    with pytest.raises(UnsupportedFormError, match="one flat row"):
        split_batch({"input_ids": torch.zeros(2, 8)}, cp)
    segments = Segments.from_lengths([[4, 4]])
    assert split_batch({"input_ids": torch.zeros(1, 8)}, cp, segments=segments)["input_ids"].shape == (1, 4)
    with pytest.raises(CollateError, match="needs their offsets"):
        split_batch({"input_ids": torch.zeros(1, 8)}, cp, segments=Segments.from_lengths([[3, 4]], width=8))


# --- padded documents


def test_mrope_positions_and_a_2d_mask():
    batch = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "position_ids": torch.tensor([[[0, 1, 2]], [[5, 5, 6]]]),
        "attention_mask_2d": torch.ones(1, 3, dtype=torch.bool),
        "attention_mask": torch.ones(1, 3, dtype=torch.int64),
        "labels": torch.ones(1, 3, 2, dtype=torch.long),
        "reward": torch.tensor([[1.0, 2.0, 3.0]]),
        "pixel_values": torch.rand(3, 4),
        "text": "a",
        "max_length_k": torch.tensor(3),
        "cu_seq_lens_q": torch.tensor([0, 3]),
    }
    out, _ = pad_documents(batch, ContextParallel(2, 0, layout="document_zigzag"))
    assert out["position_ids"].tolist() == [[[0, 1, 2, 3]], [[5, 5, 6, 7]]]
    assert out["attention_mask_2d"].tolist() == [[True, True, True, False]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert out["labels"].tolist() == [[[1, 1]] * 3 + [[-100, -100]]]
    assert out["reward"].tolist() == [[1, 2, 3, 0]]
    assert (out["max_length_k"], out["pixel_values"] is batch["pixel_values"], out["text"]) == (torch.tensor(4), True, "a")


OFFSETS = {"cu_seqlens": torch.tensor([0, 8])}


@pytest.mark.parametrize(
    ("changed", "segments", "error", "words"),
    [
        ({}, None, CollateError, "Nothing says where one sequence"),
        *(
            (OFFSETS | {"attention_mask": torch.ones(shape)}, None, UnsupportedFormError, "cannot pad a dense mask")
            for shape in ((1, 1, 8, 8), (1, 8, 8))
        ),
        (OFFSETS, Segments.from_lengths([4], width=8, side="left"), CollateError, "Each sequence begins at an offset"),
        (OFFSETS, Segments.from_lengths([4, 4]), CollateError, "segments: got"),
    ],
)
def test_what_cannot_be_padded(changed, segments, error, words):
    with pytest.raises(error, match=words):
        pad_documents({"input_ids": torch.zeros(1, 8)} | changed, ContextParallel(2, 0), segments=segments)


def test_labels_of_whole_samples_stay():
    for labels in (torch.tensor([1, 0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.rand(1, 5)):
        batch = {"input_ids": torch.arange(5)[None], "labels": labels, "cu_seqlens": torch.tensor([0, 3, 5])}
        assert pad_documents(batch, multiple=4)[0]["labels"] is labels


# --- gather


def test_a_jagged_output_comes_back_jagged_without_padding():
    cp, values = ContextParallel(1, 0, layout="document_zigzag"), torch.arange(12.0).view(6, 2)
    output = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6]))
    assert torch.equal(gather_sequence(output, cp).values(), values)
    real = gather_sequence(output, cp, Segments.from_ids([[1, 1, 1, 0, 2, 0]]))
    assert torch.equal(real.values(), values[[0, 1, 2, 4]])
    assert real.offsets().tolist() == [0, 3, 4]
    with pytest.raises(CollateError, match=r"unsplit rows, \[1, 6\]"):
        gather_sequence(output, cp, Segments.from_lengths([3, 3]))


@pytest.mark.parametrize(
    ("shape", "segments", "loss", "words"),
    [
        ((2, 4), None, "same", "Gathering needs the process group"),
        ((2, 8), Segments.from_lengths([8, 8]), "same", r"unsplit rows, \[2, 16\]"),
        ((3, 4), Segments.from_lengths([8, 8]), "same", r"unsplit rows, \[3, 8\]"),
        ((2, 4), None, "mean", "'same'"),
        ((2, 3), None, "same", "multiple of 4"),
    ],
)
def test_what_is_wrong_is_said_before_anyone_waits(shape, segments, loss, words):
    with pytest.raises(CollateError, match=words):
        gather_sequence(torch.zeros(shape), ContextParallel(2, 0), segments, loss=loss)
