"""Consumers: what each model stack reads as a mask, where it looks for padding, and what it cannot take.

`CONSUMERS` is the table, with sources; `route` picks the form for one batch; `needs_mask_2d` tells which models carry
state from token to token (Gated DeltaNet, Mamba, short convolutions) and so need to know padding themselves.
Reading a config costs microseconds; a model type by name loads transformers' config class once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

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


DEAF: dict[str, tuple[tuple[int, int] | None, str]] = {
    "recurrent_gemma": (
        None,
        "its recurrent block takes a mask and never reads it (modeling_recurrent_gemma.py:414)",
    ),
    "rwkv": (None, "its forward takes attention_mask and only warns that it is unused (modeling_rwkv.py:547)"),
    "xlstm": (None, "its forward has no attention_mask (modeling_xlstm.py)"),
    "lfm2": ((5, 0), "its convolutions get the 4D causal mask and skip it (4.57 modeling_lfm2.py:406, 662)"),
    "zamba2": ((5, 0), "its torch path carries the wrong state from chunk to chunk (4.57 modeling_zamba2.py:879)"),
}
"""transformers models whose recurrent layers no mask reaches: the release that mended it, or None, and why."""


def _refuse_deaf(segments: Segments, model_type: str) -> None:
    mended, why = DEAF.get(model_type, ((0, 0), ""))
    if segments.padding_side in ("none", "right") or (mended is not None and _transformers_version() >= mended):
        return
    rule = f"Padding before a real token reaches the state of {model_type}: {why}."
    raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, "Pad right."))


def _refuse_single_row(segments: Segments, needs_2d: bool) -> None:
    """Before 5.15 recurrent layers skipped the mask of a batch of one row (`shape[0] > 1`), silently."""
    one_row = segments.shape[0] == 1 and segments.padding_side not in ("none", "right")
    if needs_2d and one_row and _transformers_version() < (5, 15):
        rule = "transformers before 5.15 drops the mask of a single row in recurrent layers (apply_mask_to_padding_states)."
        remedy = "Pad right, drop the padding of a single row, batch at least two rows, or upgrade transformers."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))


def _refuse_flat(segments: Segments, needs_2d: bool) -> None:
    """Before 5.20 transformers' torch path ran packed rows through recurrent layers as one sequence, silently.

    From then on it raises where it lacks kernels that read the offsets (5.20 integrations/hub_kernels.py).
    """
    if needs_2d and segments.packed and _transformers_version() < (5, 20):
        rule = "transformers before 5.20 carries the state of a recurrent layer from one sequence of a flat row to the next."
        remedy = "Upgrade transformers, or give each sequence its own row (padding_free=False)."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))


@cache
def _transformers_version() -> tuple[int, ...]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version("transformers").split(".")[:2])
    except PackageNotFoundError:
        return (1 << 30,)  # a config of something that only looks like transformers


def _refuse_packed_recurrent(segments: Segments, needs_2d: bool) -> None:
    if needs_2d and segments.packed:
        rows = [b for b, row in enumerate(segments.lengths) if len(row) > 1]
        rule = "A recurrent layer carries its state from one sequence of a row into the next; no mask stops it."
        remedy = "Give each sequence its own row, or use padding_free=True with kernels that read cu_seqlens and seq_idx."
        raise UnsupportedFormError(explain("attention_mask", f"several sequences in rows {rows[:8]}", rule, remedy))


def layer_masks(config: Any) -> dict[str, Literal["attention", "recurrent"]]:
    """The keys of transformers' mask mapping for this config, and which kind of mask each takes.

    Raises for layers whose mapping is nested (hybrid) or unknown, for models without an attention layer, and before
    transformers 5.13, whose hybrid models take no mapping. Source: transformers 5.23 masking_utils.py:1532-1545.
    """
    if _transformers_version() < (5, 13):
        rule = "transformers takes a mapping of masks from 5.13 on, and a 4D mask alone never reaches recurrent layers."
        remedy = "Upgrade transformers, or keep plain causal attention, which needs the 2D mask alone."
        raise UnsupportedFormError(explain("attention_mask", "one mask for each kind of layer", rule, remedy))
    kinds = set(_kinds(text_config(config), "layer_types"))
    unknown = sorted(kinds - _ATTENTION_KEYS - _RECURRENT_KEYS)
    if unknown or not kinds & _ATTENTION_KEYS:
        rule = "A mapping is known for full_attention beside linear_attention or conv."
        remedy = "Keep plain causal attention, which needs the 2D mask alone."
        raise UnsupportedFormError(explain("layer_types", ", ".join(unknown or sorted(kinds)) or "none", rule, remedy))
    return {kind: "recurrent" if kind in _RECURRENT_KEYS else "attention" for kind in sorted(kinds)}


_ATTENTION_KEYS = frozenset({"full_attention"})
_RECURRENT_KEYS = frozenset({"linear_attention", "conv"})

# A kind of layer that carries state from token to token, so that padding on its left reaches real tokens.
_RECURRENT_KIND = re.compile(r"linear|conv|hybrid|mamba|ssm|recurrent|delta|lightning|kda|rwkv|lstm")
# Fields that only a transformers config with such layers has; they decide where the layers are not listed.
_RECURRENT_FIELD = re.compile(
    r"mamba_|n_mamba|ssm_|linear_(conv|key|value|num|head|attn)_|time_step_|lru_width|conv_L_cache|short_conv"
    r"|rescale_every|chunkwise_kernel"
)


def needs_mask_2d(model: Any) -> bool:
    """Must this model be told which tokens are padding, beside its attention mask? A module, a config or a model type.

    Reads the text part of a composite config: `layer_types` where it lists layers, then Megatron's switches, then the
    fields only recurrent layers have. A name is looked up in transformers' config registry; an unknown one raises.
    Source: transformers 5.23 configuration_utils.py:66-99; megatron-core transformer_config.py `linear_attention_freq`.
    """
    if isinstance(model, str):
        return family_needs_mask_2d(_config_of_type(model))
    config = text_config(config_of(model))
    if kinds := _kinds(config, "layer_types"):
        return any(map(_RECURRENT_KIND.search, kinds))
    if hasattr(config, "linear_attention_freq"):
        return _megatron_is_recurrent(config)
    return family_needs_mask_2d(config)


def family_needs_mask_2d(config: Any) -> bool:
    """Whether some config of this class needs the 2D mask: `Lfm2Config()` lists no convolution, but the family has them."""
    config = text_config(config)
    kinds = [kind for name in ("layer_types", "layers_block_type", "block_types") for kind in _kinds(config, name)]
    fields = (name for name, value in vars(config).items() if value is not None)
    return any(map(_RECURRENT_KIND.search, kinds)) or any(map(_RECURRENT_FIELD.match, fields))


def text_config(config: Any) -> Any:
    """The language model's part of a composite (vision, audio) config; the config itself where there is none."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return getattr(config, "text_config", None) or config


def config_of(model: Any) -> Any:
    """The config of a model, wrapped (DDP, FSDP, Megatron's Float16Module) or not; a config as it is."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "config", model)


def _config_of_type(model_type: str) -> Any:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]()
    except (ImportError, KeyError):
        rule = "A name is looked up in the config registry of the installed transformers, which has no such one."
        raise CollateError(explain("model_type", repr(model_type), rule, "Pass the model or its config.")) from None


def _kinds(config: Any, name: str) -> list[str]:
    kinds = getattr(config, name, None)
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, (list, tuple)) else []


def _megatron_is_recurrent(config: Any) -> bool:
    # Every Megatron config carries the sizes of linear attention, used or not, so only its switches tell.
    freq = config.linear_attention_freq
    variant = getattr(config, "experimental_attention_variant", None) or ""
    return bool(
        (any(freq) if isinstance(freq, (list, tuple)) else freq)
        or _RECURRENT_KIND.search(variant)
        or getattr(config, "is_hybrid_model", False)
    )
