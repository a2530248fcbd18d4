"""Padded documents: every layout can share them out, nothing real moves or is lost, and the real lengths are carried."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collate_npu import CollateError, Segments, UnsupportedFormError, last_token, per_sequence, unpad, varlen
from collate_npu.keys import KEYS
from collate_npu.masks.find import segments_from_batch
from collate_npu.parallel import ContextParallel, cu_seqlens_of, join_shards, pad_documents, split_batch
from collate_npu.parallel.documents import place_documents, with_fills

cps = st.builds(
    ContextParallel,
    st.sampled_from([1, 2, 3, 4]),
    st.just(0),
    layout=st.sampled_from(["document_zigzag", "document_contiguous", "contiguous"]),
    tensor_parallel=st.sampled_from([1, 2, 3]),
    block=st.sampled_from([1, 4]),
)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def flat_batch(lengths: list[int]) -> dict:
    v = varlen(Segments.from_lengths([lengths]))
    T = sum(lengths)
    return {
        "input_ids": torch.arange(1, T + 1)[None],
        "labels": torch.arange(1, T + 1)[None],
        "loss_scale": torch.ones(1, T),
        "position_ids": v.position_ids,
        "attention_mask": None,
        "cu_seq_lens_q": v.cu_seqlens,
        "cu_seq_lens_k": v.cu_seqlens,
        "max_length_q": v.max_length,
        "max_length_k": torch.tensor(v.max_length),
        "seq_idx": v.seq_idx,
        "pixel_values": torch.rand(3, 4),
        "reward": torch.arange(1.0, T + 1)[None],
        "text": "a",
    }


@given(cps, lengths)
def test_nothing_real_moves_in_its_document(cp, lengths):
    batch = flat_batch(lengths)
    out, segments = pad_documents(batch, cp, pad_token_id=7)
    assert segments.lengths == (tuple(lengths),)
    for key in ("input_ids", "labels", "loss_scale", "position_ids", "seq_idx", "reward"):
        assert torch.equal(unpad(out[key], segments), batch[key][0]), key
    assert all(out[key] is batch[key] for key in ("pixel_values", "text", "attention_mask"))


@given(cps, lengths)
def test_every_document_and_the_row_keep_to_their_multiples(cp, lengths):
    out, segments = pad_documents(flat_batch(lengths), cp)
    sizes = out["cu_seqlens_padded"].diff()
    assert (sizes % cp.document_multiple == 0).all()
    assert out["input_ids"].shape[1] == out["cu_seqlens_padded"][-1] == segments.shape[1]
    assert segments.shape[1] % cp.multiple == 0
    assert segments.shape[1] < sum(-(-n // cp.document_multiple) * cp.document_multiple for n in lengths) + cp.multiple


@given(cps, lengths)
def test_real_lengths_travel_beside_padded_ones(cp, lengths):
    out, segments = pad_documents(flat_batch(lengths), cp)
    assert torch.equal(out["cu_seqlens"], segments.cu_seqlens)
    assert out["cu_seqlens"].diff().tolist() == lengths
    assert len(out["cu_seqlens_padded"]) == len(lengths) + 1  # no document is invented for the tail
    assert (out["cu_seqlens_padded"].diff() >= out["cu_seqlens"].diff()).all()
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert torch.equal(out[key], out["cu_seqlens_padded"])
    assert out["max_length_q"] == int(out["max_length_k"]) == int(out["cu_seqlens_padded"].diff().max())
    assert torch.equal(cu_seqlens_of(out), out["cu_seqlens_padded"])


@given(cps, lengths)
def test_padding_is_inert(cp, lengths):
    out, segments = pad_documents(flat_batch(lengths), cp, pad_token_id=7)
    pads = ~segments.keep
    assert (out["input_ids"][pads] == 7).all()
    assert (out["labels"][pads] == -100).all()
    assert (out["loss_scale"][pads] == 0).all()
    assert (out["reward"][pads] == 0).all()
    assert torch.equal(out["position_ids"], segments.position_ids)  # goes on counting: a reset would be a new document
    owner = torch.repeat_interleave(torch.arange(len(lengths)), out["cu_seqlens_padded"].diff())
    assert torch.equal(out["seq_idx"][0].long(), owner)


@given(cps, lengths)
def test_padded_documents_split_and_join(cp, lengths):
    out, segments = pad_documents(flat_batch(lengths), cp)
    shards = [split_batch(out, cp.with_rank(rank), segments=segments) for rank in range(cp.size)]
    whole = join_shards([shard["input_ids"] for shard in shards], cp, cu_seqlens=cu_seqlens_of(shards[0]))
    assert torch.equal(whole, out["input_ids"])
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    assert last_token(whole, segments).tolist() == ends
    assert [len(part) for part in per_sequence(whole, segments)] == lengths


@given(cps, lengths)
def test_padding_twice_is_padding_once(cp, lengths):
    once, segments = pad_documents(flat_batch(lengths), cp)
    twice, again = pad_documents(once, cp, segments=segments)
    assert again == segments
    assert all(torch.equal(once[key], twice[key]) for key in once if isinstance(once[key], torch.Tensor))


def test_an_alignment_tail_is_dropped_where_the_segments_tell_it():
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 0, 0, 0]]), "cu_seq_lens_q": torch.tensor([0, 3, 5, 8])}
    cp = ContextParallel(2, 0, layout="document_zigzag")
    out, segments = pad_documents(batch, cp, segments=Segments.from_lengths([[3, 2]], width=8))
    assert out["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 0, 0]]
    assert out["cu_seqlens_padded"].tolist() == [0, 4, 8]
    assert segments.lengths == ((3, 2),)


def test_mrope_positions_and_a_2d_mask():
    batch = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "position_ids": torch.tensor([[[0, 1, 2]], [[5, 5, 6]]]),
        "attention_mask_2d": torch.ones(1, 3, dtype=torch.bool),
        "cu_seq_lens_q": torch.tensor([0, 3]),
    }
    out, _ = pad_documents(batch, ContextParallel(2, 0, layout="document_zigzag"))
    assert out["position_ids"].tolist() == [[[0, 1, 2, 3]], [[5, 5, 6, 7]]]
    assert out["attention_mask_2d"].tolist() == [[True, True, True, False]]


def test_what_cannot_be_padded():
    cp = ContextParallel(2, 0, layout="document_zigzag")
    ids = torch.zeros(1, 8, dtype=torch.int64)
    offsets = torch.tensor([0, 8])
    with pytest.raises(CollateError, match="told apart"):
        pad_documents({"input_ids": ids}, cp)
    with pytest.raises(UnsupportedFormError, match="dense mask is not padded"):
        pad_documents({"input_ids": ids, "attention_mask": torch.ones(1, 1, 8, 8), "cu_seqlens": offsets}, cp)
    with pytest.raises(CollateError, match="padding stands at its end"):
        pad_documents(
            {"input_ids": ids, "cu_seqlens": offsets}, cp, segments=Segments.from_lengths([4], width=8, side="left")
        )
    with pytest.raises(CollateError, match="one flat row of 8"):
        pad_documents({"input_ids": ids, "cu_seqlens": offsets}, cp, segments=Segments.from_lengths([4, 4]))


# --- alignment to a chunk

multiples = st.sampled_from([1, 3, 4, 6])


@given(lengths, multiples)
def test_alignment_without_ranks(lengths, multiple):
    batch = flat_batch(lengths)
    out, segments = pad_documents(batch, multiple=multiple, pad_token_id=7)
    assert segments.lengths == (tuple(lengths),)
    assert out["cu_seqlens_padded"].diff().tolist() == [-(-n // multiple) * multiple for n in lengths]
    assert out["cu_seqlens"].diff().tolist() == lengths
    for key in ("input_ids", "labels", "loss_scale", "position_ids", "seq_idx", "reward"):
        assert torch.equal(unpad(out[key], segments), batch[key][0]), key
    assert segments.num_padding == out["input_ids"].numel() - sum(lengths) == int((out["labels"] == -100).sum())
    assert segments.padding_share == segments.num_padding / out["input_ids"].numel()
    assert segments_from_batch(out) == segments


@given(cps, lengths, multiples)
def test_alignment_and_ranks_take_both_multiples(cp, lengths, multiple):
    out, segments = pad_documents(flat_batch(lengths), cp, multiple=multiple)
    sizes = out["cu_seqlens_padded"].diff()
    assert (sizes % cp.document_multiple == 0).all()
    assert (sizes % multiple == 0).all()
    assert segments.shape[1] % cp.multiple == 0
    each = math.lcm(cp.document_multiple, multiple)
    least = sum(-(-n // each) * each for n in lengths)
    assert least <= segments.shape[1] < least + math.lcm(each, cp.multiple)  # no more than it takes
    assert segments_from_batch(out) == segments
    split_batch(out, cp, segments=segments)


@given(lengths, lengths, multiples)
def test_documents_go_to_their_places(lengths, extra, multiple):
    """Whatever the places: real tokens unmoved in their document, offsets of the batch untouched."""
    places = [n + k for n, k in zip(lengths, [*extra, *[0] * len(lengths)])] + [3, 0]
    segments = Segments.from_lengths([lengths])
    batch = {key: value for key, value in flat_batch(lengths).items() if key != "attention_mask"}
    out, placed = place_documents(batch, segments, places, keys=with_fills(KEYS, {"pad": 7, "ignored": -100}))
    assert placed.shape == (1, sum(places))
    assert placed.lengths == (tuple(lengths),)
    starts = [sum(places[:n]) for n in range(len(lengths))]
    assert [start for _, start, _ in placed.spans] == starts
    assert torch.equal(unpad(out["input_ids"], placed), batch["input_ids"][0])
    assert torch.equal(out["position_ids"], placed.position_ids)
    assert (out["labels"][~placed.keep] == -100).all()
    assert torch.equal(out["cu_seq_lens_q"], batch["cu_seq_lens_q"])


def test_a_row_without_tokens_is_padding_alone():
    batch = {"input_ids": torch.zeros(1, 0, dtype=torch.int64), "loss_scale": torch.zeros(1, 0)}
    out, placed = place_documents(batch, Segments.from_lengths([[]]), [4, 4], keys=with_fills(KEYS, {"pad": 7}))
    assert out["input_ids"].tolist() == [[7] * 8]
    assert out["loss_scale"].tolist() == [[0.0] * 8]
    assert placed.num_padding == 8


@pytest.mark.parametrize("labels", [torch.tensor([1, 0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.rand(1, 5)], ids=str)
def test_labels_of_whole_samples_stay(labels):
    batch = {"input_ids": torch.arange(5)[None], "labels": labels, "cu_seqlens": torch.tensor([0, 3, 5])}
    assert pad_documents(batch, multiple=4)[0]["labels"] is labels


@pytest.mark.parametrize("multiple", [0, -1, 1.5, True])
def test_a_multiple_is_a_whole_number(multiple):
    with pytest.raises(CollateError, match="multiple"):
        pad_documents(flat_batch([3]), multiple=multiple)
