"""Delivery on a real `GPTModel` of megatron-core: what `gpt_batch` hands over passes, other hand-overs name the layers."""

import pytest
import torch
from megatron_world import PAD, TEDotProductAttention, build, samples

from collate_npu import CollateError, PaddingCollator, check_delivery, guard_first_batch
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.masks import dense
from collate_npu.proof import delivery

NEEDS = ("megatron",)
pytestmark = pytest.mark.usefixtures("cpu")


@pytest.fixture(scope="module")
def local():
    return build()


@pytest.fixture(scope="module")
def fused():
    return build(attention=TEDotProductAttention)


def wire(side):
    return PaddingCollator(pad_token_id=PAD, padding_side=side)(samples(7, 3, 5))


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_gpt_batch_hands_over_is_delivered(local, side):
    inputs, segments = gpt_batch(wire(side), local)
    found = check_delivery(local, inputs, segments=segments, alone=True)
    assert set(found.layers) == {f"decoder.layers.{n}.self_attention" for n in range(2)}
    assert max(found.alone.errors.values()) <= found.alone.limit < 1e-4


def test_a_mask_of_the_other_polarity_names_the_layers(local):
    inputs, segments = gpt_batch(wire("left"), local)
    keep = dense(segments, polarity="keep")
    with pytest.raises(CollateError, match=r"decoder\.layers\.0\.self_attention.*attends (padding|more than causal)"):
        check_delivery(local, inputs | {"attention_mask": keep}, segments=segments)


def test_a_kernel_that_reads_no_mask_is_told(fused):
    batch = wire("left")
    inputs, segments = gpt_batch(wire("right"), fused)
    check_delivery(fused, inputs, segments=segments, alone=True)
    left = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    truth = gpt_batch(batch, build())[1]
    masks = {"attention_mask": dense(truth, polarity="masked")}
    with pytest.raises(CollateError, match="goes on from padding"):
        check_delivery(fused, left | masks, segments=truth)


def test_a_flat_row(fused):
    flat = PaddingCollator(padding_free=True)(samples(4, 3, 5))
    inputs, segments = gpt_batch(flat, fused, padding_free=True)
    check_delivery(fused, inputs, segments=segments, alone=True)
    with pytest.raises(CollateError, match="goes on from another sequence"):
        check_delivery(fused, inputs | {"packed_seq_params": None}, segments=segments)


def test_the_guard_sees_the_first_forward_of_a_loop(local):
    inputs, segments = gpt_batch(wire("left"), local)
    guard_first_batch(local, segments=segments)
    with pytest.raises(CollateError, match="self_attention"):
        local(**inputs | {"attention_mask": torch.zeros(3, 1, 7, 7, dtype=torch.bool)})
    guard_first_batch(local, segments=segments, alone=True)
    local(**inputs)


def test_a_mindspeed_that_came_too_late_is_told(local, monkeypatch):
    monkeypatch.setattr(delivery, "start_problem", lambda: "its adaptor ran too late")
    inputs, segments = gpt_batch(wire("left"), local)
    with pytest.raises(CollateError, match="ran too late"):
        check_delivery(local, inputs, segments=segments)
