"""mcore-bridge 1.6.5: real `GPTModel`s of Qwen3, Qwen3-Next and Qwen3.5 as ms-swift builds them, on ms-swift's batches and
on ours: logits and gradients against each sample alone.

`python test_mcore_bridge.py OUT cells` is one of two ranks, a row on one of them and shared by both; `... OUT more` the
plans that no cell tells (experts, pipeline stages, recomputing, rows of `gpt_batch`). Models are tiny, random, float32;
hardware alone is stood in for (`megatron_world`). Local attention without a mask is causal, as a flash kernel is.
"""

import contextlib
import os
import sys
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import megatron_world
import pytest
import swift_world  # first: it puts the stand-ins for Transformer Engine in place
import torch
from cells import Stack, of_job
from mcore_bridge.model.modules import GatedDeltaNet, gated_delta_net
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron_world import DENSE, UNFUSED, TEDotProductAttention, apart, cells_on_ranks, far, fill, judged, start, takes
from processes import found_by, refusal, write
from swift_world import LENGTHS, LOCAL, arguments, npu_there
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collate_npu import CollateError, PaddingCollator, Segments, check_delivery
from collate_npu.integrations import swift
from collate_npu.integrations.megatron import gpt_batch, mcore_bridge
from collate_npu.outputs import per_sequence
from collate_npu.parallel import ContextParallel, pad_documents

NEEDS = ("swift", "mcore_bridge", "megatron")
NEWEST = int(version("megatron-core").split(".")[1]) >= 18
"""megatron-core 0.16.1 has no Gated DeltaNet for two ranks; 0.19.2 does, in an environment of its own."""
PLACE = ("ms-swift, newest Megatron", "peers_newest") if NEWEST else ("ms-swift, Megatron", "peers_swift")
ALL = {"recompute_granularity": "full", "recompute_num_layers": 1}


# --- what is judged


def test_its_cells_on_one_rank_and_on_two(tmp_path):
    stack = Stack(PLACE[0], ("ms-swift", "mcore-bridge", "megatron-core"), PLACE[1])
    found = found_by("test_mcore_bridge", tmp_path, "cells", ranks=2)[0]
    assert found.pop("tensor parallel") <= 1e-4
    stack.tell_jobs(found, line='--external_plugins "$PLUGIN"')


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return found_by("test_mcore_bridge", tmp_path_factory.mktemp("more"), "more")[0]


def test_every_plan_and_row_is_as_alone(more):
    """On each stage of a pipeline, recomputed, with experts, whose losses do not count padding, and of `gpt_batch`."""
    assert len(more["jobs"]) == 20
    assert [(name, job) for name, job in more["jobs"].items() if of_job(job)["verdict"] != "right"] == []
    assert more["router losses"] <= 1e-4


def test_check_delivery_asks_these_models_too_and_a_mask_of_other_tokens_is_refused(more):
    assert more["delivered"] == ""
    assert "decoder.layers.0.self_attention" in more["not delivered"]
    assert "attention_mask_2d: got bool [3, 16]. This rank holds 8 tokens of 3 rows" in more["other tokens"]


def test_layers_of_transformers_are_refused_when_they_are_built(tmp_path):
    """Of Qwen3-Next mcore-bridge itself cannot build them."""
    said = found_by("test_mcore_bridge", tmp_path, "built", variants=({"USE_MCORE_GDN": "0"},))[0]
    assert all("USE_MCORE_GDN: got 0." in each for each in said)


def test_layers_nobody_measured_are_not_said_to_leave_padding_out(guarded):
    names = ("qwen3_next", "qwen3_5", "nemotron_h", "glm5_next", "qwen4_exp", None)
    assert [name for name in names if mcore_bridge.masks_padding(name)] == ["qwen3_next", "qwen3_5"]
    mcore_bridge.uninstall()
    assert not mcore_bridge.masks_padding("qwen3_next")


@pytest.fixture
def guarded():
    mcore_bridge.install()
    yield
    mcore_bridge.uninstall()


@pytest.mark.parametrize(
    ("padded", "actual", "total", "ranks", "taken"),
    [
        ([0, 3, 76], [0, 3, 73], 76, 2, None),  # what ranks cannot share out
        ([0, 6, 12], [0, 3, 73], 12, 2, None),
        ([0, 4, 76], [0, 3, 73], 80, 1, None),  # what ends early or falls
        ([3, 70], [0, 3, 73], 80, 1, None),
        ([0, 8, 4, 12], [0, 3, 73], 12, 1, None),
        (None, [0, 7, 10, 15], 20, 1, None),  # real ones alone, where sequences are padded
        ([0, 4, 12], None, 12, 2, [0, 4, 12]),
        (None, [0, 5, 5, 12], 12, 1, [0, 5, 5, 12]),
        ([5, 12], None, 12, 1, [0, 5, 12]),  # ends, which upstream mends
    ],
)
def test_offsets_that_the_layer_would_misread_are_refused(guarded, padded, actual, total, ranks, taken):
    offsets = [None if each is None else torch.tensor(each, dtype=torch.int32) for each in (padded, actual)]
    said = rf"packed_seq_params: got .*rise from 0 to the {total} tokens of the row.*Build"
    with nullcontext() if taken else pytest.raises(CollateError, match=said):
        assert GatedDeltaNet._resolve_cu_seqlens(*offsets, total, cp_size=ranks).tolist() == taken
    assert GatedDeltaNet._resolve_cu_seqlens(None, None, total) is None, "an object without any"


# --- models, and what comes of a batch


def on_cpu() -> None:
    """Put a CPU where a card would be. For a process of its own: nothing is given back."""
    from mcore_bridge.model.mm_gpts.utils import HuggingFaceVit

    start(context_parallel_size=int(os.environ.get("WORLD_SIZE", "1")))
    npu_there(True)
    stream = MagicMock()
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args, **kwargs: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    HuggingFaceVit.to = lambda self, *args, **kwargs: self


def build(name: str, *, stages: int = 1, tensor: int = 1, attention: Any = DotProductAttention, **changed: Any) -> list[Any]:
    """The model as ms-swift's `get_mcore_model` builds it, one module for each pipeline stage, all with the same weights:
    Gated DeltaNet, attention, Gated DeltaNet, attention."""
    from mcore_bridge import get_mcore_model
    from swift.megatron.model.utils import get_mcore_model_config

    takes(attention)
    model_type, _, moe = name.partition(" ")
    hf = swift_world.config(model_type)
    text = getattr(hf, "text_config", hf)
    text.full_attention_interval, text.num_hidden_layers = 2, 4
    text.layer_types = ["linear_attention", "full_attention"] * 2
    args = arguments(model_type, cp=parallel_state.get_context_parallel_world_size(), **LOCAL, bridge_backend=None)
    args.torch_dtype, args.pipeline_model_parallel_size = torch.float32, stages
    args.tensor_model_parallel_size, args.sequence_parallel = tensor, tensor > 1
    args.megatron_extra_kwargs = {
        **UNFUSED, **({"moe_permute_fusion": False, "moe_grouped_gemm": False} if moe else DENSE),
        "use_cpu_initialization": True, "deterministic_mode": False, "moe_aux_loss_coeff": 0.0, **changed,
    }  # fmt: skip
    made = []
    for rank in range(stages):
        with stage_of(rank, stages):
            made += get_mcore_model(get_mcore_model_config(args, hf))
    for module in made:
        fill(module)
    return made


@contextlib.contextmanager
def stage_of(rank: int, stages: int) -> Any:
    """This process as one stage of a pipeline: Megatron asks its state, and keeps the group in every module."""
    group, name = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, "_PIPELINE_MODEL_PARALLEL_GROUP"
    parallel_state.set_pipeline_model_parallel_world_size(stages)
    parallel_state.set_pipeline_model_parallel_rank(rank)
    setattr(parallel_state, name, SimpleNamespace(rank=lambda: rank, size=lambda: stages) if stages > 1 else group)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)
        setattr(parallel_state, name, group)


def learned(stages: list[Any], inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """The output of the last stage, hidden states handed on as Megatron's schedules do it; its loss of labels that stand
    with the token before is summed and learned."""
    out, given = None, {key: value for key, value in inputs.items() if key not in ("labels", "loss_mask", "loss_scale")}
    for stage in stages:
        if out is not None:
            stage.set_input_tensor(out)
        out = stage(**given, labels=None)
    cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return out.detach()


def gradients(stages: list[Any]) -> dict[str, Tensor]:
    """Taken off the parameters, so that the next run begins without."""
    named = {f"{i} {name}": p for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    found = {name: p.grad for name, p in named.items() if p.grad is not None}
    for stage in stages:
        stage.zero_grad()
    return found


def alone(stages: list[Any], lengths: Any = LENGTHS) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each sample by itself, without padding and without us: logits, and the gradients of all of them."""
    rows = []
    for row in swift_world.samples(*lengths):
        ids = torch.tensor([row["input_ids"]])
        given = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "attention_mask": None}
        rows.append(learned(stages, given, nn.functional.pad(ids[:, 1:], (0, 1), value=-100))[0])
    return rows, gradients(stages)


def prepared(args: Any, data: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """ms-swift's own `prepare_batch`, whatever is installed, and its labels."""
    batch = swift_world.prepare(args, data)
    return batch, batch.pop("labels")


# --- cells


def layouts(family: str, ranks: int) -> dict[str, Any]:
    """Of each layout its forms: rows padded right, padded left or flat, and whether there is a kernel for convolutions."""
    if ranks > 1:
        return {"context parallel": [("right", True), ("flat", True)]}
    recurrent = {"padded left": [("left", True)], "packed, kernels there": [("flat", True)]}
    return {"padded right": [("right", True)], "packed": [("flat", False)], **(recurrent if family != "qwen3" else {})}


def together(family: str, form: tuple[str, bool], ours: bool) -> Any:
    """The samples' batch through `prepare_batch` on this rank: rows and gradient. Left padding stands on Megatron's own
    attention, which reads a dense mask; the other rows are the template's."""
    (kind, there), cp = form, parallel_state.get_context_parallel_world_size()
    args = arguments(family, cp=cp, padding_free=kind == "flat", **(LOCAL if kind == "left" else {}))
    swift.install() if ours else None
    try:
        with nullcontext() if there else patch.object(gated_delta_net, "causal_conv1d", None):
            stages = build(family, attention=DotProductAttention if kind == "left" else TEDotProductAttention)
            data = swift_world.as_kind(None, "4d masked", side="left")[0] if kind == "left" else None
            batch, labels = prepared(args, data or swift_world.collate(args, *LENGTHS))
            out = learned(stages, batch, labels)
    finally:
        swift.uninstall()
    if kind == "left":
        return per_sequence(out, Segments.from_lengths(LENGTHS, out.shape[1], "left")), gradients(stages)
    bounds = batch["packed_seq_params"].cu_seqlens_q if kind == "flat" else None
    return megatron_world.gathered(out, LENGTHS, bounds), megatron_world.summed(gradients(stages))


def cells() -> dict[str, Any]:
    truth = lambda family: alone(build(family, attention=TEDotProductAttention))  # noqa: E731
    found = cells_on_ranks(("qwen3", "qwen3_next", "qwen3_5"), layouts, truth, together)
    return found | {"tensor parallel": tensor_parallel()}


def tensor_parallel() -> float:
    """How far logits are off of rows padded left whose tokens tensor-parallel ranks share: each zeroes its own."""
    megatron_world.groups(tensor_model_parallel_size=2)
    swift.install()
    (model,), lengths = build("qwen3_next", tensor=2), (8, 4, 6)
    data, truth = swift_world.as_kind(None, "4d masked", lengths, "left")
    args = arguments("qwen3_next", **LOCAL, tensor_model_parallel_size=2, sequence_parallel=True)
    batch, _ = prepared(args, data)
    rows = per_sequence(model(**{key: batch[key] for key in batch if key != "loss_scale"}, labels=None), truth)
    given = [torch.tensor([row["input_ids"]]) for row in swift_world.samples(*lengths)]
    alone = [model(ids, torch.arange(ids.shape[1])[None], None, labels=None)[0] for ids in given]
    swift.uninstall()
    return apart([row.detach() for row in rows], [row.detach() for row in alone])


# --- plans that no cell tells

FLAT = {
    "one-token sequences": ((1, 4, 1, 1, 3), 1, None),
    "a tail": ((7, 3, 5), 8, None),
    "each padded, and a tail": ((1, 6, 1, 2), 1, ContextParallel(2, 0, tensor_parallel=2).for_documents()),
}
"""Lengths, what the width is padded to, and the ranks that each sequence is padded for."""


def of_gpt_batch(stages: list[Any], lengths: Any, *, cp: ContextParallel | None = None, flat: bool, **rows: Any) -> Any:
    """Rows of our collator through `gpt_batch`. Something of mcore-bridge reads either of the offsets, and takes it for
    places."""
    features = [dict.fromkeys(("input_ids", "labels"), row["input_ids"]) for row in swift_world.samples(*lengths)]
    batch = PaddingCollator(pad_token_id=swift_world.PAD, padding_free=flat, **rows)(features)
    batch = batch if cp is None else pad_documents(batch, cp, pad_token_id=swift_world.PAD)[0]
    names = ("input_ids", "labels", "cu_seqlens", "cu_seqlens_padded")
    inputs, truth = gpt_batch({key: batch[key] for key in names} if cp else batch, stages[0], padding_free=flat)
    if flat:
        params = inputs["packed_seq_params"]
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_q_padded.tolist()
        assert params.cu_seqlens_q[-1] == inputs["input_ids"].shape[1]
    out = learned(stages, inputs, inputs["labels"].masked_fill(inputs["loss_mask"] == 0, -100))
    return per_sequence(out, truth), gradients(stages)


def of_swift(stages: list[Any], name: str, kernel: dict[str, Any], side: str) -> Any:
    data, truth = swift_world.as_kind(None, "4d masked", side=side)
    out = learned(stages, *prepared(arguments(name.split()[0], **kernel), data))
    return per_sequence(out, truth), gradients(stages)


def jobs() -> dict[str, Any]:
    """Padded rows, then flat ones."""
    found: dict[str, Any] = {}
    plans = {
        "qwen3_next": {}, "qwen3_5": {}, "qwen3_next moe": {},
        "qwen3_next moe, recomputed in two stages": {"stages": 2, "recompute_method": "uniform", **ALL},
    }  # fmt: skip
    for plan, changed in plans.items():
        name = plan.partition(",")[0]
        stages = build(name, **changed)
        known = alone(stages)
        for kernel, side in (({}, "right"), (LOCAL, "left")):
            found[f"{plan}, {side}"] = judged(lambda: of_swift(stages, name, kernel, side), known)  # noqa: B023
            rows = {"flat": False, "padding_side": side, "pad_to_multiple_of": 8}
            if not changed:
                found[f"{plan}, gpt_batch, {side}"] = judged(lambda: of_gpt_batch(stages, LENGTHS, **rows), known)  # noqa: B023
    npu_there(False)
    for name in ("qwen3_next moe", "qwen3_5"):
        stages = build(name, attention=TEDotProductAttention)
        for row, (lengths, multiple, cp) in FLAT.items():
            rows = {"flat": True, "pad_to_multiple_of": multiple, "cp": cp}
            made = judged(lambda: of_gpt_batch(stages, lengths, **rows), alone(stages, lengths))  # noqa: B023
            # with experts all weights moved by 1e-7 of themselves move gradients by 8e-4, logits by 1e-4
            found[f"{name}, {row}"] = {key: made[key] and made[key] / 20 if key != "refused" else made[key] for key in made}
    npu_there(True)
    return found


def router_losses() -> float:
    """How far gradients, those of the routers' losses included, move when the same tokens are padded to twice the width."""
    found = []
    stages = build("qwen3_next moe", moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.1, recompute_method="block", **ALL)
    for width in (8, 16):
        data, _ = swift_world.as_kind(None, "4d masked", width=width)
        learned(stages, *prepared(arguments("qwen3_next", **LOCAL), data))
        found.append(gradients(stages))
    return far(*found)


def plans() -> dict[str, Any]:
    swift.install()
    found: dict[str, Any] = {"jobs": jobs(), "router losses": router_losses()}
    (model,) = build("qwen3_next", deterministic_mode=True)  # no kernel is there whose mask could be missed
    data, truth = swift_world.as_kind(None, "4d masked", side="left")
    batch, _ = prepared(arguments("qwen3_next", **LOCAL), data)
    batch.pop("loss_scale", None)
    bare = {key: value for key, value in batch.items() if key != "extra_block_kwargs"}
    found["delivered"] = refusal(lambda: check_delivery(model, batch, segments=truth))
    found["not delivered"] = refusal(lambda: check_delivery(model, bare, segments=truth))
    other = {"attention_mask_2d": torch.ones(3, 16, dtype=torch.bool)}
    found["other tokens"] = refusal(lambda: model(**bare, labels=None, extra_block_kwargs=other))
    return found


def built() -> list[str]:
    """What is said of layers of transformers."""
    swift.install()
    return [refusal(lambda name=name: build(name)) for name in ("qwen3_next", "qwen3_5")]


if __name__ == "__main__":
    on_cpu()
    write({"cells": cells, "more": plans, "built": built}[sys.argv[2]]())
