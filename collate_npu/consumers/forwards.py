"""What the forward of a transformers model reads: positions, and how it counts its own; and which token its head pools.

Told by the model's own code: the signature of its forward, and what its modeling file calls. Of a config this imports
that file. Measured on every family of transformers 5.23 and 4.57 that builds tiny.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from collate_npu.consumers.models import config_of, is_transformers, text_config, unwrap
from collate_npu.errors import CollateError, explain
from collate_npu.releases import IS_CAUSAL_READ

PositionRule = Literal["places", "padding_idx", "axes", "none"]
LabelRule = Literal["next", "places", "decoder"]
Pooling = Literal["", "first", "last", "last_by_id", "counted_by_id", "pooled", "pooler", "span"]


def position_rule(model: Any) -> PositionRule:
    """How a transformers model (a module or a config) counts tokens where `position_ids` is left out, and reads it.

    * "places": 0, 1, 2 ... by place. Wrong for left padding where positions are absolute, and for packed rows.
    * "padding_idx": from `padding_idx + 1` on, over `input_ids != padding_idx`; right for padding on any side. What is
      given must count from `first_position`. Source: 5.23 modeling_roberta.py `create_position_ids_from_input_ids`.
    * "axes": by place or, with images, by the 2D mask: then never give [B, S]. A flat row needs [4, 1, T]: a text row that
      starts again with each sequence, then three axes. Source: 5.23 modeling_qwen2_5_vl.py:795-817, 1117-1163.
    * "none": `position_ids` reaches no layer (BLOOM, Mamba), or is not taken at all (T5): never give it.

    Raises `CollateError` for a config whose modeling code cannot be found.
    """
    model = unwrap(model)
    classes = _classes(model)
    if not any("position_ids" in _parameters(cls) for cls in classes):
        return "none"
    if _say(classes, "position_ids.shape[0] == 4"):
        return "axes"
    counts_ids = _say(classes, "def create_position_ids_from_input_ids")
    # evolla's protein encoder counts ids; its language model is a Llama (modeling_evolla.py:54, 1287).
    return "padding_idx" if counts_ids and config_of(model).model_type != "evolla" else "places"


def first_position(model: Any) -> int:
    """The position of the first token of a sequence: 0, or `padding_idx + 1` for RoBERTa's family."""
    config = text_config(config_of(model))
    if config.model_type in ("nystromformer", "yoso", "mra", "mpnet"):
        return 2  # whatever the pad id is: modeling_nystromformer.py:60, _yoso.py:239, _mra.py:477, _mpnet.py:61
    return int(config.pad_token_id) + 1 if position_rule(model) == "padding_idx" else 0


def follows_is_causal(model: Any) -> bool:
    """Do its masks and its kernels both follow `is_causal=False`? 5.23 utils/generic.py:1062 gives forwards with a decorator
    the keyword, and each layer must hand it on: else sdpa stays causal where a sample alone needs no mask (StableLM)."""
    whole = unwrap(model)
    layers = {
        (type(layer), name)
        for layer in (whole.modules() if is_transformers(whole) else ())
        for name, part in layer.named_children()
        if getattr(part, "is_causal", None) is True
    }
    calls = [re.search(rf"self\.{name}\((.*?)\n\s*\)", _code(cls), re.S) for cls, name in layers]
    handed = all("**" in call[1] for call in calls if call)
    return IS_CAUSAL_READ.holds() and handed and _say(_classes(whole), "merge_with_config_defaults")


def calls(model: Any, kernel: str) -> bool:
    """Does a modeling file of it call a kernel of this name?"""
    return _say(_classes(unwrap(model)), f'"{kernel}"')


def half_ahead(model: Any) -> bool:
    """Do its layers look ahead by `use_bidirectional_attention`, and the masks that it makes do not (Gemma, Gemma 2)?"""
    asked = getattr(config_of(model), "use_bidirectional_attention", None) is True
    return asked and not _say(_classes(unwrap(model)), "self.config.use_bidirectional_attention:")


def looks_ahead(model: Any, by: str) -> bool:
    """Do masks that the model makes let tokens see later ones, told by its images or by `token_type_ids`?

    A dense mask goes in place of these (5.23 modeling_gemma3.py, _paligemma.py:258, _molmo2.py:875, _hrm_text.py:462).
    """
    told = ("or_mask_function", "token_type_ids_mask_function", "block_sequence_ids", "token_type_ids[:, None, None, :]")
    return _say(_classes(unwrap(model)), *(told if by == "images" else ("torch.where(token_type_ids ==", told[-1])))


def pooling(model: Any) -> Pooling:
    """Which token of a row a head that gives one answer a row takes; "" where every token has its own, or of a config.

    * "last_by_id": the last whose id is not `pad_token_id`: decoders (5.23 modeling_layers.py).
    * "counted_by_id": the place that the number of such tokens names (BioGPT, 4.57.1 modeling_biogpt.py:910).
    * "last": the last place, whatever stands there: XLNet (modeling_xlnet.py `summary_type`).
    * "first": the first place, likewise: encoders, all that build tiny but eurobert (a mean over its mask).
    * "pooler": the same, beside answers for every token: `pooler_output` of encoders without a head, of embedding models
      (DPR), and what predicts the next sentence from it. Heads of tokens leave it unread. "pooled": where no module of that
      name takes it.
    * "span": one of all places, by a softmax over them (loss/loss_utils.py `ForQuestionAnsweringLoss`).
    """
    whole = unwrap(model)
    cls = type(whole)
    if not is_transformers(whole):
        return ""
    config = config_of(model)
    if "start_positions" in _parameters(cls):
        return "" if config.model_type == "splinter" else "span"  # masks padding there (modeling_splinter.py:536)
    if re.search(r"For(CausalLM|MaskedLM|TokenClassification)$|LMHead", cls.__name__):
        return ""
    if not re.search(r"For(SequenceClassification|MultipleChoice)$", cls.__name__):
        pooling = [part for part in whole.modules() if _pools_first(part)]
        return ("pooler" if all(getattr(part, "pooler", None) for part in pooling) else "pooled") if pooling else ""
    code = "".join(inspect.getsource(one) for one in cls.__mro__ if "Classification" in one.__name__)
    if "pad_token_id" in code:
        return "counted_by_id" if ".sum(-1) - 1" in code else "last_by_id"
    if config.is_encoder_decoder or getattr(config, "classifier_pooling", "") == "mean" or config.model_type == "eurobert":
        return ""
    return "last" if hasattr(whole, "sequence_summary") and getattr(config, "summary_type", "last") == "last" else "first"


def poolers(model: Any) -> list[Any]:
    """The modules that take hidden states `[B, S, D]` and pool the first place of a row."""
    return [part.pooler for part in model.modules() if _pools_first(part) and getattr(part, "pooler", None)]


def label_rule(model: Any) -> LabelRule | None:
    """What the head of a transformers model does with labels; None where its class does not tell, or of a decoder's config.

    * "next": it moves them, so that a token is predicted from the one before (5.23 loss/loss_utils.py `ForCausalLMLoss`).
    * "places": it reads them in place: classes of tokens, masked language models, and a few that predict the next token of
      labels that are moved already (modeling_bart.py `BartForCausalLM`, XLNet).
    * "decoder": they are of the decoder's tokens, not of these.
    """
    whole = unwrap(model)
    own = is_transformers(whole)
    if own and re.search(r"For(TokenClassification|MaskedLM)$", type(whole).__name__):
        return "places"
    if getattr(config_of(model), "is_encoder_decoder", False):
        return "decoder"
    code = _code(type(whole)) if own and "labels" in _parameters(type(whole)) else ""
    if "loss_function(" in code or re.search(r"labels\[(\.\.\.|:), 1:|shift_labels = ", code):
        return "next"
    return "places" if "CrossEntropyLoss(" in code else None


def _pools_first(part: Any) -> bool:
    """Does this part of a model take token ids, and pool the first place of a row?"""
    if not is_transformers(part) or "input_ids" not in _parameters(type(part)):
        return False
    pooler = getattr(part, "pooler", "")
    if pooler is None:  # add_pooling_layer=False
        return False
    code = _code(type(part)) + (inspect.getsource(type(pooler)) if pooler else "")
    return bool(re.search(r"pool\w* = .*\[:, 0\b|first_token_tensor = .*\[:, 0\b", code))


def _classes(model: Any) -> list[type]:
    """The classes that would read `position_ids`: of a module itself and its parts that read ids, or of a config."""
    if not is_transformers(model):
        whole, text = config_of(model).__class__, text_config(config_of(model)).__class__
        if not (classes := [cls for config_class in dict.fromkeys([whole, text]) for cls in _classes_of(config_class)]):
            got = f"{type(model).__name__}, which has no class there"
            raise CollateError(explain("model", got, _READ, "Pass the model itself."))
        return classes
    parts = [type(part) for part in model.modules() if is_transformers(part) and "input_ids" in _parameters(type(part))]
    takes = _parameters(type(model)).values()
    passes_on = any(each.kind is each.VAR_KEYWORD or each.name == "position_ids" for each in takes)
    return [type(model), *parts] if passes_on else [type(model)]


@cache
def _classes_of(config_class: Any) -> list[type]:
    """transformers' own classes for this config: its base model and its language models."""
    try:
        from transformers.models.auto import modeling_auto as auto

        names = ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING")
        found = [getattr(auto, name).get(config_class, None) for name in names]
    except ImportError as error:
        raise CollateError(explain("model", f"{config_class.__name__}, {error}", _READ, "Pass the model itself.")) from None
    return [cls for each in found if each for cls in (each if isinstance(each, (list, tuple)) else [each])]


_READ = "How a model counts positions is read from the code of its class in transformers."


def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.forward).parameters


def _code(cls: type) -> str:
    """The code of its forward; "" of one made without a file."""
    try:
        return inspect.getsource(cls.forward)  # type: ignore[attr-defined]
    except OSError:
        return ""


def _say(classes: list[type], *texts: str) -> bool:
    """Does a modeling file of these classes hold one of the texts?"""
    sources = map(_source, {cls.__module__: None for cls in classes})
    return any(text in source for source in sources for text in texts)


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])
