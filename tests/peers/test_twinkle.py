"""twinkle-kit 0.5.1: its real InputProcessor with our stages, on rows as its template emits them, and its own models, built
by their constructors, from `set_processor` to `forward_backward`.

`PART=ranks python test_twinkle.py OUT` is one of two ranks: log-probabilities as `forward_only` gives them back, and
gradients, against each sample alone, a row on one rank and shared by both. `PART=ray` is started as twinkle's README does:
the model and its processor live in a worker (`worker` prepares it). What stands in is hardware: the platform's device,
CUDA's random state and streams, TransformerEngine's modules, fla's kernels, MindSpeed.
"""

import copy
import os
import re
import tempfile
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron_world as world
import pytest
import te_stub  # noqa: F401  (before mcore_bridge)
import torch
import twinkle as kit
from cells import Stack
from hypothesis import HealthCheck, given, settings, strategies as st
from megatron_world import DENSE, UNFUSED, apart, cells_on_ranks, far, fill
from processes import CARDS, JOBS, check_sizes, found_by, saved_model, words_of, write
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
EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def device(name: str = "cuda", put: Any = setattr) -> None:
    """What twinkle takes this machine for: it knows GPU, NPU and MPS. Tensors go to the CPU."""
    put(Platform, "get_local_device", staticmethod(lambda *_, **__: "cpu"))
    put(Platform, "device_prefix", staticmethod(lambda *_, **__: name))


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    device(put=monkeypatch.setattr)


# --- its processor, on rows


def grid(tp=1, cp=1, rank=0):
    return SimpleNamespace(
        tp_world_size=tp, cp_world_size=cp, cp_rank=rank, tp_rank=0, sequence_parallel=tp > 1, has_dim=lambda _: False
    )


def processor(mesh=None, model=None, *, ours=True, needs=True, **changed):
    made = base.InputProcessor(**{"framework": "megatron", **changed})
    made.device_mesh = mesh
    if ours:
        twinkle.install(made, model, needs_mask_2d=needs)
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


def features(*lengths):
    return [feature(length, 10 * (b + 1)) for b, length in enumerate(lengths)]


LENGTHS = st.lists(st.integers(3, 9), min_size=1, max_size=4)
KEYS = ("input_ids", "labels", "completion_mask", "position_ids")


def whole(mesh, rows, **changed):
    """The keys as all ranks of the mesh hold them together."""
    ranks = [grid(mesh.tp_world_size, mesh.cp_world_size, rank) for rank in range(mesh.cp_world_size)]
    shards = [processor(rank, **changed)(copy.deepcopy(rows))[0] for rank in ranks]
    width = sum(shard["input_ids"].shape[1] for shard in shards)
    cps = [ContextParallel(len(shards), rank) for rank in range(len(shards))]
    places = torch.cat([split_tensor(torch.arange(width), cp, dim=0) for cp in cps]).argsort()
    names = [*KEYS, "mm_token_type_ids", "routed_experts", "attention_mask_2d"]
    return {key: torch.cat([shard[key] for shard in shards], 1)[:, places] for key in names}, shards[0]["attention_mask"]


@given(LENGTHS, st.sampled_from([None, 1, 2]), st.booleans())
@EXAMPLES
def test_rows_padded_right_are_twinkles(lengths, micro, variable):
    lengths = lengths + lengths[:1] if micro is not None and len(lengths) % micro else lengths
    args = {"micro_batch_size": micro, "variable_seq_lengths": variable}
    theirs, ours = processor(ours=False)(features(*lengths), **args), processor()(features(*lengths), **args)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in KEYS)
        assert torch.equal(dense(Segments.from_keep(mine["attention_mask_2d"]), polarity="masked"), other["attention_mask"])
        assert mine["attention_mask"] is None


@given(st.data(), st.sampled_from(["left", "right"]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
@EXAMPLES
def test_every_key_stands_with_its_tokens_on_either_side_for_any_ranks(data, side, tp, cp):
    """Behind the real tokens of a sample zeros of its own mask may stand, before the padding."""
    lengths = data.draw(LENGTHS.filter(lambda lengths: len(lengths) > 1))
    masks = [[1] * real + [0] * (n - real) for n in lengths for real in [data.draw(st.integers(1, n))]]
    rows = [feature(n, 10 * (b + 1), mask) for b, (n, mask) in enumerate(zip(lengths, masks))]
    for row, n in zip(rows, lengths):
        experts = torch.arange(1, n).view(-1, 1, 1).expand(-1, 2, 2)
        row |= {"mm_token_type_ids": [2] * n, "routed_experts": experts, "loss_scale": [0.5] * n}
    multiple = tp * (2 * cp if cp > 1 else 1)
    S = -(-max(lengths) // multiple) * multiple
    held, masked = whole(grid(tp, cp), rows, padding_side=side)
    fills = base.InputProcessor(framework="megatron").padding_map
    for b, (n, row) in enumerate(zip(lengths, rows)):
        before = S - n if side == "left" else 0
        for key in (*KEYS, "mm_token_type_ids"):
            assert held[key][b].tolist() == [fills[key]] * before + row[key] + [fills[key]] * (S - n - before), key
        assert held["attention_mask_2d"][b].tolist() == [0] * before + masks[b] + [0] * (S - n - before)
        experts = held["routed_experts"][b, before : before + n, 1, 1]
        assert experts.tolist() == [*range(1, n), 0], "the last token's are not known"
    truth = Segments.from_keep(held["attention_mask_2d"])
    wanted = dense(truth, polarity="masked", rows=query_rows(S, ContextParallel(cp, 0, tensor_parallel=tp)))
    assert truth.padding_side in ("none", "right") if masked is None else torch.equal(masked, wanted)


def test_zeros_inside_a_mask_are_a_hole_that_attention_passes_over_and_a_state_does_not():
    rows = [feature(6, 10), feature(5, 50, [1, 1, 0, 1, 1])]
    masked = processor(needs=False)(copy.deepcopy(rows))[0]["attention_mask"]
    assert torch.equal(masked, dense(Segments.from_keep([[1] * 6, [1, 1, 0, 1, 1, 0]]), polarity="masked"))
    with pytest.raises(UnsupportedFormError, match="Padding inside a sequence changes the state"):
        processor()(rows)


def test_zeros_leave_a_flat_row_and_positions_start_again():
    rows = [feature(5, 1, [0, 0, 1, 1, 1]), feature(6, 20, [1, 0, 1, 0, 1, 1], [0, 1, 2, 0, 1, 2])]
    out = processor(padding_free=True)(rows)[0]
    assert out["input_ids"].tolist() == [[3, 4, 5, 20, 22, 24, 25]]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert out["packed_seq_params"].cu_seqlens_q.tolist() == [0, 3, 5, 7]


def test_a_transformers_model_gets_the_2d_mask_and_of_several_sequences_in_a_row_positions_that_count_anew():
    """twinkle passes it no other key; several need padding_free."""
    named = [{**row, "attention_mask_2d": row.pop("attention_mask")} for row in (feature(3), feature(2, mask=[1, 0]))]
    out = processor(framework="transformers", padding_side="left")(named)
    assert (out["attention_mask"].tolist(), out["input_ids"][1, 0]) == ([[1, 1, 1], [0, 1, 0]], 0)
    row = feature(4, mask=[1, 1, 2, 2])
    with pytest.raises(UnsupportedFormError, match="padding_free=True"):
        processor(framework="transformers")([copy.deepcopy(row)])
    out = processor(framework="transformers", padding_free=True)([row])
    assert (out["position_ids"].tolist(), out.get("attention_mask")) == ([[0, 1, 0, 1]], None)


def test_install_twice_and_uninstall():
    made = processor(ours=False)
    before = list(made.process_pipeline)
    for _ in range(2):
        twinkle.install(made, needs_mask_2d=True)
    assert [stage.__name__ for stage in made.process_pipeline] == [stage.__name__ for stage in before]
    made.process_pipeline[2:3] = [stranger := lambda inputs, **_: inputs, made.process_pipeline[3]]
    twinkle.uninstall(made)
    assert stranger in made.process_pipeline, "somebody else's stage stays"
    assert [stage for stage in made.process_pipeline if stage is not stranger][:2] == before[:2]
    made.process_pipeline = before[2:]
    with pytest.raises(CollateError, match="pad_cp"):
        twinkle.install(made, needs_mask_2d=True)


# --- what the model that is told reads


DotProductAttention, TEDotProductAttention, GatedDeltaNet = (
    type(name, (nn.Module,), {}) for name in ("DotProductAttention", "TEDotProductAttention", "GatedDeltaNet")
)


def through_extras(self, input_ids, extra_block_kwargs=None): ...
def through_keywords(self, input_ids, **kwargs): ...
def through_nothing(self, input_ids): ...


def gpt_model(*layers, forward=through_keywords, **config):
    """A model with layers of these kinds, as Megatron-core names them."""
    model = type("GPTModel", (nn.Module,), {"forward": forward})()
    model.layers = nn.ModuleList(layer() for layer in layers)
    model.config = SimpleNamespace(**config)
    return model


def test_the_masks_go_through_the_door_the_model_has():
    """The 2D mask, and of a model with experts the padding, which a dense mask tells its routers as well."""
    rows = features(5, 3)
    for forward, reach in ((through_extras, lambda out: out["extra_block_kwargs"]), (through_keywords, lambda out: out)):
        model = gpt_model(DotProductAttention, forward=forward, num_moe_experts=4, sequence_parallel=True)
        out = processor(model=SimpleNamespace(module=model))(copy.deepcopy(rows))[0]
        assert reach(out)["attention_mask_2d"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]
        assert torch.equal(reach(out)["padding_mask"], ~reach(out)["attention_mask_2d"])
        assert ("attention_mask_2d" in out) == (reach(out) is out)
        assert "padding_mask" not in reach(processor(model=model, padding_side="left")(copy.deepcopy(rows))[0])
    closed = gpt_model(forward=through_nothing)
    twinkles = SimpleNamespace(optimizer_group={}, model=[closed], forward=through_keywords)  # it drops every keyword
    for model in (closed, [gpt_model(), closed], twinkles):
        with pytest.raises(UnsupportedFormError, match="no layer would see it"):
            processor(model=model)(copy.deepcopy(rows))


READERS = {
    "fused softmax, read no dense mask": ((TEDotProductAttention,), {}),
    "GatedDeltaNet of megatron-core reads no padding mask": ((DotProductAttention, GatedDeltaNet), {}),
    "masked_softmax_fusion=False": ((DotProductAttention,), {"masked_softmax_fusion": True}),
}


@pytest.mark.parametrize("reader", READERS)
def test_padding_that_no_kernel_reads_is_refused_in_whichever_chunk_of_a_pipeline(reader):
    layers, config = READERS[reader]
    chunks = [gpt_model(DotProductAttention), gpt_model(*layers, **config)]
    for held in (chunks[1], chunks, nn.ModuleList(chunks), SimpleNamespace(optimizer_group={}, model=chunks)):
        made = processor(model=held, padding_side="left")
        with pytest.raises(UnsupportedFormError, match=reader):
            made(features(5, 3))
        assert made(features(4, 4))[0]["attention_mask"] is None
        assert processor(model=held)(features(5, 3))[0]["attention_mask"] is None
    assert processor(model=chunks[:1], padding_side="left")(features(5, 3))[0]["attention_mask"].shape == (2, 1, 5, 5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_general_attention_of_mindspeed_gets_a_dense_mask_always(monkeypatch, side):
    """None would meet the 2048 triangle in sparse_mode 1, which the card refuses; by release (consumers/mindspeed.py)."""
    device("npu", monkeypatch.setattr)
    general = {"attention_mask_type": "general"}
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "own")
    out = processor(padding_side=side)(features(5, 3), **general)[0]
    assert out["attention_mask"].shape == (2, 1, 5, 5)
    assert not out["attention_mask"].all(-1).any(), "no query without a key"
    with pytest.raises(UnsupportedFormError, match="Set attention_mask_type=causal"):
        processor(grid(1, 2), padding_side=side)(features(5, 3), **general)
    monkeypatch.setattr("collate_npu.consumers.mindspeed.transformer_engine", lambda: "separate")
    assert processor()(features(5, 3), **general)[0]["attention_mask"] is None


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
    names = ((models, "MegatronModel"), (dataset, "Dataset"), (dataloader, "DataLoader"), (kit, "initialize"))
    fakes = {name: mock.create_autospec(getattr(module, name)) for module, name in (*names, (twinkle, "install"))}
    for module, name in (*names, (twinkle, "install")):
        monkeypatch.setattr(module, name, fakes[name])
    fakes["DataLoader"].return_value.__len__.return_value = 3
    fakes["DataLoader"].return_value.__iter__.return_value = iter(["a batch", "another"])
    monkeypatch.setattr("sys.argv", ["-c", *given])
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "twinkle.sh", "exec"), {})
    mesh = fakes["initialize"].call_args.kwargs["global_device_mesh"]
    assert (mesh.world_size, mesh.sequence_parallel, mesh.ep_size or 1) == (CARDS, True, infra.ep_size or 1)
    model = fakes["MegatronModel"].return_value
    fakes["install"].assert_called_once_with(model)
    assert model.forward_backward.call_args_list[-1] == mock.call(inputs="another", micro_batch_size=1)
    assert model.clip_grad_and_step.call_count == 2


# --- its own models, in processes of their own

NEAR = 2e-5
STACK = Stack("twinkle, Megatron", ("twinkle-kit", "mcore-bridge", "megatron-core"), "peers_misc")


def test_its_cells_on_one_rank_and_on_two(tmp_path):
    found = found_by("test_twinkle", tmp_path, variants=({"PART": "ranks"},), ranks=2)[0]
    assert found.pop("objects go by Gloo") == {"npu": True, "cuda": False}
    STACK.tell_jobs(found, line="integrations.twinkle.install(model)")


@pytest.mark.together("twinkle's models")
def test_on_ray_the_same_call_reaches_the_processor_in_each_worker(tmp_path):
    """Also a processor that is set after `install`."""
    told = found_by("test_twinkle", tmp_path, variants=({"PART": "ray", "RAY_USAGE_STATS_ENABLED": "0"},))[0]
    assert told["error"] <= NEAR
    assert "UnsupportedFormError" in told["left"]
    assert told["left afterwards"] == "computed", "in silence, as upstream"


@cache
def checkpoint(kind: str) -> str:
    """A model and a tokenizer, as twinkle downloads them."""
    return saved_model(Path(tempfile.mkdtemp()), kind, full_attention_interval=2)


def worker() -> None:
    """For each process of Ray's, before anything else in it. Those without a model of twinkle's need nothing."""
    warnings.filterwarnings("ignore")
    if "WORKER_NAME" in os.environ:
        device()
        start()


def start() -> None:
    from mcore_bridge.model import gpts  # noqa: F401  (its layers get what Megatron's get)
    from megatron.core import parallel_state

    world.start(world.Attention)
    torch.cuda.current_stream = lambda: None  # 0.19.2 asks for it before gradients travel
    parallel_state.destroy_model_parallel()  # twinkle makes its own


def megatron_model(kind: str, mesh: DeviceMesh, **changed: Any) -> Any:
    """As twinkle's README makes one, the fused kernels switched off."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if "remote_group" not in changed:
        kit.initialize(mode="local", global_device_mesh=mesh)
    made = models.MegatronModel(
        model_id=checkpoint(kind), device_mesh=mesh, mixed_precision="no", load_weights=False, recompute_granularity=None,
        deterministic_mode=False, use_distributed_optimizer=False, **UNFUSED, **DENSE, **changed,
    )  # fmt: skip
    if "remote_group" not in changed:
        drawn(made)
    return made


def drawn(model: Any) -> None:
    """In float32, every weight drawn: twinkle 0.5.1 takes "no" mixed precision for bfloat16 (strategy/megatron.py
    `params_type`), and layers built on a CPU leave some of theirs as memory had it."""
    for chunk in model.model:
        chunk.float().config.params_dtype = torch.float32
        fill(chunk)


THREE = (7, 3, 5)
CALLER = re.compile(r"\[twinkle driver caller: .*?\] ")
CONVOLUTION = "mcore_bridge.model.modules.gated_delta_net.causal_conv1d"


def rows_of(*lengths: int) -> list[dict[str, Any]]:
    ids = [[(5 * i + 3 * b) % 60 + 1 for i in range(length)] for b, length in enumerate(lengths)]
    given = {"attention_mask": lambda n: [1] * n, "position_ids": lambda n: [*range(n)]}
    more = [{key: make(len(row)) for key, make in given.items()} for row in ids]
    return [{"input_ids": row, "labels": [*row[1:], -100], **each} for row, each in zip(ids, more)]


def told(model: Any, batches: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Log-probabilities of each sample of the batches, and the gradient of their sum; of ranks it is that of a mean."""
    rows: list[Any] = []
    total: dict[str, Any] = {}
    left = next(iter(model.optimizer_group.values())).processor.padding_side == "left"
    for batch in batches:
        (logps,) = model.forward_only(inputs=[dict(row) for row in batch], micro_batch_size=len(batch))["logps"]
        sizes = [len(row["input_ids"]) for row in batch]
        rows += [(one[-n:] if left else one)[: n - 1].detach() for one, n in zip(logps, sizes)]
        getattr(model.model[0], "zero_grad_buffer", model.model[0].zero_grad)()
        model.forward_backward(inputs=[dict(row) for row in batch], micro_batch_size=len(batch))
        for name, p in model.model[0].named_parameters():  # from the first step on it may be wrapped
            mean = getattr(p, "main_grad", None)  # of ranks; a model in one worker has the sum itself
            grad = p.grad if mean is None else (sum(sizes) - len(sizes)) * mean
            total[name.removeprefix("module.")] = total.get(name.removeprefix("module."), 0) + grad
    return rows, total


def error(model: Any) -> float:
    """What a batch computes and learns, against each sample alone."""
    (rows, gradient), (wanted, known) = told(model, [rows_of(*THREE)]), told(model, [[row] for row in rows_of(*THREE)])
    return max(apart(rows, wanted), far(gradient, known))


def built(kind: str, cp: int = 1, where: str = "npu", **processor: Any) -> Any:
    device()  # there is no MindSpeed here, which twinkle asks for on an NPU
    model = megatron_model(kind, DeviceMesh.from_sizes(**({"dp_size": 1, "cp_size": 2} if cp > 1 else {"dp_size": 2})))
    if where == "npu":
        model.model[0].config.attention_mask_type = "causal"  # what MindSpeed's config has
    device(where)
    model.set_processor("InputProcessor", **processor)
    return model


def truth(kind: str) -> Any:
    return told(built(kind), [[row] for row in rows_of(*THREE)])


def layouts(kind: str, ranks: int) -> dict[str, Any]:
    """Of each layout its forms: ranks, whether there is a kernel for convolutions, the device, what the processor gets."""
    flat, recurrent = {"padding_free": True}, kind == "qwen3_next"
    if ranks > 1:
        return {"context parallel": [(2, True, "npu", {}), *([] if recurrent else [(2, True, "npu", flat)])]}
    found = {"padded right": [(1, True, where, {}) for where in ("npu", "cuda")], "packed": [(1, False, "npu", flat)]}
    if recurrent:
        found["padded left"] = [(1, True, where, {"padding_side": "left"}) for where in ("npu", "cuda")]
        found["packed, kernels there"] = [(1, True, "npu", flat)]
    return found


GLOO: dict[str, bool] = {}


def together(kind: str, form: tuple[int, bool, str, dict[str, Any]], ours: bool) -> Any:
    """The same of all samples in one batch, without us and with us."""
    from collate_npu.integrations import patching

    cp, there, where, processor = form
    world.takes(world.Attention if where == "npu" else world.TEDotProductAttention)
    with nullcontext() if there else mock.patch(CONVOLUTION, None):
        model = built(kind, cp, where, **processor)
        twinkle.install(model) if ours else None
        GLOO[where] = patching.in_place(patching.gather_by_gloo) if ours else False
        try:
            return told(model, [rows_of(*THREE)])
        except Exception as refused:
            raise type(refused)(CALLER.sub("", str(refused))) from None
        finally:
            twinkle.uninstall(model) if ours else None


def on_ranks() -> dict[str, Any]:
    device()
    start()
    return cells_on_ranks(("qwen3", "qwen3_next"), layouts, truth, together) | {"objects go by Gloo": GLOO}


def step(model: Any, rows: list[Any]) -> Any:
    """From the driver, as a training loop does it."""
    try:
        model.forward_backward(inputs=rows, micro_batch_size=len(rows))()
        return "computed"
    except Exception as refusal:
        return type(refusal).__name__ + " " + str(refusal)


def on_ray() -> dict[str, Any]:
    import ray

    ray.init(num_cpus=8, include_dashboard=False, runtime_env={"worker_process_setup_hook": "test_twinkle.worker"})
    groups = [kit.DeviceGroup(name="model", ranks=1, device_type="CPU")]
    kit.initialize(mode="ray", nproc_per_node=1, ncpu_proc_per_node=1, groups=groups)
    model = megatron_model("qwen3_next", DeviceMesh.from_sizes(dp_size=1, device_type="cpu"), remote_group="model")
    here = lambda function: ray.get(model._actors[0].__ray_call__.remote(function))  # noqa: E731
    here(drawn)
    model.set_processor("InputProcessor")
    twinkle.install(model)
    found = {"step": step(model, rows_of(*THREE)), "error": here(error)}
    model.set_processor("InputProcessor", padding_side="left")
    found["left"] = step(model, rows_of(*THREE))
    twinkle.uninstall(model)
    return found | {"left afterwards": step(model, rows_of(*THREE))}


if __name__ == "__main__":
    for kind in ("qwen3", "qwen3_next"):  # before mcore-bridge changes transformers' rotary positions
        checkpoint(kind)
    if os.environ["PART"] == "ranks":
        from processes import process_group

        process_group()
    write({"ranks": on_ranks, "ray": on_ray}[os.environ["PART"]]())
