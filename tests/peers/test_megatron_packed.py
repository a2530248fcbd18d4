"""megatron-core 0.16.1 and 0.19.2: several sequences in a row, with dense masks on local kernels, and flat with
`PackedSeqParams`."""

from dataclasses import fields, make_dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from megatron_world import PAD, TEDotProductAttention, build, gaps, outcome, samples

from collate_npu import CollateError, PaddingCollator, Segments
from collate_npu.integrations.megatron import gpt_batch, packed_seq_params, takes_places

NEEDS = ("megatron",)
pytestmark = pytest.mark.usefixtures("cpu")

one = PaddingCollator(pad_token_id=PAD)
flat = PaddingCollator(pad_token_id=PAD, padding_free=True)


@pytest.fixture(scope="module", params=["learned_absolute", "rope"])
def thd(cpu, request):
    return build(attention=TEDotProductAttention, positions=request.param)


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), multiple=st.sampled_from([1, 8]))
@settings(max_examples=8, deadline=None)
def test_a_flat_row_equals_samples_alone_in_logits_loss_and_gradients(thd, lengths, multiple):
    lengths = [*lengths, 4]
    rows = samples(*lengths)
    collate = PaddingCollator(pad_token_id=PAD, padding_free=True, pad_to_multiple_of=multiple)
    inputs, truth = gpt_batch(collate(rows), thd, padding_free=True)
    assert inputs["attention_mask"] is None
    assert inputs["packed_seq_params"].qkv_format == "thd"
    alone = outcome(thd, *(gpt_batch(one([row]), thd) for row in rows))
    assert max(gaps(outcome(thd, (inputs, truth)), alone).values()) <= 1e-5


def test_every_field_of_the_installed_class():
    truth = Segments([[1, 1, 1, 0, 2, 2, 0, 0]])
    params = packed_seq_params(truth)
    told = {field.name: getattr(params, field.name) for field in fields(params)}
    assert told.pop("qkv_format") == "thd"
    for side in ("q", "kv"):
        assert told.pop(f"cu_seqlens_{side}").tolist() == [0, 3, 5]
        assert told.pop(f"cu_seqlens_{side}_padded").tolist() == [0, 4, 8]
        assert told.pop(f"max_seqlen_{side}") == 4
    known = {"total_tokens": 8, "seq_idx": [[0, 0, 0, 0, 1, 1, 1, 1]], "pad_between_seqs": True}
    for name, value in told.items():
        assert (value.tolist() if isinstance(value, torch.Tensor) else value) == known.get(name), name
    assert params.cu_seqlens_q.dtype == params.cu_seqlens_q_padded.dtype == torch.int32


def test_padding_behind_the_last_sequence_alone_which_transformer_engine_does_not_see(monkeypatch):
    """It compares offsets without the last one, so that nothing may be left for it to see; 0.19 has a field for it."""
    from megatron.core import packed_seq_params as module

    tail = Segments([[1, 1, 1, 1, 2, 2, 0, 0]])
    if not hasattr(packed_seq_params(tail), "pad_between_seqs"):
        assert packed_seq_params(tail).cu_seqlens_q.tolist() == [0, 4, 8]
        fields = [("pad_between_seqs", object, None)]
        later = make_dataclass("PackedSeqParams", fields, bases=(module.PackedSeqParams,))
        monkeypatch.setattr(module, "PackedSeqParams", later)
    params = packed_seq_params(tail)
    assert params.cu_seqlens_q.tolist() == [0, 4, 6]
    assert params.pad_between_seqs is True
    full = packed_seq_params(Segments([[1, 1, 1, 2, 2]]))
    assert full.pad_between_seqs is False
    assert full.cu_seqlens_q is full.cu_seqlens_q_padded, "another object is taken for padding"


def test_what_takes_offsets_for_places_gets_physical_ones(thd, monkeypatch):
    """MindSpeed's attention reads no others; nor do multi-token prediction and much of mcore-bridge."""
    truth = Segments([[1, 1, 1, 0, 2, 2, 0, 0]])
    bridged = type("GPTModel", (torch.nn.Module,), {"__module__": "mcore_bridge.model.gpt_model", "config": thd.config})()
    assert [takes_places(model) for model in (thd, bridged)] == [False, True]
    monkeypatch.setattr(thd.config, "mtp_num_layers", 1)
    assert takes_places(thd)
    monkeypatch.setattr("collate_npu.consumers.mindspeed.is_installed", lambda: True)
    for params in (packed_seq_params(truth), packed_seq_params(truth, padding_counts=True)):
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 8]
        assert params.cu_seqlens_q is params.cu_seqlens_q_padded


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ([[0, 1, 1, 2]], "padding before the first sequence"),
        ([[1, 0, 1, 2]], "padding inside a sequence"),
        ([[1, 1], [1, 0]], "one flat row"),
        ([[0, 0]], "at least one sequence"),
    ],
)
def test_padding_that_no_offsets_describe(ids, what):
    with pytest.raises(CollateError, match=what):
        packed_seq_params(Segments(ids))
