"""Emission: modes of the mask, offsets that always come together, labels that nobody should learn from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import strategies
import torch
from hypothesis import given

from collate_npu import CollateError, Segments, UnsupportedFormError, dense, none_is_exact
from collate_npu.collate.wire import check_mode, finish_batch, ignore_labels
from collate_npu.keys import KEYS
from collate_npu.masks.forms import offsets_of

MODES = ("auto", "none", "4d", "2d", "omit")


def collator(**settings):
    defaults = {
        "attention_mask": "auto",
        "consumer": None,
        "pattern": "causal",
        "label_pad_token_id": -100,
        "labels_shifted": False,
        "max_mask_bytes": 1 << 30,
        "keys": KEYS,
        "_adapter": None,
    }
    return SimpleNamespace(**{**defaults, **settings})


@given(strategies.attentions())
def test_modes_without_a_consumer(attention):
    segments, pattern = attention
    exact = none_is_exact(segments, pattern)
    masked = dense(segments, polarity="masked", pattern=pattern)
    for mode in MODES:
        batch = {"input_ids": segments.ids}
        if mode == "none" and not exact:
            with pytest.raises(UnsupportedFormError, match="attention_mask='none' was asked for"):
                finish_batch(collator(attention_mask=mode, pattern=pattern), batch, segments, padding_free=False)
            continue
        out = finish_batch(collator(attention_mask=mode, pattern=pattern), batch, segments, padding_free=False)
        assert torch.equal(out["attention_mask_2d"], segments.keep)
        parted = ["segment_ids"] if segments.packed or segments.empty_rows else []
        assert list(out) == ["input_ids", *(["attention_mask"] if mode != "omit" else []), "attention_mask_2d", *parted]
        assert not parted or torch.equal(out["segment_ids"], segments.ids)
        if mode == "2d":
            assert torch.equal(out["attention_mask"], segments.keep)
        elif mode == "4d" or (mode == "auto" and not exact):
            assert torch.equal(out["attention_mask"], masked)
        elif mode != "omit":
            assert out["attention_mask"] is None


@pytest.mark.parametrize("mode", MODES)
def test_padding_free_rows_carry_no_mask(mode):
    segments = Segments.from_lengths([[3, 5]])
    out = finish_batch(collator(attention_mask=mode), {"attention_mask_2d": segments.keep}, segments, padding_free=True)
    assert out == ({} if mode == "omit" else {"attention_mask": None})


def test_the_byte_limit_reaches_the_mask():
    with pytest.raises(UnsupportedFormError, match="max_mask_bytes"):
        finish_batch(collator(attention_mask="4d", max_mask_bytes=8), {}, Segments.from_lengths([3]), padding_free=False)


def test_offsets_come_together():
    out = offsets_of(Segments.from_lengths([[3, 2]], 8))
    assert set(out) == {
        "position_ids",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "seq_lens",
    }
    assert out["cu_seq_lens_q"].tolist() == out["cu_seq_lens_k"].tolist() == [0, 3, 5, 8]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert out["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert out["seq_lens"].tolist() == [3, 2]
    assert out["max_length_q"] == out["max_length_k"] == 3


@given(strategies.segments())
def test_the_label_after_padding_or_a_neighbour_is_ignored(segments):
    labels = torch.arange(segments.ids.numel()).view(segments.shape)
    out = ignore_labels(collator(), {"labels": labels}, segments)["labels"]
    for b, row in enumerate(segments.ids.tolist()):
        for s, label in enumerate(row):
            follows = s == 0 or row[s - 1] == label
            assert out[b, s] == (labels[b, s] if label and follows else -100)


def test_labels_of_bidirectional_attention_stay():
    """It predicts tokens in place, the first one too."""
    batch = {"labels": torch.tensor([[1, 2], [3, 4]])}
    segments = Segments.from_lengths([1, 2], side="left")
    assert ignore_labels(collator(pattern="bidirectional"), batch, segments)["labels"].tolist() == [[1, 2], [3, 4]]


def test_labels_that_stay():
    segments = Segments.from_lengths([1, 2], side="left")
    labels = torch.tensor([[1, 2], [3, 4]])
    assert ignore_labels(collator(labels_shifted=True), {"labels": labels}, segments)["labels"] is labels
    per_sample = torch.tensor([1, 2])
    assert ignore_labels(collator(), {"labels": per_sample}, segments)["labels"] is per_sample
    assert ignore_labels(collator(), {}, segments) == {}
    assert ignore_labels(collator(label_pad_token_id=-1), {"labels": labels}, segments)["labels"].tolist() == [
        [-1, -1],
        [3, 4],
    ]
    assert labels.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("mode", MODES)
def test_settings_that_contradict_each_other(mode):
    check_mode(mode, None, "pt")
    if mode in ("auto", "omit"):
        check_mode(mode, "megatron", "pt")
    else:
        with pytest.raises(CollateError, match="decides the form of its mask"):
            check_mode(mode, "megatron", "pt")


@pytest.mark.parametrize(("mode", "tensors"), [("3d", "pt"), (None, "pt"), ("auto", "np"), ("auto", "tf")])
def test_settings_nobody_knows(mode, tensors):
    with pytest.raises(CollateError, match=r"attention_mask is 'auto'|Batches are torch tensors"):
        check_mode(mode, None, tensors)
