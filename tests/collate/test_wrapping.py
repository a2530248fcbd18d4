"""wrap_collator: whatever an inner collator emits, the same truth comes out, or an error that says what is missing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import strategies
import torch
from hypothesis import assume, given

from collate_npu import CollateError, Segments, wrap_collator
from collate_npu.errors import AmbiguousMaskError, UnsupportedFormError
from collate_npu.masks.batch_reader import segments_from_batch

pytestmark = pytest.mark.usefixtures("newest_transformers")

EOS = 0
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])


def bare(features, side="right"):
    """A collator as people write them: pads with EOS, and says nothing of it."""
    rows = [[int(token) for token in feature["input_ids"]] for feature in features]
    segments = Segments.from_lengths([len(row) for row in rows], side=side)
    ids = torch.full(segments.shape, EOS)
    ids[segments.keep] = torch.tensor([token for row in rows for token in row])
    return {"input_ids": ids, "labels": ids.masked_fill(~segments.keep, -100)}


def flat(features):
    """Padding free, as transformers' DataCollatorWithFlattening emits it."""
    rows = [list(feature["input_ids"]) for feature in features]
    return {
        "input_ids": torch.tensor([[token for row in rows for token in row]]),
        "labels": torch.tensor([[-100 if i == 0 else token for row in rows for i, token in enumerate(row)]]),
        "position_ids": torch.tensor([[i for row in rows for i in range(len(row))]]),
    }


def samples(*lengths):
    return [{"input_ids": [b * 10 + n + 1 for n in range(length)]} for b, length in enumerate(lengths)]


@given(strategies.features(truth=["none"]), strategies.sides())
def test_lengths_tell_where_no_mask_does(features, side):
    lengths = [len(feature["input_ids"]) for feature in features]
    expected = Segments.from_lengths(lengths, side=side)
    assume(len(features) > 1)
    batch = wrap_collator(partial(bare, side=side), attention_mask="2d")(features)
    assert torch.equal(batch["attention_mask"], expected.keep)


def test_ids_that_were_changed_are_not_aligned():
    def truncating(features):
        return bare([{"input_ids": feature["input_ids"][1:]} for feature in features])

    with pytest.raises(AmbiguousMaskError, match=r"at neither end of their rows\. Let the inner collator emit"):
        wrap_collator(truncating)(samples(3, 5))


# --- packed rows

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
NESTED = [[{"input_ids": row, "attention_mask": [1] * len(row)} for row in ROWS[:2]], [{"input_ids": ROWS[2]}]]


def packing(*keys, width=6, side="right"):
    """Rows of several samples, as a packing sampler hands them over."""

    def padded(rows, fill=0):
        gaps = [[fill] * (width - len(row)) for row in rows]
        return torch.tensor([row + gap if side == "right" else gap + row for row, gap in zip(rows, gaps)])

    def collate(features):
        ids = padded([[token for sample in row for token in sample["input_ids"]] for row in features], EOS)
        numbers = [[n for n, sample in enumerate(row, 1) for _ in sample["input_ids"]] for row in features]
        numbers = padded(numbers)
        batch = {"input_ids": ids, "labels": ids.masked_fill(numbers == 0, -100), "attention_mask": numbers}
        return {key: batch[key] for key in ("input_ids", "labels", *keys)}

    return collate


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("keys", [(), ("attention_mask",)])
def test_samples_of_one_row_come_as_a_list(keys, side):
    batch = wrap_collator(packing(*keys, side=side), attention_mask="2d")(NESTED)
    assert [row[row > 0].tolist() for row in batch["segment_ids"]] == [[1, 1, 1, 2, 2], [1, 1, 1, 1]]
    assert batch["attention_mask"].sum(1).tolist() == [5, 4]


def test_a_mask_that_loses_a_nested_sample_is_refused():
    def losing(features):
        batch = packing("attention_mask")(features)
        lost = batch["input_ids"] == 5
        masked = batch["attention_mask"].masked_fill(lost, 0)
        return batch | {"attention_mask": masked, "labels": batch["labels"].masked_fill(lost, -100)}

    [row] = [b for b, ids in enumerate(packing()(NESTED)["input_ids"].tolist()) if 5 in ids]
    with pytest.raises(CollateError, match=f"1 bad row.\n  row {row}: .*\n.*disagrees with the sam.*\n.*mask from lengths"):
        wrap_collator(losing)(NESTED)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("keys", [(), ("attention_mask",)])
def test_padding_free_makes_a_flat_row_of_packed_rows(keys, side):
    """The remedy of packed rows on recurrent layers, for a collator that pads."""
    inner = packing(*keys, side=side)
    with pytest.raises(UnsupportedFormError, match="use padding_free=True"):
        wrap_collator(inner, consumer="megatron", model=HYBRID)(NESTED)
    batch = wrap_collator(inner, consumer="megatron", model=HYBRID, padding_free=True)(NESTED)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch["labels"].tolist()[0][1:] == [2, 3, -100, 5, -100, 7, 8, 9]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch["attention_mask"] is None


def test_padding_free_flattens_every_key_of_tokens():
    positions = torch.arange(18).view(3, 1, 6).repeat(1, 2, 1)

    def inner(features):
        batch = packing("attention_mask")(features)
        experts = batch["input_ids"][..., None].repeat(1, 1, 2)
        more = {"position_ids": positions, "score": torch.tensor([1.0, 2.0]), "routed_experts": experts}
        return batch | {"loss_scale": batch["input_ids"] / 2} | more

    batch = wrap_collator(inner, padding_free=True)(NESTED)
    assert batch["loss_scale"].tolist() == [[n / 2 for n in range(1, 10)]]
    assert batch["position_ids"].shape == (3, 1, 9)
    assert batch["position_ids"][1, 0].tolist() == [6, 7, 8, 9, 10, 6, 7, 8, 9]
    assert batch["text_position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch["score"].tolist() == [1.0, 2.0]
    assert batch["routed_experts"].tolist() == [[[n, n] for n in range(1, 10)]]


def test_a_flat_row_without_the_padding_of_its_sample():
    """LLaMA-Factory on flash attention drops the padding that its packed sample came with, and the mask."""
    sample = {"input_ids": [1, 2, 3, 4, 5, EOS, EOS], "attention_mask": [1, 1, 1, 2, 2, 0, 0]}
    ids, positions = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 2, 0, 1]])
    batch = wrap_collator(lambda features: {"input_ids": ids, "position_ids": positions})([sample])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    more = {"input_ids": [6, 7, EOS], "attention_mask": [1, 1, 0]}
    batch = wrap_collator(lambda features: {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 6, 7]])})([sample, more])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 7]


def test_samples_are_read_before_the_inner_collator_writes_into_them():
    def writing(features):
        for feature in features:
            feature["input_ids"] = feature["input_ids"] + [EOS] * (4 - len(feature["input_ids"]))
        return {"input_ids": torch.tensor([feature["input_ids"] for feature in features])}

    batch = wrap_collator(writing, attention_mask="2d")([{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5, 6]}])
    assert batch["attention_mask"].sum(1).tolist() == [2, 4]


def test_arguments_reach_the_inner_collator():
    def inner(features, return_tensors=None, *, scale=1):
        assert return_tensors == "pt"
        return bare(features) | {"scale": scale}

    assert wrap_collator(inner)(samples(3, 5), "pt", scale=3)["scale"] == 3


# --- flat rows with padding behind each sample

ALIGNED = {
    "physical offsets alone": lambda batch: {k: batch[k] for k in ("input_ids", "cu_seq_lens_q")},
    "real ones beside": lambda batch: {k: batch[k] for k in ("input_ids", "cu_seqlens", "cu_seqlens_padded")},
    "all of them": lambda batch: batch,
}


@pytest.mark.parametrize("told", ALIGNED)
@pytest.mark.parametrize(
    "rows", [[[1, 2, 3], [4, 5]], [[1], [0]], [[0, 0], [0]], [[1, 2, 3, 4], [5, 0], [0]], [[1, 2, 3]]], ids=str
)
def test_padding_behind_each_sample_is_padding_whatever_its_id(rows, told):
    """Also where the pad token, 0, is a real one: by the ids alone the second sample would stand behind the first."""
    inner = strategies.flat_collator(0, multiple=4)
    features = [{"input_ids": row} for row in rows]
    out = wrap_collator(lambda samples: ALIGNED[told](inner(samples)))(features)
    assert segments_from_batch(out) == segments_from_batch(inner(features))
    if len(rows) > 1 or told != "physical offsets alone":  # there one row's padding is a tail, as anywhere
        assert out["cu_seq_lens_q"].tolist() == [4 * n for n in range(len(rows) + 1)]


@pytest.mark.parametrize(
    ("rows", "ids", "offsets", "found"),
    [
        ([[1], [0]], [1, 0, 0, 0, 0, 0, 0, 0], [0, 2, 4, 6, 8], [1, 0, 2, 0, 0, 0, 0, 0]),  # two more, for equal shapes
        ([[1], [0]], [1, 0, 0, 0], [0, 4], [1, 2, 0, 0]),  # the row is one sequence for the kernel, the samples are two
        ([[1], [5]], [1, 0, 0, 0, 5, 0], [0, 4, 8], None),  # of a longer row
        ([[1], [5]], [1, 0, 0, 0, 6, 0], [0, 4, 6], [1, 1, 1, 1, 2, 2]),  # of other samples
    ],
)
def test_offsets_place_the_samples_that_stand_there(rows, ids, offsets, found):
    wrapped = wrap_collator(lambda _: {"input_ids": torch.tensor([ids]), "cu_seq_lens_q": torch.tensor(offsets)})
    features = [{"input_ids": row} for row in rows]
    if found:
        assert segments_from_batch(wrapped(features)).ids.tolist() == [found]
    else:
        with pytest.raises(CollateError):
            wrapped(features)


@pytest.mark.parametrize(
    ("settings", "labels", "left"),
    [
        ({"pattern": "bidirectional"}, [[-100, 2], [3, 4]], [[-100, 2], [3, 4]]),  # it predicts tokens in place
        ({"labels_shifted": True}, [[1, 2], [3, 4]], [[-100, 2], [3, 4]]),
        ({"label_pad_token_id": -1}, [[-100, 2], [3, 4]], [[-100, -1], [3, 4]]),
        ({}, [1, 2], [1, 2]),  # one a sample
        ({}, [[0.5, 0.5], [0.0, 1.0]], [[0.5, 0.5], [0.0, 1.0]]),
    ],
)
def test_labels_that_stay(settings, labels, left):
    ids = Segments.from_lengths([1, 2], side="left").ids
    inner = {"input_ids": torch.ones_like(ids), "segment_ids": ids, "labels": torch.tensor(labels)}
    assert wrap_collator(lambda _: inner, attention_mask="2d", **settings)([{}])["labels"].tolist() == left
    assert inner["labels"].tolist() == labels


@pytest.mark.parametrize("offsets", [[0, 8], [0, 3, 9], [0, 3, 8], [0, 5, 8]])
def test_a_flat_row_in_another_order_is_told_by_its_own_keys(offsets):
    """Offsets that do not place the samples, and tokens that do not stand in their order: what the row says counts."""

    def turned(features):
        batch = flat(features[::-1])
        return batch | {"cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32)}

    if offsets == [0, 5, 8]:
        assert wrap_collator(turned)(samples(3, 5))["seq_lens"].tolist() == [5, 3]
    else:
        with pytest.raises(CollateError):
            wrap_collator(turned)(samples(3, 5))
    one = wrap_collator(lambda features: flat(features[::-1]) | {"position_ids": torch.arange(8)[None]})
    assert one(samples(3, 5))["seq_lens"].tolist() == [8]
