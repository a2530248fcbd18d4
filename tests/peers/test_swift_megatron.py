"""ms-swift 4.6.0 on Megatron: installing and giving back, what its template and its `prepare_batch` give, what reaches
`model(**batch)`, what is refused, which tokens are pooled, and what is wrong in silence without us."""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from swift.megatron.trainers import base, utils
from swift.template.base import Template
from swift.utils import import_external_file
from swift_world import (
    KINDS,
    LENGTHS,
    LOCAL,
    MODEL_TYPES,
    MULTIMODAL,
    NEEDS_2D,
    World,
    arguments,
    as_kind,
    collate,
    prepare,
    reaches_model,
    template,
    trainer_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from collate_npu import CollateError, Segments, split_batch
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import swift
from collate_npu.integrations.swift import flat_segments
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel, query_rows, split_tensor

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_install_reaches_functions_that_were_imported_by_name_and_uninstall_gives_them_back():
    original = utils.prepare_batch
    assert base.prepare_batch is original
    swift.install()
    swift.install()  # twice is once
    assert base.prepare_batch is utils.prepare_batch is not original
    assert inspect.unwrap(base.prepare_batch) is original
    swift.uninstall()
    assert base.prepare_batch is utils.prepare_batch is original
    swift.uninstall()


@pytest.mark.parametrize("there", [True, False], ids=["npu", "gpu"])
def test_python_objects_go_by_gloo_on_an_npu(world, monkeypatch, there):
    """The names of the metrics, at every step: `all_gather_object` over HCCL takes device memory in silence."""
    seen = []
    world.npu(there)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda values, value, group=None: seen.append(group))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(swift, "gloo_group", lambda group: f"gloo of {group}")
    swift.install()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    swift.uninstall()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    assert seen == ["gloo of dp and cp" if there else "dp and cp", "dp and cp"]


def test_as_external_plugins_file_it_installs_and_hides_no_package(tmp_path):
    original, path = utils.prepare_batch, list(sys.path)
    for _ in range(2):
        import_external_file(str(Path(swift.__file__).with_name("plugin.py")))
        assert utils.prepare_batch is not original
        assert sys.path == path  # with its folder first, `import transformers` would find this package's file
    swift.uninstall()


# --- what its template sends


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            self.elements = max(self.elements, out.numel())
        return out


def shipped_bytes(batch):
    return sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("cp", [1, 2])
def test_no_worker_builds_or_ships_a_dense_mask(cp):
    args = arguments("qwen3_next", cp=cp)
    lengths = (512, 301, 17, 400)
    with Largest() as upstream:
        theirs = collate(args, *lengths)
    swift.install()
    try:
        with Largest() as wrapped:
            ours = collate(args, *lengths)
    finally:
        swift.uninstall()
    assert upstream.elements == 4 * 512 * 512
    assert wrapped.elements == 4 * 512
    assert shipped_bytes(theirs) == 4 * 512 * 512 + 4 * 4 * 512 * 8  # four int64 keys beside it
    assert shipped_bytes(ours) == 3 * 4 * 512 * 8 + 4 * 512  # three, and a 2D mask of bools
    assert theirs.keys() - ours.keys() == {"attention_mask"}
    for key in ours.keys() - {"attention_mask_2d"}:
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])), key
    assert torch.equal(ours["attention_mask_2d"], ~theirs["attention_mask"][:, 0, -1])


@pytest.mark.usefixtures("installed")
def test_tensors_of_a_template_of_your_own_keep_their_memory(monkeypatch):
    """Squares of bools too: only the mask that the template itself builds has none."""

    class Vision(Template):
        def _data_collator(self, batch, *, padding_to=None):
            mine = torch.ones((3, 4, 4), dtype=torch.bool)
            return {**super()._data_collator(batch, padding_to=padding_to), "mine": mine}

        def _data_collator_mm_data(self, batch):
            return {"pixel_values": torch.ones((3, 8, 8)), "seen": torch.ones((2, 7, 7), dtype=torch.bool)}

    made = template()
    monkeypatch.setattr(made, "__class__", Vision)
    rows = [{"input_ids": [5] * n, "labels": [5] * n, "length": n} for n in (7, 3)]
    batch = made.data_collator(rows)
    assert all(batch[key].device.type == "cpu" for key in ("mine", "pixel_values", "seen"))
    assert batch["pixel_values"].sum() == 192
    assert batch["attention_mask_2d"].sum(1).tolist() == [7, 3]


# --- the offsets of its flat rows


@pytest.mark.parametrize(
    ("ranks", "changed", "offsets"),
    [
        (1, {}, [0, 7, 10, 15]),
        (1, {"fp8_format": "e4m3"}, [0, 7, 10, 15, 16]),
        (1, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, [0, 7, 10, 15, 16]),
        (1, {"fp8_recipe": "mxfp8"}, [0, 7, 10, *range(15, 33)]),
        (2, {}, [0, 8, 12, 20]),
        (2, {"fp8_format": "e4m3"}, [0, 8, 12, 20, 24, 28, 32]),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, [0, 8, 12, 20]),
    ],
)
def test_the_offsets_are_physical_end_with_the_row_and_can_be_shared_out(monkeypatch, installed, ranks, changed, offsets):
    world = World(monkeypatch)
    world.npu(False)
    world.rank(0, ranks)
    args = arguments("qwen3_next", cp=ranks, padding_free=True, **changed)
    data = collate(args, *LENGTHS)
    width = data["input_ids"].shape[1]
    params = prepare(args, data)["packed_seq_params"]
    assert params.cu_seqlens_q.tolist() == offsets
    assert params.cu_seqlens_q.dtype == torch.int32
    assert offsets[-1] == width
    assert isinstance(params.max_seqlen_q, int)
    truth = flat_segments(data, params, ranks)
    assert truth.shape == (1, width)
    assert truth.sequence_lengths == LENGTHS
    assert [start for _, start, _ in truth.spans] == offsets[:3]


def test_upstream_positions_are_shorter_than_the_row_where_three_ranks_share_the_tokens_of_two(monkeypatch):
    """padding_to is 6 and the row 24, of which 20 have places: the last four have no position at all."""
    world = World(monkeypatch)
    world.npu(False)
    world.rank(0, 2)
    args = arguments("qwen3_next", cp=2, padding_free=True, tensor_model_parallel_size=3, sequence_parallel=True)
    data = collate(args, *LENGTHS, 6)
    params = prepare(args, data)["packed_seq_params"]
    assert data["input_ids"].shape[1] > params.cu_seqlens_q[-1]
    with pytest.raises(
        CollateError, match=r"packed_seq_params: got .*Set padding_free=False, or a tensor_model_parallel_size"
    ):
        flat_segments(data, params, 2)


UNFIT = {
    "ends early": ([0, 7, 10, 15], 1),
    "begins late": ([1, 8, 11, 16], 1),
    "too short for the first": ([0, 6, 10, 16], 1),
    "two sequences for three": ([0, 7, 16], 1),
    "an empty one": ([0, 7, 10, 15, 15, 16], 1),
    "not to be shared out": ([0, 7, 10, 16], 2),
}


@pytest.mark.parametrize("how", UNFIT)
def test_offsets_that_do_not_fit_the_samples_are_refused(how):
    def params(offsets, **others):
        q = torch.tensor(offsets)
        none = {"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
        return SimpleNamespace(**{"cu_seqlens_q": q, "cu_seqlens_kv": q, **none, **others})

    row, (offsets, ranks) = {"input_ids": torch.ones(1, 16), "seq_lens": [7, 3, 5]}, UNFIT[how]
    right, other = [0, 7, 10, 16], torch.tensor([0, 8, 11, 16])
    assert flat_segments(row, params(right)) == Segments.from_lengths([LENGTHS], 16)
    for wrong in (params(offsets), params(right, cu_seqlens_kv=other), params(right, cu_seqlens_q_padded=other)):
        with pytest.raises(CollateError, match=r"packed_seq_params: got .* 16 tokens .*Set padding_free=False"):
            flat_segments(row, wrong, ranks)


# --- without `install()`: a test that fails here says which silent defect upstream has fixed


def test_upstream_a_keep_mask_is_inverted_in_silence(world):
    world.npu()
    args = arguments("qwen3_5")
    data, truth = as_kind(args, "4d keep")
    derived = prepare(args, data)["attention_mask_2d"]
    assert not torch.equal(derived, truth.keep)
    assert derived.tolist() == [[False] + [True] * 7] * 3


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_moe"])
def test_upstream_both_masks_are_lost_and_routers_do_not_learn_the_padding(world, model_type):
    world.npu()
    args = arguments(model_type)
    batch = prepare(args, as_kind(args, "template")[0])
    assert batch["attention_mask"] is None
    assert not {"attention_mask_2d", "padding_mask", "extra_block_kwargs"} & set(batch)


@pytest.mark.parametrize(("backend", "side"), [("flash", "left"), ("local", "right")])
def test_upstream_a_dense_mask_is_dropped_in_silence(world, backend, side):
    """Local kernels are not recognised, because the backend is an enum."""
    world.npu()
    args = arguments("qwen3_5", attention_backend=backend, use_flash_attn=True)
    assert prepare(args, as_kind(args, "4d masked", side=side)[0])["attention_mask"] is None


# --- what reaches the model


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
            args.model_info.config = None  # a model ms-swift has read no config of
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
    for found in ranks(2)("test_parallel_peers.swift_last_tokens", layout, backend, batches, [1, 0], seconds=180):
        assert found == [[1.0, 7.0, 0.0], [6.0, 2.0, 4.0]]
