"""Model traits: what a transformers model does with masks, positions and labels, and whether it is in scope.

A model's config, the signature of its forward and the code of its modeling file tell which layers it has, how it counts
positions, which token its head pools, and above which length padding or another sequence changes a token's output. A probe
(`probe`) shows the rest on a tiny copy, which cannot show these lengths. Checked on every family of transformers 5.23 and
4.57 that can be built tiny.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import torch

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.validation import check_model

Stack = Literal["transformers", "megatron", "torchtitan"]
_BASES: dict[tuple[str, str], Stack] = {
    ("transformers", "PreTrainedModel"): "transformers",
    ("megatron", "MegatronModule"): "megatron",  # transformer/module.py:29: Float16Module and its DDP derive from it too
    ("torchtitan", "Decoder"): "torchtitan",  # 0.3: models/common/decoder.py:62, protocols/model.py:32
    ("torchtitan", "BaseModel"): "torchtitan",
    ("torchtitan", "ModelProtocol"): "torchtitan",  # 0.2
}


def consumer_of(model: Any) -> Stack | None:
    """Return the stack whose base class this module has, wrapped or not; None without one."""
    return _stack(unwrap(model))


def is_transformers(model: Any) -> bool:
    """Return True if this module itself is one of transformers', not a wrapper of one."""
    return _stack(model) == "transformers"


def _stack(model: Any) -> Stack | None:
    bases = ((base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__)
    return next((_BASES[base] for base in bases if base in _BASES), None)


def unwrap(model: Any) -> Any:
    """Return the model inside DDP, FSDP, DeepSpeed, Float16Module (`module`), torch.compile (`_orig_mod`), PEFT, and the
    value head of TRL before 1.0 (`pretrained_model`; trl 0.24 models/modeling_base.py)."""
    if is_transformers(model):
        return model
    if callable(base := getattr(model, "get_base_model", None)):
        inner = base()
    else:
        held = (getattr(model, name, None) for name in ("_orig_mod", "module", "pretrained_model"))
        inner = next((each for each in held if each is not None), model)
    return model if inner is model else unwrap(inner)


# Kinds of layer that carry state from token to token: padding before a real token reaches it.
RECURRENT_KIND = re.compile(r"linear|conv|hybrid|mamba|ssm|recurrent|delta|lightning|kda|rwkv|lstm")
# Fields that only a transformers config with such layers has; they decide if the config lists no layers.
_RECURRENT_FIELD = re.compile(
    r"mamba_|n_mamba|ssm_|linear_(conv|key|value|num|head|attn)_|time_step_|lru_width|conv_L_cache|short_conv"
    r"|rescale_every|chunkwise_kernel"
)


def needs_mask_2d(model: Any) -> bool:
    """Return True if this module, config or model type has recurrent layers: it needs the 2D mask beside its attention mask.

    In the text part of the config the first that is there decides: `layer_types`, Megatron's switches, or fields of
    recurrent layers. A name is looked up in transformers' config registry; an unknown one raises.
    Source: transformers 5.23 configuration_utils.py:66-99; megatron-core transformer_config.py `linear_attention_freq`.

    >>> needs_mask_2d("qwen3_next"), needs_mask_2d("llama")
    (True, False)
    """
    if isinstance(model, str):
        try:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            return family_needs_mask_2d(CONFIG_MAPPING[model]())
        except (ImportError, KeyError) as error:
            why = "does not load here" if isinstance(error, ImportError) else "has no such name"
            rule = f"A name is looked up in the config registry of transformers, which {why}."
            remedy = f"Pass the model, or its config: AutoConfig.from_pretrained({model!r})."
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


def family_needs_mask_2d(config: Any) -> bool:
    """Return True if configs of this class may list recurrent layers, even if this one lists none (`Lfm2Config()`)."""
    config = text_config(config)
    kinds = [kind for name in ("layer_types", "layers_block_type", "block_types") for kind in layer_kinds(config, name)]
    fields = (name for name, value in vars(config).items() if value is not None)
    return any(map(RECURRENT_KIND.search, kinds)) or any(map(_RECURRENT_FIELD.match, fields))


def text_config(config: Any) -> Any:
    """Return the language model's part of a composite (vision, audio) config; of any other config, the config itself."""
    if hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return getattr(config, "text_config", None) or config


def known_config(config: Any) -> Any:
    """Return the config; for another object with a `model_type` of transformers, the default config of that type."""
    with suppress(ImportError):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if not hasattr(type(config), "get_text_config") and (name := getattr(config, "model_type", "")) in CONFIG_MAPPING:
            return CONFIG_MAPPING[name]()
    return config


def config_of(model: Any) -> Any:
    """Return the config of a model, wrapped or not; a config (its class has `get_text_config`) as it is."""
    if hasattr(type(model), "get_text_config"):
        return model
    model = unwrap(model)
    return getattr(model, "config", model)


def layer_kinds(config: Any, name: str = "layer_types") -> list[str]:
    """Return the kinds of layer that a config lists under this name."""
    kinds = getattr(config, name, None)
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, (list, tuple)) else []


def recurrent_heads(config: Any) -> tuple[int, ...]:
    """Return the numbers of key and value heads of Gated DeltaNet layers, which ranks may split; () without any."""
    # transformers 5.23 configuration_qwen3_next.py, megatron-core 0.19.2 transformer_config.py:1368-1382
    names = ("linear_num_key_heads", "linear_num_value_heads")
    return tuple(n for name in names if isinstance(n := getattr(text_config(config), name, None), int))


def windows(model: Any) -> tuple[int, ...]:
    """Return, sorted, the sizes of windows and chunks of layers that attend only a part of the past; () without such layers.
    A mask or a kernel without windows is right for sequences no longer than the smallest size."""
    config = text_config(config_of(model))
    local = {config.window_size} if "local" in layer_kinds(config, "attention_layers") else set()  # gpt_neo
    return tuple(sorted(local.union(*_windows(config).values())))


def attention_windows(model: Any) -> dict[str, int | None]:
    """Return the window, or None, of each kind of attention layer of a transformers model; "" is the only kind if its config
    lists none. The model takes a mask mapping with these keys, or one mask for "". A dense mask in the batch replaces the
    model's own, so it must have the same window. Raises if layers of one kind have different windows.
    Source: transformers 5.23 masking_utils.py:833-846 (a 4D mask stays unchanged), :1532-1545, modeling_mistral.py:353.
    """
    found = _windows(text_config(config_of(model)))
    for kind, sizes in found.items():
        if len(sizes) > 1:
            rule = "A mapping has one mask for each kind of layer."
            remedy = "Keep plain causal attention and one sequence a row, which need only the 2D mask."
            raise UnsupportedFormError(explain("attention_mask", f"{kind} with windows {sorted(sizes)}", rule, remedy))
    return {kind: next(iter(sizes), None) for kind, sizes in found.items()}


def _windows(config: Any) -> dict[str, set[int]]:
    if not (kinds := set(layer_kinds(config))):
        flash = "flash" in str(getattr(config, "_attn_implementation", ""))
        unread = getattr(config, "model_type", "") in _WINDOW_OF_FLASH and not flash
        off = unread or getattr(config, "use_sliding_window", None) is False
        return {"": set() if off else _sizes(config, *_WINDOW_FIELDS)}
    windowed = {kind for kind in kinds if "sliding" in kind or "compressed" in kind or kind == "window_attention"}
    fields = {"chunked_attention": ("attention_chunk_size",), **dict.fromkeys(windowed, _WINDOW_FIELDS)}
    return {kind: _sizes(config, *fields.get(kind, ())) for kind in sorted(kinds - {"linear_attention", "conv", "moe"})}


_WINDOW_OF_FLASH = ("moshi", "kyutai_speech_to_text")
"""Families whose `sliding_window` is read by flash attention alone (5.23 modeling_moshi.py:510-606; in 4.57 a sample
without a mask also attends later tokens)."""
_WINDOW_FIELDS = ("sliding_window", "attention_window_size", "local_attention")


def _sizes(config: Any, *names: str) -> set[int]:
    """Return the values of the first field that is set: one, or several where layers have configs of their own."""
    for name in names:
        try:
            found = [getattr(config, name, None)]
        except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError: 5.23 integrations/heterogeneity
            found = [getattr(layer, name, None) for layer in config.per_layer_config]
        halved = 2 if name == "local_attention" else 1  # ModernBERT counts both sides
        if sizes := {size // halved for size in found if isinstance(size, int) and size > 0}:
            return sizes
    return set()


def pattern_of(model: Any) -> Literal["causal", "bidirectional"] | None:
    """Return the direction that the attention layers of a transformers module declare (`is_causal`). If none declares it, an
    encoder is bidirectional (BERT in 4.57). Else, for a config, and if layers differ: None. Of 214 families of 5.23, 168
    declare it. A decoder is causal whatever they declare (modeling_bigbird_pegasus.py:1144, 2293)."""
    if not is_transformers(module := unwrap(model)):
        return None
    flags = {part.is_causal for part in module.modules() if isinstance(getattr(part, "is_causal", None), bool)}
    if not flags:
        return "bidirectional" if is_encoder(config_of(model)) else None
    causal = True in flags or getattr(module.config, "is_decoder", False)
    return None if len(flags) > 1 else "causal" if causal else "bidirectional"


def is_encoder(config: Any) -> bool:
    """Return True for the config of an encoder that is not set to decode. An encoder's family has a masked language model in
    transformers, or classification heads and no causal or image-text language model (LiLT, CANINE)."""
    if not (family := getattr(config, "model_type", "")):
        return False
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:  # transformers is not installed: the class only looks like one of its own
        return False

    def has(*heads: str) -> bool:
        return any(family in getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", ()) for head in heads)

    decodes = any(getattr(config, name, False) for name in ("is_decoder", "is_encoder_decoder", "causal"))
    reads = has("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
    return not decodes and (has("MASKED_LM") or (reads and not has("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")))


# --- scope: causal language models (dense, mixture of experts, hybrid; vision-language models by their text), their
# backbones, and heads on them (reward, classification, value). Rules decide, not a list of families.


def out_of_scope_reason(model: Any) -> str:
    """Return why the batches of this transformers model (a module or a config) are not changed; "" if it is in scope.

    >>> from types import SimpleNamespace
    >>> out_of_scope_reason(SimpleNamespace(model_type="t5", is_encoder_decoder=True))
    'it has an encoder beside its decoder'
    """
    config = config_of(model)
    text = text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder beside its decoder"
    ahead = getattr(text, "use_bidirectional_attention", None) in (True, "all") or getattr(text, "is_causal", None) is False
    ahead = ahead or getattr(text, "attn_type", None) == "bi"  # XLNet's
    if pattern_of(model) == "bidirectional" or is_encoder(config) or ahead:
        return "its tokens attend later tokens"
    if hasattr(model, "forward") and "start_positions" in inspect.signature(type(unwrap(model)).forward).parameters:
        return "its head predicts a span of the row"
    return _peft_reason(model)


def warn_if_left(model: Any, reason: str = "") -> str:
    """Warn if this model is out of scope: its batches are not changed. Return why, "" if it is in scope."""
    if reason := reason or out_of_scope_reason(model):
        text = f"collate_npu leaves every batch of this {type(unwrap(model)).__name__} as it came: {reason}"
        warnings.warn(f"{text}, which is out of scope (collate-npu guide scope).", stacklevel=4)
    return reason


def _peft_reason(model: Any) -> str:
    """Return what PEFT does by rows, which must stay: learned tokens before them (prompt and prefix tuning), or weights that
    begin at a token of each (aLoRA, peft 0.20 tuners/lora/variants.py); "" if nothing."""
    modules = model.modules() if callable(getattr(model, "modules", None)) else ()
    wrappers = [each for each in modules if callable(getattr(each, "get_base_model", None))]
    held = [configs for each in wrappers if isinstance(configs := getattr(each, "peft_config", None), Mapping)]
    peft = [config for configs in held for config in configs.values()]
    if any(getattr(config, "is_prompt_learning", False) for config in peft):
        return "PEFT puts learned tokens before its rows"
    by_token = any(getattr(config, "alora_invocation_tokens", None) for config in peft)
    return "PEFT's aLoRA begins at a token of each row" if by_token else ""


def is_compiled(model: Any) -> bool:
    """Return True if this module, or a part of it, is compiled."""
    return any(hasattr(x, "_orig_mod") or getattr(x, "_compiled_call_impl", None) is not None for x in model.modules())


PositionRule = Literal["places", "padding_idx", "axes", "none"]
LabelRule = Literal["next", "places"]
Pooling = Literal["", "last_by_id", "counted_by_id"]


def position_rule(model: Any) -> PositionRule:
    """Return how a transformers model (a module or a config) makes positions if the batch has no `position_ids`.

    * "places": 0, 1, 2 ... along the row. Wrong for packed rows, and for left padding if positions are absolute.
    * "padding_idx": it counts tokens with `input_ids != padding_idx`, from `padding_idx + 1` on; correct for padding on any
      side. Positions in the batch must count from `first_position`. Source: 5.23 modeling_roberta.py.
    * "axes": along the row; with images, by the 2D mask: then never pass `position_ids` [B, S]. A flat row needs [4, 1, T]:
      text positions, from 0 in each sequence, then three axes. Source: 5.23 modeling_qwen2_5_vl.py:795-817, 1117-1163.
    * "none": no forward that takes ids takes `position_ids` (BLOOM, Mamba): never pass it.

    Raises `CollateError` for a config whose modeling code cannot be found.
    """
    model = unwrap(model)
    classes = _classes(model)
    if not any("position_ids" in _parameters(cls) for cls in classes):
        return "none"
    if _code_holds(classes, "position_ids.shape[0] == 4"):
        return "axes"
    counts_ids = _code_holds(classes, "def create_position_ids_from_input_ids")
    # evolla's protein encoder counts ids; its language model is a Llama (modeling_evolla.py:54, 1287).
    return "padding_idx" if counts_ids and config_of(model).model_type != "evolla" else "places"


def first_position(model: Any) -> int:
    """Return the position of the first token of a sequence: 0, `padding_idx + 1` for RoBERTa's family, 2 for four others."""
    config = text_config(config_of(model))
    if config.model_type in ("nystromformer", "yoso", "mra", "mpnet"):
        return 2  # whatever the pad id is: modeling_nystromformer.py:60, _yoso.py:239, _mra.py:477, _mpnet.py:61
    return int(config.pad_token_id) + 1 if position_rule(model) == "padding_idx" else 0


def looks_ahead(model: Any, by: str) -> bool:
    """Return True if the model's own masks let tokens see later ones: `by` "images", or by token "types" (`token_type_ids`).

    A dense mask in the batch replaces them (5.23 modeling_gemma3.py, _paligemma.py:258, _molmo2.py:875, _hrm_text.py:462).
    """
    marks = ("or_mask_function", "token_type_ids_mask_function", "block_sequence_ids", "token_type_ids[:, None, None, :]")
    marks_of = {"images": marks, "types": ("torch.where(token_type_ids ==", marks[-1])}
    return _code_holds(_classes(unwrap(model)), *marks_of[by])


_IMAGE_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def image_types(model: Any) -> tuple[str, ...]:
    """Return the key by which layers are told which tokens are images, and what the config calls the ids of these; () if its
    layers ask by no key (5.23 modeling_qwen2_5_vl.py:999, _gemma3.py:889, _molmo2.py:875)."""
    config, classes = config_of(model), _classes(unwrap(model))
    named = tuple(name for name in _IMAGE_IDS if isinstance(getattr(config, name, None), int))
    marks = {"mm_token_type_ids": ("= mm_token_type_ids[", "(mm_token_type_ids"), "token_type_ids": ("mask(token_type_ids",)}
    key = next((key for key, texts in marks.items() if named and _code_holds(classes, *texts)), "")
    return (key, *named) if key else ()


def pooling(model: Any) -> Pooling:
    """Return which token of a row the head pools; "" if every token has an answer.

    * "last_by_id": the last whose id is not `pad_token_id` (5.23 modeling_layers.py).
    * "counted_by_id": the one at index n - 1, where n counts such tokens (BioGPT, 4.57.1 modeling_biogpt.py:910).
    """
    cls = type(unwrap(model))
    if not is_transformers(unwrap(model)) or not cls.__name__.endswith("ForSequenceClassification"):
        return ""
    code = "".join(inspect.getsource(one) for one in cls.__mro__ if "Classification" in one.__name__)
    return "counted_by_id" if ".sum(-1) - 1" in code else "last_by_id"


def label_rule(model: Any) -> LabelRule | None:
    """Return what the head of a transformers model does with labels; None for a config, or if its class does not show it.

    * "next": it shifts them, so that a token is predicted from the one before (5.23 loss/loss_utils.py `ForCausalLMLoss`).
    * "places": it does not shift them: classes of tokens, and a few heads whose labels are shifted already
      (modeling_bart.py `BartForCausalLM`).
    """
    whole = unwrap(model)
    own = is_transformers(whole)
    if own and type(whole).__name__.endswith("ForTokenClassification"):
        return "places"
    code = _code(type(whole)) if own and "labels" in _parameters(type(whole)) else ""
    if "loss_function(" in code or re.search(r"labels\[(\.\.\.|:), 1:|shift_labels = ", code):
        return "next"
    return "places" if "CrossEntropyLoss(" in code else None


def _classes(model: Any) -> list[type]:
    """Return the classes whose code is read: of the module and its parts that take `input_ids`, or those of a config."""
    if not is_transformers(model):
        whole, text = config_of(model).__class__, text_config(config_of(model)).__class__
        if not (classes := [cls for config_class in dict.fromkeys([whole, text]) for cls in classes_of(config_class)]):
            got = f"{type(model).__name__}, which has no class in transformers"
            raise CollateError(explain("model", got, _READ, "Pass the model itself."))
        return classes
    parts = [type(part) for part in model.modules() if is_transformers(part) and "input_ids" in _parameters(type(part))]
    return [type(model), *parts] if takes(model, "position_ids") else [type(model)]


@cache
def classes_of(config_class: Any) -> list[Any]:
    """Return transformers' own classes for this config: its base model and its language models; for one that its registry
    does not name (5.23 modeling_emu3.py `Emu3ForCausalLM`), those of its modeling file, the last one whole."""
    try:
        from transformers.models.auto import modeling_auto as auto

        names = ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING")
        found = [getattr(auto, name).get(config_class, None) for name in names]
    except ImportError as error:
        raise CollateError(explain("model", f"{config_class.__name__}, {error}", _READ, "Pass the model itself.")) from None
    named = [cls for each in found if each for cls in (each if isinstance(each, (list, tuple)) else [each])]
    if not named:
        with suppress(ImportError):
            file = vars(importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_")))
            named = [each for each in file.values() if getattr(each, "config_class", None) is config_class]
    return named


_READ = "How a model counts positions is read from the code of its class in transformers."


def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.forward).parameters


def takes(model: Any, name: str) -> bool:
    """Return True if the forward of a module takes an argument of this name, by itself or with all others."""
    taken = _parameters(type(model))
    return name in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())


def _code(cls: type) -> str:
    """Return the code of a class's forward; "" if there is no source file."""
    try:
        return inspect.getsource(cls.forward)  # type: ignore[attr-defined]
    except OSError:
        return ""


def _code_holds(classes: list[type], *texts: str) -> bool:
    """Return True if a modeling file of these classes holds one of the texts."""
    return any(text in source for source in map(_source, {cls.__module__: None for cls in classes}) for text in texts)


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


def width_dependence(model: Any) -> int | None:
    """Return the longest sequence whose attention is the same at any padded width; None: any length.

    An indexer keeps the best `index_topk` keys. With few heads, ReLU makes many scores exactly 0, and which of these are
    kept depends on the number of keys. Measured on 5.23: with 2 heads every family's output changes, with 8 none.
    Source: modeling_deepseek_v32.py:228-241, modeling_glm5_next.py:863-889.
    """
    config = text_config(config_of(model))
    heads, topk = getattr(config, "index_n_heads", None), getattr(config, "index_topk", None)
    if heads is None or heads >= 8 or topk is None:
        return None
    return int(topk * (getattr(config, "compress_rates", None) or {}).get("compressed_sparse_attention", 1))


def rope_limit(model: Any) -> int | None:
    """Return the position from which "longrope" or "dynamic" frequencies change for the whole batch; None without them. The
    highest position of the batch decides. Without `position_ids` padding counts too: a wider batch needs them. Source:
    transformers 5.23 modeling_rope_utils.py `dynamic_rope_update`."""
    config, original = text_config(config_of(model)), "original_max_position_embeddings"
    if not {"longrope", "dynamic"} & {each["rope_type"] for each in _ropes(config)}:
        return None
    limits = [each.get(original) or getattr(config, original, None) for each in _ropes(config)]
    whole = [size for size in [*limits, getattr(config, "max_position_embeddings", None)] if isinstance(size, int)]
    return min(whole, default=None)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings: one, or one for each kind of layer. In 4.x they are `rope_scaling`."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [each for each in settings.values() if isinstance(each, dict)]
    return [{"rope_type": each.get("type"), **each} for each in nested or [settings]]


def lengths_clash_reason(model: Any, lengths: Iterable[int]) -> str:
    """Return why sequences of these lengths must not share a batch; "" if they may."""
    limit, sizes = rope_limit(model), set(lengths)
    if limit is None or max(sizes, default=0) <= limit or len(sizes) == 1:
        return ""
    if min(sizes) > limit and all(each["rope_type"] != "dynamic" for each in _ropes(text_config(config_of(model)))):
        return ""
    return f"a sequence longer than {limit} changes the rotary frequencies of every other one in its batch"
