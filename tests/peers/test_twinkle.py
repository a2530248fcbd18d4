"""twinkle-kit 0.5.1: its real InputProcessor with our stages, on rows as its template emits them, without a card."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import twinkle as kit
from cells import Stack, verdict
from hypothesis import HealthCheck, given, settings, strategies as st
from processes import CARDS, JOBS, check_sizes, found_by, words_of
from torch import nn
from twinkle import DeviceMesh, Platform, dataloader, dataset, model as models
from twinkle.cli import CLI
from twinkle.processor import base

from collate_npu import CollateError, ContextParallel, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import twinkle
from collate_npu.masks import dense
from collate_npu.parallel import query_rows, split_tensor

NEEDS = ("twinkle", "megatron", "mcore_bridge", "ray")


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    """twinkle knows GPU, NPU and MPS; tensors go to the CPU here, and the device's name is what a test says."""
    monkeypatch.setattr(Platform, "get_local_device", staticmethod(lambda *_, **__: "cpu"))
    monkeypatch.setattr(Platform, "device_prefix", staticmethod(lambda *_, **__: "cuda"))


@pytest.fixture
def npu(monkeypatch):
    monkeypatch.setattr(Platform, "device_prefix", staticmethod(lambda *_, **__: "npu"))


def grid(tp=1, cp=1, rank=0):
    return SimpleNamespace(
        tp_world_size=tp, cp_world_size=cp, cp_rank=rank, tp_rank=0, sequence_parallel=tp > 1, has_dim=lambda _: False
    )


def processor(mesh=None, *, ours=True, needs=True, **settings):
    made = base.InputProcessor(**{"framework": "megatron", **settings})
    made.device_mesh = mesh
    if ours:
        twinkle.install(made, needs_mask_2d=needs)
    return made


def feature(length, start=1, mask=None, positions=None):
    """What twinkle's template emits for one sample: labels are shifted already."""
    ids, real = list(range(start, start + length)), mask or [1] * length
    return {
        "input_ids": ids,
        "labels": [x if n else -100 for x, n in zip([*ids[1:], -100], real)],
        "completion_mask": [1] * length,
        "attention_mask": real,
        "position_ids": list(range(length)) if positions is None else positions,
    }


def features(lengths):
    return [feature(length, 10 * (b + 1)) for b, length in enumerate(lengths)]


LENGTHS = st.lists(st.integers(2, 9), min_size=1, max_size=4)
KEYS = ("input_ids", "labels", "completion_mask", "mm_token_type_ids", "loss_scale")


def whole(mesh, rows, key, **settings):
    """The key as all ranks of the mesh hold it together."""
    ranks = [grid(mesh.tp_world_size, mesh.cp_world_size, rank) for rank in range(mesh.cp_world_size)]
    shards = [processor(rank, **settings)(copy.deepcopy(rows))[0][key] for rank in ranks]
    joined = torch.cat(shards, 1)
    places, cps = torch.arange(joined.shape[1]), [ContextParallel(len(shards), rank) for rank in range(len(shards))]
    return joined[:, torch.cat([split_tensor(places, cp, dim=0) for cp in cps]).argsort()]


@given(LENGTHS, st.sampled_from([None, 1, 2]), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_rows_padded_right_are_twinkles(lengths, micro, variable):
    if micro is not None and len(lengths) % micro:
        lengths = lengths + lengths[:1]
    args = {"micro_batch_size": micro, "variable_seq_lengths": variable}
    theirs = processor(ours=False)(features(lengths), **args)
    ours = processor()(features(lengths), **args)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        for key in (*KEYS[:3], "position_ids"):
            assert torch.equal(mine[key], other[key]), key
        truth = Segments.from_keep(mine["attention_mask_2d"])
        assert torch.equal(dense(truth, polarity="masked"), other["attention_mask"])
        assert mine["attention_mask"] is None


@given(st.data(), st.sampled_from(["left", "right"]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_side_zeros_and_multiples(data, side, tp, cp):
    lengths = data.draw(LENGTHS)
    reals = [data.draw(st.integers(1, n)) for n in lengths]
    masks = [[1] * real + [0] * (n - real) for n, real in zip(lengths, reals)]
    rows = [feature(n, 10 * (b + 1), mask) for b, (n, mask) in enumerate(zip(lengths, masks))]
    mesh = grid(tp, cp)
    multiple = tp * (2 * cp if cp > 1 else 1)
    out = processor(mesh, padding_side=side)(copy.deepcopy(rows))[0]
    S = -(-max(lengths) // multiple) * multiple
    keep = whole(mesh, rows, "attention_mask_2d", padding_side=side)
    assert keep.shape == (len(lengths), S)
    assert out["attention_mask_2d"].shape == out["input_ids"].shape, "split like the tokens"
    for b, (n, mask) in enumerate(zip(lengths, masks)):
        at = slice(S - n, S) if side == "left" else slice(0, n)
        assert keep[b, at].tolist() == [bool(m) for m in mask]
        assert keep[b].sum() == sum(mask)
    ids = whole(mesh, rows, "input_ids", padding_side=side)
    assert all(ids[b][keep[b]].tolist() == [i for i, m in zip(row["input_ids"], row["attention_mask"]) if m]
               for b, row in enumerate(rows))  # fmt: skip
    truth = Segments.from_keep(keep)
    if out["attention_mask"] is not None:
        rows_of_rank = query_rows(S, ContextParallel(cp, 0, tensor_parallel=tp))
        assert torch.equal(out["attention_mask"], dense(truth, polarity="masked", rows=rows_of_rank))
    else:
        assert truth.padding_side in ("none", "right")


def test_zeros_inside_a_mask_are_a_hole_that_attention_passes_over_and_a_state_does_not():
    rows = [feature(6, 10), feature(5, 50, [1, 1, 0, 1, 1])]
    masked = processor(needs=False)(copy.deepcopy(rows))[0]["attention_mask"]
    assert torch.equal(masked, dense(Segments.from_keep([[1] * 6, [1, 1, 0, 1, 1, 0]]), polarity="masked"))
    with pytest.raises(UnsupportedFormError, match="Padding inside a sequence changes the state"):
        processor()(rows)


def test_every_token_key_keeps_its_places_under_cp():
    rows = features([5, 3])
    for b, row in enumerate(rows):
        row["mm_token_type_ids"] = [1 + b] * len(row["input_ids"])
        row["loss_scale"] = [0.5 + i for i in range(len(row["input_ids"]))]
        row["routed_experts"] = torch.arange(1, 1 + (len(row["input_ids"]) - 1) * 4).view(-1, 2, 2)
    made = processor(padding_side="left")
    # twinkle's list of keys has no loss_scale: it is padded and stacked, and then left out by twinkle's own stage
    out = made(copy.deepcopy(rows))[0]
    assert "loss_scale" not in out
    assert out["mm_token_type_ids"].tolist() == [[1] * 5, [0, 0, 2, 2, 2]]
    assert out["routed_experts"].shape == (2, 5, 2, 2)
    assert out["routed_experts"][1, :, 0, 0].tolist() == [0, 0, 1, 5, 0], "the last token's experts are not known"
    for key in ("labels", "mm_token_type_ids", "routed_experts", "position_ids", "completion_mask"):
        unsplit = processor(grid(4, 1), padding_side="left")(copy.deepcopy(rows))[0][key]
        assert torch.equal(whole(grid(1, 2), rows, key, padding_side="left"), unsplit), key


def test_zeros_leave_a_flat_row_and_positions_start_again():
    rows = [feature(5, 1, [0, 0, 1, 1, 1]), feature(6, 20, [1, 0, 1, 0, 1, 1], [0, 1, 2, 0, 1, 2])]
    out = processor(padding_free=True)(copy.deepcopy(rows))[0]
    assert out["input_ids"].tolist() == [[3, 4, 5, 20, 22, 24, 25]]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert out["packed_seq_params"].cu_seqlens_q.tolist() == [0, 3, 5, 7]


def test_install_twice_and_uninstall():
    made = processor(ours=False)
    before = list(made.process_pipeline)
    twinkle.install(made, needs_mask_2d=True)
    twinkle.install(made, needs_mask_2d=True)
    assert [stage.__name__ for stage in made.process_pipeline] == [stage.__name__ for stage in before]
    made.process_pipeline[2:3] = [stranger := lambda inputs, **_: inputs, made.process_pipeline[3]]
    twinkle.uninstall(made)
    assert stranger in made.process_pipeline, "somebody else's stage stays"
    assert [stage for stage in made.process_pipeline if stage is not stranger][:2] == before[:2]
    made.process_pipeline = before[2:]
    with pytest.raises(CollateError, match="pad_cp"):
        twinkle.install(made, needs_mask_2d=True)


DotProductAttention, TEDotProductAttention, GatedDeltaNet = (
    type(name, (nn.Module,), {}) for name in ("DotProductAttention", "TEDotProductAttention", "GatedDeltaNet")
)


def gpt_model(*layers, forward, **config):
    """A wrapped model with layers of these kinds, as Megatron-core names them."""
    model = type("GPTModel", (nn.Module,), {"forward": forward})()
    model.layers = nn.ModuleList(layer() for layer in layers)
    model.config = SimpleNamespace(**config)
    return SimpleNamespace(module=model)


def through_extras(self, input_ids, extra_block_kwargs=None): ...
def through_keywords(self, input_ids, **kwargs): ...
def through_nothing(self, input_ids): ...


def installed(model, mesh=None, **settings):
    made = processor(mesh, ours=False, **settings)
    twinkle.install(made, model, needs_mask_2d=True)
    return made


def test_the_2d_mask_goes_through_the_door_the_model_has():
    rows = features([5, 3])
    for forward, reach in ((through_extras, lambda out: out["extra_block_kwargs"]), (through_keywords, lambda out: out)):
        out = installed(gpt_model(forward=forward))(copy.deepcopy(rows))[0]
        assert reach(out)["attention_mask_2d"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]
        assert ("attention_mask_2d" in out) == (reach(out) is out)
    closed = gpt_model(forward=through_nothing)
    twinkles = SimpleNamespace(optimizer_group={}, model=[closed.module], forward=through_keywords)  # it drops every keyword
    for model in (closed, [gpt_model(forward=through_keywords), closed], twinkles):
        with pytest.raises(UnsupportedFormError, match="no layer would see it"):
            installed(model)(copy.deepcopy(rows))


def test_routers_of_moe_models_are_told_the_padding():
    model = gpt_model(DotProductAttention, forward=through_extras, num_moe_experts=4, sequence_parallel=True)
    out = installed(model)(features([5, 3]))[0]
    assert out["extra_block_kwargs"]["padding_mask"].tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    left = installed(model, padding_side="left")(features([5, 3]))[0]
    assert "padding_mask" not in left["extra_block_kwargs"], "the dense mask says it"


READERS = {
    "fused softmax, read no dense mask": ((TEDotProductAttention,), {}),
    "GatedDeltaNet of megatron-core reads no padding mask": ((DotProductAttention, GatedDeltaNet), {}),
    "masked_softmax_fusion=False": ((DotProductAttention,), {"masked_softmax_fusion": True}),
}


@pytest.mark.parametrize("reader", READERS)
def test_padding_that_no_kernel_reads_is_refused_in_whichever_chunk_of_a_pipeline(reader):
    layers, config = READERS[reader]
    model = gpt_model(*layers, forward=through_keywords, **config)
    chunks = [gpt_model(DotProductAttention, forward=through_keywords).module, model.module]
    for held in (model, chunks, nn.ModuleList(chunks), SimpleNamespace(optimizer_group={}, model=chunks)):
        made = installed(held, padding_side="left")
        with pytest.raises(UnsupportedFormError, match=reader):
            made(features([5, 3]))
        assert made(features([4, 4]))[0]["attention_mask"] is None
        assert installed(held)(features([5, 3]))[0]["attention_mask"] is None
    read = installed(chunks[:1], padding_side="left")(features([5, 3]))[0]
    assert read["attention_mask"].shape == (2, 1, 5, 5)


def test_several_sequences_in_a_row_of_a_transformers_model_need_padding_free_and_then_count_anew():
    row = feature(4, mask=[1, 1, 2, 2])
    with pytest.raises(UnsupportedFormError, match="padding_free=True"):
        processor(framework="transformers")([copy.deepcopy(row)])
    out = processor(framework="transformers", padding_free=True)([copy.deepcopy(row)])
    assert out["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert out.get("attention_mask") is None


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("side", ["left", "right"])
def test_general_attention_of_mindspeed_gets_a_dense_mask_always(monkeypatch, side):
    """None would meet the 2048 triangle in sparse_mode 1, which the card refuses; by release (consumers/mindspeed.py)."""
    general = {"attention_mask_type": "general"}
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "own")
    out = processor(padding_side=side)(features([5, 3]), **general)[0]
    assert out["attention_mask"].shape == (2, 1, 5, 5)
    assert not out["attention_mask"].all(-1).any(), "no query without a key"
    with pytest.raises(UnsupportedFormError, match="Set attention_mask_type=causal"):
        processor(grid(1, 2), padding_side=side)(features([5, 3]), **general)
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "separate")
    assert processor()(features([5, 3]), **general)[0]["attention_mask"] is None


# --- the launch script of the guide: its words parsed by twinkle's CLI, its program run on twinkle's own signatures


@pytest.mark.parametrize("job", JOBS)
def test_twinkle_knows_every_word_and_call(job, tmp_path, monkeypatch):
    words, _ = words_of("twinkle.sh", "torchrun", job, tmp_path)
    assert words[:5] == ["--nproc_per_node", str(CARDS), "--no-python", "python", "-c"]
    program, given = words[5], words[6:]
    args = CLI.from_args(given, env_file=tmp_path / "none")
    assert args.extra == {}, "words that twinkle does not know"
    infra = args.infra
    check_sizes(job, infra.tp_size, infra.pp_size or 1, infra.cp_size or 1, infra.dp_size, infra.ep_size or 1)
    assert (infra.sequence_parallel, args["model_id"], args["dataset_id"]) == (True, "MODEL", "DATASET")

    fakes = {
        (models, "MegatronModel"): mock.create_autospec(models.MegatronModel),
        (dataset, "Dataset"): mock.create_autospec(dataset.Dataset),
        (dataloader, "DataLoader"): mock.create_autospec(dataloader.DataLoader),
        (kit, "initialize"): mock.create_autospec(kit.initialize),
        (twinkle, "install"): mock.create_autospec(twinkle.install),
    }
    fakes[dataloader, "DataLoader"].return_value.__len__.return_value = 3
    fakes[dataloader, "DataLoader"].return_value.__iter__.return_value = iter(["a batch", "another"])
    for (module, name), fake in fakes.items():
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr("sys.argv", ["-c", *given])
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "twinkle.sh", "exec"), {})
    mesh = fakes[kit, "initialize"].call_args.kwargs["global_device_mesh"]
    assert isinstance(mesh, DeviceMesh)
    assert (mesh.world_size, mesh.sequence_parallel, mesh.ep_size or 1) == (CARDS, True, infra.ep_size or 1)
    model = fakes[models, "MegatronModel"].return_value
    fakes[twinkle, "install"].assert_called_once_with(model)
    assert model.forward_backward.call_args_list[-1] == mock.call(inputs="another", micro_batch_size=1)
    assert model.clip_grad_and_step.call_count == 2


# --- its own models, built by their constructors, from `set_processor` to `forward_backward`, in one process and on Ray
#
# On a CPU; each program runs in processes of its own (`twinkle_work`).

MODELS = pytest.mark.together("twinkle's models")
NEAR = 2e-5
NONE = {"attention": [None], "recurrent": [None, None]}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Both at once: each takes a while to import its stack."""
    parts = ({"PART": "models"}, {"PART": "ray", "RAY_USAGE_STATS_ENABLED": "0"})
    return dict(zip(("models", "ray"), found_by("twinkle_work", tmp_path_factory.mktemp("twinkle"), variants=parts)))


@pytest.fixture(scope="module")
def told(programs):
    return programs["models"]


def received(answer):
    return {name: answer[name] for name in ("attention", "recurrent")}


@MODELS
@pytest.mark.parametrize("device", ["npu", "other"])
def test_a_hybrid_megatron_model_computes_each_sample_alone(told, device):
    answer = told[f"ours {device}"]
    assert answer["error"] <= NEAR
    assert received(answer) == NONE
    assert told[f"gradient {device}"] <= NEAR
    assert told[f"objects go by Gloo {device}"] == (device == "npu")


@MODELS
@pytest.mark.parametrize("device", ["npu", "other"])
def test_left_padding_is_refused_where_no_layer_reads_it(told, device):
    """The processor was set after `install`: it has our stages all the same."""
    assert told[f"ours left {device}"]["raised"] == "UnsupportedFormError"
    assert "pad right" in told[f"ours left {device}"]["said"].lower()
    assert told["stages after uninstall"] == ["InputProcessor"]


STACK = Stack("twinkle, Megatron", ("twinkle-kit", "mcore-bridge", "megatron-core"), "peers_misc")
LINE = "integrations.twinkle.install(model)"


@MODELS
def test_a_cell_of_left_padding(told):
    cases = (("alone", told["upstream left"]), ("ours", told["ours left npu"]))
    both = {who: verdict(x.get("error"), refused=f"{x.get('raised')}: {x.get('said')}") for who, x in cases}
    STACK.tell("qwen3_next", "padded left", **both, line=LINE)


def test_its_cells_on_one_rank_and_on_two(tmp_path):
    STACK.tell_jobs(found_by("twinkle_work", tmp_path, variants=({"PART": "ranks"},), ranks=2)[0], line=LINE)


@MODELS
def test_left_padding_is_computed_where_local_kernels_read_a_dense_mask(told):
    assert told["ours dense left"]["error"] <= NEAR


@MODELS
def test_a_transformers_model_reads_the_2d_mask_that_twinkle_drops(told):
    assert told["ours transformers, 2D alone"]["error"] <= NEAR


@MODELS
def test_on_ray_the_same_call_reaches_the_processor_in_each_worker(programs):
    told = programs["ray"]
    assert told["stages"] == ["InputProcessor", "Stages"]
    assert told["step"] == "computed"
    assert told["ours"]["error"] <= NEAR
    assert received(told["ours"]) == NONE
    assert "UnsupportedFormError" in told["left"]
    assert told["left afterwards"] == "computed", "in silence, as upstream"
