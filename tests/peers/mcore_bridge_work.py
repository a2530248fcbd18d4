"""What the tests of mcore-bridge have processes do: run real models on a CPU, write JSON.

`python mcore_bridge_work.py OUT`: padded rows, then flat ones; with USE_MCORE_GDN=0 what is refused. Each case: which layers
received what, and how far real tokens are from each sample alone. With families behind OUT, in two processes: ms-swift's own
batches, each rank alone and both as ranks of a row.

Models are tiny, random, float32, built as ms-swift builds them; hardware alone is stood in for (`megatron_world`). Local
attention without a mask is causal, as a flash kernel is.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import megatron_world as world
import swift_world  # first: it puts the stand-ins for Transformer Engine in place
import torch
from cells import gradient_error
from mcore_bridge.model.modules import gated_delta_net
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron_world import DENSE, UNFUSED, apart, far, fill, gathered, groups, hardware, kernels, layers, summed
from processes import refusal, write
from swift_world import LOCAL, arguments, npu_there
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collate_npu import PaddingCollator, Segments, check_delivery
from collate_npu.integrations import swift
from collate_npu.integrations.megatron import gpt_batch, mcore_bridge
from collate_npu.parallel import ContextParallel, pad_documents

FREQUENCY = 2
"""Every second layer is attention: GDN, attention, GDN, attention."""


def on_cpu() -> None:
    """Put a CPU where a card would be. For a process of its own: nothing is given back."""
    from mcore_bridge.model.mm_gpts.utils import HuggingFaceVit

    groups(context_parallel_size=int(os.environ.get("WORLD_SIZE", "1")))
    hardware(setattr)
    layers(setattr)
    stream = MagicMock()
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args, **kwargs: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    HuggingFaceVit.to = lambda self, *args, **kwargs: self
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def build(model_type: str, *, moe: bool = False, stages: int = 1, cp: int = 1, **changed: Any) -> list[nn.Module]:
    """The model as ms-swift's `get_mcore_model` builds it, one module for each pipeline stage, all with the same weights."""
    from mcore_bridge import get_mcore_model
    from swift.megatron.model.utils import get_mcore_model_config

    hf = swift_world.config(model_type)
    text = getattr(hf, "text_config", hf)
    text.full_attention_interval, text.num_hidden_layers = FREQUENCY, 4
    text.layer_types = ["linear_attention", "full_attention"] * 2
    local = {"attention_backend": "local", "masked_softmax_fusion": False, "bridge_backend": None}
    args = swift_world.arguments(model_type, cp=cp, **local)
    args.torch_dtype = torch.float32
    args.pipeline_model_parallel_size = stages
    args.megatron_extra_kwargs = {
        **UNFUSED,
        **({"moe_permute_fusion": False, "moe_grouped_gemm": False} if moe else DENSE),
        "use_cpu_initialization": True,
        "deterministic_mode": True,
        **changed,
    }
    made = []
    for rank in range(stages):
        with stage_of(rank, stages):
            made += get_mcore_model(get_mcore_model_config(args, hf))
    for module in made:
        fill(module)
    return made


@contextlib.contextmanager
def stage_of(rank: int, stages: int) -> Iterator[None]:
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


@contextlib.contextmanager
def recording(stages: list[nn.Module]) -> Iterator[dict[str, dict[int, Any]]]:
    """What the layers of the last forward received, by layer number.

    `handed`: which of the two masks a layer got, before anything of ours; `runs`: how often it ran, recomputing included;
    `gdn`: places whose input to a recurrent layer's projection is exactly zero, bool `[B, S]`; `attention`: the dense mask;
    `router`: the padding mask, bool `[B, S]`.
    """
    seen: dict[str, dict[int, Any]] = {key: {} for key in ("handed", "runs", "gdn", "attention", "router")}

    def note_layer(number: int, module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        seen["handed"][number] = [key for key in ("attention_mask_2d", "padding_mask") if named.get(key) is not None]
        seen["runs"][number] = seen["runs"].get(number, 0) + 1

    def note(key: str, number: int, read: Any, module: nn.Module, given: tuple[Any, ...]) -> None:
        seen[key][number] = read(given)

    with contextlib.ExitStack() as hooks:
        for layer in (layer for stage in stages for layer in getattr(stage, "language_model", stage).decoder.layers):
            number, inner = layer.layer_number, layer.self_attention
            hooks.enter_context(layer.register_forward_pre_hook(partial(note_layer, number), with_kwargs=True))
            reads = [(inner, name, "gdn", partial(zeros, inner)) for name in ("in_proj", "in_proj_qkvz", "in_proj_qkv")]
            reads.append((inner, "core_attention", "attention", lambda given: given[3]))
            reads.append((layer.mlp, "router", "router", lambda given: None if given[1] is None else given[1].T))
            for owner, name, key, read in reads:
                if getattr(owner, name, None) is not None:
                    hook = getattr(owner, name).register_forward_pre_hook(partial(note, key, number, read))
                    hooks.enter_context(hook)
        yield seen


def zeros(layer: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    zero = given[0].eq(0).all(-1)
    return zero.T if type(layer).__name__ == "GatedDeltaNet" else zero  # Megatron's; transformers' is [B, S, H]


def run(stages: list[nn.Module], batch: dict[str, Any]) -> Tensor:
    """The forward of each stage on the same batch, the hidden states handed on: as Megatron's schedules do it."""
    out = None
    for stage in stages:
        if out is not None:
            stage.set_input_tensor(out)
        out = stage(**batch)
    return out


LENGTHS, WIDTH, PAD = (7, 3, 5), 8, swift_world.PAD


def wire(side: str, width: int = WIDTH) -> tuple[dict[str, Any], Segments]:
    """A padded batch with a 4D mask (True = blocked), as a collator of a user's own may send it; first labels ignored."""
    data, truth = swift_world.as_kind(None, "4d masked", side=side, width=width)
    return data | {"labels": data["labels"].masked_fill(truth.position_ids == 0, -100)}, truth


def prepared(model_type: str, kernel: str, data: dict[str, Any]) -> dict[str, Any]:
    """ms-swift's own `prepare_batch`, whatever is installed."""
    args = arguments(model_type, **(LOCAL if kernel == "local" else {}))
    batch = swift_world.prepare(args, data)
    batch.pop("loss_scale", None)
    return batch


class Alone(NamedTuple):
    """Each sample by itself, without padding and without us: its logits, and the gradients of all of them."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]


def alone(stages: list[Any], lengths: tuple[int, ...] = LENGTHS) -> Alone:
    logits = []
    for row in swift_world.samples(*lengths):
        ids = torch.tensor([row["input_ids"]])
        given = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "attention_mask": None}
        logits += run(stages, given)
        loss_of(logits[-1:], learned(ids)).backward()
    return Alone([row.detach() for row in logits], gradients(stages))


def learned(ids: Tensor) -> Tensor:
    return ids.masked_fill(torch.arange(ids.shape[1]) == 0, -100)


def measure(stages: list[Any], batch: dict[str, Any], side: str, by_itself: Alone) -> dict[str, Any]:
    """Logits and gradients against each sample alone, and what each layer received."""
    data, truth = wire(side, batch["input_ids"].shape[1])
    with recording(stages) as seen:
        logits = run(stages, {**batch, "labels": None})
        loss_of(logits, data["labels"]).backward()
    padding, grads = ~truth.keep, gradients(stages)
    real = [logits[b, keep].detach() for b, keep in enumerate(truth.keep)]
    return {
        "logits": apart(real, by_itself.logits),
        "gradients": far(grads, by_itself.gradients),
        "gradient": gradient_error([grads[name] for name in by_itself.gradients], [*by_itself.gradients.values()]),
        "gdn": {n: bool(zero.equal(padding)) for n, zero in seen["gdn"].items()},
        "attention": {n: None if mask is None else list(mask.shape) for n, mask in seen["attention"].items()},
        "router": {n: mask is not None and bool(mask.equal(padding)) for n, mask in seen["router"].items()},
        "handed": seen["handed"],
        "runs": seen["runs"],
    }


def loss_of(logits: Any, labels: Tensor) -> Tensor:
    """Summed; a row's first label is ignored, so that no padding is asked for it."""
    rows = [cross_entropy(row[:-1], label[1:], reduction="sum") for row, label in zip(logits, labels)]
    return torch.stack(rows).sum()


def gradients(stages: list[Any]) -> dict[str, Tensor]:
    """Taken off the parameters, so that the next run begins without."""
    named = {f"{i} {name}": p for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    found = {name: p.grad for name, p in named.items() if p.grad is not None}
    for stage in stages:
        stage.zero_grad()
    return found


def from_ours(stages: list[Any], side: str, by_itself: Alone) -> dict[str, Any]:
    """Our collator, then `gpt_batch`."""
    rows = [{"input_ids": row["input_ids"]} for row in swift_world.samples(*LENGTHS)]
    batch = PaddingCollator(pad_token_id=PAD, padding_side=side, pad_to_multiple_of=WIDTH)(rows)
    return measure(stages, gpt_batch(batch, stages[0])[0], side, by_itself)


def invariance() -> float:
    """How far gradients, those of the routers' losses included, move when the same tokens are padded to twice the width."""
    found = []
    full = {"recompute_granularity": "full", "recompute_num_layers": 1, "recompute_method": "block"}
    stages = build("qwen3_next", moe=True, moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.1, **full)
    for width in (WIDTH, 2 * WIDTH):
        data, _ = wire("right", width)
        loss_of(run(stages, prepared("qwen3_next", "local", data) | {"labels": None}), data["labels"]).backward()
        found.append(gradients(stages))
    return far(*found)


def padded_rows() -> dict[str, Any]:
    on_cpu()
    npu_there(True)
    out: dict[str, Any] = {}
    for name in ("qwen3_next", "qwen3_next moe", "qwen3_5"):
        out |= {f"{name}, {key}": value for key, value in cases(name).items()}
    for who in ("ours", "upstream"):
        swift.install() if who == "ours" else swift.uninstall()
        out[f"router losses, {who}"] = invariance()
    swift.uninstall()
    return out | delivery()


def delivery() -> dict[str, Any]:
    """What `check_delivery` says of a left-padded batch, with what recurrent layers read and without it."""
    swift.install()
    (model,) = build("qwen3_next")
    data, truth = wire("left")
    batch = prepared("qwen3_next", "local", data)
    bare = {key: value for key, value in batch.items() if key != "extra_block_kwargs"}
    found = {"delivered": refusal(lambda: check_delivery(model, batch, segments=truth))}
    found["not delivered"] = refusal(lambda: check_delivery(model, bare, segments=truth))
    swift.uninstall()
    return found


def cases(name: str) -> dict[str, Any]:
    """With `install`; of what the page of stacks shows without it, too."""
    model_type, _, moe = name.partition(" ")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    swift.install()
    is_moe, out = bool(moe) or model_type.endswith("_moe"), {}
    for plan, stages, changed in (("1 stage", 1, {}), ("2 stages, recomputed", 2, full))[: 1 + is_moe]:
        built = build(model_type, moe=is_moe, stages=stages, moe_aux_loss_coeff=0.0, **changed)
        by_itself = alone(built)
        for kernel, side in (("flash", "right"), ("template", "right"), ("local", "right"), ("local", "left")):
            shown = not moe and (kernel, side) in (("template", "right"), ("local", "left"))
            for who in ("upstream", "ours") if shown else ("ours",):
                swift.install() if who == "ours" else swift.uninstall()
                data = swift_world.collate(arguments(model_type), *LENGTHS) if kernel == "template" else wire(side)[0]
                batch = prepared(model_type, kernel, data)
                out[f"{plan}, {kernel}, {side}, {who}"] = measure(built, batch, side, by_itself)
        for side in ("left", "right") if stages == 1 else ():
            out[f"{plan}, gpt_batch, {side}, ours"] = from_ours(built, side, by_itself)
    swift.uninstall()
    return out


RANKS = ContextParallel(2, 0).for_documents(), ContextParallel(2, 0, tensor_parallel=2).for_documents()
ROWS = {
    "side by side": ((7, 3, 5), 1, None),
    "one-token sequences": ((1, 4, 1, 1, 3), 1, None),
    "a tail": ((7, 3, 5), 8, None),
    "each padded": ((7, 3, 5), 1, RANKS[0]),
    "each padded, and a tail": ((1, 6, 1, 2), 1, RANKS[1]),
}
"""Lengths, what the width is padded to, and the ranks that each sequence is padded for."""


def kernels_on_cpu() -> None:
    """fla's kernels, where the layers look for them, and attention that takes offsets."""
    TESpecProvider.core_attention = lambda self: world.TEDotProductAttention
    kernels(setattr)


def flat(name: str) -> dict[str, Any]:
    lengths, multiple, cp = ROWS[name]
    rows = [{"input_ids": row["input_ids"]} for row in swift_world.samples(*lengths)]
    batch = PaddingCollator(pad_token_id=PAD, padding_free=True, pad_to_multiple_of=multiple)(rows)
    if cp is None:
        return batch
    batch, _ = pad_documents(batch, cp, pad_token_id=PAD)
    return {key: batch[key] for key in ("input_ids", "cu_seqlens", "cu_seqlens_padded")}


def measure_flat(stages: list[Any], inputs: dict[str, Any], truth: Segments, by_itself: Alone) -> dict[str, Any]:
    """Logits and gradients against each sample alone."""
    given = {key: value for key, value in inputs.items() if key not in ("labels", "loss_mask")}
    logits = run(stages, given)
    parts = [logits[0, start : start + n] for n, (_, start, _) in zip(truth.sequence_lengths, truth.spans)]
    ids = [inputs["input_ids"][:, start : start + n] for n, (_, start, _) in zip(truth.sequence_lengths, truth.spans)]
    torch.stack([loss_of([part], learned(row)) for part, row in zip(parts, ids)]).sum().backward()
    found = {"logits": apart([part.detach() for part in parts], by_itself.logits)}
    return found | {"gradients": far(gradients(stages), by_itself.gradients)}


def params_of(real: list[int], padded: list[int] | None, longest: int) -> Any:
    """As somebody else builds them."""
    offsets = [torch.tensor(each, dtype=torch.int32) if each else None for each in (real, padded)]
    sides = {f"cu_seqlens_{side}{kind}": each for side in ("q", "kv") for kind, each in zip(("", "_padded"), offsets)}
    return PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **sides)


SPOILT = {
    "real offsets alone, each padded": ([0, 7, 10, 15], None),
    "real offsets alone, a tail": ([0, 7, 10, 15], None),
    "padded offsets that end early": ([0, 7, 10, 15], [0, 8, 12, 18]),
    "lengths": ([7, 3, 5], None),
    "real beside padded": ([0, 7, 10, 15], [0, 8, 12, 20]),
}
"""Rows 7, 3, 5 by offsets of others; the second reads "a tail", `0 7 10 16`, the others "each padded", `0 8 12 20`."""


@contextlib.contextmanager
def recurrent_layers_get(stages: list[Any], params: Any) -> Iterator[None]:
    """Another `packed_seq_params` for them alone: the attention keeps the right one."""
    spoil = lambda module, args, kwargs: (args, {**kwargs, "packed_seq_params": params})  # noqa: E731
    layers = [part for stage in stages for part in stage.modules() if type(part).__name__.endswith("GatedDeltaNet")]
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(spoil, with_kwargs=True))
        yield


def traps(stages: list[Any]) -> dict[str, str]:
    """What is said of offsets of others."""
    found = {}
    for name, (real, padded) in SPOILT.items():
        inputs, _ = gpt_batch(flat("a tail" if name.endswith("a tail") else "each padded"), stages[0], padding_free=True)
        given = {**only_tokens(inputs), "extra_block_kwargs": {}}
        with recurrent_layers_get(stages, params_of(real, padded, 8)):
            found[name] = refusal(lambda given=given: run(stages, given))
    return found


def flat_rows() -> dict[str, Any]:
    kernels_on_cpu()
    mcore_bridge.install()
    out: dict[str, Any] = {}
    for name in ("qwen3_next", "qwen3_next moe", "qwen3_5"):
        model_type, _, moe = name.partition(" ")
        stages = build(model_type, moe=bool(moe), deterministic_mode=False, moe_aux_loss_coeff=0.0)
        for row in ROWS:
            inputs, truth = gpt_batch(flat(row), stages[0], padding_free=True)
            params = inputs["packed_seq_params"]
            found = measure_flat(stages, inputs, truth, alone(stages, ROWS[row][0]))
            found |= {"offsets": params.cu_seqlens_q.tolist(), "padded": params.cu_seqlens_q_padded.tolist()}
            out[f"{name}, {row}"] = found
        if name == "qwen3_next":
            out["traps"] = traps(stages)
    return out


def only_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask", "packed_seq_params")}


def of_transformers() -> dict[str, str]:
    """What is said of layers of transformers."""
    on_cpu()
    swift.install()
    return {name: refusal(lambda name=name: build(name)) for name in ("qwen3_next", "qwen3_5")}


def layouts(family: str, ranks: int) -> dict[str, Any]:
    """Of each layout its forms: whether rows are flat, whether there is a kernel for convolutions."""
    if ranks > 1:
        return {"context parallel": [(False, True), (True, True)]}
    there = {} if family == "qwen3" else {"packed, kernels there": [(True, True)]}
    return {"padded right": [(False, True)], "packed": [(True, False)], **there}


def together(family: str, form: tuple[bool, bool], ours: bool) -> Any:
    """The template's batch through `prepare_batch` on this rank: rows and gradient of the samples."""
    flat, there = form
    cp = parallel_state.get_context_parallel_world_size()
    swift.install() if ours else None
    try:
        with nullcontext() if there else patch.object(gated_delta_net, "causal_conv1d", None):
            stages, args = build(family, cp=cp, deterministic_mode=False), arguments(family, cp=cp, padding_free=flat)
            batch = swift_world.prepare(args, swift_world.collate(args, *LENGTHS))
            labels, _ = batch.pop("labels"), batch.pop("loss_scale", None)
            out = run(stages, {**batch, "labels": None})
            cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    finally:
        swift.uninstall()
    bounds = batch["packed_seq_params"].cu_seqlens_q if flat else None
    return gathered(out, LENGTHS, bounds), summed(gradients(stages))


def on_ranks(families: list[str]) -> dict[str, Any]:
    on_cpu()
    kernels_on_cpu()
    npu_there(True)
    return world.cells_on_ranks(families, layouts, lambda family: alone(build(family, deterministic_mode=False)), together)


def main(families: list[str]) -> dict[str, Any]:
    if families:
        return on_ranks(families)
    if os.environ.get("USE_MCORE_GDN") == "0":
        return of_transformers()
    padded = padded_rows()
    npu_there(False)
    return {"padded": padded, "flat": flat_rows()}


if __name__ == "__main__":
    write(main(sys.argv[2:]))
