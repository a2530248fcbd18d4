"""ms-swift 4.6.0 on Megatron: where no right form exists, and which sources of a batch must agree."""

import pytest
import torch
from swift_world import LENGTHS, LOCAL, arguments, as_kind, collate, prepare, reaches_model

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import swift
from collate_npu.masks import dense
from collate_npu.masks.forms import open_empty_rows

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize(
    ("settings", "side", "said"),
    [
        ({}, "left", "fused softmax, read no dense mask, and padding stands on the left"),
        ({"attention_backend": "fused"}, "left", "fused softmax, read no dense mask"),
        ({"attention_backend": "local"}, "left", "run local kernels with masked_softmax_fusion=False"),  # on by default
        ({"mlp_padding_free": True}, "right", "mlp_padding_free needs a dense mask"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_where_none_is_wrong_and_no_dense_mask_is_read_it_refuses(world, settings, side, said):
    world.npu()
    args = arguments("qwen3_next", **settings)
    with pytest.raises(UnsupportedFormError, match=said):
        prepare(args, as_kind(args, "2d", side=side)[0])


@pytest.mark.parametrize(
    ("settings", "side", "gets"),
    [
        ({}, "right", "none"),
        ({}, "left", "MindSpeed's flash kernel"),
        ({"attention_mask_type": "general"}, "right", "dense"),
        ({"attention_mask_type": "general"}, "left", "dense"),
        (LOCAL, "right", "none"),
        (LOCAL, "left", "MindSpeed's flash kernel"),
        (LOCAL | {"use_flash_attn": False}, "right", "dense"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_where_mindspeed_is_installed_its_rules_are_asked(world, monkeypatch, settings, side, gets):
    """By its settings and its release (consumers/mindspeed.py), here one with a TransformerEngine attention of its own."""
    world.npu()
    monkeypatch.setattr("collate_npu.consumers.mindspeed.is_installed", lambda: True)
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "own")
    args, (data, truth) = arguments("qwen3"), as_kind(None, "2d", side=side)
    for name, value in settings.items():
        setattr(args, name, value)
    if gets not in ("none", "dense"):
        with pytest.raises(UnsupportedFormError, match=gets):
            prepare(args, data)
        return
    masked = prepare(args, data)["attention_mask"]
    assert (masked is None) == (gets == "none")
    if masked is not None:
        assert torch.equal(masked, open_empty_rows(dense(truth, polarity="masked")))


@pytest.mark.usefixtures("installed")
def test_off_an_npu_mlp_padding_free_gets_the_dense_mask_it_reads(world):
    world.npu(False)
    args = arguments("qwen3", mlp_padding_free=True)
    data, truth = as_kind(args, "template")
    assert torch.equal(prepare(args, data)["attention_mask"], dense(truth, polarity="masked"))


def test_several_sequences_in_a_row_of_a_recurrent_model_are_refused(world, installed):
    world.npu()
    args = arguments("qwen3_next", attention_backend="local")
    truth = Segments.from_lengths([[3, 4], [7]])
    data = {"input_ids": truth.ids.long() + 3, "labels": truth.ids.long(), "attention_mask": dense(truth, polarity="masked")}
    data["position_ids"] = truth.position_ids.clone()
    with pytest.raises(UnsupportedFormError, match=r"rows \[0\] hold several sequences"):
        prepare(args, data)


@pytest.mark.parametrize("length", [2, 4, 6])
def test_seq_lens_that_contradict_the_2d_mask_name_the_row(length):
    data, truth = as_kind(arguments("qwen3"), "2d beside 4d")
    data["seq_lens"] = [7, length, 5]
    with pytest.raises(CollateError, match=rf"row 1: got seq_lens {length} beside 3 real tokens"):
        swift.segments_from_swift(arguments("qwen3"), data)
    data["seq_lens"] = list(LENGTHS)
    assert swift.segments_from_swift(arguments("qwen3"), data) == truth
    data["attention_mask_2d"] = data["attention_mask_2d"].flip(1)  # padded left, in a batch that counts from the right
    with pytest.raises(CollateError, match="3 bad rows"):
        swift.segments_from_swift(arguments("qwen3"), data)


@pytest.mark.parametrize("cp", [1, 2])
def test_only_alignment_padding_may_be_real_in_upstreams_own_2d_mask(cp):
    data = collate(arguments("qwen3", cp=2), *LENGTHS)
    if cp == 2:
        assert swift.segments_from_swift(arguments("qwen3", cp=cp), data).row_lengths == LENGTHS
    else:
        with pytest.raises(CollateError, match="row 0: got seq_lens 7 beside 8"):
            swift.segments_from_swift(arguments("qwen3", cp=cp), data)


def test_a_batch_that_lost_its_masks_is_refused(world, installed):
    world.npu()
    data, _ = as_kind(arguments("qwen3_next"), "2d")
    del data["attention_mask"]
    data["position_ids"] = None
    with pytest.raises(CollateError, match="No key says which tokens are padding"):
        prepare(arguments("qwen3_next"), data)


@pytest.mark.usefixtures("installed")
def test_a_worker_without_the_plugin_sends_upstreams_batch_and_the_real_lengths_still_win(world):
    swift.uninstall()
    data = collate(arguments("qwen3_next", cp=2), *LENGTHS)
    swift.install()
    world.npu()
    world.rank(0, 2)
    assert data["attention_mask_2d"].sum(1).tolist() == [8, 4, 8]
    batch = reaches_model(arguments("qwen3_next", cp=2), data)
    keep = Segments.from_lengths(LENGTHS, 8).keep
    assert torch.equal(batch["attention_mask_2d"], keep[:, [0, 1, 6, 7]])
