"""Adapters: any batch in; for one consumer, the masks it reads out, from a truth that all sources of the batch agree on."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from collate_npu import BatchAdapter, CollateError, ContextParallel, PaddingCollator, Pattern, Segments
from collate_npu.consumers.device_copy import move_batch
from collate_npu.consumers.mask_choice import Model, consumers
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks import dense

pytestmark = pytest.mark.usefixtures("newest_transformers")
megatron = partial(BatchAdapter, consumer="megatron")
RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
FLAT = Segments.from_lengths([[3, 5]])
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
DENSE = SimpleNamespace(layer_types=["full_attention"])


def batch_of(segments, **keys):
    B, S = segments.shape
    return {"input_ids": torch.arange(B * S).view(B, S), **keys}


# --- the batch that leaves


def test_positions_that_are_there_stay():
    positions = torch.full((2, 5), 7)
    out = megatron(DENSE).write(batch_of(LEFT, attention_mask_2d=LEFT.keep, position_ids=positions), LEFT)
    assert out["position_ids"] is positions
    vision = batch_of(LEFT, attention_mask_2d=LEFT.keep, pixel_values=torch.zeros(1))
    assert "position_ids" not in megatron(DENSE)(vision)


def test_a_window_that_the_model_makes_by_itself_is_no_window_of_megatrons():
    """On transformers it is taken: tests/integration/test_differential.py."""
    config = SimpleNamespace(layer_types=["sliding_attention"], sliding_window=2, model_type="mistral")
    window = batch_of(LEFT, attention_mask=dense(LEFT, pattern=Pattern.sliding(2), polarity="masked"))
    with pytest.raises(CollateError, match=r"Pass pattern=Pattern\.sliding\(2\)"):
        megatron(config, polarity="masked")(window)


def test_what_is_made_is_where_the_batch_is():
    out = megatron(HYBRID).write(batch_of(LEFT, input_ids=torch.empty(2, 5, device="meta")), LEFT)
    made = {"position_ids", "attention_mask", "attention_mask_2d"}
    there = megatron(HYBRID, device="meta")(batch_of(LEFT, attention_mask_2d=LEFT.keep))
    assert all({key for key, value in each.items() if value.is_meta} == {"input_ids", *made} for each in (out, there))


@pytest.mark.parametrize("rank", [0, 1])
def test_under_context_parallelism_only_this_rank_s_rows_are_built(rank):
    segments = Segments.from_lengths([3, 8], side="left")
    cp = ContextParallel(2, rank)
    places = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
    adapter = megatron(HYBRID, context_parallel=cp, max_mask_bytes=2 * 4 * 8)
    labels = torch.arange(50, 66).view(2, 8).masked_fill(~segments.keep, -100)
    out = adapter(batch_of(segments, attention_mask_2d=segments.keep, labels=labels))
    assert torch.equal(out["attention_mask"], dense(segments, polarity="masked")[:, :, places])
    assert torch.equal(out["attention_mask_2d"], segments.keep[:, places])
    assert torch.equal(out["position_ids"], segments.position_ids[:, places])
    assert torch.equal(out["labels"], labels[:, places])
    there = megatron(HYBRID, context_parallel=cp, device="meta")(batch_of(segments, attention_mask_2d=segments.keep))
    assert {value.device.type for value in there.values()} == {"meta"}


def test_of_a_mask_beside_documents_that_are_shared_out_each_rank_has_its_tokens_rows():
    flat = Segments.from_lengths([[4, 8]])
    cp = ContextParallel(2, 1, layout="document_zigzag")
    adapter = BatchAdapter(DENSE, consumer="transformers", padding_free=True, context_parallel=cp)
    out = adapter(batch_of(flat, cu_seqlens=flat.cu_seqlens))
    assert torch.equal(out["attention_mask"], dense(flat)[:, :, [1, 2, 6, 7, 8, 9]])


@pytest.mark.parametrize("consumer", [name for name, c in consumers().items() if c.splits_rows and not c.shares_recurrent])
def test_recurrent_layers_whose_stack_does_not_share_them_out_cannot_be_split(consumer):
    for cp in (ContextParallel(2, 0), ContextParallel(2, 0, layout="contiguous")):
        with pytest.raises(UnsupportedFormError, match=r"need the state of the tokens before .*give each rank"):
            BatchAdapter(HYBRID, consumer=consumer, context_parallel=cp)
        BatchAdapter(DENSE, consumer=consumer, context_parallel=cp)
    BatchAdapter(HYBRID, consumer=consumer, context_parallel=ContextParallel(1, 0))


@pytest.mark.parametrize("consumer", [name for name, c in consumers().items() if c.shares_recurrent])
def test_ranks_that_share_recurrent_layers_hold_the_tokens_these_put_in_order(consumer):
    """Of the stacks that share a row at all, every one undoes a zigzag, whatever its loader did."""
    rows, flat = Segments.from_lengths([3, 8]), Segments.from_lengths([[8, 12]])
    for segments, padding_free, right in ((rows, False, "zigzag"), (flat, True, "document_zigzag")):
        for layout in ("contiguous", right):
            cp = ContextParallel(2, 1, layout=layout)
            batch = batch_of(segments, cu_seqlens=segments.cu_seqlens) if padding_free else batch_of(segments)
            batch |= {} if padding_free else {"attention_mask_2d": segments.keep}
            settings = {"consumer": consumer, "padding_free": padding_free, "context_parallel": cp}
            assert BatchAdapter(DENSE, **settings)(batch)["input_ids"].shape[1] == segments.shape[1] // 2
            if layout == right:
                own = BatchAdapter(HYBRID, **settings)(batch)
                assert own["input_ids"].shape[1] == segments.shape[1] // 2
                if consumers()[consumer].keeps_mask_2d != "never" and not padding_free:
                    assert torch.equal(own["attention_mask_2d"], segments.keep[:, 2:6])
                continue
            with pytest.raises(UnsupportedFormError, match=rf"layout: got '{layout}'\. .* only from the layout '{right}'"):
                BatchAdapter(HYBRID, **settings)(batch)


# --- settings


def test_the_model_must_be_told_where_it_matters():
    for consumer in consumers():
        if consumers()[consumer].keeps_mask_2d != "recurrent":
            BatchAdapter(consumer=consumer)
        else:
            with pytest.raises(CollateError, match="Pass model=, model_type= or needs_mask_2d="):
                BatchAdapter(consumer=consumer)
            BatchAdapter(consumer=consumer, padding_free=True)
    for named in ({}, {"model": HYBRID}, {"model": HYBRID, "model_type": "mine"}):
        with pytest.raises(CollateError, match="Pass consumer="):
            BatchAdapter(**named, needs_mask_2d=True)
    assert BatchAdapter(model_type="mine", needs_mask_2d=True).consumer.name == "megatron"
    for wrong in ({"model": 5}, {"polarity": "white"}):
        with pytest.raises(CollateError, match=f"^{next(iter(wrong))}: got"):
            megatron(**wrong, needs_mask_2d=True)
    out = megatron(torch.nn.Module(), needs_mask_2d=True)(batch_of(RIGHT, attention_mask_2d=RIGHT.keep))
    assert out["attention_mask_2d"].any()


def test_offsets_that_are_made_of_others_are_the_physical_ones_and_nothing_looks_ahead_to_their_padding():
    apart, places = Segments([[1, 1, 1, 0, 2, 2, 0, 0]]), torch.tensor([0, 4, 8], dtype=torch.int32)
    flash = SimpleNamespace(layer_types=["full_attention"], _attn_implementation="flash_attention_2", model_type="llama")
    both = batch_of(apart, cu_seqlens=apart.cu_seqlens, cu_seqlens_padded=places)
    out = BatchAdapter(flash, consumer="transformers", padding_free=True)(both)
    assert out["cu_seq_lens_q"].tolist() == out["cu_seq_lens_k"].tolist() == [0, 4, 8]
    ahead = BatchAdapter(flash, consumer="megatron", padding_free=True, pattern="bidirectional")
    assert ahead(both)["attention_mask"] is None  # its kernels read both
    for more in ({"seq_lens": [3, 2]}, {"attention_mask_2d": apart.keep}):
        with pytest.raises(UnsupportedFormError, match="this attention looks ahead"):
            ahead(batch_of(apart, cu_seqlens=places, **more))


def test_offsets_that_kernels_know_otherwise_go_no_further():
    one, told = Segments.from_lengths([[8]]), {"cu_seq_lens_q", "seq_idx"}
    for segments, recurrent, left in ((FLAT, False, told), (one, True, set()), (one, False, told)):
        known = Model(config=DENSE, needs_mask_2d=recurrent, model_type="mine")
        adapter = BatchAdapter(known, consumer="transformers", padding_free=True)
        offsets = segments.cu_seqlens
        numbers = {"seq_idx": segments.ids - 1, "seq_lens": offsets.diff()[None], "qkv_format": "thd"}
        out = adapter(batch_of(segments, cu_seq_lens_q=offsets, cu_seqlens=offsets.clone(), **numbers))
        assert out.keys() & {"cu_seq_lens_q", "cu_seqlens", *numbers} == left
        out = adapter(batch_of(segments, cu_seqlens=offsets))
        assert out.keys() & {"cu_seqlens"} == ({"cu_seqlens"} if left else set())


@pytest.mark.parametrize("width", [4, 5])
def test_a_row_wider_than_the_limit_of_rotary_frequencies_gets_its_positions(width):
    """Counted by place, padding would change the frequencies of every token."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4}
    model = SimpleNamespace(**vars(DENSE), model_type="phi3", rope_parameters=rope)
    segments = Segments.from_lengths([3, 4], width)
    out = BatchAdapter(model, consumer="transformers")(batch_of(segments, attention_mask_2d=segments.keep))
    assert ("position_ids" in out) == (width > 4)


# --- a batch on its way to a device arrives as it left, in one copy


def test_a_block_mask_made_there_goes_along():
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "segment_ids": torch.tensor([[1, 1, 2, 2]])}
    adapter = BatchAdapter(needs_mask_2d=False, consumer="transformers", attn_implementation="flex_attention", device="cpu")
    assert type(adapter(batch)["attention_mask"]).__name__ == "BlockMask"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("consumer", ["megatron", "transformers", "verl"])
def test_an_adapter_with_a_device_makes_the_same_batch_there(consumer, side):
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    batch = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")(rows)
    del batch["position_ids"]  # they are made there
    here, there = (BatchAdapter(needs_mask_2d=True, consumer=consumer, device=device)(batch) for device in (None, "meta"))
    assert list(here) == list(there)
    for key, value in here.items():
        assert value is there[key] is None or (there[key].is_meta, there[key].shape, there[key].dtype) == (
            True, value.shape, value.dtype
        )  # fmt: skip
    same = BatchAdapter(needs_mask_2d=True, consumer=consumer, device="cpu")(batch)
    assert all(value is same[key] is None or torch.equal(value, same[key]) for key, value in here.items())


def test_a_tensor_under_two_names_is_two_on_the_device():
    """labels that are the ids themselves: who writes into the one does not write into the other."""
    ids = torch.tensor([[1, 2, 3]])
    out = move_batch({"input_ids": ids, "labels": ids, "each": {"kind": ids}}, torch.device("meta"))
    assert len({id(x) for x in (out["input_ids"], out["labels"], out["each"]["kind"])}) == 3
    assert all(x.is_meta and x.shape == ids.shape for x in (out["input_ids"], out["labels"], out["each"]["kind"]))
