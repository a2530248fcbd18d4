"""ms-swift 4.6.0 and mcore-bridge 1.6.5, the released packages: what reaches `model(**batch)`, with and without `install()`.

Transformer Engine and triton import as stand-ins (`te_stub`) and an NPU is there because `is_torch_npu_available` says so.
Tests named `upstream` hold a defect of the release without `install()`: one that fails says that upstream has fixed it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
for _name in ("swift", "mcore_bridge", "megatron"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"{_name} is not installed", allow_module_level=True)

import te_stub  # noqa: E402, F401

# isort: split  (the stand-ins stand before mcore_bridge and swift.megatron are imported)
import torch  # noqa: E402
from gloo_pool import Pool  # noqa: E402
from mcore_bridge.model import GPTModel, MultimodalGPTModel  # noqa: E402
from mcore_bridge.model.modules import TransformerLayer  # noqa: E402
from megatron.core import mpu  # noqa: E402
from swift.megatron.trainers import base, utils  # noqa: E402
from swift.template.base import Template  # noqa: E402
from swift.utils import import_external_file, patch_dataloader_external_plugins  # noqa: E402
from swift_world import (  # noqa: E402
    MODEL_TYPES,
    MULTIMODAL,
    NEEDS_2D,
    PAD,
    World,
    arguments,
    collate,
    prepare,
    reaches_model,
    template,
    trainer_of,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from collate_npu import BatchAdapter, CollateError, Segments, UnsupportedFormError, dense, split_batch  # noqa: E402
from collate_npu.integrations import swift  # noqa: E402
from collate_npu.integrations.megatron import gpt_batch, mcore_bridge  # noqa: E402
from collate_npu.integrations.swift import masks as swift_masks  # noqa: E402
from collate_npu.masks.forms import open_empty_rows  # noqa: E402
from collate_npu.parallel import ContextParallel, query_rows  # noqa: E402

LENGTHS = (7, 3, 5)
LOCAL = {"attention_backend": "local", "masked_softmax_fusion": False}
"""The kernels that read a dense mask."""
KINDS = ("template", "2d", "4d masked", "4d keep", "4d additive", "2d beside 4d")


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.fixture
def installed():
    swift.install()
    yield
    swift.uninstall()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    watched = [(Template, "_data_collator"), (utils, "prepare_batch"), (base, "prepare_batch")]
    watched += [
        (base.BaseMegatronTrainer, "get_last_tokens"),
        (MultimodalGPTModel, "forward"),
        (TransformerLayer, "forward"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    yield
    assert [getattr(owner, name) for owner, name in watched] == before


def as_kind(args, kind, lengths=LENGTHS, side="right"):
    """A batch as some collator sends it, and the truth of it."""
    if kind == "template":
        data = collate(args, *lengths)
        return data, Segments.from_lengths(lengths, data["input_ids"].shape[1])
    width = -(-max(lengths) // 4) * 4
    truth = Segments.from_lengths(lengths, width, side)
    ids = torch.where(truth.keep, torch.arange(truth.ids.numel()).view(truth.shape) % 200 + 3, PAD)
    data = {"input_ids": ids, "labels": torch.where(truth.keep, ids, -100), "position_ids": truth.position_ids.clone()}
    polarity = {"4d keep": "keep", "4d additive": "bias"}.get(kind, "masked")
    if "4d" in kind:
        data["attention_mask"] = dense(truth, polarity=polarity)
    if kind == "2d":
        data["attention_mask"] = truth.keep.long()
    if kind == "2d beside 4d":
        data["attention_mask_2d"] = truth.keep.long()
    return data, truth


# --- what reaches the model: model types x mask kinds x layouts x ranks


@pytest.mark.parametrize("place", [(0, 1), (0, 2), (1, 2)], ids=lambda place: f"rank {place[0]} of {place[1]}")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_on_an_npu_the_model_gets_none_and_the_2d_mask_where_it_has_layers_that_read_it(
    world, model_type, kind, layout, place
):
    world.npu()
    world.rank(*place)
    args = arguments(model_type, cp=place[1], cp_partition_mode=layout)
    data, truth = as_kind(args, kind)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_off_an_npu_recurrent_layers_get_the_2d_mask_too_and_a_router_learns_the_padding(world, model_type, kind):
    world.npu(False)
    args = arguments(model_type)
    data, truth = as_kind(args, kind)
    batch = reaches_model(args, data)
    assert batch["attention_mask"] is None
    assert ("attention_mask_2d" in batch) == (model_type in NEEDS_2D)
    assert model_type not in NEEDS_2D or torch.equal(batch["attention_mask_2d"], truth.keep)
    assert ("padding_mask" in batch) == args.model_info.is_moe_model
    assert not args.model_info.is_moe_model or torch.equal(batch["padding_mask"], ~truth.keep)


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


@pytest.mark.parametrize("place", [(0, 1), (0, 2), (1, 2)], ids=lambda place: f"rank {place[0]} of {place[1]}")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.usefixtures("installed")
def test_local_kernels_read_a_dense_mask_of_this_ranks_rows(world, kind, side, layout, place):
    world.npu()
    world.rank(*place)
    for model_type in MODEL_TYPES:
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


@pytest.mark.usefixtures("installed")
def test_a_whole_2d_mask_on_every_rank_for_layers_that_gather_the_row(world):
    swift.install(mask_2d="global")
    world.npu()
    world.rank(1, 2)
    args = arguments("qwen3_next", cp=2)
    data, truth = as_kind(args, "template")
    assert torch.equal(reaches_model(args, data)["attention_mask_2d"], truth.keep)


@pytest.mark.parametrize("context_parallel", [1, 2])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 3])
@pytest.mark.usefixtures("installed")
def test_widths_divide_for_every_tensor_parallel_size(world, monkeypatch, tensor_parallel, context_parallel):
    world.npu()
    world.rank(context_parallel - 1, context_parallel)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: tensor_parallel - 1)
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


# --- refusals


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
    monkeypatch.setattr("collate_npu.consumers.mindspeed.installed", lambda: True)
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
def test_fused_softmax_is_refused_as_megatron_refuses_it(world):
    """One rule, one message, one remedy, with ms-swift's own defaults; `test_twinkle` has the same for twinkle."""
    world.npu()
    model = torch.nn.Sequential(type("DotProductAttention", (torch.nn.Module,), {})())
    model.config = SimpleNamespace(num_moe_experts=None, linear_attention_freq=None, masked_softmax_fusion=True)
    data, _ = as_kind(None, "2d", side="left")
    for backend in ("flash", "local"):
        args = arguments("qwen3", attention_backend=backend)
        assert args.masked_softmax_fusion, "ms-swift's default"
        with pytest.raises(UnsupportedFormError, match="masked_softmax_fusion=False") as ours:
            prepare(args, data)
        with pytest.raises(UnsupportedFormError) as megatrons:
            gpt_batch(data, model)
        assert str(ours.value) == str(megatrons.value)


@pytest.mark.usefixtures("installed")
def test_a_dense_model_on_local_kernels_takes_left_padding_whatever_gdn_is_compiled_in(world):
    world.npu()
    args = arguments("qwen3", **LOCAL)
    data, truth = as_kind(args, "2d", side="left")
    assert torch.equal(prepare(args, data)["attention_mask"], dense(truth, polarity="masked"))


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
        swift_masks.segments_from_swift(arguments("qwen3"), data)
    data["seq_lens"] = list(LENGTHS)
    assert swift_masks.segments_from_swift(arguments("qwen3"), data) == truth
    data["attention_mask_2d"] = data["attention_mask_2d"].flip(1)  # padded left, in a batch that counts from the right
    with pytest.raises(CollateError, match="3 bad rows"):
        swift_masks.segments_from_swift(arguments("qwen3"), data)


@pytest.mark.parametrize("cp", [1, 2])
def test_only_alignment_padding_may_be_real_in_upstreams_own_2d_mask(cp):
    data = collate(arguments("qwen3", cp=2), *LENGTHS)
    if cp == 2:
        assert swift_masks.segments_from_swift(arguments("qwen3", cp=cp), data).row_lengths == LENGTHS
    else:
        with pytest.raises(CollateError, match="row 0: got seq_lens 7 beside 8"):
            swift_masks.segments_from_swift(arguments("qwen3", cp=cp), data)


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


# --- the template


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


@pytest.mark.parametrize("task", ["seq_cls", "embedding", "reranker"])
@pytest.mark.usefixtures("installed")
def test_other_tasks_templates_send_the_2d_mask_alone(task):
    made = template(task=task)
    rows = [{"input_ids": [5] * n, "labels": 1, "length": n} for n in LENGTHS]
    if task == "embedding":
        rows = [
            {f"{side}_{k}": v for side in ("anchor", "positive") for k, v in row.items() if k != "labels"} for row in rows
        ]
    if task == "reranker":
        rows = [{"input_ids": [row["input_ids"]], "labels": [1], "length": [row["length"]]} for row in rows]
    batch = made.data_collator(rows)
    assert "attention_mask" not in batch
    assert batch["attention_mask_2d"].sum(1).tolist() == [n for n in LENGTHS for _ in range(2 if task == "embedding" else 1)]


@pytest.mark.usefixtures("installed")
def test_the_transformers_path_of_the_template_is_left_alone():
    made = template()
    made.use_megatron = False
    batch = made.data_collator([{"input_ids": [5] * n, "labels": [5] * n} for n in LENGTHS])
    assert batch["attention_mask"].tolist() == Segments.from_lengths(LENGTHS).keep.long().tolist()


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


# --- pooling


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.usefixtures("installed")
def test_the_last_token_is_found_whatever_mask_the_model_was_given(world, side, monkeypatch):
    world.npu()
    for backend in ("local", "flash") if side == "right" else ("local",):
        reads = LOCAL if backend == "local" else {}
        args = arguments("qwen3_next", task_type="seq_cls", **reads)
        trainer = trainer_of(args)
        data, truth = as_kind(args, "4d masked", side=side)
        data["labels"] = torch.tensor([0, 1, 2])
        args.problem_type, args.num_labels = "single_label_classification", 3
        monkeypatch.setattr(trainer, "_all_reduce_metric", lambda metric: metric, raising=False)
        _, loss_of = trainer.forward_step(iter([data]), Logits())
        positions = truth.position_ids.unsqueeze(-1).float()
        last = trainer.get_last_tokens(positions, None, None)
        assert last.flatten().tolist() == [6.0, 2.0, 4.0]
        assert loss_of(positions.expand(-1, -1, 3))[0].isfinite()


@pytest.mark.usefixtures("installed")
def test_a_mask_of_whole_rows_is_obeyed_and_another_batchs_length_is_refused(world):
    world.npu()
    args = arguments("qwen3", task_type="seq_cls")
    trainer, (data, truth) = trainer_of(args), as_kind(args, "template")
    prepare(args, data)
    positions = truth.position_ids.unsqueeze(-1).float()
    other = Segments.from_lengths((2, 6, 1), truth.shape[1]).keep
    assert trainer.get_last_tokens(positions, None, other).flatten().tolist() == [1.0, 5.0, 0.0]
    assert trainer.get_last_tokens(positions, None, None).flatten().tolist() == [6.0, 2.0, 4.0]
    for wrong in (positions[:2], positions[:, :5]):
        with pytest.raises(CollateError, match=r"prepared last is \[3, 7\] on 1 ranks"):
            trainer.get_last_tokens(wrong, None, None)


class Logits(torch.nn.Module):
    vp_stage = None

    def forward(self, **batch):
        return torch.zeros(1)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("backend", ["flash", "local"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_two_ranks_pool_the_last_token_of_rows_they_share(pool, layout, backend):
    """Upstream's own gather, on Gloo, with the mask of the whole row."""
    for found in pool("swift_work.last_tokens", layout, backend, LENGTHS, seconds=180):
        assert found == [6.0, 2.0, 4.0]


# --- delivery: is what stands in the batch what a layer reads?


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.usefixtures("installed")
def test_every_batch_fits_the_signature_of_the_real_forward(world, model_type):
    world.npu()
    args = arguments(model_type)
    batch = prepare(args, as_kind(args, "template")[0])
    batch.pop("loss_scale", None)
    real = MultimodalGPTModel if model_type in MULTIMODAL else GPTModel
    inspect.signature(inspect.unwrap(real.forward)).bind(None, **batch)


# --- upstream, without install(): one of these that fails says which defect is fixed


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


# --- installing


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


def test_your_own_install_of_mcore_bridge_survives_ours_and_the_other_way_round():
    theirs = TransformerLayer.forward
    for first, second in ((swift, mcore_bridge), (mcore_bridge, swift)):
        first.install()
        second.install()
        ours = TransformerLayer.forward
        assert inspect.unwrap(ours) is theirs
        swift.uninstall()
        assert TransformerLayer.forward is ours
        mcore_bridge.uninstall()
        assert TransformerLayer.forward is theirs


def test_a_later_patch_of_another_library_stays_and_ours_lets_through(world):
    world.npu()
    args = arguments("qwen3_next")
    data, _ = as_kind(args, "template")
    original, theirs = utils.prepare_batch, prepare(args, data)
    swift.install()
    ours = utils.prepare_batch
    stranger = lambda *given: {**ours(*given), "seen": True}  # noqa: E731
    utils.prepare_batch = stranger
    assert "padding_mask" in prepare(args, data)["extra_block_kwargs"]
    swift.uninstall()
    assert utils.prepare_batch is stranger
    assert base.prepare_batch is original
    after = prepare(args, data)
    assert after.pop("seen")
    assert after.keys() == theirs.keys()
    utils.prepare_batch = ours  # the stranger undoes its own
    assert prepare(args, data).keys() == theirs.keys()
    swift.install()
    swift.uninstall()
    assert utils.prepare_batch is original


def test_as_external_plugins_file_it_installs_and_hides_no_package(tmp_path):
    original, path = utils.prepare_batch, list(sys.path)
    for _ in range(2):
        import_external_file(str(Path(swift.__file__).with_name("plugin.py")))
        assert utils.prepare_batch is not original
        assert sys.path == path  # with its folder first, `import transformers` would find this package's file
    swift.uninstall()


def test_a_spawned_dataloader_worker_replays_the_plugin():
    made = template()
    for attribute in ("model_info", "model_meta"):  # SimpleNamespace, so that the template pickles
        assert hasattr(made.tokenizer, attribute)
    before = DataLoader.__init__, getattr(DataLoader, "_swift_external_plugins", False)
    try:
        import_external_file(str(Path(swift.__file__).with_name("plugin.py")))
        patch_dataloader_external_plugins()
        rows = [{"input_ids": [5] * n, "labels": [5] * n, "length": n} for n in LENGTHS]
        loader = DataLoader(
            rows, batch_size=3, collate_fn=made.data_collator, num_workers=1, multiprocessing_context="spawn"
        )
        (batch,) = loader
    finally:
        DataLoader.__init__, DataLoader._swift_external_plugins = before
        swift.uninstall()
    assert "attention_mask" not in batch
    assert batch["attention_mask_2d"].sum(1).tolist() == list(LENGTHS)


def test_from_args_reads_ms_swifts_own_names(world):
    """Also without the HF config: model_type, padding_free, context_parallel_size, cp_partition_mode."""
    args = arguments("qwen3_next")
    del args.model_info
    adapter = BatchAdapter.from_args(args)
    assert adapter.route(Segments.from_lengths(LENGTHS)).keeps_mask_2d
    args.padding_free = True
    assert not BatchAdapter.from_args(args).route(Segments.from_lengths([list(LENGTHS)])).keeps_mask_2d
