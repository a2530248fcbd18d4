"""What two ranks do with one `GPTModel`: context parallelism, or tensor parallelism with sequence parallelism. Runs in
processes of a Pool; the same `CASES` run in one process beside it."""

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_world import (
    PAD,
    DotProductAttention,
    TEDotProductAttention,
    aux_losses,
    build,
    gaps,
    logits_of,
    on_cpu,
    packed_rows,
    samples,
)
from torch import Tensor

from collate_npu import CollateError, PaddingCollator, Segments, gather_sequence
from collate_npu.integrations.megatron import gpt_batch, packed_seq_params
from collate_npu.outputs import per_sequence, shift_labels
from collate_npu.parallel import ContextParallel, split_batch

ROWS, ODD = samples(7, 3, 6), samples(7, 3, 5)
DENSE = {"attention": DotProductAttention, "positions": "rope"}
KERNEL = {"attention": TEDotProductAttention, "positions": "rope"}
MTP = {"mtp_num_layers": 2, "calculate_per_token_loss": True}


def padded(side: str = "right") -> dict[str, Any]:
    return PaddingCollator(pad_token_id=PAD, padding_side=side, pad_to_multiple_of=4)(ROWS)


def packed() -> dict[str, Any]:
    return packed_rows(samples(7, 1, 3, 5), [[7, 1], [3, 5]])


def flat(rows: Any = ROWS) -> dict[str, Any]:
    return PaddingCollator(pad_token_id=PAD, padding_free=True)(rows)


CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "right padding": (padded, KERNEL, False),
    "right padding, learned positions": (padded, {**KERNEL, "positions": "learned_absolute"}, False),
    "left padding, dense": (functools.partial(padded, "left"), DENSE, False),
    "left padding, dense, learned positions": (
        functools.partial(padded, "left"),
        {**DENSE, "positions": "learned_absolute"},
        False,
    ),
    "packed rows, dense": (packed, DENSE, False),
    "flat": (flat, KERNEL, True),
    "flat, learned positions": (flat, {**KERNEL, "positions": "learned_absolute"}, True),
    "flat, padding behind the last alone": (functools.partial(flat, samples(8, 4, 6)), KERNEL, True),
    "experts": (padded, {**KERNEL, "experts": True}, False),
    "experts, left padding, dense": (functools.partial(padded, "left"), {**DENSE, "experts": True}, False),
    "experts, flat": (flat, {**KERNEL, "experts": True}, True),
    "multi-token prediction": (padded, {**KERNEL, **MTP}, False),
    "multi-token prediction, flat": (flat, {**KERNEL, **MTP}, True),
}


@functools.lru_cache(maxsize=1)
def start(tp: int = 1) -> None:
    """Megatron's groups, made anew where the last call asked for others."""
    from megatron.core import parallel_state

    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=world // tp)
    on_cpu(pytest.MonkeyPatch())


SPOILT = {
    "experts": ("no padding mask",),
    "right padding": ("labels shifted by each rank",),
    "flat, learned positions": ("positions of a plain row", "cut across sequences"),
    "multi-token prediction, flat": ("real offsets",),
}
"""What goes wrong in silence where one thing of the inputs is not as `gpt_batch` makes it."""


def spoilt(how: str, batch: dict[str, Any], inputs: dict[str, Any], truth: Segments) -> dict[str, Any]:
    cp = ContextParallel.from_megatron()
    if how == "no padding mask":
        return {**inputs, "padding_mask": None}
    if how == "labels shifted by each rank":
        return {**inputs, "labels": shift_labels(split_batch({"labels": batch["labels"]}, cp)["labels"]).clamp(min=0)}
    if how == "real offsets":
        return {**inputs, "packed_seq_params": packed_seq_params(truth)}
    ids, positions = (inputs[key] for key in ("input_ids", "position_ids"))
    bounds = inputs["packed_seq_params"].cu_seqlens_q_padded
    by_document = cp.for_documents()
    if how == "positions of a plain row":
        plain = torch.arange(truth.shape[1])[None]
        return {
            **inputs,
            "position_ids": split_batch({"position_ids": plain}, by_document, cu_seqlens=bounds)["position_ids"],
        }
    assert how == "cut across sequences"
    row = {"input_ids": gather_sequence(ids, by_document, cu_seqlens=bounds)}
    row |= {"position_ids": gather_sequence(positions, by_document, cu_seqlens=bounds)}
    return {**inputs, **split_batch(row, cp)}


def run(case: str, how: str = "") -> dict[str, Any]:
    """Loss, logits of each sample, losses of routers and gradients, summed over the ranks; `how` spoils the inputs."""
    batch, settings, padding_free = CASES[case]
    model = build(**settings)
    batch = batch()
    inputs, truth = gpt_batch(batch, model, padding_free=padding_free)
    inputs = spoilt(how, batch, inputs, truth) if how else inputs
    aux_losses()
    logits = logits_of(model, inputs)
    aux_losses()
    loss = (model(**inputs) * inputs["loss_mask"]).sum()
    loss.backward()
    told = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    aux = torch.tensor(list(aux_losses().values()))
    params = inputs.get("packed_seq_params")
    if dist.get_world_size() > 1:
        bounds = None if params is None else params.cu_seqlens_q_padded
        cp = ContextParallel.from_megatron(layout="document_zigzag" if padding_free else "zigzag")
        logits = gather_sequence(logits.detach(), cp, truth, cu_seqlens=bounds)
        for value in (loss.detach(), aux, *told.values()):
            dist.all_reduce(value)
    return {
        "loss": loss.detach(),
        "logits": [x.detach() for x in per_sequence(logits, truth)],
        "gradients": told,
        "aux": aux,
        "shapes": {key: list(x.shape) for key, x in inputs.items() if isinstance(x, Tensor)},
    }


def same_as_megatron(side: str) -> None:
    """What `gpt_batch` hands this rank is what Megatron's own split makes of the whole batch, key by key."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    model = build(**DENSE, experts=True)
    alone = ContextParallel(1, 0)
    whole, _ = gpt_batch(padded(side), model, context_parallel=alone)
    theirs = get_batch_on_this_cp_rank({key: value.clone() for key, value in whole.items()})
    ours, _ = gpt_batch(padded(side), model)
    assert ours.keys() == theirs.keys() == {*split_batch(whole, alone)}
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


# --- tensor parallelism with sequence parallelism


def sequence_parallel(multiple: int, padding_free: bool = False) -> dict[str, Any]:
    """Loss, losses of routers and their gradients: each rank's routers see half the tokens."""
    tp = dist.get_world_size()
    settings = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, "add_bias_linear": False}
    model = build(**KERNEL, experts=True, **settings)
    batch = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=multiple, padding_free=padding_free)(ODD)
    inputs, _ = gpt_batch(batch, model, padding_free=padding_free)
    aux_losses()
    loss = (model(**inputs) * inputs["loss_mask"]).sum()
    loss.backward()
    routers = {name: p.grad for name, p in model.named_parameters() if name.endswith("router.weight")}
    aux = torch.tensor(list(aux_losses().values()))
    if tp > 1:
        for value in (aux, *routers.values()):
            dist.all_reduce(value)
    return {"loss": loss.detach(), "aux": aux, "routers": routers, "shape": list(inputs["padding_mask"].shape)}


def refusal() -> str:
    """Of rows whose width the ranks cannot share out."""
    model = build(**KERNEL, tensor_model_parallel_size=2, sequence_parallel=True)
    try:
        gpt_batch(PaddingCollator(pad_token_id=PAD)(ODD), model)
    except CollateError as error:
        return str(error)
    return ""


def compare(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    aux = float((found["aux"] - alone["aux"]).abs().max()) if len(alone["aux"]) else 0.0
    return {**gaps(found, alone), "aux": aux}


def refused() -> str:
    """The second rank's batch is refused before any split. What each says."""
    model = build(**DENSE)
    batch = padded() | ({"labels": padded()["input_ids"], "loss_mask": torch.ones(3, 8)} if dist.get_rank() else {})
    try:
        gpt_batch(batch, model, context_parallel=ContextParallel.from_megatron())
    except CollateError as error:
        return str(error)
    return ""
