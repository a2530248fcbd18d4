"""Hybrid `GPTModel`s of megatron-core on a CPU, called as slime, miles, vime, Relax, ROLL and MindSpeed-MM call theirs.

`native()` is of Megatron's own Gated DeltaNet; `plugged()` of a layer as slime_plugins/models/hf_attention.py:93-182 and
qwen3_next.py:104-175 (slime 624b824) put in its place: it reads `packed_seq_params.cu_seqlens_q`, and nothing else. fla's
kernels are the references under fla's names.
"""

from contextlib import suppress
from typing import Any

import pytest
import rl_batches as batches
import torch
from gated_delta_world import hybrid as native
from megatron_world import HIDDEN, TEDotProductAttention, gpt, on_cpu
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.parallel import ContextParallel, gather_sequence, token_rows
from collate_npu.proof import watch

SAMPLES = [[5, 9, 31, 2, 44, 8, 17], [12, 3, 0, 25], [7, 7, 50, 1, 33, 21, 60, 11, 4], [40, 6]]
"""Token 0, which pads, is text in one of them."""
HEADS, D = 4, 8


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, cu_seqlens: Any = None, **_: Any
) -> Any:
    return reference_causal_conv1d(x, weight, bias, activation, cu_seqlens=cu_seqlens), None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any = None, **_: Any
) -> Any:
    return reference_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)


def on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """References for fla's kernels, and a CPU for the card."""
    on_cpu(patch)
    with suppress(ImportError):  # from 0.18 on
        from megatron.core.ssm.gated_delta_net import common, gdn

        patch.setattr(common, "HAVE_FLA", True)
        patch.setattr(common, "l2norm", lambda x: normalize(x, dim=-1, eps=1e-6))
        patch.setattr(gdn, "causal_conv1d", causal_conv1d)
        patch.setattr(gdn, "chunk_gated_delta_rule", chunk_gated_delta_rule)


class VarlenGatedDeltaNet(nn.Module):
    """Called `(hidden_states [1, T, H], cu_seqlens)`."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk_gated_delta_rule = chunk_gated_delta_rule
        self.in_proj = nn.Linear(HIDDEN, 3 * HEADS * D + 2 * HEADS, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(3 * HEADS * D, 4) / 2)
        self.out_proj = nn.Linear(HEADS * D, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, cu_seqlens: Any = None) -> Tensor:
        qkv, beta, gate = self.in_proj(hidden_states).split([3 * HEADS * D, HEADS, HEADS], dim=-1)
        qkv, _ = causal_conv1d(qkv, self.conv_weight, activation="silu", cu_seqlens=cu_seqlens)
        q, k, v = qkv.unflatten(-1, (3 * HEADS, D)).chunk(3, dim=2)
        out, _ = self.chunk_gated_delta_rule(q, k, v, g=-softplus(gate) / 16, beta=beta.sigmoid(), cu_seqlens=cu_seqlens)
        return self.out_proj(out.flatten(2))


class Attention(nn.Module):
    """In the place of Megatron's self-attention."""

    def __init__(self, config: Any, *_: Any, pg_collection: Any = None, **__: Any) -> None:
        super().__init__()
        self.linear_attn = VarlenGatedDeltaNet()

    def forward(self, hidden_states: Tensor, attention_mask: Any, packed_seq_params: Any = None, **_: Any) -> Any:
        assert packed_seq_params is not None
        out = self.linear_attn(hidden_states.transpose(0, 1), cu_seqlens=packed_seq_params.cu_seqlens_q)
        return out.transpose(0, 1), None


def plugged(**changed: Any) -> Any:
    """The same with the layer of slime's plugins."""
    model = gpt("aaa", flash=TEDotProductAttention, **changed)
    torch.manual_seed(1)
    for n in (0, 2):
        model.decoder.layers[n].self_attention = Attention(model.config)
    return model


def alone(model: Any, rows: Any = SAMPLES) -> dict[str, Any]:
    """Loss, logits and gradients where each sample is a batch of its own, without any padding."""
    return learned(model, [batches.slime([row], multiple=1) for row in rows], [[len(row)] for row in rows])


def learned(model: Any, runs: list[dict[str, Any]], lengths: list[list[int]], held: Any = None) -> dict[str, Any]:
    """What comes of these calls: logits of each sample, summed loss and gradients. `held`: the places of each sample."""
    model.zero_grad()
    total, logits = torch.zeros(()), []
    for inputs, row in zip(runs, lengths):
        out = model(**inputs)
        total = total + _loss(out, inputs)
        logits += samples_of(out.detach(), row, held)
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), "logits": logits, "gradients": gradients}


def _loss(out: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Minus the log-probability of each response token, as slime's loss.py takes it of the token before."""
    ids = inputs.get("shifted", inputs["input_ids"].roll(-1, 1))
    told = out.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    return -(told * inputs["loss_mask"]).sum()


def samples_of(out: Tensor, lengths: list[int], held: Any = None) -> list[Tensor]:
    """Logits `[1, T, V]` or `[B, S, V]`, of each sample; `held` says how many places each takes up."""
    if len(out) > 1:
        return [row[:length] for row, length in zip(out, lengths)]
    starts = [0]
    for n in held or lengths:
        starts.append(starts[-1] + n)
    return [out[0, start : start + length] for start, length in zip(starts, lengths)]


def together(make: str, untold: bool = False) -> dict[str, Any]:
    """In each process: this rank's part of a batch through `native`; logits gathered, loss and gradients summed over the
    ranks, and what watching tells. `untold`: the rule loses its boundaries."""
    import torch.distributed as dist

    inputs = getattr(batches, make)(SAMPLES, size=dist.get_world_size(), rank=dist.get_rank())
    model, offsets = native(), inputs["packed_seq_params"].cu_seqlens_q
    for layer in model.decoder.layers if untold else ():
        layer.self_attention.gated_delta_rule = _untold
    cp, offsets = ContextParallel.from_megatron().for_documents(), offsets[: len(SAMPLES) + 1]  # without the tail
    local = {key: inputs[key][:, : int(offsets[-1]) // cp.size] for key in ("input_ids", "loss_mask")}
    ids = gather_sequence(local["input_ids"], cp, cu_seqlens=offsets)
    with watch(say=False) as seen:
        out = model(**inputs)[:, : local["input_ids"].shape[1]]
    loss = _loss(out, {**local, "shifted": ids.roll(-1, 1)[:, token_rows(ids.shape[1], cp, offsets)]})
    loss.backward()
    loss, gradients = loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for value in (loss, *gradients.values()):
        dist.all_reduce(value)
    gathered = gather_sequence(out.detach(), cp, cu_seqlens=offsets)
    logits = samples_of(gathered, [len(row) for row in SAMPLES], offsets.diff().tolist())
    told = [*map(str, seen.faults), seen.summary()]
    return {"loss": loss, "logits": logits, "gradients": gradients, "told": told}


def _untold(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
    from megatron.core.ssm.gated_delta_net import gdn

    return gdn.chunk_gated_delta_rule(*args, **kwargs)


def start() -> None:
    """Megatron's groups for all processes as ranks of one row."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    on_a_cpu(pytest.MonkeyPatch())
