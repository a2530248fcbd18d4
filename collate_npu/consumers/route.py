"""Consumers: what each model stack reads as a mask, where it looks for padding, and what it cannot take.

`CONSUMERS` is the table, with sources; `route` picks the form for one batch; `needs_mask_2d` tells which models carry
state from token to token (Gated DeltaNet, Mamba, short convolutions) and so need to know padding themselves.
Reading a config costs microseconds; a model type by name loads transformers' config class once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collate_npu.consumers import models
from collate_npu.consumers.leaks import MODELS_IGNORING_MASK
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

Form = Literal["none", "keep_2d", "masked", "keep", "bias", "mapping", "block_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """One model stack: what it reads and where that is written."""

    attention_mask: str
    padding: str
    """Where the consumer learns which tokens are padding."""
    refuses: str
    source: str


CONSUMERS: dict[str, Consumer] = {
    "megatron": Consumer(
        attention_mask="None where exact, else bool [B, 1, S, S], True = blocked: its local kernels",
        padding="attention_mask_2d, for models with recurrent layers, when not padding_free",
        refuses="an additive mask (it is never emitted)",
        source="megatron-core core/transformer/utils.py:54-55, core/datasets/gpt_dataset.py:833-872; "
        "ms-swift 4.6.0 megatron/trainers/utils.py:358-407",
    ),
    "transformer_engine": Consumer(
        attention_mask="None: its kernels compute causal attention whatever mask they are given",
        padding="attention_mask_2d, as megatron",
        refuses="every batch where None is not exact",
        source="megatron-core core/extensions/transformer_engine.py:2307-2315, core/transformer/enums.py:40-48",
    ),
    "mindspeed": Consumer(
        attention_mask="None, which its kernel turns into a compressed causal triangle",
        padding="attention_mask_2d, as megatron",
        refuses="every batch where None is not exact: sparse_mode 2 takes a [2048, 2048] triangle, never a dense mask",
        source="MindSpeed core/transformer/dot_product_attention.py:613-630, core/transformer/flash_attention/generate_mask",
    ),
    "transformers": Consumer(
        attention_mask="the 2D mask itself; for other patterns a 4D mask, or {layer kind: mask} on hybrid models",
        padding="inside attention_mask: an attention_mask_2d keyword is accepted and never read",
        refuses="4D beside recurrent layers with MoE aux loss; dense 4D on flash and flex attention; packed rows on GDN",
        source="transformers 5.23 masking_utils.py:833-846, 1499-1529, modeling_qwen3_next.py:1016-1038",
    ),
    "verl": Consumer(
        attention_mask="bool [B, S], True = real",
        padding="attention_mask_2d is returned beside it, for post-processing",
        refuses="several sequences in a row",
        source="verl models/mcore/util.py:649-655, 775-848",
    ),
    "verl_npu": Consumer(
        attention_mask="None where exact, else bool [B, 1, S, S], True = blocked",
        padding="attention_mask_2d is returned beside it, for post-processing",
        refuses="",
        source="verl models/mcore/util.py:768-770, 884-885",
    ),
    "torchtitan": Consumer(
        attention_mask="a BlockMask, under the key attention_masks",
        padding="inside it: no query sees a padded key; integrations.torchtitan makes padding a document of its own",
        refuses="",
        source="torchtitan models/common/attention.py:85-87, 468-508",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What becomes of the masks of one batch."""

    form: Form
    mask_2d: bool
    """Does `attention_mask_2d` stay in the batch?"""
    why: str


def route(
    consumer: str,
    segments: Segments,
    *,
    pattern: str | Pattern = "causal",
    needs_2d: bool = False,
    padding_free: bool = False,
    attn_implementation: str = "sdpa",
    aux_loss: bool = False,
    model_type: str = "",
) -> Route:
    """The one form in which this consumer computes this batch right. Raises `UnsupportedFormError` where there is none.

    `needs_2d` is `needs_mask_2d(model)`. `attn_implementation`, `aux_loss` (a config's `output_router_logits`) and
    `model_type` matter to transformers alone. Device is never a reason; the consumer's kernel is.
    """
    pattern = Pattern.of(pattern)
    check_consumer(consumer)
    if padding_free:
        if consumer == "transformers":
            _refuse_flat(segments, needs_2d)
        return Route(form="none", mask_2d=False, why="padding free: offsets carry the boundaries, and there is no padding")
    if consumer == "transformers":
        _refuse_deaf(segments, model_type)
        return _route_transformers(segments, pattern, needs_2d, attn_implementation, aux_loss)
    _refuse_packed_recurrent(segments, needs_2d)
    if consumer == "torchtitan":
        if needs_2d and segments.padding_side not in ("none", "right"):
            rule = "torchtitan's recurrent layers read cu_seqlens, and padding before a token reaches their state."
            raise UnsupportedFormError(explain("attention_masks", repr(segments), rule, "Pad right, or pack the rows."))
        return Route(form="block_mask", mask_2d=False, why="flex_attention takes a BlockMask")
    if consumer == "verl":
        return _route_verl(segments, pattern)
    exact = none_is_exact(segments, pattern)
    if consumer in _CAUSAL_KERNELS and not exact:
        kernel, otherwise = _CAUSAL_KERNELS[consumer]
        rule = f"{kernel}, and here {exact.why}."
        remedy = f"Pad right with one sequence a row, use padding_free=True, or {otherwise}."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))
    mask_2d = needs_2d or consumer == "verl_npu"
    return Route(form="none" if exact else "masked", mask_2d=mask_2d, why=exact.why)


_CAUSAL_KERNELS = {
    "mindspeed": ("MindSpeed's flash kernel runs a compressed causal triangle", "set attention_mask_type=general"),
    "transformer_engine": ("TransformerEngine's causal kernels read no dense mask", "run local kernels (megatron)"),
}


def check_consumer(consumer: str) -> None:
    """Raise for a name that is not in the table."""
    if consumer not in CONSUMERS:
        raise CollateError(explain("consumer", repr(consumer), f"Known are {', '.join(CONSUMERS)}.", "Name one of them."))


def _route_verl(segments: Segments, pattern: Pattern) -> Route:
    if segments.packed or pattern.kind != "causal":
        rule = "verl's padded engine reads a [B, S] mask and causal attention."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Use its padding-free (thd) engine."))
    return Route(form="keep_2d", mask_2d=True, why="verl's padded engine reads [B, S]")


def _route_transformers(
    segments: Segments, pattern: Pattern, needs_2d: bool, attn_implementation: str, aux_loss: bool
) -> Route:
    if pattern.kind == "causal" and not segments.packed:
        _refuse_single_row(segments, needs_2d)
        return Route(form="keep_2d", mask_2d=False, why="every layer of a transformers model reads the 2D mask")
    _refuse_packed_recurrent(segments, needs_2d)
    why = "the row holds several sequences" if segments.packed else f"attention is {pattern}"
    if needs_2d and attn_implementation == "flex_attention":
        rule = "A BlockMask says nothing to recurrent layers, which then ignore padding."
        remedy = "Use attn_implementation='sdpa' or 'eager'."
        raise UnsupportedFormError(explain("attention_mask", f"{why}, on flex_attention", rule, remedy))
    if attn_implementation == "flex_attention":
        return Route(form="block_mask", mask_2d=False, why=f"{why}; flex_attention takes a BlockMask")
    if attn_implementation not in ("sdpa", "eager"):
        rule = f"{attn_implementation} reads a 2D mask or offsets, and {why}."
        remedy = "Use attn_implementation='sdpa' or 'eager', or padding_free=True."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))
    if needs_2d and aux_loss:
        rule = "The router's aux loss indexes a 2D mask, and recurrent layers beside a 4D one need a mapping."
        remedy = "Set output_router_logits=False, or keep plain causal attention."
        raise UnsupportedFormError(explain("attention_mask", f"{pattern} attention", rule, remedy))
    form: Form = "bias" if attn_implementation == "eager" else "keep"
    return Route(form="mapping" if needs_2d else form, mask_2d=False, why=why)


def _refuse_deaf(segments: Segments, model_type: str) -> None:
    mended, why = MODELS_IGNORING_MASK.get(model_type, ((0, 0), ""))
    if segments.padding_side in ("none", "right") or (mended is not None and models.transformers_version() >= mended):
        return
    rule = f"Padding before a real token reaches the state of {model_type}: {why}."
    raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Pad right."))


def _refuse_single_row(segments: Segments, needs_2d: bool) -> None:
    """Before 5.15 recurrent layers skipped the mask of a batch of one row (`shape[0] > 1`), silently."""
    one_row = segments.shape[0] == 1 and segments.padding_side not in ("none", "right")
    if needs_2d and one_row and models.transformers_version() < (5, 15):
        rule = "transformers before 5.15 drops the mask of a single row in recurrent layers (apply_mask_to_padding_states)."
        remedy = "Pad right, drop the padding of a single row, batch at least two rows, or upgrade transformers."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))


def _refuse_flat(segments: Segments, needs_2d: bool) -> None:
    """Before 5.20 transformers' torch path ran packed rows through recurrent layers as one sequence, silently.

    From then on it raises where it lacks kernels that read the offsets (5.20 integrations/hub_kernels.py).
    """
    if needs_2d and segments.packed and models.transformers_version() < (5, 20):
        rule = "transformers before 5.20 carries the state of a recurrent layer from one sequence of a flat row to the next."
        remedy = "Upgrade transformers, or give each sequence its own row (padding_free=False)."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))


def _refuse_packed_recurrent(segments: Segments, needs_2d: bool) -> None:
    if needs_2d and segments.packed:
        rows = [b for b, row in enumerate(segments.lengths) if len(row) > 1]
        rule = "A recurrent layer carries its state from one sequence of a row into the next; no mask stops it."
        remedy = "Give each sequence its own row, or use padding_free=True with kernels that read cu_seqlens and seq_idx."
        raise UnsupportedFormError(explain("attention_mask", f"several sequences in rows {rows[:8]}", rule, remedy))
