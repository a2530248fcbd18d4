"""megatron-core 0.16.1: a real `GPTModel` (local spec, CPU), forward and backward: our batches against samples alone."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_world import PAD, build, far, loss_and_gradients, on_cpu, samples
from torch.utils.data import DataLoader

from collate_npu import (
    BatchAdapter,
    CollateError,
    PaddingCollator,
    Segments,
    UnsupportedFormError,
    dense,
    last_token,
    per_sequence,
    split_batch,
    wrap_collator,
)
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.parallel import ContextParallel, query_rows

LENGTHS = (7, 3, 5)


@pytest.fixture(scope="module", autouse=True)
def cpu():
    patch = pytest.MonkeyPatch()
    on_cpu(patch)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model(cpu):
    return build()


@pytest.fixture(scope="module")
def moe(cpu):
    return build(experts=True)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), side=st.sampled_from(["left", "right"]))
@settings(max_examples=12, deadline=None)
def test_padded_batches_equal_samples_alone_in_logits_loss_and_gradients(model, lengths, side):
    collator = PaddingCollator(pad_token_id=PAD, padding_side=side)
    rows = samples(*lengths)
    loss, logits, gradients = loss_and_gradients(model, [gpt_batch(collator(rows), model)])
    alone = loss_and_gradients(model, [gpt_batch(collator([row]), model) for row in rows])
    assert max(float((x - y).abs().max()) for x, y in zip(logits, alone[1])) <= 1e-5
    assert abs(loss - alone[0]) <= 1e-5 * (1 + abs(alone[0]))
    assert far(gradients, alone[2]) <= 1e-5


@pytest.mark.parametrize("polarity", ["keep", "masked", "bias"])
def test_a_4d_mask_of_a_foreign_collator_reaches_the_model_in_megatrons_polarity(model, polarity):
    truth = Segments.from_lengths(LENGTHS, side="left")
    ids = torch.where(truth.keep, torch.arange(truth.ids.numel()).view(truth.shape) % 60 + 1, PAD)
    batch = {"input_ids": ids, "attention_mask": dense(truth, polarity=polarity)}
    inputs, found = gpt_batch(batch, model)
    assert found == truth
    assert torch.equal(inputs["attention_mask"], dense(truth, polarity="masked"))
    assert inputs["position_ids"].tolist() == truth.position_ids.tolist()
    logits = per_sequence(model(**inputs, labels=None), truth)
    for b, row in enumerate(logits):
        alone, _ = gpt_batch({"input_ids": ids[b, truth.keep[b]][None], "attention_mask": torch.ones(1, len(row))}, model)
        assert (model(**alone, labels=None)[0] - row).abs().max() <= 1e-5


def test_it_has_power_upstream_the_other_polarity_is_wrong_in_silence(model):
    inputs, truth = gpt_batch(PaddingCollator(pad_token_id=PAD, padding_side="left")(samples(*LENGTHS)), model)
    del inputs["loss_mask"], inputs["labels"]
    right = per_sequence(model(**inputs), truth)
    wrong = per_sequence(model(**{**inputs, "attention_mask": ~inputs["attention_mask"]}), truth)
    blind = dense(Segments.from_lengths([7, 7, 7]), polarity="masked")
    padded = per_sequence(model(**{**inputs, "attention_mask": blind}), truth)
    for other in (wrong, padded):
        assert max(float((x - y).abs().max()) for x, y in zip(right, other)) > 1e-2


def test_upstream_the_forward_has_no_place_for_a_2d_mask(model):
    inputs, truth = gpt_batch(PaddingCollator(pad_token_id=PAD)(samples(*LENGTHS)), model)
    assert "attention_mask_2d" not in inputs
    with pytest.raises(TypeError, match="attention_mask_2d"):
        model(**inputs, attention_mask_2d=truth.keep)


def test_a_wrapped_collator_works_too(model):
    inner = PaddingCollator(pad_token_id=PAD, padding_side="left", consumer="transformers")
    ours, _ = gpt_batch(wrap_collator(inner)(samples(*LENGTHS)), model)
    direct, _ = gpt_batch(PaddingCollator(pad_token_id=PAD, padding_side="left")(samples(*LENGTHS)), model)
    assert ours.keys() == direct.keys()
    assert all(torch.equal(ours[key], direct[key]) for key in ours)


def test_labels_are_shifted_and_what_follows_padding_or_nothing_is_not_learned(model):
    batch = PaddingCollator(pad_token_id=PAD, padding_side="left")([{"input_ids": [5, 6], "labels": [5, 6]}, *samples(4)])
    inputs, _ = gpt_batch(batch, model)
    assert inputs["labels"][0].tolist() == [0, 0, 6, 0]
    assert inputs["loss_mask"].tolist() == [[0, 0, 1, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize("said_by", ["segment_ids", "position_ids", "attention_mask"])
def test_several_sequences_in_a_row_equal_samples_alone_in_logits_loss_and_gradients(model, said_by):
    """Whatever says where one ends: the last token of a sequence must not learn the first of the next."""
    lengths = [[3, 4], [5, 2]]
    truth, rows = Segments.from_lengths(lengths), samples(3, 4, 5, 2)
    ids = torch.tensor([i for row in rows for i in row["input_ids"]]).view(2, 7)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask_2d": truth.keep}
    batch[said_by] = {
        "segment_ids": truth.ids,
        "position_ids": truth.position_ids,
        "attention_mask": dense(truth, polarity="masked"),
    }[said_by]
    inputs, found = gpt_batch(batch, model)
    assert found == truth
    assert inputs["loss_mask"].tolist() == [[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1, 0]]
    loss, logits, gradients = loss_and_gradients(model, [(inputs, found)])
    collator = PaddingCollator(pad_token_id=PAD)
    alone = loss_and_gradients(model, [gpt_batch(collator([row]), model) for row in rows])
    assert max(float((x - y).abs().max()) for x, y in zip(logits, alone[1])) <= 1e-5
    assert abs(loss - alone[0]) <= 1e-5 * (1 + abs(alone[0]))
    assert far(gradients, alone[2]) <= 1e-5


# --- mixture of experts


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_router_counts_no_padding(moe, side):
    """Gradients of the aux loss too: with the padding in it they differ."""
    narrow = PaddingCollator(pad_token_id=PAD, padding_side=side)
    wide = PaddingCollator(pad_token_id=PAD, padding_side=side, pad_to_multiple_of=16)
    moe.train()
    rows = samples(*LENGTHS)
    expected = loss_and_gradients(moe, [gpt_batch(narrow(rows), moe)])
    inputs, truth = gpt_batch(wide(rows), moe)
    assert torch.equal(inputs["padding_mask"], ~truth.keep)
    assert far(loss_and_gradients(moe, [(inputs, truth)])[2], expected[2]) <= 1e-5
    del inputs["padding_mask"]
    assert far(loss_and_gradients(moe, [(inputs, truth)])[2], expected[2]) > 1e-3


def test_a_model_without_experts_gets_no_padding_mask(model):
    assert "padding_mask" not in gpt_batch(PaddingCollator(pad_token_id=PAD)(samples(*LENGTHS)), model)[0]


# --- kernels that read no mask


class TEDotProductAttention(torch.nn.Module): ...


class GatedDeltaNet(torch.nn.Module): ...


def fused(**config):
    module = torch.nn.Sequential(TEDotProductAttention())
    module.config = SimpleNamespace(num_moe_experts=None, linear_attention_freq=None, masked_softmax_fusion=False, **config)
    return module


def test_transformer_engine_gets_none_where_that_is_exact_and_a_refusal_elsewhere():
    right = PaddingCollator(pad_token_id=PAD)(samples(*LENGTHS))
    assert gpt_batch(right, fused())[0]["attention_mask"] is None
    left = PaddingCollator(pad_token_id=PAD, padding_side="left")(samples(*LENGTHS))
    with pytest.raises(UnsupportedFormError, match="fused softmax, read no dense mask, and padding stands on the left"):
        gpt_batch(left, fused())


def test_the_fused_local_softmax_reads_no_mask_either(model, monkeypatch):
    monkeypatch.setattr(model.config, "masked_softmax_fusion", True)
    with pytest.raises(UnsupportedFormError, match="run local kernels with masked_softmax_fusion=False"):
        gpt_batch(PaddingCollator(pad_token_id=PAD, padding_side="left")(samples(*LENGTHS)), model)


def test_gated_delta_net_of_megatron_takes_no_left_padding(model, monkeypatch):
    monkeypatch.setattr(model.config, "linear_attention_freq", 2)
    right = PaddingCollator(pad_token_id=PAD)(samples(*LENGTHS))
    assert gpt_batch(right, model)[0]["attention_mask"] is not None
    with pytest.raises(UnsupportedFormError, match="GatedDeltaNet of megatron-core reads no padding mask"):
        gpt_batch(PaddingCollator(pad_token_id=PAD, padding_side="left")(samples(*LENGTHS)), model)


# --- context parallelism


def test_recurrent_layers_get_the_tokens_whose_zigzag_they_undo(model, monkeypatch):
    right = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=8)(samples(*LENGTHS))
    slices, zigzag = ContextParallel(2, 0, layout="contiguous"), ContextParallel(2, 0)
    assert gpt_batch(right, model, context_parallel=slices)[0]["input_ids"].shape[1] == 4
    monkeypatch.setattr(model.config, "linear_attention_freq", 2)
    assert gpt_batch(right, model, context_parallel=zigzag)[0]["input_ids"].shape[1] == 4
    with pytest.raises(UnsupportedFormError, match=r"got 'contiguous'\. .*layout='zigzag'"):
        gpt_batch(right, model, context_parallel=slices)
    flat = PaddingCollator(pad_token_id=PAD, padding_free=True)(samples(*LENGTHS))
    monkeypatch.setattr(model, "modules", list)  # its local attention takes no flat row
    monkeypatch.setattr(model.config, "linear_num_key_heads", 1, raising=False)
    with pytest.raises(UnsupportedFormError, match=r"got 'contiguous'\. .*layout='document_zigzag'"):
        gpt_batch(flat, model, context_parallel=slices, padding_free=True)
    with pytest.raises(CollateError, match=r"heads: got \[1"):
        gpt_batch(flat, model, context_parallel=zigzag, padding_free=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_under_context_parallelism_every_key_is_this_ranks_and_the_mask_its_rows(moe, rank):
    cp = ContextParallel(2, rank)
    batch = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=cp.multiple)(samples(*LENGTHS))
    whole, truth = gpt_batch(batch, moe)
    ours, same = gpt_batch(batch, moe, context_parallel=cp)
    assert truth == same
    expected = split_batch(whole, cp)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    assert torch.equal(ours["attention_mask"], dense(truth, polarity="masked", rows=query_rows(8, cp)))


def test_parallel_state_tells_the_rank(moe, monkeypatch):
    from megatron.core import parallel_state

    group = torch.distributed.group.WORLD
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr("collate_npu.parallel.split.ranks_agree", lambda cp: nullcontext({}))  # the other rank is none
    batch = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=4)(samples(*LENGTHS))
    inputs, _ = gpt_batch(batch, moe)
    assert torch.equal(inputs["input_ids"], batch["input_ids"][:, 2:6])


# --- the loops of the README


def test_the_megatron_loop_learns(model):
    dataset, device = samples(*LENGTHS, 9), "cpu"
    collator = PaddingCollator(pad_token_id=PAD, padding_side="left", pad_to_multiple_of=4)
    weights = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(4):
        for batch in DataLoader(dataset, batch_size=2, collate_fn=collator):
            batch = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
            inputs, _ = gpt_batch(batch, model)
            loss = (model(**inputs) * inputs["loss_mask"]).sum() / inputs["loss_mask"].sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    model.load_state_dict(weights, strict=False)
    assert sum(losses[-2:]) < sum(losses[:2])


def test_the_loop_without_any_framework(model):
    """The same collator, `BatchAdapter` instead of `gpt_batch`, the way back with `last_token`."""
    collator = PaddingCollator(pad_token_id=PAD, padding_side="left")
    adapter = BatchAdapter(model, consumer="megatron")
    inputs, segments = adapter.with_segments(collator(samples(*LENGTHS)))
    inputs.pop("labels")
    last = last_token(model(**inputs), segments)
    for b, row in enumerate(samples(*LENGTHS)):
        alone, _ = gpt_batch(collator([row]), model)
        assert (model(**{**alone, "labels": None})[0, -1] - last[b]).abs().max() <= 1e-5
