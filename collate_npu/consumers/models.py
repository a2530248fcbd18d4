"""What a config or a module of a model tells: who reads its batches, its layers, how it counts positions, its windows.

A module may be wrapped (DDP, FSDP, torch.compile, PEFT). Reading a config costs microseconds; `position_rule` of a config,
and a model type by name, import transformers' code of that one family. Rules are those of transformers 4.57 to 5.23.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any, Literal

from collate_npu.errors import CollateError, UnsupportedFormError, explain

PositionRule = Literal["places", "padding_idx", "axes", "none"]

MODELS_IGNORING_MASK: dict[str, tuple[tuple[int, int] | None, str]] = {
    "recurrent_gemma": (
        None,
        "its recurrent block takes a mask and never reads it (modeling_recurrent_gemma.py:414)",
    ),
    "rwkv": (None, "its forward takes attention_mask and only warns that it is unused (modeling_rwkv.py:547)"),
    "xlstm": (None, "its forward has no attention_mask (modeling_xlstm.py)"),
    "lfm2": ((5, 0), "its convolutions get the 4D causal mask and skip it (4.57 modeling_lfm2.py:406, 662)"),
    "zamba2": ((5, 0), "its torch path carries the wrong state from chunk to chunk (4.57 modeling_zamba2.py:879)"),
}
"""Model type -> (first transformers release that masks its recurrent layers, or None; why earlier ones do not)."""


@cache
def transformers_version() -> tuple[int, ...]:
    """Major and minor of the installed transformers, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version("transformers").split(".")[:2])
    except PackageNotFoundError:
        return (1 << 30,)  # a config of something that only looks like transformers


def consumer_of(model: Any) -> Literal["transformers", "megatron", "torchtitan"] | None:
    """The stack whose code runs this module, wrapped or not; None for a config, a plain module, a name.

    Told by the modules its base classes were defined in, so that nothing is imported.
    """
    return _kind(unwrap(model))


def unwrap(model: Any) -> Any:
    """The model inside DDP, FSDP, DeepSpeed, Float16Module (`module`), torch.compile (`_orig_mod`) and PEFT."""
    while (inner := _inner(model)) is not None and inner is not model:
        model = inner
    return model


def _inner(model: Any) -> Any:
    if _kind(model) == "transformers":
        return None
    if callable(base := getattr(model, "get_base_model", None)):
        return base()
    return next((inner for name in ("_orig_mod", "module") if (inner := getattr(model, name, None)) is not None), None)


# Base class -> the package that defines it. torchtitan 0.3: models/common/decoder.py:62, protocols/model.py:32; earlier
# releases have ModelProtocol. megatron-core: transformer/module.py:29, which Float16Module and its DDP derive from.
_BASES = {
    ("transformers", "PreTrainedModel"): "transformers",
    ("megatron", "MegatronModule"): "megatron",
    ("torchtitan", "Decoder"): "torchtitan",
    ("torchtitan", "BaseModel"): "torchtitan",
    ("torchtitan", "ModelProtocol"): "torchtitan",
}


def _kind(model: Any) -> Any:
    bases = ((base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__)
    return next((_BASES[base] for base in bases if base in _BASES), None)


def layer_masks(config: Any) -> dict[str, Literal["attention", "recurrent"]]:
    """The keys of transformers' mask mapping for this config, and which kind of mask each takes.

    Raises for layers whose mapping is nested (hybrid) or unknown, for models without an attention layer, and before
    transformers 5.13, whose hybrid models take no mapping. Source: transformers 5.23 masking_utils.py:1532-1545.
    """
    if transformers_version() < (5, 13):
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
    """The config of a model, wrapped or not; a config as it is."""
    model = unwrap(model)
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
