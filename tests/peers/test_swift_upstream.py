"""ms-swift 4.6.0 without `install()`: its silent defects. A test that fails here says which one upstream has fixed."""

import pytest
import torch
from swift_world import arguments, as_kind, prepare

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture(autouse=True)
def npu(world):
    world.npu()


def test_upstream_a_keep_mask_is_inverted_in_silence():
    args = arguments("qwen3_5")
    data, truth = as_kind(args, "4d keep")
    derived = prepare(args, data)["attention_mask_2d"]
    assert not torch.equal(derived, truth.keep)
    assert derived.tolist() == [[False] + [True] * 7] * 3


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_moe"])
def test_upstream_both_masks_are_lost_and_routers_do_not_learn_the_padding(model_type):
    args = arguments(model_type)
    batch = prepare(args, as_kind(args, "template")[0])
    assert batch["attention_mask"] is None
    assert not {"attention_mask_2d", "padding_mask", "extra_block_kwargs"} & set(batch)


@pytest.mark.parametrize(("backend", "side"), [("flash", "left"), ("local", "right")])
def test_upstream_a_dense_mask_is_dropped_in_silence(backend, side):
    """Local kernels are not recognised, because the backend is an enum."""
    args = arguments("qwen3_5", attention_backend=backend, use_flash_attn=True)
    assert prepare(args, as_kind(args, "4d masked", side=side)[0])["attention_mask"] is None
