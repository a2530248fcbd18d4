"""What a layer makes of the masks of its rank: Megatron's kernels, alone and under context parallelism."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import ContextParallel, Segments
from collate_npu.consumers.consumer import Case, Model
from collate_npu.masks import block_mask, dense
from collate_npu.parallel import query_rows, split_tensor
from collate_npu.proof.reading import Judge, evaluated, row_of, why_row_wrong
from collate_npu.proof.received import Received

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


def received(kind="DotProductAttention", mask=None, keep=None, **offsets):
    told = {"attention_mask": mask, "attention_mask_2d": keep, **offsets}
    told = {key: value for key, value in told.items() if value is not None}
    name = "self_attention" if "GatedDelta" in kind else "core_attention"
    return Received(name=name, reader=KINDS[kind](), told=told, hidden=(8, 2, 4))


def masked(segments, cp=None, **settings):
    rows = None if cp is None else query_rows(8, cp)
    return dense(segments, polarity="masked", rows=rows, **settings)


@places
@pytest.mark.parametrize("segments", [LEFT, RIGHT], ids=["left", "right"])
def test_the_rows_of_this_rank_are_right_and_those_of_another_are_told(segments, cp):
    asked = judge(segments, cp)
    assert asked.why_wrong(received(mask=masked(segments, cp))) == ""
    if cp is not None:
        other = ContextParallel(2, 1 - cp.rank, layout=cp.layout)
        assert asked.why_wrong(received(mask=masked(segments, other)))
        assert "queries and keys" in asked.why_wrong(received(mask=masked(segments)))


@places
def test_none_and_kernels_that_read_none_are_a_triangle(cp):
    for mask in (None, masked(LEFT, cp)):
        assert judge(RIGHT, cp, "TEDotProductAttention").why_wrong(received(mask=mask)) == ""
        assert "row 1 attends padding" in judge(LEFT, cp, "TEDotProductAttention").why_wrong(received(mask=mask))


def test_a_future_token_and_another_sequence_are_named():
    packed = Segments.from_lengths([[3, 5], [5]])
    asked = judge(packed)
    assert "attends more than causal" in asked.why_wrong(received(mask=masked(packed, pattern="bidirectional")))
    assert "row 0 attends another sequence" in asked.why_wrong(received(mask=None))
    assert "does not attend all" in asked.why_wrong(received(mask=masked(packed) | ~torch.eye(8, dtype=torch.bool)))


@places
def test_a_recurrent_layer_of_mcore_bridge_is_told_by_the_part_of_this_rank(cp):
    keep = LEFT.keep if cp is None else split_tensor(LEFT.keep, cp)
    calls = [("BridgeGatedDeltaNet", ~keep), ("BridgeGatedDeltaNet", None), ("GatedDeltaNet", keep)]
    for (kind, told), why in zip(calls, ("other tokens", "no 2D mask", "no 2D mask")):
        assert why in judge(LEFT, cp).why_wrong(received(kind, keep=told))
    assert judge(LEFT, cp).why_wrong(received("BridgeGatedDeltaNet", keep=keep)) == ""
    assert judge(RIGHT, cp).why_wrong(received("GatedDeltaNet")) == ""


def test_packed_rows_of_recurrent_layers_need_their_offsets():
    asked = judge(Segments.from_lengths([[3, 5], [8]]))
    assert "several sequences" in asked.why_wrong(received("GatedDeltaNet"))
    right, wrong = torch.tensor([0, 3, 8, 16]), torch.tensor([0, 4, 8, 16])
    assert "several sequences" in asked.why_wrong(received("GatedDeltaNet", cu_seq_lens_q=right))
    for offsets, said in ((right, ""), (wrong, "[0, 4, 8, 16]: the token at (row, column) (0, 3) goes on from another")):
        held = SimpleNamespace(cu_seqlens_q=offsets)
        for told in ({"cu_seq_lens_q": offsets, "seq_idx": 1}, {"packed_seq_params": held}):
            why = asked.why_wrong(received("GatedDeltaNet", **told))
            assert (said in why) if said else why == ""


def test_other_batches_of_the_same_model_are_not_asked():
    calls = (received(), replace(received(), hidden=(8, 7, 4)), replace(received(), crosses=True))
    assert [judge(LEFT).asks(call) for call in calls] == [True, False, False]


PRETRAINED = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})


def asked_of(segments, model=None, **facts):
    flat = facts.pop("padding_free", False)
    case = Case(segments=segments, model=Model(**{"needs_mask_2d": False, **facts}), padding_free=flat)
    return Judge(model=model or PRETRAINED(), case=case)


def attention(segments, mask=None, name="self_attn", **told):
    told |= {} if mask is None else {"attention_mask": mask}
    return Received(name=name, reader=nn.Module(), told=told, hidden=(*segments.shape, 4))


@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("name", ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"])
def test_the_decoder_beside_an_encoder_works_on_tokens_of_its_own(two, name):
    model = PRETRAINED()
    model.encoder, model.config = nn.Identity(), SimpleNamespace(is_encoder_decoder=two)
    assert asked_of(LEFT, model).asks(attention(LEFT, name=name)) is not (two and "decoder" in name)


@pytest.mark.parametrize(("mask", "read"), [(LEFT.keep, True), (dense(LEFT)[:, 0], False), (dense(LEFT), False)])
def test_true_and_false_of_a_2d_mask_is_read(mask, read):
    assert asked_of(LEFT, attn_implementation="eager").asks(attention(LEFT, mask)) is read


TWO = Segments.from_lengths([[3, 5]])


@pytest.mark.parametrize(
    ("attn", "offsets", "mask", "said"),
    [
        ("flash_attention_2", [0, 3, 8], None, ""),
        ("flash_attention_2", [0, 4, 8], None, "cu_seq_lens_q"),
        ("sdpa", [0, 3, 8], None, "attends another sequence"),
        ("sdpa", [0, 4, 8], dense(TWO), ""),
    ],
)
def test_offsets_count_where_attention_reads_them(attn, offsets, mask, said):
    asked = asked_of(TWO, attn_implementation=attn, padding_free=True)
    why = asked.why_wrong(attention(TWO, mask, cu_seq_lens_q=torch.tensor(offsets)))
    assert (said in why) if said else why == ""


def test_offsets_count_for_megatrons_kernels_whatever_the_implementation():
    asked = judge(TWO)
    flat = replace(asked, case=replace(asked.case, padding_free=True))
    for offsets, right in (([0, 3, 8], True), ([0, 4, 8], False)):
        told = SimpleNamespace(cu_seqlens_q=torch.tensor(offsets))
        assert (flat.why_wrong(received(packed_seq_params=told)) == "") is right


def test_two_queries_that_attend_ahead_are_told():
    short = Segments.from_lengths([2])
    asked = asked_of(short, attn_implementation="eager")
    assert "more than causal" in asked.why_wrong(attention(short, torch.zeros(1, 1, 2, 2)))


PLAIN, CHUNKED = (
    SimpleNamespace(sliding_window=3),
    SimpleNamespace(attention_chunk_size=4, layer_types=["chunked_attention"]),
)


@pytest.mark.parametrize(
    ("config", "back", "right"),
    [(PLAIN, 3, True), (PLAIN, 2, False), (CHUNKED, 1, True), (CHUNKED, 0, False), (None, 8, True), (None, 7, False)],
)
def test_a_layer_attends_at_least_the_narrowest_window_of_the_model(config, back, right):
    row, places = Segments.from_lengths([8]), torch.arange(8)
    mask = (places[:, None] >= places) & (places[:, None] - places < back)
    why = asked_of(row, config=config, attn_implementation="sdpa").why_wrong(attention(row, mask[None, None]))
    assert why.endswith("" if right else "does not attend all of its sequence")
    assert bool(why) is not right
    mask[7, 7] = False
    assert asked_of(row, config=config).why_wrong(attention(row, mask[None, None]))
    mask[7, 7] = True
    assert bool(why_row_wrong(row, Case(segments=row).pattern, 0, places, mask)) is (back < 8)


def test_true_and_false_to_attention_of_a_layers_own_is_not_read():
    model = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})()
    call = Received(name="attn", reader=nn.Module(), told={"attention_mask": dense(LEFT)}, hidden=(2, 8, 4))
    for attn, read in (("eager", False), ("sdpa", True)):
        asked = Judge(model=model, case=Case(segments=LEFT, model=Model(needs_mask_2d=False, attn_implementation=attn)))
        assert asked.asks(call) is read
    keys = dense(LEFT, polarity="bias")[:, :, -1:]
    assert asked.why_wrong(replace(call, told={"attention_mask": keys})) == ""
    assert "attends padding" in asked.why_wrong(replace(call, told={"attention_mask": keys.zero_()}))


KEEP, BIAS = dense(LEFT), dense(LEFT, polarity="bias")


@pytest.mark.parametrize(
    ("attn", "mask", "said"),
    [
        ("sdpa", KEEP, ""),
        ("sdpa", BIAS, ""),
        ("eager", BIAS, ""),
        ("sdpa", KEEP.long(), "which sdpa adds"),
        ("sdpa", ~KEEP, "attends"),
        ("flash_attention_2", LEFT.keep.long(), ""),
        ("flash_attention_2", RIGHT.keep.long(), "other tokens"),
        ("flash_attention_2", None, "row 1 attends padding"),
        ("flex_attention", block_mask(LEFT), ""),
        ("flex_attention", block_mask(RIGHT), "row 1 attends padding"),
        ("flex_attention", None, "row 0 attends more than causal"),
    ],
    ids=range(11),
)
def test_what_a_mask_means_depends_on_the_implementation(attn, mask, said):
    model = type("PreTrainedModel", (nn.Module,), {"__module__": "transformers.modeling_utils"})()
    asked = Judge(model=model, case=Case(segments=LEFT, model=Model(needs_mask_2d=False, attn_implementation=attn)))
    told = {} if mask is None else {"attention_mask": mask}
    why = asked.why_wrong(Received(name="self_attn", reader=nn.Module(), told=told, hidden=(2, 8, 4)))
    assert (said in why) if said else why == ""


def test_a_mask_that_rows_share_is_that_of_each():
    shared = torch.ones(1, 1, 2, 2).tril().bool()
    assert torch.equal(row_of(shared, 1), shared[0, 0])
    rows = torch.stack([torch.ones(2, 2).tril(), torch.zeros(2, 2)])
    assert torch.equal(row_of(rows, 1), rows[1])
    heads = torch.tensor([[[1, 0], [0, 0]], [[0, 0], [1, 0]]])[None]
    assert torch.equal(row_of(heads.bool(), 0), torch.tensor([[True, False], [True, False]]))
    assert torch.equal(row_of(heads, 0), torch.tensor([[1, 0], [1, 0]]))
    three = Segments.from_lengths([3, 2, 1])
    assert all(torch.equal(evaluated(block_mask(three), b), dense(three)[b, 0]) for b in range(3))
