"""Emission: modes of the mask, offsets that always come together, labels that nobody should learn from."""

from __future__ import annotations

import pytest
import strategies
import torch
from hypothesis import given

from collate_npu import CollateError, Segments, wrap_collator
from collate_npu.collate import Layout
from collate_npu.collate.collators import Emitter, add_offsets
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks import dense, none_is_exact
from collate_npu.masks.forms import offsets_of

MODES = ("auto", "none", "4d", "2d", "omit")


def collator(**settings):
    made = Emitter(**settings)
    made._settle(None)
    return made


def finished(batch, segments, padding_free=False, **settings):
    return collator(**settings)._finished(batch, segments, padding_free=padding_free)


@given(strategies.attentions())
def test_modes_without_a_consumer(attention):
    segments, pattern = attention
    exact = none_is_exact(segments, pattern)
    masked = dense(segments, polarity="masked", pattern=pattern)
    for mode in MODES:
        batch = {"input_ids": segments.ids, "segment_ids": segments.ids}  # which come last, where they are needed
        if mode == "none" and not exact:
            with pytest.raises(UnsupportedFormError, match="attention_mask='none' was asked for"):
                finished(batch, segments, attention_mask=mode, pattern=pattern)
            continue
        out = finished(batch, segments, attention_mask=mode, pattern=pattern)
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


@pytest.mark.parametrize("mode", ["auto", "none", "omit"])
def test_padding_free_rows_carry_no_mask(mode):
    segments = Segments.from_lengths([[3, 5]])
    out = finished({"attention_mask_2d": segments.keep}, segments, padding_free=True, attention_mask=mode)
    assert out == ({} if mode == "omit" else {"attention_mask": None})


def test_the_byte_limit_reaches_the_mask():
    with pytest.raises(UnsupportedFormError, match="max_mask_bytes"):
        finished({}, Segments.from_lengths([3]), attention_mask="4d", layout=Layout(max_mask_bytes=8))


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


@pytest.mark.parametrize(
    ("told", "longest"), [({}, 4), ({"max_length_q": 8, "max_length_k": None}, 8), ({"max_seqlen": torch.tensor(8)}, 8)]
)
def test_physical_offsets_that_fit_stay_and_their_longest_does(told, longest):
    batch = {"cu_seqlens_padded": torch.tensor([0, 4, 8]), **told}
    out = add_offsets(batch, Segments.from_ids([[1, 1, 1, 0, 2, 2, 0, 0]]))
    assert out["cu_seq_lens_q"].tolist() == [0, 4, 8]
    assert out["max_length_q"] == out["max_length_k"] == longest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("told", [{"consumer": "verl"}, {"model_type": "qwen3_next"}])
def test_the_consumer_and_a_model_decide_the_form_of_the_mask(mode, told):
    """Beside a model "4d" was taken, and another form sent."""
    pytest.importorskip("transformers")
    if mode in ("auto", "omit"):
        wrap_collator(lambda rows: {}, attention_mask=mode, **told)
    else:
        with pytest.raises(CollateError, match="decides the form of its mask"):
            wrap_collator(lambda rows: {}, attention_mask=mode, **told)


@pytest.mark.parametrize("mode", ["3d", None])
def test_modes_nobody_knows(mode):
    with pytest.raises(CollateError, match="attention_mask is 'auto'"):
        collator(attention_mask=mode)
