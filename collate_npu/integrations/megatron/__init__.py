"""megatron-core 0.16.1: the arguments of `GPTModel` for a batch, cut for this rank.

`GPTModel` reads a dense mask (True = blocked) on its local kernels and none on Transformer Engine's causal ones. It takes
the router's `padding_mask` (True = padding), and has no argument for a 2D mask. A flat row has `PackedSeqParams` instead.
Costs O(B * S), and the dense mask if a kernel reads it. Legend: B batch, S width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from collate_npu.arrays import host_tensor
from collate_npu.consumers import mindspeed
from collate_npu.consumers.labels_and_positions import kind_of, labels_are_shifted, labels_for
from collate_npu.consumers.megatron import kernel_of, npu_engine
from collate_npu.consumers.model_traits import config_of, needs_mask_2d, recurrent_heads, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain, refuse_rows
from collate_npu.integrations import patching
from collate_npu.integrations.megatron import mcore_bridge
from collate_npu.kernels.gated_delta import flat_offsets, gated_delta_kwargs
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.batch_reader import agreed
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.mask_values import Polarity
from collate_npu.masks.sources import Sources
from collate_npu.outputs import shift_labels
from collate_npu.parallel import ContextParallel, check_recurrent_split, pad_documents, ranks_agree
from collate_npu.parallel.split import share_out
from collate_npu.segments import Segments, ready
from collate_npu.validation import check_model

__all__ = ["PACKAGE", "TESTED", "gpt_batch", "install", "packed_seq_params", "uninstall"]

PACKAGE, TESTED = "megatron-core", "0.16.1"


def install() -> None:
    """Let routers with an expert bias take a padding mask. Up to 0.19.2 its shape makes them raise (Megatron-LM issue 6111).

    >>> install()  # doctest: +SKIP
    """
    from megatron.core.transformer.moe.router import TopKRouter

    patching.patch(PACKAGE, TopKRouter, "_apply_expert_bias", real_tokens_alone)


def uninstall() -> None:
    """Undo `install`."""
    patching.release(PACKAGE)


def gpt_batch(
    batch: Mapping[str, Any],
    model: Any,
    *,
    padding_free: bool = False,
    context_parallel: ContextParallel | None = None,
    polarity: Polarity | None = None,
) -> tuple[dict[str, Any], Segments]:
    """Return the inputs, and the Segments of the whole rows: `model(**inputs)` computes each real token as its sample alone.

    `inputs` are this rank's `input_ids`, `position_ids`, `attention_mask`, with labels also `labels` (shifted, 0 where
    ignored) and `loss_mask`, on MoE models `padding_mask`. `context_parallel` is by default Megatron's own, of
    `parallel_state`; pad the width to its `multiple`. Raises `UnsupportedFormError` if this model's kernels have no right
    form for the padding. Source: megatron-core core/models/gpt/gpt_model.py:470-485.

    `padding_free=True` takes one flat row `[1, T]` and adds `packed_seq_params`. Under context or sequence parallelism each
    sequence is padded to what the ranks can share out, so that row and Segments are wider than the batch; gather by
    `cu_seqlens=inputs["packed_seq_params"].cu_seqlens_q_padded`.

    >>> inputs, segments = gpt_batch(batch, model)  # doctest: +SKIP
    >>> loss = model(**inputs)  # doctest: +SKIP
    """
    check_model(model)
    cp = context_parallel or megatron_ranks(shared=getattr(config_of(model), "sequence_parallel", False))
    with nullcontext() if cp is None else ranks_agree(cp, call="split"):  # one that refuses its batch says so
        if batch.get("input_ids") is None:
            rule, keys = "GPTModel takes token ids [B, S] under that name.", ", ".join(map(str, batch))
            raise CollateError(explain("input_ids", f"keys {keys}", rule, "Rename tokens to input_ids."))
        sources = Sources.of(batch)
        segments = ready(agreed(sources, polarity=polarity, pattern=None, padding_free=padding_free))
        row = _row(batch, sources, segments)
        if padding_free:
            return _flat(row, segments, model, cp)
        return _padded(row, segments, model, cp), segments


def _row(batch: Mapping[str, Any], sources: Sources, segments: Segments) -> dict[str, Tensor]:
    """Return the keys that the model reads: labels with the token that predicts each, no positions that count padding."""
    given = {key: batch[key] for key in ("input_ids", "position_ids", "labels") if batch.get(key) is not None}
    if "position_ids" in given and kind_of(torch.from_numpy(sources.array("position_ids")), segments) == "places":
        del given["position_ids"]
    row = {key: value if isinstance(value, Tensor) else host_tensor(key, value) for key, value in given.items()}
    return row | {"labels": _targets(batch, sources, segments, row["labels"])} if "labels" in row else row


def _targets(batch: Mapping[str, Any], sources: Sources, segments: Segments, labels: Tensor) -> Tensor:
    """Return labels `[B, S]`, each with the token before it. Megatron's datasets make such, and the loss mask of them."""
    moved = labels_are_shifted(sources.array("input_ids"), sources.array("labels"), segments)
    others = ("loss_scale", "shift_labels") if moved else ("loss_mask", "loss_scale", "shift_labels")
    beside = [key for key in others if batch.get(key) is not None]
    if beside:
        rule = "The loss mask is made from labels, -100 = not learned, before they are shifted; a second one would be lost."
        remedy = f"If it is of tokens: labels.masked_fill(loss_mask == 0, -100), and leave {', '.join(beside)} out."
        raise CollateError(explain(", ".join(beside), "beside labels", rule, remedy))
    if not moved:
        return shift_labels(labels, segments)
    own = labels_for(sources, segments, "next", True).get("labels", labels)
    return own if batch.get("loss_mask") is None else own.masked_fill(torch.as_tensor(batch["loss_mask"]) == 0, -100)


def _padded(row: Mapping[str, Any], segments: Segments, model: Any, cp: ContextParallel | None) -> dict[str, Any]:
    """Return the inputs of padded rows, with the dense mask if the attention of this model reads one."""
    kernel, kind = kernel_of(model), getattr(config_of(model), "mcore_model_type", None)
    mcore_bridge.check_padding(segments, kernel, recurrent=needs_mask_2d(model), model_type=kind)
    refuse_crossing(segments, config_of(model), padding_free=False)
    inputs, device = _inputs(row, segments, model, cp, None), row["input_ids"].device
    return {**inputs, "attention_mask": mcore_bridge.attention_mask(segments, kernel, cp, device=device)}


def _flat(
    row: Mapping[str, Any], segments: Segments, model: Any, cp: ContextParallel | None
) -> tuple[dict[str, Any], Segments]:
    """Return the inputs of a flat row with its offsets, each sequence padded to what the ranks can share out."""
    if segments.packed:
        mcore_bridge.refuse_unseparated(model.modules())
    offsets = torch.tensor(flat_row_offsets(segments))
    if cp is not None:
        cp = cp.for_documents()
        padded, segments = pad_documents({**row, "cu_seqlens_padded": offsets}, cp, segments=segments)
        row, offsets = {key: padded[key] for key in row}, torch.tensor(flat_row_offsets(segments))
    refuse_crossing(segments, config_of(model), padding_free=True)
    inputs, counts = _inputs(row, segments, model, cp, offsets), takes_places(model)
    settings: dict[str, Any] = {"padding_counts": counts, "context_parallel": cp or ContextParallel(1, 0)}
    inputs["packed_seq_params"] = packed_seq_params(segments, device=row["input_ids"].device, **settings)
    return inputs, segments


def _inputs(
    row: Mapping[str, Any], segments: Segments, model: Any, cp: ContextParallel | None, offsets: Tensor | None
) -> dict[str, Any]:
    """Return this rank's part of the rows, with the masks of routers and recurrent layers as the model's forward takes them.
    GPTModel shares out the routers' mask on its first stage alone (gpt_model.py:307-320), mcore-bridge's model only a mask
    that it made itself (1.6.5 model/gpt_model.py:307-316)."""
    device, config, stage = row["input_ids"].device, config_of(model), unwrap(model)
    inputs = {"position_ids": segments.position_ids.to(device), **row, "attention_mask": None}
    if "labels" in row:
        inputs |= {"labels": row["labels"].clamp(min=0), "loss_mask": (row["labels"] != -100).float()}
    whole = {"padding_mask": router_padding_mask(segments, model)}
    if needs_mask_2d(model):
        if mcore_bridge.masks_padding(getattr(config, "mcore_model_type", None)):
            whole[KEEP_KEY] = segments.keep
        if cp is not None:  # from 0.18 on; before, Megatron's config refuses it
            flat, heads = offsets is not None, recurrent_heads(config)
            check_recurrent_split(cp, segments, padding_free=flat, offsets=offsets, heads=heads)
    masks = {key: mask.to(device) for key, mask in whole.items() if mask is not None}
    if cp is not None:
        inputs = share_out(inputs | masks, cp, segments=segments, cu_seqlens=offsets)
        masks = {key: inputs.pop(key) for key in masks}
    if "padding_mask" in masks:
        cut_later = getattr(stage, "pre_process", True) and not type(stage).__module__.startswith("mcore_bridge")
        shared = not cut_later and bool(getattr(config, "sequence_parallel", False))
        masks["padding_mask"] = mcore_bridge.router_padding(masks["padding_mask"], shared=shared)
    return mcore_bridge.pass_through_forward(type(stage), inputs, masks)


# --- PackedSeqParams


def packed_seq_params(
    segments: Segments,
    *,
    padding_counts: bool = False,
    context_parallel: ContextParallel | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """Return Megatron's `PackedSeqParams` of a flat row `[1, S]`: `qkv_format="thd"`, int32 offsets `[N + 1]`.

    Under context parallelism pass the Segments of the whole row, as `pad_documents` returns them. `context_parallel` is by
    default Megatron's own, of `parallel_state`. `max_seqlen_*` count padding, because rotary positions are made for them
    (core/transformer/attention.py:1082-1089), and `total_tokens` is S, for Mamba's sequence numbers (`__post_init__`).

    `padding_counts=True` passes the padded offsets as the real ones, for readers that take `cu_seqlens_q` for places in the
    row (`takes_places`, FlashAttention 2). Causal attention stays exact; code that counts tokens by them counts padding.
    It is the default beside MindSpeed, whose attention takes them so (core_r0.16.0 core/transformer/
    dot_product_attention.py:282, 0.18 flash_attention/adaptor.py:50-55), and beside TransformerEngineNPU
    (consumers.megatron). It is the default too if padding stands behind the last sequence alone and Megatron is older than
    0.19, which brought `pad_between_seqs`: TransformerEngine up to 2.16 then reads wrong rows in silence under context
    parallelism (issue 3331).

    Raises `CollateError` for padding before or inside a sequence, and where the ranks cannot share out each sequence: Gated
    DeltaNet of 0.18 to 0.19.2 takes such in silence (0.19.2 core/ssm/gated_delta_net/common.py:466, 574-600).

    >>> packed_seq_params(Segments.from_lengths([[3, 2]])).cu_seqlens_q.tolist()  # doctest: +SKIP
    [0, 3, 5]
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    offsets = flat_row_offsets(segments)
    _check_shared_out(offsets, context_parallel or megatron_ranks())
    fields = gated_delta_kwargs(segments, kernel="megatron", device=device)
    real = segments.cu_seqlens_host
    unseen = "pad_between_seqs" not in names and real[:-1] == offsets[:-1]
    apart = not (padding_counts or mindspeed.is_installed() or npu_engine() or unseen or real == offsets)
    for side in ("q", "kv"):  # the very same tensor says "no padding" to TransformerEngine's main branch
        fields[f"cu_seqlens_{side}"] = segments.cu_seqlens.to(device) if apart else fields[f"cu_seqlens_{side}_padded"]
    fields["pad_between_seqs"] = apart
    return PackedSeqParams(**{name: value for name, value in fields.items() if name in names})


def takes_places(model: Any) -> bool:
    """True if this model reads the places of sequences from `cu_seqlens_q`, and not from the padded offsets. Multi-token
    prediction does (core/transformer/multi_token_prediction.py:236 of 0.16.1, 249 of 0.19.2), and mcore-bridge's Gated
    DeltaNets and latent attention (1.6.5 gpts/qwen3_next.py:477, modules/multi_latent_attention.py:35)."""
    depths = getattr(config_of(model), "mtp_num_layers", None)
    return bool(depths) or type(unwrap(model)).__module__.startswith("mcore_bridge")


def megatron_ranks(*, shared: bool = False) -> ContextParallel | None:
    """Return the ranks that share a row by Megatron's `parallel_state`, with `shared` the tensor-parallel ones too."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    cp = ContextParallel.from_megatron(**({} if shared else {"tensor_parallel": 1}))
    return cp if cp.size * cp.tensor_parallel > 1 else None


def flat_row_offsets(segments: Segments) -> tuple[int, ...]:
    """Return where the sequences of a flat row stand: `(0, start of the second, ..., S)`, each with the padding behind it.
    Raises `UnsupportedFormError` where there is not one row, no sequence, or padding before or inside a sequence."""
    if segments.shape[0] != 1 or not segments.num_sequences:
        rule = "Offsets speak of one flat row [1, S] with at least one sequence."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, "Collate with padding_free=True."))
    return flat_offsets(segments, padding="behind")


def _check_shared_out(offsets: tuple[int, ...], cp: ContextParallel | None) -> None:
    if cp is None:
        return
    multiple = cp.document_multiple
    bad = [(n, f"{b - a} places") for n, (a, b) in enumerate(pairwise(offsets)) if (b - a) % multiple]
    rule = f"{cp.size} ranks ({cp.layout}) share each sequence out in parts of equal size: lengths % {multiple} == 0."
    remedy = "Use the row and Segments of pad_documents(batch, cp), or gpt_batch, which does so."
    refuse_rows("segments (rows are sequences)", bad, rule, remedy)


# --- mixture of experts. `padding_mask` is True = padding (the docstrings of core/transformer/moe say the opposite of their
# code). A router leaves it out of its losses and its expert bias (router.py:471-626), and still routes it: three settings
# let that reach real tokens.


def router_padding_mask(segments: Segments, model: Any) -> Tensor | None:
    """Return the routers' mask, bool `[B, S]`, True = padding; None for a model without experts. A batch without padding has
    one too, because ranks must count tokens in the same way (moe_utils.py:214-233). Raises `UnsupportedFormError` if padding
    would change the experts of real tokens."""
    config = config_of(model)
    if not getattr(config, "num_moe_experts", None):
        return None
    kinds = getattr(config, "moe_router_load_balancing_type", None) or "none"
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)  # several have coefficients of their own
    capacity = getattr(config, "moe_expert_capacity_factor", None)
    settings = [f"moe_expert_capacity_factor={capacity}"] * (capacity is not None)
    settings += [kind for kind in kinds if kind in ("sinkhorn", "quantile_balancing")]
    if segments.padding_side != "none" and settings:  # router.py:566-595; 0.19: 764-800
        rule = f"With {settings[0]} padding takes experts' places from real tokens, or moves the balance they are chosen by."
        remedy = "Drop that setting, or use padding_free=True with lengths that need no alignment."
        raise UnsupportedFormError(explain("padding_mask", repr(segments), rule, remedy))
    if (stops := _stops_at_mask(model)) and segments.padding_side != "none":
        rule = "Megatron's router with moe_router_enable_expert_bias=True stops at a padding mask (Megatron-LM issue 6111)."
        raise UnsupportedFormError(explain("padding_mask", repr(segments), rule, f"Call {__name__}.install() once."))
    return None if stops or "quantile_balancing" in kinds else ~segments.keep


def _stops_at_mask(model: Any) -> bool:
    """True if Megatron's own function counts the expert bias of a router. mcore-bridge brings a mended one."""
    if not getattr(config_of(model), "moe_router_enable_expert_bias", False) or patching.in_place(real_tokens_alone):
        return False
    from megatron.core.transformer.moe.router import TopKRouter

    routers = (type(module) for module in unwrap(model).modules() if isinstance(module, TopKRouter))
    return any(kind._apply_expert_bias is TopKRouter._apply_expert_bias for kind in routers)


def real_tokens_alone(
    original: Callable[..., Any], self: Any, routing_map: Tensor, padding_mask: Tensor | None = None
) -> Any:
    """Run a router's `_apply_expert_bias` without padding: `routing_map` is bool `[T, E]`, the mask `[T]`, True = pad."""
    return original(self, routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1))


# --- multi-token prediction: at depth k Megatron moves ids, positions, labels and loss mask k places to the left itself,
# along the whole row, or inside the sequences that `cu_seqlens_q` tells (0.16.1 to 0.19.2, core/transformer/
# multi_token_prediction.py:115-318). For a loss of your own: `shift_labels(labels, segments, steps=1 + k)`.


def refuse_crossing(segments: Segments, config: Any, *, padding_free: bool) -> None:
    """Raise if a model with multi-token prediction would learn across sequences, or if its routers would count padding. In
    0.16.1 and 0.17 those routers get no padding mask; later ones move it, and the last token of the row becomes real."""
    if not getattr(config, "mtp_num_layers", None):
        return
    exact = none_is_exact(segments)
    if not exact and not padding_free:
        rule = f"Multi-token prediction moves labels along the whole row, and {exact.why}."
        remedy = "Pad right with one sequence a row, or use padding_free=True."
        raise UnsupportedFormError(explain("labels", repr(segments), rule, remedy))
    counting = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")
    values = [getattr(config, name, None) for name in counting if getattr(config, "num_moe_experts", None)]
    if segments.padding_side != "none" and any(any(x) if isinstance(x, (list, tuple)) else x for x in values):
        rule = "Routers of the multi-token prediction layers count padding: no padding_mask reaches them."
        remedy = "Use padding_free=True with lengths that need no alignment, or set moe_aux_loss_coeff=0 (and no z-loss)."
        raise UnsupportedFormError(explain("padding_mask", repr(segments), rule, remedy))
