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


def position_rule(model: Any) -> PositionRule:
    """How a transformers model (a module or a config) counts tokens where `position_ids` is left out, and reads it.

    * "places": 0, 1, 2 ... by place. Wrong for left padding where positions are absolute, and for packed rows.
    * "padding_idx": from `padding_idx + 1` on, over `input_ids != padding_idx`; right for padding on any side. What is
      given must count from `first_position`. Source: transformers 5.23 modeling_roberta.py `create_position_ids_from_input_ids`.
    * "axes": by place or, with images, by the 2D mask. A flat row needs [4, 1, T]: a text row that starts again with each
      sequence, from which the mask is built, then three axes. Source: 5.23 modeling_qwen2_5_vl.py:795-817, 1117-1163.
    * "none": `position_ids` reaches no layer (BLOOM, Mamba), or is not taken at all (T5): never give it.

    Raises `CollateError` for a config whose modeling code cannot be found.
    """
    model = unwrap(model)
    classes = _classes(model)
    if not any("position_ids" in inspect.signature(cls.forward).parameters for cls in classes):
        return "none"
    sources = [_source(module) for module in {cls.__module__: None for cls in classes}]
    if any(map(_FOUR_ROWS.search, sources)):
        return "axes"
    counts_ids = any("def create_position_ids_from_input_ids" in source for source in sources)
    return "padding_idx" if counts_ids and config_of(model).model_type not in _COUNTS_PLACES else "places"


_FOUR_ROWS = re.compile(r"position_ids\.shape\[0\] == 4")
# Its protein encoder counts ids; its language model is a Llama (modeling_evolla.py:54, 1287).
_COUNTS_PLACES = frozenset({"evolla"})
# Counted from 2 whatever the pad id is: modeling_nystromformer.py:60, modeling_yoso.py:239, modeling_mra.py:477,
# and modeling_mpnet.py:61 (`self.padding_idx = 1`).
_FIRST_POSITION = dict.fromkeys(("nystromformer", "yoso", "mra", "mpnet"), 2)


def first_position(model: Any) -> int:
    """The position of the first token of a sequence: 0, or `padding_idx + 1` for RoBERTa's family."""
    config = text_config(config_of(model))
    if config.model_type in _FIRST_POSITION:
        return _FIRST_POSITION[config.model_type]
    return int(config.pad_token_id) + 1 if position_rule(model) == "padding_idx" else 0


def _classes(model: Any) -> list[type]:
    """The classes that would read `position_ids`: of a module itself and its parts that read ids, or of a config."""
    if _kind(model) != "transformers":
        configs = {id(config): config for config in (model, text_config(model))}.values()
        return [cls for config in configs for cls in _classes_of(type(config))]
    parts = [type(part) for part in model.modules() if _kind(part) == "transformers" and part.main_input_name == "input_ids"]
    takes = inspect.signature(type(model).forward).parameters.values()
    passes_on = any(each.kind is each.VAR_KEYWORD or each.name == "position_ids" for each in takes)
    return [type(model), *parts] if passes_on else [type(model)]


@cache
def _classes_of(config_class: type) -> list[type]:
    """The model classes of transformers' own registry for this config, else of the modeling file beside its own."""
    try:
        from transformers.models.auto import modeling_auto as auto

        found = auto.MODEL_MAPPING.get(config_class, None) or auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
        first = found[0] if isinstance(found, (list, tuple)) else found
        name = first.__module__ if first else config_class.__module__.replace("configuration_", "modeling_")
        module = importlib.import_module(name)
    except ImportError as error:
        rule = "How a model counts positions is read from the code of its transformers module."
        raise CollateError(explain("model", f"{config_class.__name__}, {error}", rule, "Pass the model itself.")) from None
    read = first.config_class if first else config_class
    models = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if "PreTrainedModel" in map(_name, cls.__mro__)]
    return [cls for cls in models if getattr(cls, "config_class", None) is read]


def _name(cls: type) -> str:
    return cls.__name__


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


def windows(model: Any) -> tuple[int, ...]:
    """The windows and chunks of the layers that attend less than the whole past, ascending; () where all attend to all.

    A kernel that drops them is right for rows no longer than the smallest. Source: transformers 5.23 masking_utils.py
    `sliding_window_overlay`, `chunked_overlay`; modeling_mistral.py:353 for configs that list no layers.
    """
    config = text_config(config_of(model))
    kinds = set(_kinds(config, "layer_types")) | set(_kinds(config, "attention_layers"))
    sliding = any("sliding" in kind or kind in _WINDOWED for kind in kinds)
    if not kinds:
        sliding = getattr(config, "use_sliding_window", True) is not False
    fields = [*_WINDOW_FIELDS] * sliding + ["attention_chunk_size"] * ("chunked_attention" in kinds)
    sizes = {size for name in fields if isinstance(size := getattr(config, name, None), int) and size > 0}
    return tuple(sorted(sizes))


_WINDOWED = frozenset({"local", "window_attention", "compressed_sparse_attention", "heavily_compressed_attention"})
# gpt_neo says window_size, recurrent_gemma attention_window_size, modernbert local_attention.
_WINDOW_FIELDS = ("sliding_window", "window_size", "attention_window_size", "local_attention")


def why_padding_leaks(config: Any, where: Literal["left", "holes"], *, longest: int = sys.maxsize) -> str:
    """Why padding before ("left") or between ("holes") the tokens of a row changes them in transformers; "" if it does not.

    `longest` is the longest row with its holes: a window that no row fills cannot be cut short by one.
    """
    model_type, text = getattr(config, "model_type", ""), text_config(config)
    names = {model_type, getattr(text, "model_type", "")}
    recurrent = needs_mask_2d(text)
    for name in names & set(MODELS_IGNORING_MASK):
        mended, why = MODELS_IGNORING_MASK[name]
        if mended is None or transformers_version() < mended:
            return why
    if recurrent and (fields := _bias_of_projections(text)):
        return f"with {fields[0]}=True the projection into its recurrent layers turns masked padding into its bias"
    if why := next((why for name, why in _COUNTING_PLACES.items() if name in names | set(_kinds(text, "layer_types"))), ""):
        return why
    if where == "left":
        return ""
    if recurrent:
        return "the state of a recurrent layer decays over the hole, and its convolution reaches into it"
    if (sizes := windows(text)) and sizes[0] < longest:
        return f"its window of {sizes[0]} counts places, the hole included"
    return _COUNTING_HOLES.get(text.model_type, "")


def _bias_of_projections(config: Any) -> list[str]:
    """Masked tokens enter these projections as zeros and leave them as the bias; those after the scan do no harm."""
    harmless = {"nemotron_h": {"mamba_proj_bias"}}.get(config.model_type, set())
    return [name for name in _PROJECTION_BIASES if getattr(config, name, False) is True and name not in harmless]


# mamba, mamba2, falcon_mamba, nemotron_h; bamba, falcon_h1, granitemoehybrid, jamba, zamba; lfm2, lfm3; zamba2. The bias of
# the convolution alone (use_conv_bias, mamba_conv_bias) is masked again behind it (5.23 modeling_mamba2.py:431).
_PROJECTION_BIASES = ("use_bias", "mamba_proj_bias", "conv_bias", "add_bias_linear")

# Model type or kind of layer -> why padding on the left is counted as text.
_COUNTING_PLACES = {
    "compressed_sparse_attention": "it compresses every few places into one key (modeling_deepseek_v4.py:419-431)",
    "heavily_compressed_attention": "it compresses every few places into one key (modeling_deepseek_v4.py:419-431)",
    "minimax_m3_sparse": "its indexer compares places with positions (modeling_minimax_m3_vl.py:567)",
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "trocr"),
        "its positions are places, and position_ids is not taken (modeling_bart.py)",
    ),
}
_COUNTING_HOLES = dict.fromkeys(
    ("mpnet", "mpt", "roformer", "xlnet", "ultrabert"), "the distance of two tokens is one of places, the hole included"
)


def layer_kinds(config: Any) -> list[str]:
    """The kinds of layers a config lists, `["full_attention", ...]`; empty where it lists none."""
    return _kinds(text_config(config), "layer_types")


def width_dependence(config: Any) -> int | None:
    """The longest sequence whose attention does not depend on the width of the tensor, padded or not; None: any length.

    An indexer keeps the best `index_topk` keys; ReLU makes many scores exactly zero where it has few heads, and which of
    equal scores win depends on how many there are. Measured on 5.23: with 2 heads every family moves, with 8 none.
    Source: modeling_deepseek_v32.py:228-241, modeling_glm5_next.py:863-889.
    """
    config = text_config(config)
    if (heads := getattr(config, "index_n_heads", None)) is None or heads >= _HEADS_WITHOUT_TIES:
        return None
    rates = getattr(config, "compress_rates", None) or {}
    topk = getattr(config, "index_topk", None)
    return None if topk is None else topk * int(rates.get("compressed_sparse_attention", 1))


_HEADS_WITHOUT_TIES = 8
