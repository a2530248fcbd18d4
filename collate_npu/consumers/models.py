"""What a config or a module of a model tells: who reads its batches, which layers it has, and their windows.

A module may be wrapped (DDP, FSDP, torch.compile, PEFT). Reading costs microseconds; a model type by name loads
transformers' config class once. How it counts positions: forwards.py; where padding reaches its tokens: leaks.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal

import torch

from collate_npu.checked import check_model
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.releases import MASK_MAPPING, ZAMBA2_MAPPING

Stack = Literal["transformers", "megatron", "torchtitan"]


def consumer_of(model: Any) -> Stack | None:
    """The stack whose code runs this module, wrapped or not, by where its base classes come from; else None."""
    return _stack(unwrap(model))


def is_transformers(model: Any) -> bool:
    """Is this module itself, unwrapped, one of transformers'?"""
    return _stack(model) == "transformers"


def _stack(model: Any) -> Stack | None:
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__}
    return next((stack for stack, names in _BASES.items() if any((stack, name) in bases for name in names)), None)


# torchtitan 0.3: models/common/decoder.py:62, protocols/model.py:32; earlier ones: ModelProtocol. megatron-core:
# transformer/module.py:29, which Float16Module and its DDP derive from too.
_BASES: dict[Stack, tuple[str, ...]] = {
    "transformers": ("PreTrainedModel",),
    "megatron": ("MegatronModule",),
    "torchtitan": ("Decoder", "BaseModel", "ModelProtocol"),
}


def unwrap(model: Any) -> Any:
    """The model inside DDP, FSDP, DeepSpeed, Float16Module (`module`), torch.compile (`_orig_mod`), PEFT, and the value
    head of TRL before 1.0 (`pretrained_model`; trl 0.24 models/modeling_base.py)."""
    if is_transformers(model):
        return model
    if callable(base := getattr(model, "get_base_model", None)):
        inner = base()
    else:
        held = (getattr(model, name, None) for name in ("_orig_mod", "module", "pretrained_model"))
        inner = next((each for each in held if each is not None), model)
    return model if inner is model else unwrap(inner)


def has_virtual_tokens(model: Any) -> bool:
    """Does a wrapper of PEFT put learned tokens before each row? Prefix tuning keeps positions (peft 0.20 peft_model.py)."""
    wrappers = [each for each in model.modules() if callable(getattr(each, "get_base_model", None))]
    held = [configs for each in wrappers if isinstance(configs := getattr(each, "peft_config", None), Mapping)]
    tuned = [config for configs in held for config in configs.values() if getattr(config, "is_prompt_learning", False)]
    return any("PREFIX" not in str(config.peft_type) for config in tuned)


def layer_masks(config: Any) -> dict[str, Literal["attention", "recurrent"]]:
    """The keys of transformers' mask mapping for this config, and which kind of mask each takes.

    Raises for layers whose mapping is nested (hybrid) or unknown, for models without an attention layer, and for releases
    whose hybrid models take no mapping (`MASK_MAPPING`).
    """
    if not MASK_MAPPING.holds():
        rule = f"transformers takes a mapping from {MASK_MAPPING} on, and a 4D mask alone never reaches recurrent layers."
        remedy = "Upgrade transformers, use flash attention for flat rows, or keep plain causal attention (a 2D mask alone)."
        raise UnsupportedFormError(explain("attention_mask", "one mask for each kind of layer", rule, remedy))
    text = text_config(config)
    family = getattr(text, "model_type", "")
    own = {} if family == "zamba2" and not ZAMBA2_MAPPING.holds() else _MASKS_OF.get(family, {})
    kinds, known = set(layer_kinds(text)), {**_MASKS, **own}
    unknown = sorted(kinds - known.keys())
    masks = {key: what for kind in sorted(kinds - {*unknown}) for key, what in known[kind].items()}
    if unknown or "attention" not in masks.values():
        rule = "A mapping is known for full_attention beside linear_attention or conv."
        raise UnsupportedFormError(explain("layer_types", ", ".join(unknown or sorted(kinds)) or "none", rule, _BY_2D))
    return masks


_Masks = Mapping[str, Literal["attention", "recurrent"]]
_MASKS: Mapping[str, _Masks] = {
    "full_attention": {"full_attention": "attention"},
    "linear_attention": {"linear_attention": "recurrent"},
    "conv": {"conv": "recurrent"},
}
"""Kind of layer -> the masks it takes out of a mapping."""
_BOTH: _Masks = {"full_attention": "attention", "linear_attention": "recurrent"}
_MASKS_OF: Mapping[str, Mapping[str, _Masks]] = {
    "falcon_h1": {"hybrid": _BOTH},  # modeling_falcon_h1.py:1092-1093
    "zamba2": {"hybrid": _BOTH},
    "nemotron_h": {"moe": {}, "mlp": {}},  # modeling_nemotron_h.py:1141
    "qwen4_exp_text": {"indexed_attention": {"indexed_attention": "attention"}},  # in glm5_next it is a 2D mask
}
"""The same of kinds that one family alone has; transformers 5.23."""

_BY_2D = "Keep plain causal attention and one sequence a row, which need the 2D mask alone."

# A kind of layer that carries state from token to token, so that padding on its left reaches real tokens.
RECURRENT_KIND = re.compile(r"linear|conv|hybrid|mamba|ssm|recurrent|delta|lightning|kda|rwkv|lstm")
# Fields that only a transformers config with such layers has; they decide where the layers are not listed.
_RECURRENT_FIELD = re.compile(
    r"mamba_|n_mamba|ssm_|linear_(conv|key|value|num|head|attn)_|time_step_|lru_width|conv_L_cache|short_conv"
    r"|rescale_every|chunkwise_kernel"
)


def needs_mask_2d(model: Any) -> bool:
    """Does this model need the 2D mask beside its attention mask (recurrent layers)? A module, a config or a model type.

    Reads the text part of a composite config: `layer_types` where it lists layers, then Megatron's switches, then the
    fields only recurrent layers have. A name is looked up in transformers' config registry; an unknown one raises.
    Source: transformers 5.23 configuration_utils.py:66-99; megatron-core transformer_config.py `linear_attention_freq`.

    >>> needs_mask_2d("qwen3_next"), needs_mask_2d("llama")
    (True, False)
    """
    if isinstance(model, str):
        try:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            return family_needs_mask_2d(CONFIG_MAPPING[model]())
        except (ImportError, KeyError) as error:
            why, remedy = "has no such one", _meant(model)
            if isinstance(error, ImportError):
                why, remedy = "does not load here", "pip install transformers, or pass the model or its config."
            rule = f"A name is looked up in the config registry of transformers, which {why}."
            raise CollateError(explain("model_type", repr(model), rule, remedy)) from None
    check_model(model, config=True)
    config = text_config(config_of(model))
    if config is None or isinstance(config, torch.nn.Module):
        arrived, rule = f"{type(config).__name__} without a config", "A model's config says which layers it has."
        raise CollateError(explain("model", arrived, rule, "Pass the config itself, or the model's type as a string."))
    if kinds := layer_kinds(config):
        return any(map(RECURRENT_KIND.search, kinds))
    if not hasattr(config, "linear_attention_freq"):
        return family_needs_mask_2d(config)
    # Every Megatron config carries the sizes of linear attention, used or not, so only its switches tell.
    freq, variant = config.linear_attention_freq, getattr(config, "experimental_attention_variant", None) or ""
    layers = any(freq) if isinstance(freq, (list, tuple)) else bool(freq)
    return layers or bool(RECURRENT_KIND.search(variant)) or bool(getattr(config, "is_hybrid_model", False))


def _meant(name: str) -> str:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as KNOWN
    except ImportError:
        KNOWN = {}
    near = "".join(f"Did you mean {one}? " for one in get_close_matches(name, KNOWN, n=1))
    return f"{near}Of a checkpoint pass the model, or AutoConfig.from_pretrained({name!r})."


def family_needs_mask_2d(config: Any) -> bool:
    """Whether some config of this class needs the 2D mask: `Lfm2Config()` lists no convolution, but the family has them."""
    config = text_config(config)
    kinds = [kind for name in ("layer_types", "layers_block_type", "block_types") for kind in layer_kinds(config, name)]
    fields = (name for name, value in vars(config).items() if value is not None)
    return any(map(RECURRENT_KIND.search, kinds)) or any(map(_RECURRENT_FIELD.match, fields))


def text_config(config: Any) -> Any:
    """The language model's part of a composite (vision, audio) config; the config itself where there is none."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return getattr(config, "text_config", None) or config


def known_config(config: Any) -> Any:
    """A config as it is; of what has no class of transformers' but names a type of its registry, that type's own."""
    with suppress(ImportError):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if not hasattr(type(config), "get_text_config") and (name := getattr(config, "model_type", "")) in CONFIG_MAPPING:
            return CONFIG_MAPPING[name]()
    return config


def config_of(model: Any) -> Any:
    """The config of a model, wrapped or not; a config as it is (its class says `get_text_config`: nothing wraps it)."""
    if hasattr(type(model), "get_text_config"):
        return model
    model = unwrap(model)
    return getattr(model, "config", model)


def layer_kinds(config: Any, name: str = "layer_types") -> list[str]:
    """The kinds of layer a config lists under this name; none where it lists none."""
    kinds = getattr(config, name, None)
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, (list, tuple)) else []


def recurrent_heads(config: Any) -> tuple[int, ...]:
    """The numbers of key and of value heads of Gated DeltaNet layers, which ranks may share out; () where not said."""
    # transformers 5.23 configuration_qwen3_next.py, megatron-core 0.19.2 transformer_config.py:1368-1382
    names = ("linear_num_key_heads", "linear_num_value_heads")
    return tuple(n for name in names if isinstance(n := getattr(text_config(config), name, None), int))


def windows(model: Any) -> tuple[int, ...]:
    """The windows and chunks of the layers that attend less than the whole past, ascending; () where all attend to all.

    A mask or a kernel that drops them is right for sequences no longer than the smallest.
    """
    config = text_config(config_of(model))
    local = {config.window_size} if "local" in layer_kinds(config, "attention_layers") else set()  # gpt_neo
    return tuple(sorted(local.union(*_windows(config).values())))


def attention_windows(model: Any) -> dict[str, int | None]:
    """Each kind of attention layer of a transformers model and its window; the kind "" where its config lists none.

    The kinds are the keys of the mask mapping it takes; with "" it takes one mask. A window belongs to that mask: a dense
    mask that is handed over replaces the model's own, window and all. Raises where layers of one kind differ in it.
    Source: transformers 5.23 masking_utils.py:833-846 (returned as it is), :1532-1545 (keys), modeling_mistral.py:353.
    """
    found = _windows(text_config(config_of(model)))
    for kind, sizes in found.items():
        if len(sizes) > 1:
            rule = "A mapping has one mask for each kind of layer."
            raise UnsupportedFormError(explain("attention_mask", f"{kind} with windows {sorted(sizes)}", rule, _BY_2D))
    return {kind: next(iter(sizes), None) for kind, sizes in found.items()}


def _windows(config: Any) -> dict[str, set[int]]:
    if not (kinds := set(layer_kinds(config))):
        if getattr(config, "model_type", "") in _WINDOW_OF_FLASH:
            return {
                "": _sizes(config, *_WINDOW_FIELDS) if "flash" in str(getattr(config, "_attn_implementation", "")) else set()
            }
        return {"": set() if getattr(config, "use_sliding_window", None) is False else _sizes(config, *_WINDOW_FIELDS)}
    windowed = {kind for kind in kinds if "sliding" in kind or "compressed" in kind or kind == "window_attention"}
    fields = {"chunked_attention": ("attention_chunk_size",), **dict.fromkeys(windowed, _WINDOW_FIELDS)}
    return {kind: _sizes(config, *fields.get(kind, ())) for kind in sorted(kinds - {"linear_attention", "conv", "moe"})}


_WINDOW_OF_FLASH = ("moshi", "kyutai_speech_to_text")
"""Families whose `sliding_window` is read by flash attention alone (5.23 modeling_moshi.py:510-606; 4.57 lets a sample
without a mask attend to everything, too)."""
_WINDOW_FIELDS = ("sliding_window", "attention_window_size", "local_attention")


def _sizes(config: Any, *names: str) -> set[int]:
    """The values of the first field that is set: one, or one for each layer where layers have configs of their own."""
    for name in names:
        try:
            found = [getattr(config, name, None)]
        except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError: 5.23 integrations/heterogeneity
            found = [getattr(layer, name, None) for layer in config.per_layer_config]
        halved = 2 if name == "local_attention" else 1  # modernbert's is that to both sides together
        if sizes := {size // halved for size in found if isinstance(size, int) and size > 0}:
            return sizes
    return set()


def pattern_of(model: Any) -> Literal["causal", "bidirectional"] | None:
    """What the attention layers of a transformers module say they are; None where they say nothing, or not the same.

    Read from their `is_causal`. Of 214 causal and masked families of 5.23, 168 say it and none says it wrongly. Where no
    layer says it (BERT in 4.57), masked language models that are not told to decode look at both sides.
    """
    module = unwrap(model)
    if not is_transformers(module):
        return None
    said = {part.is_causal for part in module.modules() if isinstance(getattr(part, "is_causal", None), bool)}
    if not said:
        return "bidirectional" if is_encoder(config_of(model)) else None
    return None if len(said) > 1 else "causal" if said.pop() else "bidirectional"


def is_encoder(config: Any) -> bool:
    """Is this config one of a masked language model that is not told to decode?"""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED
    except ImportError:  # a class of something that only looks like transformers
        return False
    decodes = any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder", "causal"))
    return getattr(config, "model_type", "") in MASKED and not decodes


def has_two_sides(model: Any) -> bool:
    """Is it an encoder beside a decoder? The config of a decoder alone may say so, too."""
    said = getattr(config_of(model), "is_encoder_decoder", False)
    return bool(said) and any(name.rpartition(".")[2] == "encoder" for name, _ in model.named_modules())


def is_compiled(model: Any) -> bool:
    """Is a forward of this module compiled code, in part at least?"""
    return any(hasattr(x, "_orig_mod") or getattr(x, "_compiled_call_impl", None) is not None for x in model.modules())
