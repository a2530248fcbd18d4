"""ms-swift 4.6.0 on Megatron: what its template and its `prepare_batch` give, what reaches `model(**batch)`, what is
refused, and which tokens are pooled.

What a rank takes is computed from Megatron's sizes alone, so any number of ranks is played in one process; what ranks
gather, two real processes do (`ranks`).
"""

from contextlib import nullcontext

import pytest
import swift_world
import torch
from megatron.core import parallel_state
from swift_world import KINDS, LENGTHS, LOCAL, NEEDS_2D, arguments, as_kind, collate, prepare, reaches_model, trainer_of
from torch.utils._python_dispatch import TorchDispatchMode

from collate_npu import CollateError, Segments, split_batch
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import patching, swift
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel, query_rows, split_tensor

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
IMPORTS = 300  # seconds: the first call imports ms-swift in each rank


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
    args, lengths, found = arguments("qwen3_next", cp=cp), (512, 301, 17, 400), []
    for install in (swift.uninstall, swift.install):
        install()
        with Largest() as seen:
            found.append((seen, collate(args, *lengths)))
    swift.uninstall()
    (upstream, theirs), (wrapped, ours) = found
    assert (upstream.elements, wrapped.elements) == (4 * 512 * 512, 4 * 512)
    assert theirs.keys() - ours.keys() == {"attention_mask"}
    assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours if "mask" not in key)
    assert torch.equal(ours["attention_mask_2d"], ~theirs["attention_mask"][:, 0, -1])


def test_lengths_win_over_alignment_padding_and_must_agree_with_a_mask(world, installed):
    """A worker without the plugin sends alignment padding as real."""
    world.npu()
    swift.uninstall()
    args, whole = arguments("qwen3_next", cp=2), arguments("qwen3_next")
    data = collate(args, *LENGTHS)
    swift.install()
    assert data["attention_mask_2d"].sum(1).tolist() == [8, 4, 8]
    world.rank(0, 2)
    kept = reaches_model(args, data)["attention_mask_2d"]
    assert torch.equal(kept, split_tensor(Segments.from_lengths(LENGTHS, 8).keep, ContextParallel(2, 0)))
    with pytest.raises(CollateError, match="row 0: got seq_lens 7 beside 8"):
        prepare(whole, data)
    data, _ = as_kind(whole, "2d beside 4d")
    for changed, said in (
        ({"seq_lens": [7, 4, 5]}, "row 1: got seq_lens 4 beside 3 real tokens"),
        ({"seq_lens": [*LENGTHS], "attention_mask_2d": data["attention_mask_2d"].flip(1)}, "3 bad rows"),  # padded left
    ):
        with pytest.raises(CollateError, match=said):
            prepare(whole, data | changed)
    assert prepare(whole, data | {"seq_lens": [*LENGTHS]})["attention_mask"] is None


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
    changed, side = KERNELS[kernel]
    side = "right" if kind == "template" else side  # it pads there
    for layout, rank, size in PLACES:
        world.rank(rank, size)
        args = arguments(model_type, cp=size, cp_partition_mode=layout, **changed)
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
    batch = reaches_model(args := arguments(model_type, padding_free=True), collate(args, *LENGTHS))
    assert batch["attention_mask"] is None
    assert not {"attention_mask_2d", "padding_mask"} & set(batch)
    assert batch["packed_seq_params"].cu_seqlens_q.tolist()[:4] == [0, 7, 10, 15]
    world.rank(0, 2)
    for layout in ("contiguous", "zigzag"):
        args = arguments(model_type, cp=2, padding_free=True, cp_partition_mode=layout)
        said = r"document_zigzag.*cp_partition_mode='zigzag'"
        refused = pytest.raises(UnsupportedFormError, match=said) if out_of_order(model_type, layout, 2) else nullcontext()
        with refused:
            assert reaches_model(args, collate(args, *LENGTHS))["attention_mask"] is None
    args.model_info.config = None  # a model ms-swift has read no config of
    assert reaches_model(args, collate(args, *LENGTHS))["attention_mask"] is None


# --- where no right form exists

MLP, MTP = {"mlp_padding_free": True}, {**LOCAL, "mtp_num_layers": 1}
REFUSED = [
    ("qwen3_next", {}, "left", "fused softmax, read no dense mask, and padding stands on the left"),
    ("qwen3_next", {"attention_backend": "fused"}, "left", "fused softmax, read no dense mask"),
    ("qwen3_next", {"attention_backend": "local"}, "left", "run local kernels with masked_softmax_fusion=False"),
    ("qwen3_next", MLP, "right", "mlp_padding_free needs a dense mask"),
    # mcore-bridge would cut its mask otherwise than the tokens
    ("qwen3", {**MLP, **LOCAL, "cp": 2, "cp_partition_mode": "contiguous"}, "right", "cp_partition_mode: got contiguous"),
    # the gradient of the prediction layers is off by its own size
    ("qwen3", MTP, "left", r"labels: got learned ones there in rows \[1, 2\]\. With mtp_num_lay"),
]


@pytest.mark.parametrize(("model_type", "changed", "side", "said"), REFUSED)
@pytest.mark.usefixtures("installed")
def test_where_none_is_wrong_and_no_dense_mask_is_read_it_refuses(world, model_type, changed, side, said):
    world.npu()
    world.rank(0, changed.get("cp", 1))
    data = as_kind(args := arguments(model_type, **changed), "2d", side=side)[0]
    data["labels"][0, :3] = -100
    with pytest.raises(UnsupportedFormError, match=said):
        prepare(args, data)


@pytest.mark.usefixtures("installed")
def test_off_an_npu_the_dense_mask_of_mlp_padding_free_and_with_ignored_labels_what_predicts_ahead_go_through(world):
    world.npu(False)
    data, truth = as_kind(args := arguments("qwen3", **MLP), "template")
    assert torch.equal(prepare(args, data)["attention_mask"], dense(truth, polarity="masked"))
    data, truth = as_kind(args := arguments("qwen3", **MTP), "2d", side="left")
    data["labels"] = data["labels"].masked_fill(truth.position_ids < 2, -100)
    assert torch.equal(prepare(args, data)["attention_mask"], dense(truth, polarity="masked"))


# --- the last token of each row is told by the batch that is pooled, and by no other


def test_the_mask_that_is_given_is_obeyed_and_anything_else_is_refused(world, installed):
    world.npu()
    trainer = trainer_of(arguments("qwen3", task_type="seq_cls"))
    other = Segments.from_lengths((2, 6, 1), 7)
    places = torch.arange(7.0).expand(3, 7).unsqueeze(-1)
    for mask in (other.keep, other.keep.long()):
        assert trainer.get_last_tokens(places, None, mask).flatten().tolist() == [1.0, 5.0, 0.0]
    for mask in (None, other.keep[:2], other.keep[:, :5], dense(other, polarity="masked")):
        with pytest.raises(CollateError, match=r"this output has 3 rows of 7 \(1 ranks\). .* unsplit"):
            trainer.get_last_tokens(places, None, mask)
    with pytest.raises(CollateError, match="row 1: got padding alone"):
        trainer.get_last_tokens(places, None, other.keep & torch.tensor([[1], [0], [1]]).bool())
    world.rank(0, 2)
    trainer = trainer_of(arguments("qwen3", cp=2, task_type="seq_cls"))
    with pytest.raises(CollateError, match=r"this output has 3 rows of 8 \(2 ranks\)"):
        trainer.get_last_tokens(torch.zeros(3, 4, 1), None, torch.ones(3, 4))


def pooled(layout: str, backend: str, batches: list[tuple[int, ...]], order: list[int]) -> list[list[float]]:
    """ms-swift's own pooling of a row that ranks share: every batch is prepared, then they are pooled in `order`.

    Gives the place in which each row's last token stands.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=2)
    cp = ContextParallel.from_megatron(layout=layout)
    args = arguments("qwen3", cp=2, cp_partition_mode=layout, task_type="seq_cls", attention_backend=backend)
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        swift_world.World(patch).npu()
        swift.install()
        try:
            trainer = swift_world.pooling_trainer(args)
            for lengths in batches:
                data = collate(args, *lengths)
                truth = Segments.from_lengths(lengths, data["input_ids"].shape[1])
                data["labels"] = torch.zeros(len(lengths), dtype=torch.long)
                places = split_batch({"x": truth.position_ids.unsqueeze(-1).float(), "input_ids": truth.ids}, cp)["x"]
                steps.append((places, trainer.forward_step(iter([data]), swift_world.Recorder())[1]))
            return [loss(places).flatten().tolist() for places, loss in (steps[i] for i in order)]
        finally:
            swift.uninstall()


@pytest.mark.together("two ranks pool")
@pytest.mark.parametrize(("layout", "backend"), [("zigzag", "flash"), ("contiguous", "local")])
def test_two_ranks_pool_the_last_token_of_rows_they_share(ranks, layout, backend):
    """Upstream's own gather, on Gloo; two batches are prepared before the first of them is pooled."""
    for found in ranks(2)("test_swift_megatron.pooled", layout, backend, [(7, 3, 5), (2, 8, 1)], [1, 0], seconds=IMPORTS):
        assert found == [[1.0, 7.0, 0.0], [6.0, 2.0, 4.0]]
