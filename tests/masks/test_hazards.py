"""What is legal in a batch and goes wrong in silence somewhere: named where it is, and nowhere else."""

import pytest
import torch

from collate_npu import PaddingCollator, Segments
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import find_hazards, reads
from collate_npu.masks.sources import Sources

LEFT, RIGHT = Segments.from_lengths([2, 3], side="left"), Segments.from_lengths([2, 3])
WHOLE = Segments.from_lengths([3, 3])
IDS = torch.arange(1, 7).view(2, 3)


def test_our_own_batches_have_none():
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    for side in ("left", "right"):
        for form in ("auto", "4d", "2d"):
            collate = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask=form)
            assert find_hazards(Sources(collate(rows)), Segments.from_lengths([3, 1], side=side)) == {}


KEEP = {"attention_mask_2d": LEFT.keep}
BIAS = dense(LEFT, polarity="bias")
INFINITE = torch.where(dense(LEFT), 0.0, -torch.inf)
EMBEDS = torch.zeros(2, 3, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("segments", "keys", "expected"),
    [
        (LEFT, {"attention_mask": dense(LEFT)}, "4D alone"),
        (None, {"attention_mask": dense(LEFT)}, "4D alone"),
        (LEFT, {"attention_mask": dense(LEFT)[:, 0]}, "4D alone"),
        (LEFT, {"attention_mask": dense(LEFT), **KEEP}, ""),
        (WHOLE, {"attention_mask": dense(WHOLE)}, ""),
        (LEFT, {"attention_mask": LEFT.keep}, ""),
        (LEFT, {"attention_mask": dense(LEFT).float(), **KEEP}, "float without a bias"),
        (LEFT, {"attention_mask": BIAS, **KEEP}, ""),
        (LEFT, {"attention_mask": BIAS.double(), **KEEP}, "dtype of a bias"),
        (LEFT, {"attention_mask": BIAS, "inputs_embeds": EMBEDS, **KEEP}, "dtype of a bias"),
        (LEFT, {"attention_mask": BIAS, "inputs_embeds": EMBEDS.float(), **KEEP}, ""),
        (LEFT, {"attention_mask": INFINITE, **KEEP}, "empty rows of -inf"),
        (LEFT, {"attention_mask": INFINITE.clamp(min=torch.finfo(torch.float32).min), **KEEP}, ""),
        (RIGHT, {"attention_mask": torch.where(dense(RIGHT), 0.0, -torch.inf), "attention_mask_2d": RIGHT.keep}, ""),
        (LEFT, KEEP, "no mask"),
        (RIGHT, {"attention_mask_2d": RIGHT.keep}, ""),
        (LEFT, {"cu_seq_lens_q": torch.tensor([0, 3]), **KEEP}, ""),
        (LEFT, {"labels": IDS, "attention_mask": LEFT.keep}, "labels on padding"),
        (LEFT, {"labels": IDS.masked_fill(~LEFT.keep, 0), "attention_mask": LEFT.keep}, "labels on padding"),
        (LEFT, {"labels": IDS.masked_fill(~LEFT.keep, -100), "attention_mask": LEFT.keep}, ""),
        (LEFT, {"labels": torch.tensor([1, 0]), "attention_mask": LEFT.keep}, ""),  # targets of a classifier
        (LEFT, {"input_ids": torch.full((2, 3), 9), "attention_mask": LEFT.keep}, "pad id of a real token"),
        (LEFT, {"input_ids": IDS.masked_fill(~LEFT.keep, 0), "attention_mask": LEFT.keep}, ""),
    ],
)
def test_what_goes_wrong_is_named_and_nothing_else(segments, keys, expected):
    assert "".join(find_hazards(Sources({"input_ids": IDS, **keys}), segments)) == expected


def test_the_rows_of_labels_on_padding_are_listed():
    assert (
        "1 labels stand on padding (rows [0])"
        in find_hazards(Sources({"input_ids": IDS, "labels": IDS}), LEFT)["labels on padding"]
    )


@pytest.mark.parametrize("segments", [LEFT, RIGHT])
@pytest.mark.parametrize("polarity", ["keep", "masked"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_integers_say_what_one_means(segments, polarity, dtype):
    full = dense(segments, polarity=polarity).to(dtype)
    batch = Sources({"input_ids": IDS, "attention_mask": full, "attention_mask_2d": segments.keep})
    said = find_hazards(batch, segments)
    assert set(said) == {"integer polarity"}
    assert f"1 = {'attends' if polarity == 'keep' else 'blocked'}" in said["integer polarity"]
    assert "1 =" not in find_hazards(batch, None)["integer polarity"]
    wide = Segments.from_lengths([3, 3], width=4)  # one mask for all rows is read too
    assert reads(dense(wide, polarity=polarity)[:1], wide).endswith("attends" if polarity == "keep" else "blocked")


def test_what_a_mask_means_is_read_at_a_real_token():
    """Of the first row that has one; a mask of three dimensions, of one row for all, or without rows is read alike."""
    late = Segments([[0, 0, 0], [1, 1, 0]])
    full = dense(late)
    for written in (full, full[:, 0], full[1:], full[1, 0], full.repeat(1, 3, 1, 1)):
        assert (reads(written, late), reads(~written, late)) == ("True = attends", "True = blocked")
    assert reads(dense(Segments.from_lengths([2], 3)), Segments.from_lengths([2], 3)) == "True = attends"
    for fill, told in ((-9984.0, "additive"), (-9983.0, "")):
        assert reads(torch.where(full, 0.0, fill), late) == told
