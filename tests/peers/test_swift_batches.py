"""ms-swift 4.6.0 on Megatron: what reaches `model(**batch)`: model types, mask kinds, layouts, ranks."""

import pytest
import torch
from megatron.core import mpu
from swift_world import KINDS, LENGTHS, LOCAL, MODEL_TYPES, MULTIMODAL, NEEDS_2D, arguments, as_kind, collate, reaches_model

from collate_npu import Segments, split_batch
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel, query_rows, split_tensor

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def out_of_order(model_type, layout, place):
    """mcore-bridge's Gated DeltaNet undoes a zigzag, whatever `cp_partition_mode` says (modules/gated_delta_net.py:273)."""
    return model_type in NEEDS_2D and layout == "contiguous" and place[1] > 1


@pytest.mark.parametrize(
    ("layout", "place", "there"),
    [("zigzag", (0, 1), False), ("zigzag", (0, 1), True)]
    + [(layout, (rank, 2), True) for layout in ("zigzag", "contiguous") for rank in (0, 1)],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_the_model_gets_none_and_the_2d_mask_where_it_has_layers_that_read_it(world, model_type, kind, layout, place, there):
    world.npu(there)
    world.rank(*place)
    args = arguments(model_type, cp=place[1], cp_partition_mode=layout)
    data, truth = as_kind(args, kind)
    if out_of_order(model_type, layout, place):
        with pytest.raises(UnsupportedFormError, match="layout: got 'contiguous'"):
            reaches_model(args, data)
        return
    batch = reaches_model(args, data)
    cp = ContextParallel(place[1], place[0], layout=layout)
    local = split_batch({"keep": truth.keep, "input_ids": data["input_ids"]}, cp)
    assert batch["attention_mask"] is None
    assert torch.equal(batch["input_ids"], data["input_ids"] if model_type in MULTIMODAL else local["input_ids"])
    if model_type in NEEDS_2D:
        assert batch["attention_mask_2d"].dtype == torch.bool
        assert torch.equal(batch["attention_mask_2d"], local["keep"])
    else:
        assert "attention_mask_2d" not in batch
    if model_type in ("qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        assert torch.equal(batch["padding_mask"], ~local["keep"])
    else:
        assert "padding_mask" not in batch


@pytest.mark.parametrize("there", [False, True], ids=["gpu", "npu"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_padding_free_batches_go_through_as_upstream_prepares_them(world, model_type, there):
    world.npu(there)
    args = arguments(model_type, padding_free=True)
    data = collate(args, *LENGTHS)
    batch = reaches_model(args, data)
    assert batch["attention_mask"] is None
    assert not {"attention_mask_2d", "padding_mask"} & set(batch)
    assert batch["packed_seq_params"].cu_seqlens_q.tolist()[:4] == [0, 7, 10, 15]
    assert batch["packed_seq_params"].seq_lens.tolist() == [7, 3, 5]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_a_flat_row_in_slices_is_refused_where_a_recurrent_layer_would_put_it_out_of_order(world, model_type):
    world.npu()
    world.rank(0, 2)
    for layout in ("contiguous", "zigzag"):
        args = arguments(model_type, cp=2, padding_free=True, cp_partition_mode=layout)
        if out_of_order(model_type, layout, (0, 2)):
            with pytest.raises(UnsupportedFormError, match=r"document_zigzag.*cp_partition_mode='zigzag'"):
                reaches_model(args, collate(args, *LENGTHS))
        else:
            assert reaches_model(args, collate(args, *LENGTHS))["attention_mask"] is None


@pytest.mark.parametrize("place", [(0, 1), (0, 2), (1, 2)], ids=lambda place: f"rank {place[0]} of {place[1]}")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.usefixtures("installed")
def test_local_kernels_read_a_dense_mask_of_this_ranks_rows(world, kind, side, layout, place):
    world.npu()
    world.rank(*place)
    for model_type in MODEL_TYPES:
        if out_of_order(model_type, layout, place):
            continue
        reads = {"attention_backend": "local", "masked_softmax_fusion": side == "right"}  # fused, it reads no mask
        args = arguments(model_type, cp=place[1], cp_partition_mode=layout, **reads)
        data, truth = as_kind(args, kind, side=side)
        cp = ContextParallel(place[1], place[0], layout=layout)
        rows = query_rows(truth.shape[1], cp)
        batch = reaches_model(args, data)
        assert torch.equal(batch["attention_mask"], dense(truth, polarity="masked", rows=rows))
        assert "padding_mask" not in batch  # mcore-bridge takes it from the dense mask
        assert ("attention_mask_2d" in batch) == (model_type in NEEDS_2D)
        if model_type in NEEDS_2D:
            assert torch.equal(batch["attention_mask_2d"], split_batch({"x": truth.keep, "input_ids": truth.ids}, cp)["x"])


@pytest.mark.parametrize("place", [(0, 1), (0, 2), (1, 2)], ids=lambda place: f"rank {place[0]} of {place[1]}")
@pytest.mark.usefixtures("installed")
def test_padding_before_a_row_is_not_asked_for_its_first_token(world, place):
    """Labels are rolled by ms-swift: where the first token is learned, the place before it would be asked for it."""
    world.npu()
    world.rank(*place)
    args = arguments("qwen3", cp=place[1], **LOCAL)
    data, truth = as_kind(args, "2d", side="left")
    labels = reaches_model(args, data)["labels"]
    rolled = torch.where(truth.keep, data["labels"].roll(-1, dims=-1), -100)
    assert torch.equal(labels, split_tensor(rolled, ContextParallel(place[1], place[0])))
    assert (data["labels"].roll(-1, dims=-1)[~truth.keep] != -100).any(), "upstream asks"


@pytest.mark.parametrize("context_parallel", [1, 2])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 3])
@pytest.mark.usefixtures("installed")
def test_widths_divide_for_every_tensor_parallel_size(world, monkeypatch, tensor_parallel, context_parallel):
    world.npu()
    world.rank(context_parallel - 1, context_parallel)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: tensor_parallel - 1)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: tensor_parallel)
    shared = {"tensor_model_parallel_size": tensor_parallel, "sequence_parallel": tensor_parallel > 1}
    args = arguments("qwen3_next", cp=context_parallel, **shared)
    data = collate(args, 3, 2)
    batch = reaches_model(args, data)
    width = data["input_ids"].shape[1]
    assert width % (context_parallel * tensor_parallel) == 0
    assert context_parallel == 1 or width % 4 == 0
    cp = ContextParallel(context_parallel, context_parallel - 1)
    whole = split_batch({"x": Segments.from_lengths([3, 2], width).keep, "input_ids": data["input_ids"]}, cp)["x"]
    assert torch.equal(batch["padding_mask"], ~whole.chunk(tensor_parallel, dim=1)[-1])
