"""A batch on its way to a card: what arrives is what left, and it left in one copy. A card itself is not needed for that."""

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments
from collate_npu.consumers.adapter import move_batch
from collate_npu.consumers.positions import positions_on
from collate_npu.masks import dense
from collate_npu.masks.forms import _triangle_on

CPU = torch.device("cpu")
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=6))
def test_tensors_of_any_type_and_shape_arrive_as_they_left_in_one_storage(kinds):
    batch = {str(n): torch.randint(0, 2, shape).to(dtype) for n, (dtype, shape) in enumerate(kinds)}
    out = move_batch({**batch, "none": None, "ids": ["a"]}, CPU)
    assert list(out) == [*batch, "none", "ids"]
    assert (out["none"], out["ids"]) == (None, ["a"])
    for name, tensor in batch.items():
        assert out[name].dtype == tensor.dtype
        assert torch.equal(out[name], tensor)
    assert len({out[name].untyped_storage().data_ptr() for name in batch}) <= 1


def test_what_is_no_plain_host_tensor_goes_by_itself():
    transposed, graph = torch.arange(6).view(2, 3).T, torch.ones(2, requires_grad=True)
    masks = {"full": torch.ones(2, 2, dtype=torch.bool), "linear": None}
    out = move_batch({"t": transposed, "g": graph, "masks": masks}, torch.device("meta"))
    assert (out["t"].device.type, out["t"].shape, out["t"].is_contiguous()) == ("meta", (3, 2), True)
    assert out["g"].is_meta
    assert (out["masks"]["full"].is_meta, out["masks"]["linear"]) == (True, None)


def test_a_block_mask_made_there_goes_along():
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "segment_ids": torch.tensor([[1, 1, 2, 2]])}
    adapter = BatchAdapter(needs_mask_2d=False, consumer="transformers", attn_implementation="flex_attention", device="cpu")
    assert type(adapter(batch)["attention_mask"]).__name__ == "BlockMask"


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_positions_made_on_a_device_are_those_of_the_host(lengths, side):
    segments = Segments.from_lengths(lengths, 7, side)
    assert torch.equal(positions_on(segments, CPU), segments.position_ids)
    assert positions_on(segments, torch.device("meta")).is_meta
    assert not positions_on(segments, None).is_meta
    packed = Segments.from_lengths([[2, 3], [4]])
    assert torch.equal(positions_on(packed, CPU), packed.position_ids)
    holes = Segments.from_keep([[True, False, True]])
    assert torch.equal(positions_on(holes, CPU), holes.position_ids)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3), st.sampled_from(DTYPES[4:7]))
def test_a_dense_mask_made_on_a_device_is_that_of_the_host(keep, dtype):
    segments = Segments.from_keep(keep)
    for polarity in ("keep", "masked", "bias"):
        right = dense(segments, polarity=polarity, dtype=dtype if polarity == "bias" else None)
        blocked = float(torch.finfo(dtype).min) if polarity == "bias" else float(polarity == "masked")
        made = _triangle_on(segments, CPU, right.dtype, float(polarity == "keep"), blocked)
        assert (made.shape, made.dtype) == (right.shape, right.dtype)
        assert torch.equal(made, right)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("consumer", ["megatron", "transformers", "verl"])
def test_an_adapter_with_a_device_makes_the_same_batch_there(consumer, side):
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    batch = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")(rows)
    here, there = (BatchAdapter(needs_mask_2d=True, consumer=consumer, device=device)(batch) for device in (None, "meta"))
    assert list(here) == list(there)
    for key, value in here.items():
        assert value is there[key] is None or (there[key].is_meta, there[key].shape, there[key].dtype) == (
            True, value.shape, value.dtype
        )  # fmt: skip
    same = BatchAdapter(needs_mask_2d=True, consumer=consumer, device="cpu")(batch)
    assert all(value is same[key] is None or torch.equal(value, same[key]) for key, value in here.items())


def test_an_adapter_reads_the_name_of_its_device_and_touches_none():
    """Ranks set theirs later: "cuda" is no index yet."""
    made = BatchAdapter(needs_mask_2d=False, consumer="transformers", device="cuda")
    assert made.device == torch.device("cuda")
    with pytest.raises(CollateError, match="device"):
        BatchAdapter(needs_mask_2d=False, consumer="transformers", device="nowhere")
