"""Real `GPTModel`s of megatron-core on a CPU, through their constructor, hybrid ones too; and what comes of their batches.

Hardware and attention are stood in for by `cpu_world`.
"""

import copy
import sys
import warnings
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
import stand_ins
import torch
from cpu_world import Attention, groups, hardware
from torch import Tensor

from collate_npu import Segments
from collate_npu.outputs import per_sequence

if int(version("megatron-core").split(".")[1]) >= 18:
    stand_ins.triton()

VOCABULARY, PAD, HIDDEN = 64, 63, 32


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """A CPU in the place of CUDA, and process groups."""
    if "mcore_bridge" in sys.modules:
        pytest.skip("mcore-bridge, once imported, changes Megatron's classes: run these files in a process of their own")
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    groups()
    hardware(partial(patch.setattr, raising=False))
    patch.setattr(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", _rotary_part)  # its index goes by pinned memory


def _rotary_part(frequencies: Tensor, dim: int, group: Any) -> Tensor:
    """Chunks r and 2 * size - 1 - r, as rope_utils.py:45-65 of 0.16.1 picks them on a GPU."""
    size, rank = group.size(), group.rank()
    chunks = frequencies.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def gpt(kinds: str = "aa", *, flash: Any = Attention, positions: str = "rope", **changed: Any) -> Any:
    """A model of these layers: `a` attention, `g` Gated DeltaNet; the same weights at every call. It needs `hardware`.

    `flash` is the kernel in the place of TransformerEngine's; None leaves Megatron's local attention."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.manual_seed(0)
    recurrent = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [k == "g" for k in kinds]}
    recurrent["deterministic_mode"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=len(kinds), hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=64,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3,
            bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
            gradient_accumulation_fusion=False, apply_rope_fusion=False, linear_conv_kernel_dim=4, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_num_key_heads=4, linear_num_value_heads=4,
            **{
                "context_parallel_size": parallel_state.get_context_parallel_world_size(),
                **(recurrent if "g" in kinds else {}),
                **changed,
            },
        )  # fmt: skip
        layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        if flash:
            layer.submodules.self_attention.submodules.core_attention = flash
        spec = TransformerBlockSubmodules([_gated_delta(layer) if kind == "g" else layer for kind in kinds], layer_norm=Norm)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
        made = GPTModel(config, spec, VOCABULARY, 64, position_embedding_type=positions, mtp_block_spec=mtp)
    with torch.no_grad():  # a zero row for the padding would hide what reaches it
        held = made.embedding.word_embeddings
        first = held.vocab_start_index
        held.weight[[token - first for token in (0, PAD) if first <= token < first + len(held.weight)]] += 1.0
    return made.eval()


def _gated_delta(layer: Any) -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    layer = copy.deepcopy(layer)
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return layer


def build(*, attention: Any = None, experts: bool = False, positions: str = "learned_absolute", **changed: Any) -> Any:
    """One to be trained, of two attention layers (and `mtp_num_layers` more); `attention` replaces the local one."""
    mixture = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1.0}
    mixture["moe_router_load_balancing_type"] = "aux_loss"
    return gpt("aa", flash=attention, positions=positions, **{**(mixture if experts else {}), **changed}).train()


class Norm(torch.nn.LayerNorm):
    """In the place of Transformer Engine's: Megatron's torch one refuses sequence parallelism (torch_norm.py:32)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)


# --- samples and what comes of them


def samples(*lengths: int) -> list[dict[str, Any]]:
    ids = [[(5 * i + 3 * b) % 60 + 1 for i in range(length)] for b, length in enumerate(lengths)]
    return [{"input_ids": row, "labels": row} for row in ids]


def packed_rows(rows: list[dict[str, Any]], lengths: Any) -> dict[str, Tensor]:
    """The samples in rows as `lengths` says, padded on the right, with the three keys of the wire."""
    truth = Segments.from_lengths(lengths)
    whole = torch.full(truth.shape, PAD).masked_scatter(
        truth.keep, torch.tensor([i for row in rows for i in row["input_ids"]])
    )
    labels = whole.masked_fill(~truth.keep, -100)
    return {"input_ids": whole, "labels": labels, "attention_mask_2d": truth.keep, "segment_ids": truth.ids}


def loss_and_gradients(model: Any, runs: list[tuple[dict[str, Any], Segments]]) -> tuple[Tensor, list[Tensor], Any]:
    """Summed loss, logits of each sample and gradients, over batches `(inputs, truth)`."""
    model.zero_grad()
    total, logits = torch.zeros(()), []
    for inputs, truth in runs:
        logits += per_sequence(logits_of(model, inputs), truth)
        total = total + (model(**inputs) * inputs["loss_mask"]).sum()
    total.backward()
    return total.detach(), logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """With multi-token prediction 0.16.1 takes no labels=None; the logits are those of the main head."""
    if getattr(model.config, "mtp_num_layers", None):
        seen: list[Tensor] = []
        hook = model.output_layer.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        model(**inputs)
        hook.remove()
        return seen[-1].transpose(0, 1)
    return model(**{**inputs, "labels": None})


def aux_losses() -> dict[str, float]:
    """The losses that Megatron logged of its routers, layer by layer, since the last call."""
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

    tracked = get_moe_layer_wise_logging_tracker()
    told = {f"{name} {n}": float(x) for name, held in tracked.items() for n, x in enumerate(held["values"])}
    clear_aux_losses_tracker()
    tracked.clear()
    return told


def far(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to its size; inf where one is not finite."""
    gaps = [float((ours[key] - theirs[key]).abs().max() / (1 + theirs[key].abs().max())) for key in theirs]
    assert ours.keys() == theirs.keys()
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of any logit."""
    gaps = [float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


def gaps(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """How far a run is from another: loss, logits and gradients."""
    return {
        "loss": float((found["loss"] - alone["loss"]).abs() / (1 + alone["loss"].abs())),
        "logits": apart(found["logits"], alone["logits"]),
        "gradients": far(found["gradients"], alone["gradients"]),
    }


# --- attention in the place of a GPU's


class TEDotProductAttention(Attention):
    """A mask that is given is not looked at, as Transformer Engine does under `causal`."""

    lenient, reads_dense = True, False


class DotProductAttention(Attention):
    """Megatron's local one, which refuses context parallelism: here with the dense mask of this rank's queries."""
