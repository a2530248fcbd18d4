"""What is legal in a batch and goes wrong in silence somewhere: named where it is, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from collate_npu import PaddingCollator, Segments, dense
from collate_npu.masks.hazards import hazards, reads

PADDED = {side: Segments.from_lengths([2, 3], side=side) for side in ("left", "right")}
WHOLE = Segments.from_lengths([3, 3])
IDS = torch.arange(1, 7).view(2, 3)
sides = pytest.mark.parametrize("side", PADDED)


def kinds(segments, **keys):
    return set(hazards({"input_ids": IDS, **keys}, segments))


def test_our_own_batches_have_none():
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    for side in PADDED:
        for form in ("auto", "4d", "2d"):
            collate = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask=form)
            assert hazards(collate(rows), Segments.from_lengths([3, 1], side=side)) == {}


@sides
def test_a_4d_mask_alone(side):
    segments = PADDED[side]
    full = dense(segments)
    assert kinds(segments, attention_mask=full) == {"4D alone"}
    assert kinds(None, attention_mask=full) == {"4D alone"}
    assert kinds(segments, attention_mask=full, attention_mask_2d=segments.keep) == set()
    assert kinds(WHOLE, attention_mask=dense(WHOLE)) == set()
    assert kinds(segments, attention_mask=segments.keep) == set()


@sides
@pytest.mark.parametrize("polarity", ["keep", "masked"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_integers_say_what_one_means(side, polarity, dtype):
    segments = PADDED[side]
    full = dense(segments, polarity=polarity).to(dtype)
    batch = {"input_ids": IDS, "attention_mask": full, "attention_mask_2d": segments.keep}
    said = hazards(batch, segments)
    assert set(said) == {"integer polarity"}
    assert f"1 = {'attends' if polarity == 'keep' else 'blocked'}" in said["integer polarity"]
    assert "1 =" not in hazards(batch, None)["integer polarity"]


@pytest.mark.parametrize("polarity", ["keep", "masked"])
def test_one_mask_for_all_rows_is_read_too(polarity):
    segments = Segments.from_lengths([3, 3], width=4)
    assert reads(dense(segments, polarity=polarity)[:1], segments).endswith("attends" if polarity == "keep" else "blocked")


def test_a_float_mask_that_blocks_nothing():
    segments = PADDED["left"]
    beside = {"attention_mask_2d": segments.keep}
    assert kinds(segments, attention_mask=dense(segments).float(), **beside) == {"float without a bias"}
    assert kinds(segments, attention_mask=dense(segments, polarity="bias"), **beside) == set()


def test_a_bias_of_another_dtype():
    segments = PADDED["right"]
    bias = dense(segments, polarity="bias")
    keys = {"attention_mask": bias.double(), "attention_mask_2d": segments.keep}
    assert kinds(segments, **keys) == {"dtype of a bias"}
    embeds = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    assert kinds(segments, **{**keys, "attention_mask": bias}, inputs_embeds=embeds) == {"dtype of a bias"}
    assert kinds(segments, **{**keys, "attention_mask": bias}, inputs_embeds=embeds.float()) == set()


def test_rows_that_are_minus_infinity_throughout():
    segments = PADDED["left"]
    bias = torch.where(dense(segments), 0.0, -torch.inf)
    keys = {"attention_mask": bias, "attention_mask_2d": segments.keep}
    assert kinds(segments, **keys) == {"empty rows of -inf"}
    assert kinds(segments, **{**keys, "attention_mask": bias.clamp(min=torch.finfo(torch.float32).min)}) == set()


@sides
def test_no_mask_where_none_is_wrong(side):
    segments = PADDED[side]
    assert kinds(segments, attention_mask_2d=segments.keep) == ({"no mask"} if side == "left" else set())
    assert kinds(segments, attention_mask_2d=segments.keep, cu_seq_lens_q=torch.tensor([0, 3])) == set()


@sides
def test_labels_on_padding(side):
    segments = PADDED[side]
    keys = {"attention_mask": segments.keep}
    assert kinds(segments, labels=IDS, **keys) == {"labels on padding"}
    assert kinds(segments, labels=IDS.masked_fill(~segments.keep, -100), **keys) == set()
    assert kinds(segments, labels=torch.tensor([1, 0]), **keys) == set()  # targets of a classifier


@sides
def test_a_pad_id_that_real_tokens_have(side):
    segments = PADDED[side]
    real = IDS.masked_fill(segments.keep, 9).masked_fill(~segments.keep, 9)
    assert set(hazards({"input_ids": real, "attention_mask": segments.keep}, segments)) == {"pad id of a real token"}
    apart = IDS.masked_fill(~segments.keep, 0)
    assert hazards({"input_ids": apart, "attention_mask": segments.keep}, segments) == {}
