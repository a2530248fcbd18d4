"""What the tests of mcore-bridge have two processes do: ms-swift's own batches, each rank alone and both as ranks of a row.

`python bridge_cp_work.py OUT FAMILY ...`. Attention gathers keys over the ranks (`cpu_world`); fla's kernels are the
references.
"""

import json
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bridge_world as world  # first: the stand-ins
import torch
import torch.distributed as dist
from bridge_packed_work import kernels_on_cpu, learned
from bridge_work import LENGTHS, Alone, apart, furthest, gradients, loss_of, npu_there, said
from mcore_bridge.model.modules import gated_delta_net
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron_world import _rotary_part
from swift_world import arguments, collate, prepare, samples
from torch.nn.functional import cross_entropy

from collate_npu.integrations import swift
from collate_npu.parallel import ContextParallel, gather_sequence


def alone(stages: list[Any]) -> Alone:
    """Each sample by itself, without us."""
    logits = []
    for row in samples(*LENGTHS):
        ids = torch.tensor([row["input_ids"]])
        given = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "attention_mask": None}
        logits += world.run(stages, given)
        loss_of(logits[-1:], learned(ids)).backward()
    return Alone([row.detach() for row in logits], gradients(stages))


def error(family: str, stages: list[Any], flat: bool, by_itself: Alone) -> float:
    """The template's batch through `prepare_batch` on this rank, against each sample alone."""
    args = arguments(family, cp=parallel_state.get_context_parallel_world_size(), padding_free=flat)
    batch = prepare(args, collate(args, *LENGTHS))
    labels, _ = batch.pop("labels"), batch.pop("loss_scale", None)
    out = world.run(stages, {**batch, "labels": None})
    cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    found, cp = gradients(stages), ContextParallel.from_megatron()
    for grad in found.values() if cp.size > 1 else ():
        dist.all_reduce(grad)
    bounds = batch["packed_seq_params"].cu_seqlens_q if flat else None
    whole = gather_sequence(out.detach(), cp.for_documents() if flat else cp, cu_seqlens=bounds)
    places = [(0, start) for start in bounds.tolist()] if flat else [(b, 0) for b in range(len(LENGTHS))]
    rows = [whole[b, start : start + n] for (b, start), n in zip(places, LENGTHS)]
    return max(*map(furthest, rows, by_itself.logits), apart(found, by_itself.gradients))


def cells(family: str, known: Any = None) -> dict[str, Any]:
    """On the groups that stand: each layout, without us and with us."""
    shared, out, no_kernels = known is not None, {}, patch.object(gated_delta_net, "causal_conv1d", None)
    try:
        stages = world.build(family, cp=dist.get_world_size() if shared else 1, deterministic_mode=False)
    except AssertionError as refusal:
        raised = {"error": None, "refused": f"AssertionError: {refusal}"}
        return {"context parallel": {"alone": [raised], "ours": [raised]}}
    known = known or alone(stages)
    layouts = {"context parallel": (False, True)} if shared else {"padded right": (False,), "packed": (True,)}
    layouts |= {} if shared or family == "qwen3" else {"packed, kernels there": (True,)}
    for (layout, forms), who in product(layouts.items(), ("alone", "ours")):
        swift.install() if who == "ours" else swift.uninstall()
        for flat in forms:
            case: dict[str, Any] = {"error": None}
            with no_kernels if layout == "packed" else nullcontext():
                case["refused"] = said(lambda flat=flat, case=case: case.update(error=error(family, stages, flat, known)))
            out.setdefault(layout, {}).setdefault(who, []).append(case)
    swift.uninstall()
    return out | ({} if shared else {"known": known})


def main(families: list[str]) -> dict[str, Any]:
    world.on_cpu()
    kernels_on_cpu()
    npu_there(True)
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = _rotary_part
    found: dict[str, Any] = {}
    for ranks in (1, dist.get_world_size()):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        for family in families:
            told = found.setdefault(family, {})
            told |= cells(family, told.pop("known", None))
    return found


if __name__ == "__main__":
    found = main(sys.argv[2:])
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")
