"""How a transformers model counts positions, and so when a batch must carry them.

Read from the model's own code: the signature of its forward, and how its modeling file makes positions up. Of a config
this imports that file. Measured on every family of transformers 5.23 and 4.57 that builds tiny.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from collate_npu.consumers.models import config_of, is_transformers, text_config, unwrap
from collate_npu.errors import CollateError, explain

PositionRule = Literal["places", "padding_idx", "axes", "none"]


def position_rule(model: Any) -> PositionRule:
    """How a transformers model (a module or a config) counts tokens where `position_ids` is left out, and reads it.

    * "places": 0, 1, 2 ... by place. Wrong for left padding where positions are absolute, and for packed rows.
    * "padding_idx": from `padding_idx + 1` on, over `input_ids != padding_idx`; right for padding on any side. What is
      given must count from `first_position`. Source: 5.23 modeling_roberta.py `create_position_ids_from_input_ids`.
    * "axes": by place or, with images, by the 2D mask. A flat row needs [4, 1, T]: a text row that starts again with each
      sequence, from which the mask is built, then three axes. Source: 5.23 modeling_qwen2_5_vl.py:795-817, 1117-1163.
    * "none": `position_ids` reaches no layer (BLOOM, Mamba), or is not taken at all (T5): never give it.

    Raises `CollateError` for a config whose modeling code cannot be found.
    """
    model = unwrap(model)
    classes = _classes(model)
    if not any("position_ids" in _parameters(cls) for cls in classes):
        return "none"
    sources = [_source(module) for module in {cls.__module__: None for cls in classes}]
    if any(_FOUR_ROWS in source for source in sources):
        return "axes"
    counts_ids = any("def create_position_ids_from_input_ids" in source for source in sources)
    return "padding_idx" if counts_ids and config_of(model).model_type not in _COUNTS_PLACES else "places"


_FOUR_ROWS = "position_ids.shape[0] == 4"
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
    if not is_transformers(model):
        configs = {id(config): config for config in (model, text_config(model))}.values()
        return [cls for config in configs for cls in _classes_of(config.__class__)]
    parts = [type(part) for part in model.modules() if is_transformers(part) and part.main_input_name == "input_ids"]
    takes = _parameters(type(model)).values()
    passes_on = any(each.kind is each.VAR_KEYWORD or each.name == "position_ids" for each in takes)
    return [type(model), *parts] if passes_on else [type(model)]


@cache
def _classes_of(config_class: Any) -> list[type]:
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


def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.forward).parameters


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])
