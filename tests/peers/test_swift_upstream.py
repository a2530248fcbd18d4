"""ms-swift 4.6.0 without `install()`: its defects. A test that fails here says which one upstream has fixed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
if importlib.util.find_spec("swift") is None:
    pytest.skip("ms-swift is not installed", allow_module_level=True)

import te_stub  # noqa: E402, F401

# isort: split  (the stand-ins stand before Megatron is imported)
import torch  # noqa: E402
from swift_fixtures import LENGTHS, as_kind  # noqa: E402
from swift_world import (  # noqa: E402
    arguments,
    collate,
    prepare,
    trainer_of,
)

pytest_plugins = "swift_fixtures"
pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_upstream_a_2d_mask_is_an_index_error(world):
    world.npu()
    args = arguments("qwen3_5")
    with pytest.raises(IndexError, match="Dimension out of range"):
        prepare(args, as_kind(args, "2d")[0])


def test_upstream_a_keep_mask_is_inverted_in_silence(world):
    world.npu()
    args = arguments("qwen3_5")
    data, truth = as_kind(args, "4d keep")
    derived = prepare(args, data)["attention_mask_2d"]
    assert not torch.equal(derived, truth.keep)
    assert derived.tolist() == [[False] + [True] * 7] * 3


def test_upstream_an_additive_mask_only_happens_to_be_read_right(world):
    world.npu()
    args = arguments("qwen3_5")
    data, truth = as_kind(args, "4d additive")
    assert torch.equal(prepare(args, data)["attention_mask_2d"], truth.keep)
    data["attention_mask"] = data["attention_mask"] - 0.5  # any bias on the keys that stay
    assert not prepare(args, data)["attention_mask_2d"].any()


def test_upstream_qwen3_next_loses_both_masks(world):
    world.npu()
    args = arguments("qwen3_next")
    batch = prepare(args, as_kind(args, "template")[0])
    assert batch["attention_mask"] is None
    assert "attention_mask_2d" not in batch


def test_upstream_the_2d_mask_is_not_split(world):
    world.npu()
    world.rank(0, 2)
    args = arguments("qwen3_5", cp=2)
    batch = prepare(args, as_kind(args, "template")[0])
    assert batch["attention_mask_2d"].shape == (3, 8)
    assert batch["labels"].shape == (3, 4)


def test_upstream_2d_and_4d_of_one_batch_disagree_under_context_parallelism():
    data = collate(arguments("qwen3_5", cp=2), *LENGTHS)
    assert data["attention_mask_2d"].sum(1).tolist() == [8, 4, 8]
    assert (~data["attention_mask"])[:, 0, -1].sum(1).tolist() == [7, 3, 5]


def test_upstream_get_last_tokens_needs_a_mask():
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'dim'"):
        trainer_of(arguments("qwen3")).get_last_tokens(torch.zeros(3, 7, 1), None, None)


def test_upstream_a_local_backend_is_not_recognised_because_it_is_an_enum(world):
    world.npu()
    args = arguments("qwen3", attention_backend="local", use_flash_attn=True)
    assert prepare(args, as_kind(args, "template")[0])["attention_mask"] is None


def test_upstream_left_padding_is_dropped_to_none_in_silence(world):
    world.npu()
    args = arguments("qwen3_5")
    assert prepare(args, as_kind(args, "4d masked", side="left")[0])["attention_mask"] is None


def test_upstream_a_router_on_an_npu_does_not_learn_the_padding(world):
    world.npu()
    args = arguments("qwen3_moe")
    batch = prepare(args, as_kind(args, "template")[0])
    assert batch["attention_mask"] is None
    assert "padding_mask" not in batch


def test_upstream_an_odd_tensor_parallel_size_makes_a_width_that_does_not_divide(world):
    world.npu()
    world.rank(0, 2)
    args = arguments("qwen3", cp=2, tensor_model_parallel_size=3, sequence_parallel=True)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        prepare(args, collate(args, 3, 2))
