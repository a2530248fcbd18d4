"""Padded documents: every layout can share them out, nothing real moves or is lost, and the real lengths are carried."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import CollateError, Segments, arrays, unpad
from collate_npu.errors import UnsupportedFormError
from collate_npu.keys import KEYS
from collate_npu.masks import varlen
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.parallel import ContextParallel, cu_seqlens_of, join_shards, pad_documents, split_batch
from collate_npu.parallel.split import place_documents, with_fills

cps = st.builds(
    ContextParallel,
    st.sampled_from([1, 2, 3, 4]),
    st.just(0),
    layout=st.sampled_from(["document_zigzag", "document_contiguous", "contiguous"]),
    tensor_parallel=st.sampled_from([1, 2, 3]),
    block=st.sampled_from([1, 4]),
)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
multiples = st.sampled_from([1, 3, 4, 6])


def flat_batch(lengths: list[int]) -> dict:
    v = varlen(Segments.from_lengths([lengths]))
    T = sum(lengths)
    return {
        "input_ids": torch.arange(1, T + 1)[None],
        "labels": torch.arange(1, T + 1)[None],
        "loss_scale": torch.ones(1, T),
        "token_type_ids": torch.ones(1, T, dtype=torch.int64),
        "position_ids": v.position_ids,
        "attention_mask": None,
        "cu_seq_lens_q": v.cu_seqlens,
        "cu_seq_lens_k": v.cu_seqlens,
        "max_length_q": v.max_length,
        "max_length_k": torch.tensor(v.max_length),
        "seq_idx": v.ids - 1,
        "pixel_values": torch.rand(3, 4),
        "reward": torch.arange(1.0, T + 1)[None],
        "text": "a",
    }


PER_TOKEN = ("input_ids", "labels", "loss_scale", "token_type_ids", "position_ids", "seq_idx", "reward")


@given(cps | st.none(), lengths, multiples)
def test_nothing_real_moves_padding_is_inert_and_lengths_travel(cp, lengths, multiple):
    batch = flat_batch(lengths)
    out, segments = pad_documents(batch, cp, multiple=multiple, pad_token_id=7)
    assert segments.lengths == (tuple(lengths),)
    assert all(torch.equal(unpad(out[key], segments), batch[key][0]) for key in PER_TOKEN)
    assert all(out[key] is batch[key] for key in ("pixel_values", "text", "attention_mask"))

    pads = ~segments.keep
    for key, fill in {"input_ids": 7, "labels": -100, "loss_scale": 0, "token_type_ids": 0, "reward": 0}.items():
        assert (out[key][pads] == fill).all()
    assert torch.equal(out["position_ids"], segments.position_ids)  # goes on counting: a reset would be a new document
    sizes = out["cu_seqlens_padded"].diff()
    assert torch.equal(out["seq_idx"][0].long(), torch.repeat_interleave(torch.arange(len(lengths)), sizes))
    assert segments.num_padding == int(pads.sum())
    assert segments.padding_share == segments.num_padding / pads.numel()
    assert segments_from_batch(out) == segments

    assert torch.equal(out["cu_seqlens"], segments.cu_seqlens)
    assert out["cu_seqlens"].diff().tolist() == lengths
    assert len(sizes) == len(lengths)  # no document is invented for the tail
    assert torch.equal(out["cu_seq_lens_q"], out["cu_seqlens_padded"])
    assert torch.equal(out["cu_seq_lens_k"], out["cu_seqlens_padded"])
    assert out["max_length_q"] == int(out["max_length_k"]) == int(sizes.max())
    assert torch.equal(cu_seqlens_of(out), out["cu_seqlens_padded"])

    shared, whole = (1, 1) if cp is None else (cp.document_multiple, cp.multiple)
    each = math.lcm(shared, multiple)
    assert (sizes % each == 0).all()
    assert segments.shape[1] % whole == 0
    least = sum(-(-n // each) * each for n in lengths)
    assert least <= segments.shape[1] < least + math.lcm(each, whole)  # no more than it takes


@given(cps, lengths)
def test_padded_documents_split_and_join_and_padding_twice_is_padding_once(cp, lengths):
    out, segments = pad_documents(flat_batch(lengths), cp)
    shards = [split_batch(out, cp.with_rank(rank), segments=segments) for rank in range(cp.size)]
    whole = join_shards([shard["input_ids"] for shard in shards], cp, cu_seqlens=cu_seqlens_of(shards[0]))
    assert torch.equal(whole, out["input_ids"])
    twice, again = pad_documents(out, cp, segments=segments)
    assert again == segments
    assert all(torch.equal(out[key], twice[key]) for key in out if isinstance(out[key], torch.Tensor))


def test_an_alignment_tail_is_dropped_where_the_segments_tell_it():
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 0, 0, 0]]), "cu_seq_lens_q": torch.tensor([0, 3, 5, 8])}
    cp = ContextParallel(2, 0, layout="document_zigzag")
    out, segments = pad_documents(batch, cp, segments=Segments.from_lengths([[3, 2]], width=8))
    assert out["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    assert out["cu_seqlens_padded"].tolist() == [0, 4, 8]
    assert segments.lengths == ((3, 2),)


@pytest.mark.parametrize(
    ("ids", "offsets", "real"),
    [([1, 2, 3, 0, 0, 4, 5, 6], [0, 3, 5, 8], [[1, 1, 1, 0, 0, 2, 2, 2]]), ([1, 2, 3, 4, 5, 6], [0, 0, 3, 3, 6, 6], None)],
)
def test_documents_without_a_token_are_left_out(ids, offsets, real):
    batch = {"input_ids": torch.tensor([ids]), "cu_seqlens": torch.tensor(offsets)}
    out, _ = pad_documents(batch, multiple=4, segments=real and Segments.from_ids(real))
    assert out["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 6, 0]]
    assert [out[key].tolist() for key in ("cu_seqlens", "cu_seqlens_padded")] == [[0, 3, 6], [0, 4, 8]]


def test_mrope_positions_and_a_2d_mask():
    batch = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "position_ids": torch.tensor([[[0, 1, 2]], [[5, 5, 6]]]),
        "attention_mask_2d": torch.ones(1, 3, dtype=torch.bool),
        "attention_mask": torch.ones(1, 3, dtype=torch.int64),
        "labels": torch.ones(1, 3, 2, dtype=torch.long),
        "cu_seq_lens_q": torch.tensor([0, 3]),
    }
    out, _ = pad_documents(batch, ContextParallel(2, 0, layout="document_zigzag"))
    assert out["position_ids"].tolist() == [[[0, 1, 2, 3]], [[5, 5, 6, 7]]]
    assert out["attention_mask_2d"].tolist() == [[True, True, True, False]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert out["labels"].tolist() == [[[1, 1]] * 3 + [[-100, -100]]]


OFFSETS = {"cu_seqlens": torch.tensor([0, 8])}


@pytest.mark.parametrize(
    ("changed", "segments", "error", "words"),
    [
        ({}, None, CollateError, "Nothing says where one sequence"),
        *(
            (OFFSETS | {"attention_mask": torch.ones(shape)}, None, UnsupportedFormError, "dense mask is not padded")
            for shape in ((1, 1, 8, 8), (1, 8, 8))
        ),
        (OFFSETS, Segments.from_lengths([4], width=8, side="left"), CollateError, "A sequence begins at an offset"),
        (OFFSETS, Segments.from_lengths([4, 4]), CollateError, "segments: got"),
    ],
)
def test_what_cannot_be_padded(changed, segments, error, words):
    with pytest.raises(error, match=words):
        pad_documents({"input_ids": torch.zeros(1, 8)} | changed, ContextParallel(2, 0), segments=segments)


def test_documents_are_moved_to_the_places_they_are_given():
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    out, placed = place_documents(batch, Segments.from_lengths([[3, 2]]), [4, 2, 2], keys=with_fills(KEYS, {"pad": 0}))
    assert out["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    assert placed == Segments.from_ids([[1, 1, 1, 0, 2, 2, 0, 0]])


def test_a_row_without_tokens_is_padding_alone():
    batch = {"input_ids": torch.zeros(1, 0, dtype=torch.int64), "loss_scale": torch.zeros(1, 0)}
    out, placed = place_documents(batch, Segments.from_lengths([[]]), [4, 4], keys=with_fills(KEYS, {"pad": 7}))
    assert out["input_ids"].tolist() == [[7] * 8]
    assert out["loss_scale"].tolist() == [[0.0] * 8]
    assert placed.num_padding == 8


def test_labels_of_whole_samples_stay():
    for labels in (torch.tensor([1, 0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.rand(1, 5)):
        batch = {"input_ids": torch.arange(5)[None], "labels": labels, "cu_seqlens": torch.tensor([0, 3, 5])}
        assert pad_documents(batch, multiple=4)[0]["labels"] is labels


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("multiple", n) for n in (0, -1, 1.5, True)), *(("pad_token_id", n) for n in (1.5, True, -(1 << 63) - 1))],
)
def test_a_multiple_and_a_pad_id_are_whole_numbers(name, value):
    with pytest.raises(CollateError, match=name):
        pad_documents(flat_batch([3]), **{name: value})


def test_padding_may_hold_a_number_below_0():
    assert pad_documents(flat_batch([3]), multiple=4, pad_token_id=-1)[0]["input_ids"].tolist() == [[1, 2, 3, -1]]


def test_more_places_than_a_batch_can_have_are_refused(monkeypatch):
    monkeypatch.setattr(arrays, "MOST_PLACES", 128)
    assert pad_documents(flat_batch([3, 2]), multiple=64)[1].shape == (1, 128)
    with pytest.raises(CollateError, match="multiple: got 130 places"):
        pad_documents(flat_batch([3, 2]), multiple=65)
