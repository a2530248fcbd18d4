"""Scope: of which models the batches are made right.

In scope are causal language models (dense, mixture of experts, hybrid; vision-language models by their text), their
backbones, and heads on them (reward, classification, value). The batches of any other transformers model are left as they
came, and that is said once, when `adapt`, a `BatchAdapter` or a collator with `model=` is made. The module and its config
are asked; there is no list of families.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from collate_npu.consumers.model_traits import config_of, is_encoder, pattern_of, text_config, unwrap


def out_of_scope_reason(model: Any) -> str:
    """Return why the batches of this transformers model (a module or a config) are left as they came; "" if it is in scope.

    >>> from types import SimpleNamespace
    >>> out_of_scope_reason(SimpleNamespace(model_type="t5", is_encoder_decoder=True))
    'it has an encoder beside its decoder'
    """
    config = config_of(model)
    text = text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder beside its decoder"
    if pattern_of(model) == "bidirectional" or is_encoder(config) or _says_both_sides(text):
        return "its tokens attend later tokens"
    if hasattr(model, "forward") and "start_positions" in inspect.signature(type(unwrap(model)).forward).parameters:
        return "its head answers with a span of the row"
    return "PEFT puts learned tokens before its rows" if _learns_tokens(model) else ""


def warn_of_left(model: Any, reason: str) -> None:
    """Warn that every batch of this model is left as it came."""
    name = type(unwrap(model)).__name__
    text = f"collate_npu leaves every batch of this {name} as it came: {reason}, and causal language models are in scope"
    warnings.warn(f"{text} (collate-npu guide scope).", stacklevel=4)


def _says_both_sides(config: Any) -> bool:
    """Return True if the config of a causal family, or of XLNet, says that its tokens attend later ones."""
    ahead = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    return ahead or getattr(config, "is_causal", None) is False or getattr(config, "attn_type", None) == "bi"


def _learns_tokens(model: Any) -> bool:
    """Return True if a PEFT wrapper puts learned tokens before rows, or into the cache: prompt tuning, prefix tuning."""
    modules = model.modules() if callable(getattr(model, "modules", None)) else ()
    wrappers = [each for each in modules if callable(getattr(each, "get_base_model", None))]
    held = [configs for each in wrappers if isinstance(configs := getattr(each, "peft_config", None), Mapping)]
    return any(getattr(config, "is_prompt_learning", False) for configs in held for config in configs.values())
