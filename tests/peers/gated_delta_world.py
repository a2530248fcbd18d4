"""megatron-core's own Gated DeltaNet on flat rows, from 0.18 on: real hybrid `GPTModel`s on a CPU, one rank or several.

In the place of fla's two kernels stand the references, which leave unwritten what no sequence covers (NaN).
"""

from typing import Any

import pytest
import torch
from megatron_world import PAD, TEDotProductAttention, gpt, loss_and_gradients, on_cpu, samples
from torch import Tensor
from torch.nn.functional import normalize, silu

from collate_npu import PaddingCollator, Segments, gather_sequence
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.outputs import per_sequence
from collate_npu.parallel import ContextParallel, pad_documents

CASES = {
    "one-token sequences": ([1, 5, 1, 1, 3, 2], 1),
    "a tail": ([6, 3, 4], 8),
    "odd lengths": ([5, 3, 7, 1, 9], 1),
    "one sequence": ([7], 1),
}
"""Lengths, and what the width is padded to."""
KINDS = "gag"


def fla_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """References for fla's convolution and rule, and a CPU for the card."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    on_cpu(patch)
    patch.setattr(common, "HAVE_FLA", True)
    patch.setattr(common, "l2norm", lambda x: normalize(x, dim=-1, eps=1e-6))
    patch.setattr(gdn, "causal_conv1d", convolution)
    patch.setattr(gdn, "chunk_gated_delta_rule", reference_gated_delta_rule)


def convolution(x: Tensor, weight: Tensor, *, initial_state: Any, output_final_state: bool, **given: Any) -> Any:
    assert initial_state is None
    assert not output_final_state
    return reference_causal_conv1d(x, weight, **given), None


def hybrid(**changed: Any) -> Any:
    """Gated DeltaNet, attention, Gated DeltaNet; the same weights at every call."""
    model = gpt(KINDS, flash=TEDotProductAttention, deterministic_mode=False, activation_func=silu, **changed)
    for layer in model.decoder.layers:  # a state that is kept for long, so that one that leaks shows
        if hasattr(layer.self_attention, "A_log"):
            layer.self_attention.A_log.data.fill_(-3.0)
    return model


def flat(case: str) -> dict[str, Any]:
    lengths, multiple = CASES[case]
    collate = PaddingCollator(pad_token_id=PAD, padding_free=True, pad_to_multiple_of=multiple)
    return collate(samples(*lengths))


def alone(case: str, model: Any) -> dict[str, Any]:
    """Each sample by itself, in a batch of one row, on one rank."""
    one, rank = PaddingCollator(pad_token_id=PAD), ContextParallel(1, 0)
    runs = [gpt_batch(one([row]), model, context_parallel=rank) for row in samples(*CASES[case][0])]
    loss, logits, gradients = loss_and_gradients(model, runs)
    return {"loss": loss, "logits": [x.detach() for x in logits], "gradients": gradients}


def run(case: str, spoil: Any = None) -> dict[str, Any]:
    """The flat row through `gpt_batch` on this rank; logits gathered, loss and gradients summed over the ranks."""
    import torch.distributed as dist

    model = hybrid()
    inputs, truth = gpt_batch(flat(case), model, padding_free=True)
    params = inputs["packed_seq_params"]
    if spoil is not None:
        spoil(params)
    loss = (model(**inputs) * inputs["loss_mask"]).sum()
    loss.backward()
    loss, gradients = loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    logits = model(**{**inputs, "labels": None}).detach()
    if dist.get_world_size() > 1:
        cp = ContextParallel.from_megatron().for_documents()
        logits = gather_sequence(logits, cp, truth, cu_seqlens=params.cu_seqlens_q_padded)
        for value in (loss, *gradients.values()):
            dist.all_reduce(value)
    return {"loss": loss, "logits": per_sequence(logits, truth), "gradients": gradients, "width": truth.shape[1]}


def shared_out(lengths: list[int], size: int) -> tuple[Segments, ContextParallel]:
    """The Segments of a flat row whose sequences are padded for so many ranks."""
    cp = ContextParallel(size, 0).for_documents()
    row = {"input_ids": torch.zeros(1, sum(lengths), dtype=torch.long)}
    row["cu_seqlens"] = Segments.from_lengths([lengths]).cu_seqlens
    return pad_documents(row, cp)[1], cp


def start() -> None:
    """Megatron's groups for all processes as ranks of one row; a CPU stays in the place of CUDA."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    fla_on_cpu(pytest.MonkeyPatch())
