"""What a layer makes of the masks of its rank: Megatron's kernels, alone and under context parallelism."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import ContextParallel, Segments, block_mask, dense
from collate_npu.consumers.consumer import Case, Model
from collate_npu.integrations.delivery.reading import Judge
from collate_npu.integrations.delivery.received import Received
from collate_npu.parallel import query_rows, split_tensor

LEFT, RIGHT = Segments.from_lengths([8, 5], side="left"), Segments.from_lengths([8, 5])
PLACES = [None, ContextParallel(2, 0), ContextParallel(2, 1), ContextParallel(2, 0, layout="contiguous")]
places = pytest.mark.parametrize("cp", PLACES, ids=["alone", "zigzag 0", "zigzag 1", "contiguous"])
KINDS = {
    name: type(name, (nn.Module,), {"__module__": home})
    for name, home in {
        "DotProductAttention": "megatron.core.transformer.dot_product_attention",
        "TEDotProductAttention": "megatron.core.extensions.transformer_engine",
        "GatedDeltaNet": "megatron.core.ssm.gated_delta_net",
        "BridgeGatedDeltaNet": "mcore_bridge.model.modules.gated_delta_net",
    }.items()
}


def judge(segments, cp=None, kernel="DotProductAttention"):
    model = type("MegatronModule", (nn.Module,), {"__module__": "megatron.core.transformer.module"})()
    model.core_attention = KINDS[kernel]()
    model.config = SimpleNamespace(masked_softmax_fusion=False)
    return Judge(model=model, case=Case(segments=segments, model=Model(needs_mask_2d=True)), cp=cp)


def received(kind="DotProductAttention", mask=None, keep=None, tokens=8, **offsets):
    return Received(
        module=KINDS[kind](), attention_mask=mask, keep=keep, offsets=offsets, hidden=(tokens, 2, 4), crosses=False
    )


def masked(segments, cp=None, **settings):
    rows = None if cp is None else query_rows(8, cp)
    return dense(segments, polarity="masked", rows=rows, **settings)


@places
@pytest.mark.parametrize("segments", [LEFT, RIGHT], ids=["left", "right"])
def test_the_rows_of_this_rank_are_right_and_those_of_another_are_told(segments, cp):
    asked = judge(segments, cp)
    assert asked.why_wrong("core_attention", received(mask=masked(segments, cp))) == ""
    if cp is not None:
        other = ContextParallel(2, 1 - cp.rank, layout=cp.layout)
        assert asked.why_wrong("core_attention", received(mask=masked(segments, other)))
        assert "queries and keys" in asked.why_wrong("core_attention", received(mask=masked(segments)))


@places
def test_none_and_kernels_that_read_none_are_a_triangle(cp):
    for mask in (None, masked(LEFT, cp)):
        assert judge(RIGHT, cp, "TEDotProductAttention").why_wrong("core_attention", received(mask=mask)) == ""
        told = judge(LEFT, cp, "TEDotProductAttention").why_wrong("core_attention", received(mask=mask))
        assert "row 1 attends padding" in told


def test_a_future_token_and_another_sequence_are_named():
    packed = Segments.from_lengths([[3, 5], [5]])
    asked = judge(packed)
    assert "attends more than causal" in asked.why_wrong("a", received(mask=masked(packed, pattern="bidirectional")))
    assert "row 0 attends another sequence" in asked.why_wrong("a", received(mask=None))
    assert "does not attend all" in asked.why_wrong("a", received(mask=masked(packed) | ~torch.eye(8, dtype=torch.bool)))


@places
def test_a_recurrent_layer_of_mcore_bridge_is_told_by_the_part_of_this_rank(cp):
    asked = judge(LEFT, cp)
    keep = LEFT.keep if cp is None else split_tensor(LEFT.keep, cp)
    assert asked.why_wrong("self_attention", received("BridgeGatedDeltaNet", keep=keep)) == ""
    assert "other tokens" in asked.why_wrong("self_attention", received("BridgeGatedDeltaNet", keep=~keep))
    assert "no 2D mask" in asked.why_wrong("self_attention", received("BridgeGatedDeltaNet"))
    assert "no 2D mask" in asked.why_wrong("self_attention", received("GatedDeltaNet", keep=keep))
    assert judge(RIGHT, cp).why_wrong("self_attention", received("GatedDeltaNet")) == ""


def test_packed_rows_of_recurrent_layers_need_their_offsets():
    asked = judge(Segments.from_lengths([[3, 5], [8]]))
    assert "several sequences" in asked.why_wrong("self_attention", received("GatedDeltaNet"))
    assert "several sequences" in asked.why_wrong("self_attention", received("GatedDeltaNet", cu_seq_lens_q=1))
    for told in ({"cu_seq_lens_q": 1, "seq_idx": 1}, {"packed_seq_params": 1}):
        assert asked.why_wrong("self_attention", received("GatedDeltaNet", **told)) == ""


def test_other_batches_of_the_same_model_are_not_asked():
    wrong = Received(module=nn.Module(), attention_mask=None, keep=None, offsets={}, hidden=(8, 7, 4), crosses=False)
    assert not judge(LEFT).asks(wrong)
    assert judge(LEFT).asks(received())


def transformers_judge(segments, attn):
    model = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})()
    return Judge(model=model, case=Case(segments=segments, model=Model(needs_mask_2d=False, attn_implementation=attn)))


def of_transformers(mask):
    return Received(module=nn.Module(), attention_mask=mask, keep=None, offsets={}, hidden=(2, 8, 4), crosses=False)


def test_a_block_mask_is_read_by_what_it_says_of_each_row():
    asked = transformers_judge(LEFT, "flex_attention")
    assert asked.why_wrong("self_attn", of_transformers(block_mask(LEFT))) == ""
    assert "row 1 attends padding" in asked.why_wrong("self_attn", of_transformers(block_mask(RIGHT)))
    assert "row 0 attends more than causal" in asked.why_wrong("self_attn", of_transformers(None))


def test_what_a_dense_mask_means_depends_on_the_implementation():
    keep, bias = dense(LEFT), dense(LEFT, polarity="bias")
    for attn, mask, said in (
        ("sdpa", keep, ""),
        ("sdpa", bias, ""),
        ("eager", bias, ""),
        ("eager", keep, "which eager adds"),
        ("sdpa", keep.long(), "which sdpa adds"),
        ("sdpa", ~keep, "attends"),
        ("flash_attention_2", LEFT.keep.long(), ""),
        ("flash_attention_2", RIGHT.keep.long(), "other tokens"),
        ("flash_attention_2", None, "row 1 attends padding"),
    ):
        told = transformers_judge(LEFT, attn).why_wrong("self_attn", of_transformers(mask))
        assert (said in told) if said else told == "", (attn, told)
