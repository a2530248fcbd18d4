"""ms-swift 4.6.0 on Megatron: what its template and its `prepare_batch` give, what reaches `model(**batch)`, what is
refused, and which tokens are pooled."""

import pytest
import swift_world
import torch
from swift_world import KINDS, LENGTHS, LOCAL, NEEDS_2D, arguments, as_kind, collate, prepare, reaches_model, trainer_of
from torch.utils._python_dispatch import TorchDispatchMode

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import patching, swift
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel, query_rows, split_tensor

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("there", [True, False], ids=["npu", "gpu"])
def test_python_objects_go_by_gloo_on_an_npu(world, monkeypatch, there):
    """The names of the metrics, at every step: `all_gather_object` over HCCL takes device memory in silence."""
    seen = []
    world.npu(there)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda values, value, group=None: seen.append(group))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(patching, "gloo_group", lambda group: f"gloo of {group}")
    swift.install()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    swift.uninstall()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    assert seen == ["gloo of dp and cp" if there else "dp and cp", "dp and cp"]


# --- what its template sends


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("cp", [1, 2])
def test_no_worker_builds_or_ships_a_dense_mask(cp):
    args, lengths = arguments("qwen3_next", cp=cp), (512, 301, 17, 400)
    with Largest() as upstream:
        theirs = collate(args, *lengths)
    swift.install()
    try:
        with Largest() as wrapped:
            ours = collate(args, *lengths)
    finally:
        swift.uninstall()
    assert (upstream.elements, wrapped.elements) == (4 * 512 * 512, 4 * 512)
    assert theirs.keys() - ours.keys() == {"attention_mask"}
    assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours if "mask" not in key)
    assert torch.equal(ours["attention_mask_2d"], ~theirs["attention_mask"][:, 0, -1])


# --- the offsets of its flat rows


@pytest.mark.parametrize(
    ("ranks", "changed", "offsets"),
    [
        (1, {"fp8_format": "e4m3"}, [0, 7, 10, 15, 16]),
        (1, {"fp8_recipe": "mxfp8"}, [0, 7, 10, *range(15, 33)]),
        (2, {}, [0, 8, 12, 20]),
        (2, {"fp8_format": "e4m3"}, [0, 8, 12, 20, 24, 28, 32]),
    ],
)
def test_the_offsets_are_physical_end_with_the_row_and_can_be_shared_out(world, installed, ranks, changed, offsets):
    world.npu(False)
    world.rank(0, ranks)
    args = arguments("qwen3_next", cp=ranks, padding_free=True, **changed)
    data = collate(args, *LENGTHS)
    params = prepare(args, data)["packed_seq_params"]
    assert params.cu_seqlens_q.tolist() == offsets
    assert (list(data["seq_lens"]), data["input_ids"].shape) == (list(LENGTHS), (1, offsets[-1]))


# --- what reaches the model

PLACES = [("zigzag", 0, 1), ("zigzag", 0, 2), ("zigzag", 1, 2), ("contiguous", 1, 2)]
KERNELS = {"flash": ({}, "right"), "local": ({**LOCAL}, "left"), "local, fused": ({"attention_backend": "local"}, "right")}
"""Arguments, and the side of the padding; fused, the local softmax reads no mask."""


def out_of_order(model_type, layout, ranks):
    """mcore-bridge's Gated DeltaNet undoes a zigzag, whatever `cp_partition_mode` says (modules/gated_delta_net.py:273)."""
    return model_type in NEEDS_2D and layout == "contiguous" and ranks > 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", swift_world.MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_each_layer_gets_this_ranks_part_of_what_it_reads(world, model_type, kind, kernel):
    """Flash attention None, local attention a dense mask, from which mcore-bridge tells its routers; else routers the
    padding, and recurrent layers a 2D mask. Labels are rolled by ms-swift: where the first token is learned, the padding
    before it would be asked for it."""
    world.npu()
    settings, side = KERNELS[kernel]
    if kind == "template" and side == "left":
        pytest.skip("it pads right")
    for layout, rank, size in PLACES:
        world.rank(rank, size)
        args = arguments(model_type, cp=size, cp_partition_mode=layout, **settings)
        data, truth = as_kind(args, kind, side=side)
        if out_of_order(model_type, layout, size):
            with pytest.raises(UnsupportedFormError, match="layout: got 'contiguous'"):
                reaches_model(args, data)
            continue
        batch, cp = reaches_model(args, data), ContextParallel(size, rank, layout=layout)
        masked = None
        if kernel != "flash":
            masked = dense(truth, polarity="masked", rows=query_rows(truth.shape[1], cp))
        wanted = {
            "attention_mask": masked,
            "attention_mask_2d": split_tensor(truth.keep, cp) if model_type in NEEDS_2D else None,
            "padding_mask": split_tensor(~truth.keep, cp) if masked is None and "qwen3_5" != model_type != "qwen3" else None,
            "input_ids": data["input_ids"] if model_type in swift_world.MULTIMODAL else split_tensor(data["input_ids"], cp),
            "labels": split_tensor(torch.where(truth.keep, data["labels"].roll(-1, dims=-1), -100), cp),
        }
        for key, value in wanted.items():
            got = batch.get(key)
            assert got is None if value is None else torch.equal(got, value), (key, layout, rank, size)


@pytest.mark.parametrize("there", [False, True], ids=["gpu", "npu"])
@pytest.mark.parametrize("model_type", swift_world.MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_flat_rows_go_through_as_upstream_prepares_them_or_are_refused_in_slices(world, model_type, there):
    world.npu(there)
    args = arguments(model_type, padding_free=True)
    batch = reaches_model(args, collate(args, *LENGTHS))
    assert batch["attention_mask"] is None
    assert not {"attention_mask_2d", "padding_mask"} & set(batch)
    assert batch["packed_seq_params"].cu_seqlens_q.tolist()[:4] == [0, 7, 10, 15]
    world.rank(0, 2)
    for layout in ("contiguous", "zigzag"):
        args = arguments(model_type, cp=2, padding_free=True, cp_partition_mode=layout)
        if out_of_order(model_type, layout, 2):
            with pytest.raises(UnsupportedFormError, match=r"document_zigzag.*cp_partition_mode='zigzag'"):
                reaches_model(args, collate(args, *LENGTHS))
        else:
            assert reaches_model(args, collate(args, *LENGTHS))["attention_mask"] is None
            args.model_info.config = None  # a model ms-swift has read no config of
            assert reaches_model(args, collate(args, *LENGTHS))["attention_mask"] is None


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


@pytest.mark.usefixtures("installed")
def test_off_an_npu_mlp_padding_free_gets_the_dense_mask_it_reads(world):
    world.npu(False)
    args = arguments("qwen3", mlp_padding_free=True)
    data, truth = as_kind(args, "template")
    assert torch.equal(prepare(args, data)["attention_mask"], dense(truth, polarity="masked"))


def test_seq_lens_that_contradict_the_2d_mask_name_the_row():
    data, truth = as_kind(arguments("qwen3"), "2d beside 4d")
    data["seq_lens"] = [7, 4, 5]
    with pytest.raises(CollateError, match="row 1: got seq_lens 4 beside 3 real tokens"):
        swift.segments_from_swift(arguments("qwen3"), data)
    data["seq_lens"] = list(LENGTHS)
    assert swift.segments_from_swift(arguments("qwen3"), data) == truth
    data["attention_mask_2d"] = data["attention_mask_2d"].flip(1)  # padded left, in a batch that counts from the right
    with pytest.raises(CollateError, match="3 bad rows"):
        swift.segments_from_swift(arguments("qwen3"), data)


def test_a_worker_without_the_plugin_sends_alignment_padding_as_real_and_the_lengths_win():
    data = collate(arguments("qwen3_next", cp=2), *LENGTHS)
    assert data["attention_mask_2d"].sum(1).tolist() == [8, 4, 8]
    assert swift.segments_from_swift(arguments("qwen3_next", cp=2), data).row_lengths == LENGTHS
    with pytest.raises(CollateError, match="row 0: got seq_lens 7 beside 8"):
        swift.segments_from_swift(arguments("qwen3_next", cp=1), data)


# --- the last token of each row is told by the batch that is pooled, and by no other


def test_the_mask_that_is_given_is_obeyed_and_anything_else_is_refused(world, installed):
    world.npu()
    args = arguments("qwen3", task_type="seq_cls")
    trainer, (data, truth) = trainer_of(args), as_kind(args, "template")
    trainer._prepare_batch(data)
    places = truth.position_ids.unsqueeze(-1).float()
    other = Segments.from_lengths((2, 6, 1), truth.shape[1])
    for mask in (other.keep, other.keep.long()):
        assert trainer.get_last_tokens(places, None, mask).flatten().tolist() == [1.0, 5.0, 0.0]
    for mask in (None, other.keep[:2], other.keep[:, :5], dense(other, polarity="masked")):
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


@pytest.mark.together("two ranks pool")
@pytest.mark.parametrize(("layout", "backend"), [("zigzag", "flash"), ("contiguous", "local")])
def test_two_ranks_pool_the_last_token_of_rows_they_share(ranks, layout, backend):
    """Upstream's own gather, on Gloo; two batches are prepared before the first of them is pooled."""
    batches = [(7, 3, 5), (2, 8, 1)]
    for found in ranks(2)("test_parallel_peers.swift_last_tokens", layout, backend, batches, [1, 0], seconds=180):
        assert found == [[1.0, 7.0, 0.0], [6.0, 2.0, 4.0]]
