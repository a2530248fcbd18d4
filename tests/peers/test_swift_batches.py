"""ms-swift 4.6.0 on Megatron: what reaches `model(**batch)`, what is refused, and which tokens are pooled."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from megatron.core import mpu
from swift_world import (
    KINDS,
    LENGTHS,
    LOCAL,
    MODEL_TYPES,
    MULTIMODAL,
    NEEDS_2D,
    Recorder,
    arguments,
    as_kind,
    collate,
    pooling_trainer,
    prepare,
    reaches_model,
    trainer_of,
)

from collate_npu import CollateError, Segments, split_batch
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import swift
from collate_npu.masks import dense
from collate_npu.masks.forms import open_empty_rows
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


# --- where no right form exists, and which sources of a batch must agree


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


# --- the last token of each row is told by the batch that is pooled, and by no other


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def prepared(args, trainer, rows, side):
    """A batch that its trainer has run forward: where each of its tokens stands, and the loss that is to come."""
    data, truth = as_kind(args, "2d", rows, side)  # a bare 4D mask of one short row has two readings
    data["labels"] = torch.zeros(len(rows), dtype=torch.long)
    loss = trainer.forward_step(iter([data]), Recorder())[1]
    return truth.position_ids.unsqueeze(-1).float(), loss


@given(batches=st.lists(lengths, min_size=1, max_size=4), backend=st.sampled_from(["local", "flash"]), data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_batches_prepared_in_any_order_and_pooled_in_any_order_give_their_own_tokens(
    batches, backend, data, world, installed
):
    """Local kernels read a dense mask, and padding may stand on either side; flash reads none, and padding is right."""
    world.npu()
    args = arguments("qwen3", task_type="seq_cls", **(LOCAL if backend == "local" else {}))
    trainer = pooling_trainer(args)
    sides = st.sampled_from(["left", "right"] if backend == "local" else ["right"])
    ran = [prepared(args, trainer, rows, data.draw(sides)) for rows in batches]
    for i in data.draw(st.permutations(range(len(batches)))):
        places, loss = ran[i]
        assert loss(places).flatten().tolist() == [float(n - 1) for n in batches[i]]


@pytest.mark.parametrize("task", ["seq_cls", "embedding", "generative_reranker"])
@pytest.mark.parametrize("backend", ["flash", "local"])
def test_a_prepared_batch_answers_as_each_trainer_asks_and_the_model_gets_what_it_reads(world, installed, task, backend):
    """Three of the trainers ask for either mask, the reward trainer for `attention_mask` alone."""
    world.npu()
    args = arguments("qwen3_next", task_type=task, attention_backend=backend)
    trainer = trainer_of(args)
    batch = trainer._prepare_batch(as_kind(args, "template")[0])
    truth = Segments.from_lengths((7, 3, 5)).keep
    assert torch.equal(batch.get("attention_mask"), truth)
    assert torch.equal(batch.get("attention_mask_2d"), truth)
    assert batch.get("packed_seq_params") is None
    read = dict(**batch)["attention_mask"]
    assert read is None if backend == "flash" else read.shape == (3, 1, 7, 7)


def test_the_mask_that_is_given_is_obeyed_and_anything_else_is_refused(world, installed):
    world.npu()
    args = arguments("qwen3", task_type="seq_cls")
    trainer, (data, truth) = trainer_of(args), as_kind(args, "template")
    trainer._prepare_batch(data)
    places = truth.position_ids.unsqueeze(-1).float()
    other = Segments.from_lengths((2, 6, 1), truth.shape[1])
    for mask in (other.keep, other.keep.long()):
        assert trainer.get_last_tokens(places, None, mask).flatten().tolist() == [1.0, 5.0, 0.0]
    refused = [None, other.keep[:2], other.keep[:, :5], dense(other, polarity="masked")]
    for mask in refused:
        with pytest.raises(CollateError, match=r"this output has 3 rows of 7 \(1 ranks\). .* unsplit"):
            trainer.get_last_tokens(places, None, mask)
    with pytest.raises(CollateError, match="row 1: got padding alone"):
        trainer.get_last_tokens(places, None, other.keep & torch.tensor([[1], [0], [1]]).bool())


def test_a_rank_that_holds_part_of_a_row_is_not_pooled_by_its_part_of_the_mask(world, installed):
    world.npu()
    world.rank(0, 2)
    trainer = trainer_of(arguments("qwen3", cp=2, task_type="seq_cls"))
    with pytest.raises(CollateError, match=r"this output has 3 rows of 8 \(2 ranks\)"):
        trainer.get_last_tokens(torch.zeros(3, 4, 1), None, torch.ones(3, 4))


@pytest.mark.long("two ranks pool")
@pytest.mark.parametrize("backend", ["flash", "local"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_two_ranks_pool_the_last_token_of_rows_they_share(ranks, layout, backend):
    """Upstream's own gather, on Gloo; two batches are prepared before the first of them is pooled."""
    batches = [(7, 3, 5), (2, 8, 1)]
    for found in ranks(2)("peer_work.swift_last_tokens", layout, backend, batches, [1, 0], seconds=180):
        assert found == [[1.0, 7.0, 0.0], [6.0, 2.0, 4.0]]


def test_token_losses_get_a_plain_dict(world):
    world.npu()
    swift.install()
    args = arguments("qwen3")
    assert type(trainer_of(args)._prepare_batch(as_kind(args, "template")[0])) is dict
    swift.uninstall()
